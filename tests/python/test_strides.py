"""Every layout that serving engines keep q, caches and index arrays in gives the same bits."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Case, Spec, bits, caches_of, make_case, relayout
from reference import assert_close, reference

LENGTHS = [0, 1, 40, 16, 333, 1200]


@pytest.mark.parametrize("rope", [0, 1])
@pytest.mark.parametrize("page_size", [1, 16, 17])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("layout", ["hnd", "rows", "mixed"])
def test_cache_layouts(device: str, layout: str, head_dim: int, page_size: int, rope: int) -> None:
    case = make_case(device, Spec(LENGTHS, 8, 2, head_dim, page_size, pos_encoding_mode=rope))
    expected = case.run()
    assert_close(expected, reference(case).out)
    assert torch.equal(relayout(case, layout).run(), expected)


def test_strides_of_k_and_v_differ(device: str) -> None:
    case = make_case(device, Spec(LENGTHS, 8, 2, 64))
    expected = case.run()
    for k_layout in ("nhd", "hnd", "rows"):
        mixed = replace(relayout(case, "mixed"), k_cache=relayout(case, k_layout).k_cache)
        assert mixed.k_cache.stride() != mixed.v_cache.stride()
        assert torch.equal(mixed.run(), expected)
        assert torch.equal(replace(mixed, k_cache=mixed.v_cache).run(), replace(case, k_cache=case.v_cache).run())


def test_one_buffer_for_keys_and_values(device: str) -> None:
    """[pages, 2, page_size, heads, head_dim], as several engines keep it."""
    case = make_case(device, Spec(LENGTHS, 8, 2, 128))
    both = torch.stack((case.k_cache, case.v_cache), dim=1)
    assert torch.equal(replace(case, k_cache=both[:, 0], v_cache=both[:, 1]).run(), case.run())


def test_heads_that_share_keys(device: str) -> None:
    """A head stride of 0."""
    case = make_case(device, Spec(LENGTHS, 8, 1, 64))
    expected = case.run()
    wide = replace(case, k_cache=case.k_cache.expand(-1, -1, 4, -1), v_cache=case.v_cache.expand(-1, -1, 4, -1))
    assert_close(wide.run(), expected.double())


@pytest.mark.parametrize("head_dim", [64, 128, 200])
def test_q_is_a_slice_of_packed_qkv(device: str, head_dim: int) -> None:
    case = make_case(device, Spec(LENGTHS, 8, 2, head_dim))
    packed = torch.full((len(LENGTHS), (8 + 2 + 2) * head_dim), torch.nan, dtype=case.q.dtype, device=device)
    q = packed[:, : 8 * head_dim].view(case.q.shape)
    q.copy_(case.q)
    assert not q.is_contiguous()
    assert torch.equal(replace(case, q=q).run(), case.run())


def test_q_with_heads_first(device: str) -> None:
    case = make_case(device, Spec(LENGTHS, 8, 2, 64))
    q = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    out = replace(case, q=q).run()
    assert torch.equal(out, case.run()) and out.is_contiguous()


@pytest.mark.parametrize("offsets", [(1, 1, 1), (1, 2, 3), (3, 0, 1), (2, 3, 0)])
def test_index_arrays_are_slices_at_odd_offsets(device: str, offsets: tuple[int, int, int]) -> None:
    case = make_case(device, Spec(LENGTHS, 8, 2, 64))
    names = ("page_indptr", "page_indices", "last_page_len")
    slices = {}
    for name, offset in zip(names, offsets):
        array = getattr(case, name)
        buffer = torch.full((len(array) + 8,), 2147480000, dtype=torch.int32, device=device)
        slices[name] = buffer[offset : offset + len(array)]
        slices[name].copy_(array)
    assert torch.equal(replace(case, **slices).run(), case.run())


def test_index_arrays_without_an_entry_to_spare(device: str) -> None:
    case = make_case(device, Spec(LENGTHS, 8, 2, 64))
    exact = case.page_indices[: int(case.page_indptr[-1])].clone()
    assert torch.equal(replace(case, page_indices=exact).run(), case.run())


def test_strides_of_dimensions_of_size_one_do_not_matter(device: str) -> None:
    case = make_case(device, Spec([40], 1, 1, 64, page_size=1))
    expected = case.run()
    odd = {name: getattr(case, name) for name in ("q", "k_cache", "v_cache")}
    for name, tensor in odd.items():
        strides = [5 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride())]
        odd[name] = tensor.as_strided(tensor.shape, strides)
    assert torch.equal(replace(case, **odd).run(), expected)


def test_page_ids_beyond_16_bits(device: str) -> None:
    case = make_case(device, Spec([300, 17], 2, 1, 64, page_size=1))
    expected = case.run()
    assert torch.equal(moved(case, 70000, [65535 + i for i in range(len(case.k_cache))]).run(), expected)


def moved(case: Case, num_pages: int, new_ids: list[int]) -> Case:
    """The same problem in a pool of `num_pages` NaN pages, page i moved to new_ids[i]."""
    k_cache, v_cache = caches_of("nhd", (num_pages, *case.k_cache.shape[1:]), case.q.dtype, str(case.q.device))
    return into_pool(case, k_cache, v_cache, new_ids)


def into_pool(case: Case, k_cache: torch.Tensor, v_cache: torch.Tensor, new_ids: list[int]) -> Case:
    """The same problem with its pages copied into the given pools, page i to new_ids[i]."""
    targets = torch.tensor(new_ids, device=case.q.device)
    k_cache[targets], v_cache[targets] = case.k_cache, case.v_cache
    begin, end = int(case.page_indptr[0]), int(case.page_indptr[-1])
    indices = case.page_indices.clone()
    indices[begin:end] = targets[indices[begin:end].long()].int()
    return replace(case, k_cache=k_cache, v_cache=v_cache, page_indices=indices)


# Elements: 2^32 and a little. Pages of 16 tokens, 8 heads, head_dim 128 hold 2^14, so ids 131072 and 262144 lie at
# 2^31 and 2^32 elements.
LARGE_ELEMENTS = 2**32 + 2**21


@pytest.fixture(scope="module")
def large_pools() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.full((LARGE_ELEMENTS,), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("rope", [0, 1])
@pytest.mark.parametrize(
    ("page_size", "page_stride"), [(16, 2**14), (1, 2**10), (16, 276480)], ids=["page 16", "page 1", "wide stride"]
)
def test_offsets_beyond_32_bits(
    large_pools: tuple[torch.Tensor, torch.Tensor], page_size: int, page_stride: int, rope: int
) -> None:
    case = make_case("cuda", Spec([37 * page_size, page_size, 1], 32, 8, 128, page_size, pos_encoding_mode=rope))
    num_pages = LARGE_ELEMENTS // page_stride
    size = page_size * 8 * 128
    pools = [
        pool[: num_pages * page_stride].view(num_pages, page_stride)[:, :size].view(num_pages, page_size, 8, 128)
        for pool in large_pools
    ]
    at = [2**31 // page_stride, 2**32 // page_stride]
    ids = [0, 1, *(edge + step for edge in at for step in range(-3, 4))]
    ids += range(at[1] + 4, min(num_pages, at[1] + 100))
    ids += range(at[0] + 4, at[0] + 100)
    out = into_pool(case, *pools, ids[: len(case.k_cache)]).run()
    for pool in pools:
        pool[torch.tensor(ids[: len(case.k_cache)], device="cuda")] = torch.nan
    assert_close(out, reference(case).out)
    assert torch.equal(bits(out), bits(case.run()))
