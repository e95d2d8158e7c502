"""FlashAttention's call on padded block tables: the results of page tables, and appends to live rows alone."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
import torch
from blocks import block_table_of
from cases import Case, Spec, bits, make_case

from pgqa.integrations.block_table import flash_attn_with_kvcache

LENS = [40, -1, 7, 100, 16, 1, -1, 17, 32]  # of tokens, the new one included; -1: a row that fills the batch


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
        block_table=block_table_of(case, max_blocks, fill), softmax_scale=case.options.sm_scale,
        window_size=(case.options.window_left, 0), softcap=case.options.logits_soft_cap,
    )  # fmt: skip
    assert torch.equal(out[:, 0], expected)
    assert torch.equal(bits(case.k_cache), bits(k_after)) and torch.equal(bits(case.v_cache), bits(v_after))


def test_without_an_append(device: str) -> None:
    case = case_of(device)
    lengths = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
    out = flash_attn_with_kvcache(
        case.q[:, None], case.k_cache, case.v_cache, cache_seqlens=lengths, block_table=block_table_of(case, 9)
    )
    assert torch.equal(out[:, 0], case.run())


def test_a_row_without_room_writes_nothing(device: str) -> None:
    case = case_of(device)
    table = block_table_of(case, columns=3)
    cached = torch.full((len(LENS),), 48, dtype=torch.int32, device=device)  # all blocks full
    rows, before = torch.zeros(len(LENS), 1, 2, 64, dtype=case.q.dtype, device=device), case.k_cache.clone()
    flash_attn_with_kvcache(
        case.q[:, None], case.k_cache, case.v_cache, rows, rows, cache_seqlens=cached, block_table=table
    )
    assert torch.equal(bits(case.k_cache), bits(before))


@pytest.mark.gpu
def test_captured_in_a_graph() -> None:
    """Lengths, tables and rows rewritten in place between replays; nothing waits for the device."""
    case = case_of("cuda")
    k, v = torch.zeros(2, len(LENS), 1, 2, 64, dtype=case.q.dtype, device="cuda")
    cached, table = torch.full((len(LENS),), -1, dtype=torch.int32, device="cuda"), block_table_of(case, 9)
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
        cached.copy_(before("cuda")), table.copy_(block_table_of(fresh, 9))
        graph.replay()
        assert torch.equal(out[:, 0], expected) and torch.equal(bits(case.k_cache), bits(k_after))


def test_refused_by_name() -> None:
    case = case_of("cpu")
    good = dict(cache_seqlens=before("cpu"), block_table=block_table_of(case, 9))
    q, k = case.q[:, None], torch.zeros(len(LENS), 1, 2, 64, dtype=case.q.dtype)
    for name, arguments, keywords in (
        ("q", (q.repeat(1, 2, 1, 1), case.k_cache, case.v_cache), {}),
        ("q", (case.q, case.k_cache, case.v_cache), {}),
        ("k and v", (q, case.k_cache, case.v_cache, k), {}),
        ("s_aux", (q, case.k_cache, case.v_cache), {"s_aux": torch.zeros(8)}),
        ("window_size", (q, case.k_cache, case.v_cache), {"window_size": (3, 1)}),
        ("cache_seqlens", (q, case.k_cache, case.v_cache), {"cache_seqlens": good["cache_seqlens"].long()}),
        ("cache_seqlens", (q, case.k_cache, case.v_cache), {"cache_seqlens": good["cache_seqlens"][:2]}),
        ("block_table", (q, case.k_cache, case.v_cache), {"block_table": good["block_table"].long()}),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got .*expected "):
            flash_attn_with_kvcache(*arguments, **{**good, **keywords})
    with pytest.raises(TypeError, match="rotary_cos"):
        flash_attn_with_kvcache(q, case.k_cache, case.v_cache, **good, rotary_cos=k)
