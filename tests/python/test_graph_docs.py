"""docs/graphs.md and the documentation of DecodeGraph: the example runs, no argument is left out."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import inspect
import pathlib
import re

import pgqa
import pytest

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "graphs.md"


@pytest.mark.gpu
def test_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(code, PAGE.name, "exec"), {})


def test_every_argument_is_documented() -> None:
    text = inspect.getdoc(pgqa.DecodeGraph) or ""
    names = [name for name in inspect.signature(pgqa.DecodeGraph.__init__).parameters if name != "self"]
    assert len(names) > 20
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]


@pytest.mark.skipif(pgqa.build_info()["cuda"], reason="built with CUDA")
def test_without_cuda_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="^DecodeGraph: this pgqa was built without CUDA"):
        pgqa.DecodeGraph([], [])
