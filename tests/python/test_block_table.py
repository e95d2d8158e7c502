"""Padded block tables: the same results as page tables, and appends that change the live rows' slots alone."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import random

import pgqa
import pytest
import torch
from cases import ABSURD_IDS, Case, Spec, bits, make_case

from pgqa.integrations.block_table import BlockTable, flash_attn_with_kvcache

LENS = [40, -1, 7, 100, 16, 1, -1, 17, 32]  # of tokens, the new one included; -1: a row that fills the batch


def table_of(case: Case, max_blocks: int, fill: int | None = -1) -> torch.Tensor:
    """The case's page table as rows of `max_blocks`, filled up with `fill`; None: with absurd numbers."""
    starts, ids = case.page_indptr.tolist(), case.page_indices.tolist()
    rows = []
    for begin, end in zip(starts, starts[1:]):
        count = max_blocks - (end - begin)
        rows.append(ids[begin:end] + ([fill] * count if fill is not None else list(ABSURD_IDS * count)[:count]))
    return torch.tensor(rows, dtype=torch.int32, device=case.q.device)


def case_of(device: str, **spec: object) -> Case:
    return make_case(device, Spec([max(0, length) for length in LENS], 8, 2, 64, **spec))


def before(device: str) -> torch.Tensor:
    """Tokens before the new one; -1 where there are none to come."""
    return torch.tensor([length - 1 if length > 0 else -1 for length in LENS], dtype=torch.int32, device=device)


