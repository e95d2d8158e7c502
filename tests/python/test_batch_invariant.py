"""batch_invariant: a request gives the same bits alone and in any batch, and right ones."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pathlib
import random
import re
from collections.abc import Iterator

import pgqa
import pytest
import torch
from cases import Spec, make_case
from invariance import LENGTHS, SPECS, alone, assert_rows, batch_of, other_pages, random_order, results, rows_of
from reference import assert_close, assert_lse_close, reference


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", SPECS)
def test_alone_and_in_any_batch(device: str, name: str) -> None:
    case = make_case(device, SPECS[name])
    out, lse = case.run(return_lse=True, batch_invariant=True)
    expected = reference(case)
    assert_close(out, expected.out)
    assert_lse_close(lse, expected.lse)
    rows = alone(case)
    everyone = list(range(len(LENGTHS)))
    assert_rows(results(case), everyone, rows)
    assert_rows(results(batch_of(case, everyone[::-1])), everyone[::-1], rows)
    rng = random.Random(len(name))
    for batch in (2, 7, 33) if device == "cpu" else (2, 7, 31, 33, 64, 65, 150):
        order = random_order(case, batch, rng)
        assert_rows(results(batch_of(case, order, room=rng.choice((0, 1, 999)))), order, rows)
        moved = other_pages(case, seed=batch)
        assert_rows(results(batch_of(moved, order)), order, rows)


@pytest.mark.parametrize("name", ["plain", "all options"])
def test_any_number_of_threads(name: str) -> None:
    case = make_case("cpu", SPECS[name])
    order = list(range(len(LENGTHS))) * 2
    rows = alone(case)
    for threads in (1, 2, 3, 5, 16):
        torch.set_num_threads(threads)
        assert_rows(results(batch_of(case, order)), order, rows)


def test_the_other_mode_does_depend_on_threads() -> None:
    """What the comparisons above would see."""
    case = make_case("cpu", Spec([9001], 8, 2, 128))
    found = []
    for threads in (1, 7):
        torch.set_num_threads(threads)
        found.append(results(case, invariant=False))
    assert not torch.equal(*found)


def test_a_window_that_hides_nothing_changes_nothing(device: str) -> None:
    case = make_case(device, SPECS["plain"])
    assert torch.equal(results(case), results(case.with_options(window_left=max(LENGTHS) - 1)))


def test_schedule_has_segments() -> None:
    case = make_case("cpu", SPECS["window"])
    shape = dict(case.shape(), window_left=1500, batch_invariant=True)
    schedule = pgqa.schedule(case.page_indptr, case.last_page_len, **shape)
    segment, tile = schedule.segment_tokens, schedule.tile_tokens
    assert segment > 0 and schedule.heads_per_worker == 1
    assert f"segment tokens {segment}" in str(schedule)
    pieces = [piece for worker in range(schedule.num_workers) for piece in schedule.pieces(worker)]
    live = [min(length, 1501) for length in LENGTHS]
    assert len(pieces) == 2 * sum(-(-tokens // segment) for tokens in live)
    for piece in pieces:
        assert piece["first_tile"] * tile % segment == 0
        assert piece["num_tiles"] == min(segment // tile, piece["request_tiles"] - piece["first_tile"])
        assert (piece["slot"] == -1) == (live[piece["request"]] <= segment)
    slots = [piece["slot"] for piece in pieces if piece["slot"] >= 0]
    assert len(set(slots)) == len(slots) > 0
    other = pgqa.schedule(case.page_indptr, case.last_page_len, **dict(shape, batch_invariant=False))
    assert other != schedule and other.segment_tokens == 0


def test_workspace_of_a_table() -> None:
    shape = dict(num_query_heads=32, num_kv_heads=8, head_dim=128, batch_invariant=True)
    sizes = [pgqa.workspace_bytes(**shape, batch=8, num_indices=n) for n in (0, 640, 64000)]
    assert 0 < sizes[0] < sizes[1] < sizes[2]
    assert pgqa.workspace_bytes(**shape, batch=9, num_indices=640) > sizes[1]
    for missing in ("batch", "num_indices"):
        with pytest.raises(ValueError, match=f"^{missing}: got None, expected"):
            pgqa.workspace_bytes(**shape, **{"batch": 8, "num_indices": 640, missing: None})
        with pytest.raises(ValueError, match=f"^{missing}: got -1, expected"):
            pgqa.workspace_bytes(**shape, **{"batch": 8, "num_indices": 640, missing: -1})
    with pytest.raises(ValueError, match="^page_indices: got .* segments, expected at most"):
        pgqa.workspace_bytes(**shape, batch=8, num_indices=1 << 31)


def test_operators(device: str) -> None:
    case = make_case(device, SPECS["all options"])
    keywords = dict(case.options.keywords(), batch_invariant=True)
    inputs = (*case.tensors(), case.options.sm_scale)
    out, lse = torch.ops.pgqa.decode_with_lse(*inputs, **keywords)
    assert torch.equal(rows_of(out, lse), results(case))
    assert torch.equal(torch.ops.pgqa.decode(*inputs, **keywords), out)
    written = torch.empty_like(out)
    torch.ops.pgqa.decode_out(*inputs, written, **keywords)
    assert torch.equal(written, out)


def test_example_of_the_documentation() -> None:
    page = pathlib.Path(__file__).resolve().parents[2] / "docs" / "batch_invariant.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile(code, page.name, "exec"), {})


def test_it_takes_a_bool(device: str) -> None:
    case = make_case(device, Spec([5], 4, 2, 64))
    with pytest.raises(TypeError, match="^batch_invariant: got int, expected a bool"):
        case.run(batch_invariant=1)
