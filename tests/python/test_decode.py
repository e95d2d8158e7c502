"""The decode call against the dense reference: one axis at a time, then random combinations."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import random

import pytest
import torch
from cases import Spec, make_case, ragged
from reference import assert_close, assert_lse_close, reference

LENGTHS = (0, 1, 15, 16, 17, 129, 700)
HEAD_DIMS = (8, 16, 24, 40, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 160, 192, 200, 224, 240, 248, 256)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 48, 64, 71, 127, 128)
PAGE_SIZES = (1, 2, 3, 5, 7, 16, 17, 32, 64, 96, 128, 160, 192, 256, 512)
BATCHES = (0, 1, 2, 31, 32, 33, 255, 256, 257, 1000, 1024, 4096)
HALVES = (torch.float16, torch.bfloat16)

by_dtype = pytest.mark.parametrize("dtype", HALVES, ids=str)
by_rope = pytest.mark.parametrize("rope", [0, 1], ids=["plain", "rope"])


def check(device: str, spec: Spec) -> None:
    """Output and LSE of a fresh case meet the tolerance; the output alone has the same bits."""
    case = make_case(device, spec)
    expected = reference(case)
    out, lse = case.run(return_lse=True)
    assert out.dtype == spec.dtype and out.is_contiguous()
    assert_close(out, expected.out)
    assert_lse_close(lse, expected.lse)
    assert torch.equal(case.run(), out)


@by_rope
@by_dtype
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_dims(device: str, head_dim: int, dtype: torch.dtype, rope: int) -> None:
    check(device, Spec(LENGTHS, 8, 2, head_dim, dtype=dtype, pos_encoding_mode=rope, seed=head_dim))


@by_rope
@by_dtype
@pytest.mark.parametrize("group", GROUPS)
def test_groups(device: str, group: int, dtype: torch.dtype, rope: int) -> None:
    check(device, Spec(LENGTHS, 2 * group, 2, 128, dtype=dtype, pos_encoding_mode=rope, seed=group))


@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("group", [1, 5, 7, 8, 9, 16, 17, 33, 128])
def test_groups_at_other_head_dims(device: str, group: int, head_dim: int) -> None:
    check(device, Spec((3, 250, 0, 1030), group, 1, head_dim, dtype=HALVES[group % 2], seed=group))


@by_rope
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 40])
def test_kv_head_counts(device: str, kv_heads: int, rope: int) -> None:
    check(device, Spec(LENGTHS, 4 * kv_heads, kv_heads, 64, pos_encoding_mode=rope, seed=kv_heads))


@pytest.mark.parametrize("query_heads", [1, 10, 14, 40, 71, 112, 128])
def test_one_kv_head_with_many_query_heads(device: str, query_heads: int) -> None:
    check(device, Spec((1, 5000, 17), query_heads, 1, 128, seed=query_heads))


@by_dtype
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_sizes_around_page_ends(device: str, page_size: int, dtype: torch.dtype) -> None:
    ends = [n * page_size for n in (1, 2, 3, 5)]
    lengths = sorted({max(0, end + step) for end in ends for step in (-1, 0, 1)})
    check(device, Spec(lengths, 8, 2, 64, page_size, dtype, seed=page_size))


@pytest.mark.parametrize("page_size", [1, 3, 16, 17, 512])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_page_sizes_with_window_and_rope(device: str, head_dim: int, page_size: int) -> None:
    check(device, Spec(LENGTHS, 6, 2, head_dim, page_size, window_left=100, pos_encoding_mode=1, seed=page_size))


@pytest.mark.parametrize("batch", BATCHES)
def test_batches(device: str, batch: int) -> None:
    lengths = ragged(random.Random(batch), batch, 300 if batch < 1000 else 60)
    check(device, Spec(lengths, 8, 2, 64, page_size=4, first_entry=batch % 3, seed=batch))


@pytest.mark.parametrize("batch", BATCHES)
def test_batches_with_window(device: str, batch: int) -> None:
    lengths = ragged(random.Random(batch + 1), batch, 200 if batch < 1000 else 60)
    check(device, Spec(lengths, 4, 1, 128, window_left=20, dtype=torch.float16, seed=batch))


@pytest.mark.parametrize("kind", ["first", "last", "middle", "all", "all but one", "one giant"])
@pytest.mark.parametrize("batch", [3, 32, 33, 300])
def test_where_the_empty_requests_are(device: str, batch: int, kind: str) -> None:
    third = range(batch)
    empty = {
        "first": third[: batch // 3],
        "last": third[-(batch // 3) :],
        "middle": third[batch // 3 : 2 * batch // 3],
        "all": third,
        "all but one": [i for i in third if i != batch // 2],
        "one giant": (),
    }[kind]
    lengths = [0 if i in empty else 5 + i % 40 for i in range(batch)]
    if kind == "one giant":
        lengths[batch // 2] = 6000
    check(device, Spec(lengths, 8, 4, 64, seed=batch))


@by_dtype
@pytest.mark.parametrize("cap", [0.5, 1.0, 30.0, 50.0])
def test_soft_cap(device: str, cap: float, dtype: torch.dtype) -> None:
    check(device, Spec(LENGTHS, 8, 2, 128, dtype=dtype, logits_soft_cap=cap, q_scale=10.0, seed=int(cap)))


@by_dtype
@pytest.mark.parametrize("sm_scale", [0.0, -0.1, 1.0, 3e-4])
def test_scales(device: str, sm_scale: float, dtype: torch.dtype) -> None:
    check(device, Spec(LENGTHS, 8, 2, 64, dtype=dtype, sm_scale=sm_scale))


@pytest.mark.parametrize("query_heads, kv_heads, head_dim", [(32, 8, 128), (16, 16, 64), (8, 1, 256), (64, 2, 128)])
@pytest.mark.parametrize("lengths", [(8192,), (1, 9000, 30), (2000,) * 8, (4096,) * 40], ids=["1", "3", "8", "40"])
def test_requests_cut_over_many_workers(
    device: str, lengths: tuple[int, ...], query_heads: int, kv_heads: int, head_dim: int
) -> None:
    if device == "cpu" and len(lengths) == 40:
        pytest.skip("the float64 reference of 160,000 tokens is for a GPU")
    check(device, Spec(lengths, query_heads, kv_heads, head_dim, q_scale=3.0))


@pytest.mark.parametrize("head_dim", [1, 7, 33, 300])
def test_cpu_takes_any_head_dim(head_dim: int) -> None:
    check("cpu", Spec(LENGTHS, 6, 2, head_dim, dtype=torch.float32))


@by_rope
def test_cpu_takes_float32(rope: int) -> None:
    check("cpu", Spec(LENGTHS, 6, 2, 80, dtype=torch.float32, pos_encoding_mode=rope, window_left=200))


def random_spec(seed: int) -> Spec:
    """A combination of everything that a call can vary; half of the time each feature is off."""
    rng = random.Random(seed)

    def maybe(choices: tuple, otherwise: float | int) -> float | int:
        return rng.choice(choices) if rng.random() < 0.5 else otherwise

    kv_heads = rng.choice((1, 2, 3, 4, 5, 8))
    lengths = ragged(rng, rng.choice((1, 2, 5, 20, 33, 70)), rng.choice((40, 400, 2000)))
    return Spec(
        lengths, kv_heads * rng.choice(GROUPS[:14]), kv_heads, rng.choice(HEAD_DIMS), rng.choice(PAGE_SIZES),
        rng.choice(HALVES), window_left=int(maybe((0, 1, 15, 63, 127, 1000, 2147483647), -1)),
        logits_soft_cap=maybe((5.0, 30.0), 0.0), pos_encoding_mode=rng.randint(0, 1),
        rope_scale=maybe((8.0, 0.5), 1.0), rope_theta=maybe((5e5, 1e6), 1e4), q_scale=rng.choice((0.3, 1.0, 4.0)),
        first_entry=rng.randint(0, 3), layout=rng.choice(("nhd", "hnd", "rows", "mixed")), seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(80))
def test_random_combinations(device: str, seed: int) -> None:
    check(device, random_spec(seed))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_more_random_combinations(block: int) -> None:
    for seed in range(1000 + 20 * block, 1020 + 20 * block):
        try:
            check("cuda", random_spec(seed))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {random_spec(seed)}") from error
