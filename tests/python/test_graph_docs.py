"""docs/graphs.md and the documentation of graphs and their cache: the examples run, no argument is left out."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import inspect
import pathlib
import re

import pgqa
import pytest

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "graphs.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.gpu
@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_example_runs(code: str) -> None:
    exec(compile(code, PAGE.name, "exec"), {})


@pytest.mark.parametrize(("graph", "least"), [(pgqa.DecodeGraph, 21), (pgqa.DecodeGraphCache, 6)])
def test_every_argument_is_documented(graph: type, least: int) -> None:
    text = inspect.getdoc(graph) or ""
    names = [name for name in inspect.signature(graph.__init__).parameters if name not in ("self", "graph_arguments")]
    assert len(names) >= least
    assert not [name for name in names if not re.search(rf"\b{name}\b", text)]


@pytest.mark.skipif(pgqa.build_info()["cuda"], reason="built with CUDA")
def test_without_cuda_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="^DecodeGraph: this pgqa was built without CUDA"):
        pgqa.DecodeGraph([], [])


def test_there_are_examples() -> None:
    assert len(BLOCKS) == 2
