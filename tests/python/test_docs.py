"""The examples in docs/integrations.md run as they stand."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
BLOCKS = re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("title", "code"), BLOCKS, ids=[title for title, _ in BLOCKS])
def test_example_runs(title: str, code: str) -> None:
    exec(compile(code, f"{PAGE.name}: {title}", "exec"), {})


def test_every_section_has_one() -> None:
    assert [title for title, _ in BLOCKS] == re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    assert PAGE.read_text().count("```python") == len(BLOCKS)
