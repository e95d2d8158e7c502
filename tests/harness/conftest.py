"""Shared parts of the harness tests: tiny cases, and submissions written from source text."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Callable

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness.runner import SideResult, run_side  # noqa: E402
from harness.spec import parse_case  # noqa: E402

TINY: dict[str, Any] = {
    "name": "tiny",
    "kv_lens": [5, 0, 18],
    "query_heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "page_size": 4,
    "dtype": "float32",
}
ARGUMENTS = (
    "q, k_cache, v_cache, page_indptr, page_indices, last_page_len, sm_scale, window_left=-1,"
    " logits_soft_cap=0.0, pos_encoding_mode=0, rope_scale=1.0, rope_theta=10000.0"
)
HONEST_CALL = (
    "honest(q, k_cache, v_cache, page_indptr, page_indices, last_page_len, sm_scale, window_left,"
    " logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta)"
)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def submission(tmp_path: Path) -> Callable[[str], Path]:
    """Writes solver.py from a function body that may call `honest`, a right implementation in a sibling module."""

    def write(body: str, head: str = "", full: str | None = None) -> Path:
        folder = tmp_path / "candidate"
        folder.mkdir()
        (folder / "honest.py").write_text((ROOT / "problems" / "starter.py").read_text())
        text = full
        if text is None:
            lines = "\n".join("    " + line for line in body.replace("HONEST", HONEST_CALL).splitlines())
            text = f"import torch\nfrom honest import paged_gqa_decode as honest\n{head}\n"
            text += f"def paged_gqa_decode({ARGUMENTS}):\n{lines}\n"
        (folder / "solver.py").write_text(text)
        return folder

    return write


@pytest.fixture
def judged(submission: Callable[..., Path]) -> Callable[..., list[str]]:
    """Judges a submission in its own process on one case and returns the faults."""

    def run(
        body: str = "",
        head: str = "",
        full: str | None = None,
        timeout_s: float = 300.0,
        **fields: Any,
    ) -> list[str]:
        case = parse_case({**TINY, **fields}, 0)
        side: SideResult = run_side("candidate", submission(body, head, full), [case], "cpu", 1, None, timeout_s)
        return side.faults_of(0)

    return run
