"""The README's examples: as short as they claim, right as printed, the same text as examples/."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def code_block(language: str) -> str:
    """The only block of that language in README.md."""
    blocks = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    return blocks[0]


def test_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = code_block("python")
    assert len(code.splitlines()) <= 15
    exec(compile(code, "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["torch.Size([2, 32, 128]) torch.Size([2, 32])", "[]"]
    assert len(lines) > 2, "no schedule"


def test_cpp_example_is_the_embedding_example() -> None:
    code = code_block("cpp")
    assert len(code.splitlines()) <= 25
    source = (ROOT / "examples" / "cpp_embed" / "main.cpp").read_text().splitlines(keepends=True)
    assert code == "".join(source[2:])
