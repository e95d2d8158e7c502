"""The tolerance is tight: zeros, one page dropped and one token too many in a window each fail it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
import torch
from cases import Case, Spec, make_case
from reference import assert_lse_close, fault, reference

DTYPES = [torch.float16, torch.bfloat16]
LENGTH = 4096
WINDOW = 1023


def rounded(case: Case) -> torch.Tensor:
    """The exact result, rounded to the dtype of the case."""
    return reference(case).out.to(case.q.dtype)


@pytest.fixture(params=DTYPES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case("cpu", Spec([LENGTH, 1], 8, 2, 64, dtype=request.param))


def test_rounded_exact_result_passes(case: Case) -> None:
    assert fault(rounded(case), reference(case).out) is None


def test_zeros_fail(case: Case) -> None:
    assert fault(torch.zeros_like(case.q), reference(case).out) is not None


def test_not_finite_fails(case: Case) -> None:
    out = rounded(case)
    out[1, 3, 5] = torch.nan
    assert "not finite at [1, 3, 5]" in str(fault(out, reference(case).out))


@pytest.mark.parametrize("page", [0, 100, LENGTH // 16 - 1])
def test_one_page_dropped_fails(case: Case, page: int) -> None:
    expected = reference(case).out
    kept = [i for i in range(LENGTH // 16 + 1) if i != page]
    case.page_indices = case.page_indices[kept]
    case.page_indptr[1:] -= 1
    case.kv_lens[0] -= 16
    assert fault(rounded(case), expected) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_token_too_many_in_a_window_fails(dtype: torch.dtype) -> None:
    case = make_case("cpu", Spec([LENGTH], 8, 2, 64, dtype=dtype))
    expected = reference(case.with_options(window_left=WINDOW)).out
    assert fault(rounded(case.with_options(window_left=WINDOW + 1)), expected) is not None
    assert fault(rounded(case.with_options(window_left=WINDOW - 1)), expected) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rope_of_the_wrong_position_fails(dtype: torch.dtype) -> None:
    case = make_case("cpu", Spec([300], 8, 2, 64, dtype=dtype, pos_encoding_mode=1))
    expected = reference(case).out
    for changes in ({"rope_theta": 5e5}, {"rope_scale": 8.0}, {"pos_encoding_mode": 0}):
        assert fault(rounded(case.with_options(**changes)), expected) is not None, changes


def test_base_two_lse_fails(case: Case) -> None:
    expected = reference(case).lse
    assert_lse_close(expected.float(), expected)
    with pytest.raises(AssertionError):
        assert_lse_close((expected / 0.6931471805599453).float(), expected)


def test_everything_unused_is_poison() -> None:
    case = make_case("cpu", Spec([37, 0, 300], 4, 2, 64, window_left=19, first_entry=3))
    live = torch.cat([case.live_slots(0), case.live_slots(2)])
    assert len(live) == 40
    used = torch.zeros(case.k_cache.shape[:2], dtype=torch.bool).flatten()
    used[live] = True
    for cache in (case.k_cache, case.v_cache):
        rows_finite = torch.isfinite(cache).flatten(2).all(dim=2).flatten()
        assert torch.equal(rows_finite, used)
    assert set(case.page_indices[:3].tolist()) <= {2147480000, -1, 2147483647, -2147483648}
    assert len(case.page_indices) > int(case.page_indptr[-1])
