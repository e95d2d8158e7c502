"""Parts of the evaluation harness; `protocol.py`, `selfcheck.py` and `evaluate.py` at the root use them."""

# SPDX-License-Identifier: Apache-2.0
