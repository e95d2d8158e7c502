"""window_left = w keeps exactly the last w + 1 tokens, and nothing left of them matters or is read."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
import torch
from cases import Case, Spec, make_case
from reference import assert_close, assert_lse_close, reference

HEAD_DIM = 64


def weights(case: Case, length: int) -> torch.Tensor:
    """Softmax weights [query_heads, length] of a one-request case of head_dim >= length, read off one-hot values."""
    slots = case.live_slots(0)
    page, offset = slots // case.page_size, slots % case.page_size
    one_hot = torch.zeros(len(slots), case.q.shape[-1], dtype=case.q.dtype, device=case.q.device)
    first = length - len(slots)
    one_hot[torch.arange(len(slots)), torch.arange(first, length)] = 1
    case.v_cache[page, offset] = one_hot[:, None].expand(-1, case.v_cache.shape[2], -1)
    return case.run()[0, :, :length].float()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("extra", [-1, 0, 1, 2, 3])
@pytest.mark.parametrize("window_left", [0, 1, 14, 15, 16, 17, 127])
def test_exactly_w_plus_one_tokens_have_weight(device: str, window_left: int, extra: int, page_size: int) -> None:
    length = window_left + extra
    if length < 1:
        pytest.skip("no tokens")
    spec = Spec([length], 8, 2, 256, page_size, torch.float16, sm_scale=0.0, window_left=window_left)
    seen = weights(make_case(device, spec), length)
    kept = min(length, window_left + 1)
    assert torch.count_nonzero(seen[:, : length - kept]) == 0
    live = seen[:, length - kept :]
    torch.testing.assert_close(live, torch.full_like(live, 1 / kept), rtol=2e-3, atol=0)


@pytest.mark.parametrize("extra", [-1, 0, 1, 2])
@pytest.mark.parametrize("window_left", [0, 1, 15, 127, 128, 1023])
def test_sums_over_the_window_are_exact(device: str, window_left: int, extra: int) -> None:
    """Equal scores make the LSE log of the number of tokens that count."""
    lengths = [max(0, window_left + 1 + extra), 5000 if device == "cuda" else 1500, 1]
    case = make_case(device, Spec(lengths, 8, 2, 64, sm_scale=0.0, window_left=window_left))
    _, lse = case.run(return_lse=True)
    counts = torch.tensor([min(n, window_left + 1) for n in lengths], dtype=torch.float64, device=device)
    torch.testing.assert_close(lse.double().exp(), counts[:, None].expand_as(lse), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_tokens_left_of_the_window_weigh_exactly_zero(device: str, cap: float) -> None:
    """Length 100, window 15: also with a soft cap, which must come before the mask."""
    spec = Spec([100], 8, 2, 128, dtype=torch.float16, window_left=15, logits_soft_cap=cap, q_scale=20.0)
    seen = weights(make_case(device, spec), 100)
    assert torch.count_nonzero(seen[:, :84]) == 0
    torch.testing.assert_close(seen.sum(1), torch.ones(8, device=device), rtol=5e-3, atol=0)


def test_nan_in_the_tile_of_a_live_token(device: str) -> None:
    """Length 4352, window 4095, page 32: token 256 has expired, 257 lives, both in one page."""
    case = make_case(device, Spec([4352], 8, 2, HEAD_DIM, 32, window_left=4094))
    page = case.page_indices[8]
    assert torch.isnan(case.v_cache[page, 0]).any() or torch.isinf(case.v_cache[page, 0]).any()
    assert torch.isfinite(case.v_cache[page, 1]).all()
    assert_close(case.run(), reference(case).out)


def test_huge_keys_left_of_the_window_change_nothing(device: str) -> None:
    case = make_case(device, Spec([4096], 8, 2, HEAD_DIM, window_left=63))
    expected = case.run()
    slots = case.with_options(window_left=-1).live_slots(0)[:-64]
    for cache in (case.k_cache, case.v_cache):
        cache[slots // 16, slots % 16] = 3e4
    assert torch.equal(case.run(), expected)


def test_pages_left_of_the_window_need_not_exist(device: str) -> None:
    case = make_case(device, Spec([4096, 700], 8, 2, HEAD_DIM, window_left=127))
    expected = reference(case).out
    for request, length in enumerate(case.kv_lens):
        begin = int(case.page_indptr[request])
        case.page_indices[begin : begin + (length - 128) // 16] = 2**30
    assert_close(case.run(), expected)


@pytest.mark.parametrize("window_left", [4095, 2**30, 2**31 - 1])
def test_window_longer_than_every_request_is_no_window(device: str, window_left: int) -> None:
    case = make_case(device, Spec([4096, 17, 0, 1], 8, 2, HEAD_DIM))
    assert torch.equal(case.with_options(window_left=window_left).run(), case.run())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [1, 16])
def test_ragged_windows(device: str, page_size: int, head_dim: int) -> None:
    lengths = [0, 1, 99, 100, 101, 102, 257, 2000, 3]
    case = make_case(device, Spec(lengths, 8, 2, head_dim, page_size, window_left=100, pos_encoding_mode=1))
    expected = reference(case)
    out, lse = case.run(return_lse=True)
    assert_close(out, expected.out)
    assert_lse_close(lse, expected.lse)
