"""Spec files: right ones are read, wrong ones are refused with the case and the field named."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.spec import SpecError, format_spec, load_spec, parse_spec

from conftest import TINY

PROBLEMS = Path(__file__).resolve().parents[2] / "problems"
TABLE = {"page_indptr": [0, 2, 2, 3], "page_indices": [7, 1, 4], "last_page_len": [3, 0, 4]}


def spec_of(**fields: Any) -> dict[str, Any]:
    case = {**TINY, **fields}
    return {
        "version": 1,
        "cases": [{key: value for key, value in case.items() if value is not ...}],
    }


def test_defaults() -> None:
    (case,) = parse_spec(spec_of())
    assert (case.window_left, case.logits_soft_cap, case.pos_encoding_mode) == (-1, 0.0, 0)
    assert (case.rope_scale, case.rope_theta, case.scale) == (1.0, 1e4, 0.25)


def test_page_table_gives_the_lengths() -> None:
    (case,) = parse_spec(spec_of(kv_lens=..., page_table=TABLE))
    assert case.kv_lens == (7, 0, 4)


@pytest.mark.parametrize("fields", [{}, {"kv_lens": ..., "page_table": TABLE}, {"sm_scale": None}, {"window_left": 3}])
def test_case_survives_its_own_json(fields: dict[str, Any]) -> None:
    cases = parse_spec(spec_of(**fields))
    assert parse_spec({"version": 1, "cases": [cases[0].to_json()]}) == cases


def test_live_bytes_stop_at_the_window() -> None:
    (case,) = parse_spec(spec_of(kv_lens=[5, 100], window_left=9))
    assert case.live_kv_bytes == 15 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    "fields, field",
    [
        ({"name": ""}, "name"),
        ({"name": ...}, "name"),
        ({"query_heads": 5}, "query_heads"),
        ({"kv_heads": 0}, "kv_heads"),
        ({"head_dim": 16.0}, "head_dim"),
        ({"head_dim": 15, "pos_encoding_mode": 1}, "head_dim"),
        ({"page_size": -1}, "page_size"),
        ({"page_size": True}, "page_size"),
        ({"dtype": "float64"}, "dtype"),
        ({"dtype": ["float16"]}, "dtype"),
        ({"kv_lens": [3, -1]}, "kv_lens"),
        ({"kv_lens": [3, 2**31]}, "kv_lens"),
        ({"kv_lens": 7}, "kv_lens"),
        ({"kv_lens": ...}, "kv_lens"),
        ({"page_table": TABLE}, "kv_lens"),
        ({"sm_scale": "0.1"}, "sm_scale"),
        ({"sm_scale": float("nan")}, "sm_scale"),
        ({"window_left": -2}, "window_left"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap"),
        ({"logits_soft_cap": float("inf")}, "logits_soft_cap"),
        ({"pos_encoding_mode": 2}, "pos_encoding_mode"),
        ({"rope_scale": 0}, "rope_scale"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"window": 3}, "window"),
        ({"kv_lens": ..., "page_table": [1]}, "page_table"),
        ({"kv_lens": ..., "page_table": {**TABLE, "page_indptr": [0, 2, 1, 3]}}, "page_indptr"),
        ({"kv_lens": ..., "page_table": {**TABLE, "page_indptr": [0, 3]}}, "page_indptr"),
        ({"kv_lens": ..., "page_table": {**TABLE, "page_indices": [7, 1]}}, "page_indices"),
        ({"kv_lens": ..., "page_table": {**TABLE, "page_indices": [7, -1, 4]}}, "page_indices"),
        ({"kv_lens": ..., "page_table": {**TABLE, "last_page_len": [3, 0, 5]}}, "last_page_len"),
        ({"kv_lens": ..., "page_table": {**TABLE, "last_page_len": [0, 0, 4]}}, "last_page_len"),
        ({"kv_lens": ..., "page_table": {**TABLE, "lens": []}}, "lens"),
    ],
)
def test_wrong_case_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec(spec_of(**fields))
    message = str(refused.value)
    assert message.startswith("case 0") and f"{field}:" in message
    if fields.get("name", "tiny") == "tiny":
        assert "tiny" in message


@pytest.mark.parametrize("raw", [[], {"cases": []}, {"version": 2, "cases": [TINY]}, {"version": 1, "cases": []}])
def test_wrong_spec_is_refused(raw: Any) -> None:
    with pytest.raises(SpecError, match="spec"):
        parse_spec(raw)


def test_two_cases_of_one_name_are_refused() -> None:
    with pytest.raises(SpecError, match=r"case 1 \(tiny\), name"):
        parse_spec({"version": 1, "cases": [TINY, TINY]})


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for name in ("broken.json", "missing.json"):
        with pytest.raises(SpecError, match=name):
            load_spec(tmp_path / name)


def test_visible_panel() -> None:
    cases = load_spec(PROBLEMS / "visible_spec.json")
    assert 22 <= len(cases) <= 28
    assert sum(case.page_table is not None for case in cases) >= 4
    assert 4 * sum(case.pos_encoding_mode == 1 or case.window_left >= 0 for case in cases) <= len(cases)
    assert {case.head_dim for case in cases} >= {64, 96, 128, 256}
    assert {case.page_size for case in cases} >= {1, 5, 16, 64}
    assert {case.query_heads // case.kv_heads for case in cases} >= {1, 4, 7, 8, 16}
    assert {case.dtype for case in cases} == {"float16", "bfloat16"}
    assert min(case.batch for case in cases) == 1 and max(case.batch for case in cases) >= 256


def test_cpu_panel_covers_every_dtype() -> None:
    assert {case.dtype for case in load_spec(PROBLEMS / "cpu_spec.json")} == {
        "float16",
        "bfloat16",
        "float32",
    }


@pytest.mark.parametrize("name", ["visible_spec.json", "cpu_spec.json"])
def test_spec_files_are_formatted(name: str) -> None:
    text = (PROBLEMS / name).read_text()
    assert format_spec(json.loads(text)) == text
