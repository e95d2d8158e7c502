"""Runs code in a new interpreter, where nothing has been loaded, planned or allocated yet."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import subprocess
import sys


def run_fresh(code: str) -> str:
    """Standard output of `code` in a process that finds the same modules as this one."""
    program = f"import sys; sys.path[:0] = {sys.path!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
