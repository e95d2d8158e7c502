"""Inputs, reference and tolerance: poison everywhere, two formulations agree, and small mistakes do not pass."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import ROOT, TINY
from harness.inputs import ABSURD_PAGE
from protocol import TOLERANCES, Inputs, compare, load_spec, make_inputs, parse_spec, reference


def starter(*arguments: Any) -> torch.Tensor:
    found = importlib.util.spec_from_file_location("starter", ROOT / "problems" / "starter.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.paged_gqa_decode(*arguments)


def inputs_of(seed: int = 3, **fields: Any) -> Inputs:
    case = {key: value for key, value in {**TINY, **fields}.items() if value is not ...}
    return make_inputs(parse_spec({"version": 1, "cases": [case]})[0], "cpu", seed)


OPTIONS = [
    {},
    {"kv_lens": []},
    {"kv_lens": [0, 0, 0]},
    {"kv_lens": [1]},
    {"window_left": 0},
    {"window_left": 6},
    {"window_left": 2**31 - 1},
    {"logits_soft_cap": 2.0},
    {"sm_scale": -0.3},
    {"sm_scale": 0},
    {"pos_encoding_mode": 1, "rope_scale": 8.0, "rope_theta": 5e5},
    {"pos_encoding_mode": 1, "window_left": 9, "logits_soft_cap": 5.0, "kv_lens": [1, 60, 0, 33]},
    {"query_heads": 7, "kv_heads": 1, "head_dim": 24, "page_size": 1, "dtype": "float16"},
    {"page_size": 5, "dtype": "bfloat16", "kv_lens": [500, 3]},
    {
        "kv_lens": ...,
        "page_table": {
            "page_indptr": [2, 4, 4, 5],
            "page_indices": [0, 0, 7, 3, 7],
            "last_page_len": [1, 9, 4],
        },
    },
]


@pytest.mark.parametrize("fields", OPTIONS, ids=str)
@pytest.mark.parametrize("poison", ["nan", "inf", "plausible"])
def test_starter_agrees_with_the_reference(fields: dict[str, Any], poison: str) -> None:
    inputs = inputs_of(**fields)
    inputs.write_layout(inputs.first_layout.changed(inputs.rng, inputs.case.page_size, inputs.num_pages))
    inputs.refresh(poison)
    out = starter(*inputs.arguments())
    assert out.dtype == inputs.q.dtype and out.shape == inputs.q.shape
    result = compare(out, reference(*inputs.arguments()))
    assert result.fault is None
    empty = [r for r, row in enumerate(inputs.layout.rows) if not row]
    assert (out[empty] == 0).all()


def test_starter_in_slices_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(kv_lens=[5, 0, 18, 7])
    whole = starter(*inputs.arguments())
    source = (ROOT / "problems" / "starter.py").read_text().replace("1 << 32", "800")
    scope: dict[str, Any] = {}
    exec(compile(source, "starter", "exec"), scope)
    assert torch.allclose(scope["paged_gqa_decode"](*inputs.arguments()), whole, atol=1e-6)


def test_reference_by_hand() -> None:
    """One request, two tokens, one head: weights e^a and e^b over their sum."""
    q = torch.tensor([[[1.0, 0.0]]])
    k = torch.tensor([[[[2.0, 5.0]]], [[[3.0, 7.0]]]])
    v = torch.tensor([[[[1.0, 10.0]]], [[[2.0, 20.0]]]])
    table = [torch.tensor(values, dtype=torch.int32) for values in ([0, 2], [1, 0], [1])]
    weight = torch.sigmoid(torch.tensor(0.5 * (3.0 - 2.0)))
    expected = weight * v[1, 0, 0] + (1 - weight) * v[0, 0, 0]
    assert torch.allclose(reference(q, k, v, *table, 0.5)[0, 0], expected)
    assert torch.allclose(reference(q, k, v, *table, 0.5, 0)[0, 0], v[0, 0, 0])
    near, far = (4.0 * torch.tanh(torch.tensor(x / 4.0)) for x in (1.0, 1.5))
    weight = torch.sigmoid(far - near)
    expected = weight * v[1, 0, 0] + (1 - weight) * v[0, 0, 0]
    assert torch.allclose(reference(q, k, v, *table, 0.5, -1, 4.0)[0, 0], expected)


def test_reference_rotates_by_position_difference() -> None:
    """Rotating q at 1 and keys at 0 and 1 leaves the last key's logit and turns the first's by one radian."""
    q = torch.tensor([[[1.0, 0.0]]])
    k = torch.tensor([[[[1.0, 0.0]], [[1.0, 0.0]]]])
    v = torch.tensor([[[[0.0, 0.0]], [[1.0, 1.0]]]])
    table = [torch.tensor(values, dtype=torch.int32) for values in ([0, 1], [0], [2])]
    out = reference(q, k, v, *table, 1.0, -1, 0.0, 1, 2.0, 10000.0)
    expected = torch.sigmoid(1 - torch.cos(torch.tensor(0.5)))
    assert torch.allclose(out[0, 0], expected.expand(2))


def test_what_is_not_live_is_poisoned() -> None:
    inputs = inputs_of(window_left=6)
    live = {
        (row[position // 4], position % 4)
        for row, length in zip(inputs.layout.rows, inputs.case.kv_lens)
        for position in range(max(0, length - 7), length)
    }
    for cache in (inputs.k_cache, inputs.v_cache):
        for page in range(inputs.num_pages):
            for slot in range(4):
                assert cache[page, slot].isnan().all() == ((page, slot) not in live)
    named = {page for row in inputs.layout.rows for page in row}
    assert len(named) < inputs.num_pages
    assert (inputs.page_indices[-3:] == ABSURD_PAGE).all()


def test_values_and_table_are_renewed_in_place() -> None:
    inputs = inputs_of()
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in inputs.tensors().items()}
    inputs.write_layout(inputs.first_layout.changed(inputs.rng, 4, inputs.num_pages))
    inputs.refresh()
    for name, tensor in inputs.tensors().items():
        assert tensor.data_ptr() == before[name][0]
        assert not torch.equal(tensor, before[name][1])
    assert not torch.equal(inputs.q.abs(), before["q"][1].abs())


def test_pages_are_shuffled_and_seeds_differ() -> None:
    first, again, other = (inputs_of(seed, kv_lens=[200]) for seed in (1, 1, 2))
    assert first.layout.rows[0] != sorted(first.layout.rows[0])
    assert torch.equal(first.q, again.q) and torch.equal(first.page_indices, again.page_indices)
    assert not torch.equal(first.q, other.q) and not torch.equal(first.page_indices, other.page_indices)


def test_recorded_pages_are_kept() -> None:
    for case in load_spec(ROOT / "problems" / "visible_spec.json"):
        if case.page_table is not None:
            small = {**case.to_json(), "query_heads": 1, "kv_heads": 1, "head_dim": 2}
            inputs = make_inputs(parse_spec({"version": 1, "cases": [small]})[0], "cpu", 0)
            used = case.page_table.page_indptr[-1]
            assert tuple(inputs.page_indices[:used].tolist()) == case.page_table.page_indices[:used]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tolerance(dtype: torch.dtype) -> None:
    expected = torch.randn(8, 4, 64, generator=torch.Generator().manual_seed(0))
    rounded = expected.to(dtype, copy=True)
    assert compare(rounded, rounded.float()).error == 0
    assert compare(rounded, expected).fault is None
    row = TOLERANCES[dtype].row
    assert compare((expected * (1 + 3 * row)).to(dtype), expected).fault is not None
    outlier = rounded.clone()
    outlier[3, 1, 5] += 8 * TOLERANCES[dtype].element
    assert compare(outlier, expected).fault is not None
    for wrong in (torch.zeros_like(rounded), torch.full_like(rounded, float("nan"))):
        assert compare(wrong, expected).fault is not None
    expected[2] = 0
    assert compare(rounded, expected).fault is not None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("page", [0, -1])
def test_dropped_page_fails(dtype: str, page: int) -> None:
    """A request of 8192 tokens without its first or its last page of one token."""
    inputs = inputs_of(kv_lens=[8192], page_size=1, dtype=dtype)
    expected = reference(*inputs.arguments())
    q, k, v, indptr, indices, last = inputs.tensors().values()
    kept = indices[1:8192] if page == 0 else indices[:8191]
    out = reference(q, k, v, torch.tensor([0, 8191], dtype=torch.int32), kept, last, inputs.case.scale)
    assert compare(out.to(q.dtype), expected).fault is not None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("error", [-1, 1])
def test_window_off_by_one_fails(dtype: str, error: int) -> None:
    inputs = inputs_of(kv_lens=[8192], window_left=4095, dtype=dtype)
    arguments = list(inputs.arguments())
    expected = reference(*arguments)
    arguments[7] += error
    assert compare(reference(*arguments).to(inputs.q.dtype), expected).fault is not None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_ignored_soft_cap_fails(dtype: str) -> None:
    """A cap of 30 hardly bends unit-normal logits; the wider heads make it show."""
    inputs = inputs_of(kv_lens=[2000, 1500], head_dim=128, dtype=dtype, logits_soft_cap=30.0)
    arguments = list(inputs.arguments())
    expected = reference(*arguments)
    arguments[8] = 0.0
    assert compare(reference(*arguments).to(inputs.q.dtype), expected).fault is not None
