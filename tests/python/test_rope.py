"""RoPE stays accurate at every theta, scale, head dim and position; angles of the reference are float64."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
import torch
from cases import Case, Spec, make_case
from reference import assert_close, assert_lse_close, reference

THETAS = (1e4, 5e5, 1e6)
SCALES = (1.0, 8.0)


def check(case: Case) -> None:
    expected = reference(case)
    out, lse = case.run(return_lse=True)
    assert_close(out, expected.out)
    assert_lse_close(lse, expected.lse)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 200, 256])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("theta", THETAS)
def test_thetas_and_scales(device: str, theta: float, scale: float, head_dim: int) -> None:
    lengths = [1, 2, 17, 1500, 4097 if device == "cuda" else 600]
    check(make_case(device, Spec(lengths, 8, 2, head_dim, pos_encoding_mode=1, rope_theta=theta, rope_scale=scale)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("length", [131072, 131073, 1_000_000])
def test_far_positions(device: str, length: int, theta: float, head_dim: int, dtype: torch.dtype) -> None:
    """Windows at the end of very long requests, whose pages repeat."""
    spec = Spec(
        [length, length - 77, 40], 8, 2, head_dim, dtype=dtype, window_left=1023, shared_pages=200,
        pos_encoding_mode=1, rope_theta=theta, q_scale=2.0,
    )  # fmt: skip
    check(make_case(device, spec))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim, kv_heads", [(64, 2), (128, 8), (256, 2)])
def test_all_of_131072_tokens(head_dim: int, kv_heads: int) -> None:
    spec = Spec([131072, 3], 4 * kv_heads, kv_heads, head_dim, pos_encoding_mode=1, shared_pages=4096)
    check(make_case("cuda", spec))


@pytest.mark.gpu
def test_error_at_131072_is_that_without_rope() -> None:
    """Largest error, relative to the reference, at most twice that of the same case without RoPE."""
    errors = []
    for mode in (0, 1):
        case = make_case("cuda", Spec([131072], 32, 8, 128, pos_encoding_mode=mode, shared_pages=4096))
        expected = reference(case).out
        error = (case.run().double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        errors.append(error.max().item())
    assert errors[1] <= 2 * errors[0], errors


def test_scores_depend_on_distance_alone(device: str) -> None:
    """Empty space before the window: the same keys a million positions on give nearly the same output."""
    near = make_case(
        device, Spec([512], 8, 2, 64, dtype=torch.float16, window_left=255, pos_encoding_mode=1, shared_pages=32)
    )
    far = make_case(
        device, Spec([1_000_000], 8, 2, 64, dtype=torch.float16, window_left=255, pos_encoding_mode=1, shared_pages=32)
    )
    far.q, far.k_cache, far.v_cache = near.q, near.k_cache, near.v_cache
    begin, end = int(far.page_indptr[1]) - 16, int(near.page_indptr[1])
    far.page_indices[begin : begin + 16] = near.page_indices[end - 16 : end]
    assert_close(far.run(), near.run().double())


def test_a_single_token_ignores_rope(device: str) -> None:
    case = make_case(device, Spec([1, 1], 8, 2, 128, pos_encoding_mode=1))
    slots = torch.cat([case.live_slots(0), case.live_slots(1)])
    values = case.v_cache[slots // 16, slots % 16].repeat_interleave(4, dim=1)
    assert torch.equal(case.run(), values)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_page_sizes(device: str, page_size: int) -> None:
    check(make_case(device, Spec([1, 63, 64, 65, 1030], 12, 2, 128, page_size, pos_encoding_mode=1, q_scale=3.0)))


@pytest.mark.parametrize("group", [1, 4, 8, 9, 16, 17, 32, 40])
def test_groups_over_long_requests(device: str, group: int) -> None:
    length = 20000 if device == "cuda" else 2500
    check(make_case(device, Spec([length, 100], group, 1, 128, dtype=torch.float16, pos_encoding_mode=1)))
