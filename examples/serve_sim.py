"""Simulates a server, on a GPU or the CPU: requests come, share prompts, grow, are put back and recomputed, and go.

    python examples/serve_sim.py                           # 300 steps of the conversation trace, every one checked
    python examples/serve_sim.py --trace coding --check none --steps 2000
    python examples/serve_sim.py --check 10 --padding rows --plot ""

Each step appends one token to every running request and decodes it: on a GPU by one pgqa.DecodeGraph that is captured
once and replayed, else by pgqa.append_kv and pgqa.decode on CPU tensors. There is no model: queries, keys and values
are random, one layer of them, and a prefill only writes the prompt's into the pages. Freed pages are filled with NaN.
Outputs are compared with plain float32 attention over copies of the keys and values that no page table is needed for,
a few lines of the example's own: it needs pgqa and torch alone, and matplotlib for the plot.

Exit status: 0; 1 where an output is wrong or memory has grown between step 50 and the end; 2 for wrong arguments.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import sys

from serve_sim.cli import main

if __name__ == "__main__":
    sys.exit(main(__doc__))
