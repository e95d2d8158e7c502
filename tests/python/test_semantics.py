"""What is promised of empty requests, poison, extreme logits, outputs and options; short ids name field cases."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import importlib.util
import math
import pathlib
import sys
import types
from dataclasses import replace

import pgqa
import pytest
import torch
from cases import Case, Spec, bits, make_case
from reference import assert_close, assert_lse_close, fault, reference

SOLVER = pathlib.Path(__file__).resolve().parents[2] / "methods" / "main" / "solver.py"


def load_solver() -> types.ModuleType:
    """The entry of the evaluation, over the package's module."""
    sys.modules.setdefault("_pgqa", pgqa._pgqa)
    spec = importlib.util.spec_from_file_location("solver", SOLVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_empty(out: torch.Tensor, lse: torch.Tensor, request: int) -> None:
    assert torch.count_nonzero(out[request]) == 0
    assert torch.equal(lse[request], torch.full_like(lse[request], -torch.inf))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_logits_below_any_sentinel(device: str, dtype: torch.dtype) -> None:  # T1, 21
    case = make_case(device, Spec([2], 32, 4, 128, page_size=1, dtype=dtype))
    pages = case.page_indices[:2].long()
    case.q[:], case.k_cache[pages], case.v_cache[pages] = 64, -64, 1
    out, lse = case.run(return_lse=True)
    assert torch.equal(out, torch.ones_like(out))
    logit = -64 * 64 * 128 / math.sqrt(128)
    torch.testing.assert_close(lse, torch.full_like(lse, logit + math.log(2)), rtol=1e-6, atol=0)
    lse = case.with_options(sm_scale=1.0).run(return_lse=True)[1]
    torch.testing.assert_close(lse, torch.full_like(lse, -524288 + math.log(2)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e30, -1e30])
def test_logits_up_to_the_range_of_fp32(device: str, scale: float) -> None:
    case = make_case(device, Spec([1000, 3], 8, 2, 64, sm_scale=scale))
    out = case.run()
    assert torch.isfinite(out).all()
    if abs(scale) < 1:
        assert_close(out, reference(case).out)


@pytest.mark.parametrize("window_left", [-1, 0, 5])
def test_empty_requests(device: str, window_left: int) -> None:  # T2, 32
    case = make_case(device, Spec([0, 20, 0, 0, 1, 0], 8, 2, 64, window_left=window_left))
    out, lse = case.run(return_lse=True)
    for request in (0, 2, 3, 5):
        assert_empty(out, lse, request)
    expected = reference(case)
    assert_close(out, expected.out)
    assert_lse_close(lse, expected.lse)


@pytest.mark.parametrize("last_page_len", [[0, 1, 0], [16, 1, 16], [-5, 1, 99]])
@pytest.mark.parametrize("prefill", [torch.nan, 7.0])
def test_rows_without_pages(device: str, prefill: float, last_page_len: list[int]) -> None:  # T4, T6, 30
    case = make_case(device, Spec([0, 129, 0], 8, 2, 128))
    assert case.page_indptr.tolist() == [0, 0, 9, 9]
    case.last_page_len.copy_(torch.tensor(last_page_len, dtype=torch.int32))
    target = torch.full_like(case.q, prefill)
    out, lse = case.run(out=target, return_lse=True)
    assert out is target
    assert_empty(out, lse, 0)
    assert_empty(out, lse, 2)
    assert_close(out, reference(case).out)
    two = replace(case, q=case.q[:2], page_indptr=case.page_indptr[:3], last_page_len=case.last_page_len[:2])
    two.kv_lens = [0, 129]
    assert_close(two.run(), reference(two).out)


def test_empties_are_always_overwritten(device: str) -> None:  # T6
    case = make_case(device, Spec([0, 5, 0, 80, 0, 0, 300, 0], 8, 2, 64))
    out = case.run(out=torch.full_like(case.q, 7.0))
    assert not (out == 7.0).all(dim=2).any()
    assert_close(out, reference(case).out)


def test_no_requests(device: str) -> None:  # T46
    for first_entry in (0, 4):
        case = make_case(device, Spec([], 8, 2, 64, first_entry=first_entry))
        out, lse = case.run(return_lse=True)
        assert out.shape == (0, 8, 64) and lse.shape == (0, 8)
    assert_close(make_case(device, Spec([9], 8, 2, 64)).run(), reference(make_case(device, Spec([9], 8, 2, 64))).out)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rope", [0, 1])
def test_poison_past_the_end(device: str, rope: int, bad: float) -> None:  # T8, T9, 22
    case = make_case(device, Spec([13], 8, 2, 64, page_size=4, pos_encoding_mode=rope, window_left=9))
    expected = reference(case).out
    for cache in (case.k_cache, case.v_cache):
        cache[~torch.isfinite(cache)] = bad
    assert_close(case.run(), expected)


def test_null_page_of_nan(device: str) -> None:  # 24, 16
    """Page 0 is NaN and fills every unused index entry."""
    case = make_case(device, Spec([40, 0, 3], 8, 2, 64))
    end = int(case.page_indptr[-1])
    case.page_indices[:end] += 1
    case.page_indices[end:] = 0
    nan_page = torch.full_like(case.k_cache[:1], torch.nan)
    case = replace(case, k_cache=torch.cat([nan_page, case.k_cache]), v_cache=torch.cat([nan_page, case.v_cache]))
    assert_close(case.run(), reference(case).out)


def test_nan_stays_in_its_request(device: str) -> None:  # 31
    case = make_case(device, Spec([40, 300, 7, 2000], 8, 2, 64))
    expected = reference(case).out
    slots = case.live_slots(1)
    case.k_cache[slots // 16, slots % 16] = torch.nan
    out = case.run()
    assert torch.isnan(out[1]).all()
    out[1] = expected[1]
    assert_close(out, expected)


def test_zero_length_rows_do_not_poison_a_reduction(device: str) -> None:  # T5, 28
    case = make_case(device, Spec([5, 0, 70, 0] + [0] * 12, 8, 2, 64))
    out = case.run()
    assert torch.isfinite(out.sum(dim=0)).all()
    assert torch.count_nonzero(out[3:]) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_soft_cap_of_huge_logits(device: str, dtype: torch.dtype) -> None:  # 26
    case = make_case(device, Spec([2], 8, 2, 64, page_size=1, dtype=dtype, sm_scale=1.0, logits_soft_cap=30.0))
    pages = case.page_indices[:2].long()
    for sign in (1, -1):
        case.q[:], case.k_cache[pages] = 64, 64.0 * sign
        out, lse = case.run(return_lse=True)
        torch.testing.assert_close(lse, torch.full_like(lse, 30.0 * sign + math.log(2)), rtol=0, atol=1e-4)
        assert torch.isfinite(out).all()


@pytest.mark.parametrize("cap", [0.1, 5.0, 30.0, 1000.0])
def test_soft_cap_formula(device: str, cap: float) -> None:
    """One token: the LSE is cap * tanh(s / cap)."""
    case = make_case(device, Spec([1] * 8, 4, 2, 64, logits_soft_cap=cap, q_scale=8.0))
    plain = case.with_options(logits_soft_cap=0.0).run(return_lse=True)[1].double()
    capped = case.run(return_lse=True)[1].double()
    torch.testing.assert_close(capped, cap * torch.tanh(plain / cap), rtol=1e-5, atol=1e-3)


def test_cap_and_rope_by_every_route(device: str) -> None:  # T28, 52
    spec = Spec([40, 300], 8, 2, 64, logits_soft_cap=3.0, pos_encoding_mode=1, rope_theta=5e5, q_scale=9.0)
    case = make_case(device, spec)
    options = case.options
    positional = (
        options.sm_scale, options.window_left, options.logits_soft_cap, options.pos_encoding_mode, options.rope_scale,
        options.rope_theta,
    )  # fmt: skip
    expected = reference(case).out
    solve = load_solver().paged_gqa_decode
    by_name = dict(zip(("sm_scale", *options.keywords()), (options.sm_scale, *options.keywords().values())))
    for out in (
        case.run(),
        solve(*case.tensors(), *positional),
        solve(*case.tensors(), **by_name),
        pgqa._pgqa.decode(*case.tensors(), *positional, None, False, None),
    ):
        assert_close(out, expected)
    for changes in ({"logits_soft_cap": 0.0}, {"rope_theta": 1e4}, {"rope_scale": 4.0}):
        assert fault(case.with_options(**changes).run(), expected) is not None, changes


def test_fresh_output_and_untouched_inputs(device: str) -> None:
    case = make_case(device, Spec([40, 0, 300, 5000], 8, 2, 64, pos_encoding_mode=1, window_left=1000))
    before = [bits(t).clone() for t in case.tensors()]
    first, second = case.run(), case.run()
    assert first.data_ptr() != second.data_ptr()
    for tensor, copy in zip(case.tensors(), before):
        assert first.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        assert torch.equal(bits(tensor), copy)
    second.zero_()
    assert_close(first, reference(case).out)


def test_changes_in_place_are_seen(device: str) -> None:
    """Same addresses, new values, new table: nothing may be remembered from the call before."""
    case = make_case(device, Spec([100, 50], 8, 2, 64))
    assert_close(case.run(), reference(case).out)
    case.q.mul_(-2)
    assert_close(case.run(), reference(case).out)
    slots = case.live_slots(0)
    case.v_cache[slots // 16, slots % 16] *= 3
    assert_close(case.run(), reference(case).out)
    begin, end = case.page_indptr[:2].tolist()
    case.page_indices[begin : end - 1] = case.page_indices[begin : end - 1].flip(0)
    case.last_page_len[0] -= 1
    case.kv_lens[0] -= 1
    assert_close(case.run(), reference(case).out)


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("length", [4096, 131072])
def test_common_offset_of_values(device: str, length: int, offset: float) -> None:  # T32
    """Partials must not round to 16 bits: the result is the reference rounded once, but for a few last bits."""
    if device == "cpu" and length > 4096:
        pytest.skip("the float64 reference of a long request is for a GPU")
    case = make_case(device, Spec([length], 32, 8, 128), value_offset=offset)
    expected = reference(case).out
    out = case.run()
    assert_close(out, expected)
    if offset:
        rounded = expected.to(out.dtype)
        assert (out - rounded).abs().max() <= 0.5  # one last place of bfloat16 at 100
        assert (out != rounded).double().mean() < 0.02


@pytest.mark.parametrize("lengths", [[1000] * 63 + [131072], [2000] * 32 + [131072]], ids=["63 + 1", "32 + 1"])
def test_one_giant_among_small_requests(device: str, lengths: list[int]) -> None:  # T45, 1
    if device == "cpu":
        lengths = [length // 16 for length in lengths]
    case = make_case(device, Spec(lengths, shared_pages=4096 if device == "cuda" else 64))
    assert_close(case.run(), reference(case).out)
    schedule = case.schedule()
    tiles = [sum(piece["num_tiles"] for piece in schedule.pieces(w)) for w in range(schedule.num_workers)]
    busy = [count for count in tiles if count]
    assert max(busy) - min(busy) <= 1 and len(busy) * 10 >= 9 * len(tiles)


@pytest.mark.parametrize(
    ("lengths", "kv_heads"),
    [([100_000], 1), ([131072], 8), ([25_001] * 33, 1), ([17_000], 1)],
    ids=["100k", "128k", "33 x 25k", "17k"],
)
def test_long_requests_use_every_worker(lengths: list[int], kv_heads: int) -> None:  # 5, 6, 7
    case = make_case("cpu", Spec(lengths, 4 * kv_heads, kv_heads, 8, shared_pages=8))
    schedule = pgqa.schedule(
        case.page_indptr, case.last_page_len, num_query_heads=4 * kv_heads, num_kv_heads=kv_heads, head_dim=128,
        page_size=16, num_sms=132,
    )  # fmt: skip
    busy = sum(bool(schedule.pieces(worker)) for worker in range(schedule.num_workers))
    assert busy >= 0.9 * schedule.num_workers


def solo(case: Case, request: int) -> Case:
    """One request of a case, alone in its batch."""
    one = replace(
        case, q=case.q[request : request + 1], page_indptr=case.page_indptr[request : request + 2],
        last_page_len=case.last_page_len[request : request + 1],
    )  # fmt: skip
    one.kv_lens = [case.kv_lens[request]]
    return one


def test_slices_of_a_batch_are_right_alone(device: str) -> None:
    """page_indptr[0] > 0, tables that begin in the middle of a larger one."""
    case = make_case(device, Spec([30, 700, 0, 5], 8, 2, 64))
    expected = reference(case)
    for request in range(4):
        out, lse = solo(case, request).run(return_lse=True)
        assert_close(out, expected.out[request : request + 1])
        assert_lse_close(lse, expected.lse[request : request + 1])