def without_last_tokens(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes the rows [batch, 1, kv_heads, head_dim] of each request's last token out of the caches; NaN stays."""
    taken = []
    for cache in (case.k_cache, case.v_cache):
        rows = torch.full((len(LENS), 1, *cache.shape[2:]), torch.nan, dtype=cache.dtype, device=cache.device)
        for request, length in enumerate(case.kv_lens):
            if length > 0:
                slot = int(case.live_slots(request)[-1])
                place = cache[slot // case.page_size, slot % case.page_size]
                rows[request, 0] = place
                place.fill_(torch.nan)
        taken.append(rows)
    return taken[0], taken[1]


OPTIONS = {"window_left": 20, "logits_soft_cap": 9.0}


@pytest.mark.parametrize("fill", [-1, 0, None])
@pytest.mark.parametrize("spec", [{}, {"layout": "mixed"}, {"page_size": 1}, OPTIONS])
def test_append_and_attend(device: str, spec: dict[str, object], fill: int | None) -> None:
    case = case_of(device, **spec)
    expected, k_after, v_after = case.run(), case.k_cache.clone(), case.v_cache.clone()
    k, v = without_last_tokens(case)
    max_blocks = -(-max(LENS) // case.page_size) + 2
    out = flash_attn_with_kvcache(
        case.q[:, None], case.k_cache, case.v_cache, k, v, cache_seqlens=before(device),
        block_table=table_of(case, max_blocks, fill), softmax_scale=case.options.sm_scale,
        window_size=(case.options.window_left, 0), softcap=case.options.logits_soft_cap,
    )  # fmt: skip
    assert torch.equal(out[:, 0], expected)
    assert torch.equal(bits(case.k_cache), bits(k_after)) and torch.equal(bits(case.v_cache), bits(v_after))


def test_without_an_append(device: str) -> None:
    case = case_of(device)
    lengths = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
    out = flash_attn_with_kvcache(
        case.q[:, None], case.k_cache, case.v_cache, cache_seqlens=lengths, block_table=table_of(case, 9)
    )
    assert torch.equal(out[:, 0], case.run())


def test_page_tables(device: str) -> None:
    rng = random.Random(3)
    for page_size in (1, 4, 16):
        lens = [rng.randint(-1, 70) for _ in range(20)]
        table = torch.randint(0, 50, (20, 71 // page_size + 1), dtype=torch.int32, device=device)
        cached = torch.tensor([length - 1 for length in lens], dtype=torch.int32, device=device)
        indptr, indices, last = BlockTable(table, cached, page_size, num_pages=50, appends=True).csr
        pgqa.validate_page_table(indptr, indices[: int(indptr[-1])], last.clamp(min=1), 50, page_size)
        for row, length in enumerate(max(0, length) for length in lens):
            begin, end = indptr[row : row + 2].tolist()
            assert end - begin == -(-length // page_size)
            assert indices[begin:end].tolist() == table[row, : end - begin].tolist()
            assert length == 0 or (end - begin - 1) * page_size + int(last[row]) == length


@pytest.mark.parametrize("cached", [[-1, -1, -1], [64, 7, -1], [16, -5, 0]])
def test_rows_that_can_not_be_appended(device: str, cached: list[int]) -> None:
    """Past the table, in no block, or only filling the batch: they write nothing and have no tokens."""
    table = torch.tensor([[3, -1], [1, 9], [99, 2]], dtype=torch.int32, device=device)
    cache = torch.randn(4, 16, 2, 8, device=device)
    rows = torch.randn(3, 2, 8, device=device)
    expected = cache.clone()
    if cached[1] == 7:
        expected[1, 7] = rows[1]  # the only one in a block that exists
    blocks = BlockTable(table, torch.tensor(cached, dtype=torch.int32, device=device), 16, 4, appends=True)
    blocks.append(cache, rows)
    assert torch.equal(cache, expected)
    assert blocks.csr[0].diff().tolist() == [0, int(cached[1] == 7), 0]


@pytest.mark.gpu
def test_captured_in_a_graph() -> None:
    """Lengths, tables and rows rewritten in place between replays; nothing waits for the device."""
    case = case_of("cuda")
    k, v = torch.zeros(2, len(LENS), 1, 2, 64, dtype=case.q.dtype, device="cuda")
    cached, table = torch.full((len(LENS),), -1, dtype=torch.int32, device="cuda"), table_of(case, 9)
    arguments = (case.q[:, None], case.k_cache, case.v_cache, k, v)
    flash_attn_with_kvcache(*arguments, cache_seqlens=cached, block_table=table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_with_kvcache(*arguments, cache_seqlens=cached, block_table=table)
    for seed in range(4):
        fresh = case_of("cuda", seed=seed)
        expected, k_after = fresh.run(), fresh.k_cache.clone()
        for target, rows in zip((k, v), without_last_tokens(fresh)):
            target.copy_(rows)
        case.q.copy_(fresh.q), case.k_cache.copy_(fresh.k_cache), case.v_cache.copy_(fresh.v_cache)
        cached.copy_(before("cuda")), table.copy_(table_of(fresh, 9))
        graph.replay()
        assert torch.equal(out[:, 0], expected) and torch.equal(bits(case.k_cache), bits(k_after))


def test_refused_by_name() -> None:
    case = case_of("cpu")
    good = dict(cache_seqlens=before("cpu"), block_table=table_of(case, 9))
    q, k = case.q[:, None], torch.zeros(len(LENS), 1, 2, 64, dtype=case.q.dtype)
    for name, arguments, keywords in (
        ("q", (q.repeat(1, 2, 1, 1), case.k_cache, case.v_cache), {}),
        ("q", (case.q, case.k_cache, case.v_cache), {}),
        ("k and v", (q, case.k_cache, case.v_cache, k), {}),
        ("s_aux", (q, case.k_cache, case.v_cache), {"s_aux": torch.zeros(8)}),
        ("window_size", (q, case.k_cache, case.v_cache), {"window_size": (3, 1)}),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got .*expected "):
            flash_attn_with_kvcache(*arguments, **good, **keywords)
    with pytest.raises(TypeError, match="rotary_cos"):
        flash_attn_with_kvcache(q, case.k_cache, case.v_cache, **good, rotary_cos=k)
