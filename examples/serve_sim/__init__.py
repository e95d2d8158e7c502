"""A serving simulator over pgqa: scheduler, page pool, captured decode steps, and a check of every step."""
# SPDX-License-Identifier: Apache-2.0
