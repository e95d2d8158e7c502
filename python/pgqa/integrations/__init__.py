"""Adapters of serving engines to pgqa; each is imported by its own name and needs its engine installed."""
# SPDX-License-Identifier: Apache-2.0
