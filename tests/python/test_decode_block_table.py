"""Padded block tables: the bits of the CSR table that says the same, whatever pads them; refusals by name."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pgqa
import pytest
import torch
from blocks import block_table_of, decode_blocks, seq_lens_of
from cases import Case, Spec, bits, make_case

MAX, MIN = 2**31 - 1, -(2**31)
LENS = [40, 0, 7, 100, 16, 1, 0, 17, 32]
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one token a page": dict(page_size=1),
    "every option": dict(window_left=20, logits_soft_cap=9.0, pos_encoding_mode=1, layout="mixed"),
    "one long request": dict(kv_lens=[3000]),
    "planned by warps": dict(kv_lens=[5, 0, 90] * 20),
    "planned by CTAs": dict(kv_lens=[5, 0, 90] * 100),
    "only empty requests": dict(kv_lens=[0, 0, 0]),
    "no requests": dict(kv_lens=[]),
}


def case_of(device: str, **spec: Any) -> Case:
    return make_case(device, Spec(**{"kv_lens": LENS, "query_heads": 8, "kv_heads": 2, "head_dim": 64, **spec}))


@pytest.mark.parametrize("name", SPECS)
def test_same_bits_as_csr(device: str, name: str) -> None:
    case = case_of(device, **SPECS[name])
    out, lse = case.run(return_lse=True)
    for fill, gap, new_tokens in ((-1, 0, 0), (None, 3, 1), (0, 5, 0), (None, 0, 1)):
        table, seq_lens = block_table_of(case, fill=fill, gap=gap), seq_lens_of(case, new_tokens)
        found, found_lse = decode_blocks(case, table, seq_lens, new_tokens=new_tokens, return_lse=True)
        assert torch.equal(bits(found), bits(out)) and torch.equal(found_lse, lse)


@pytest.mark.parametrize("empty", [-1, -2, MIN])
@pytest.mark.parametrize("new_tokens", [0, 1])
def test_negative_lengths_are_empty_requests(device: str, empty: int, new_tokens: int) -> None:
    case = case_of(device)
    seq_lens = seq_lens_of(case, new_tokens, empty)
    out, lse = decode_blocks(case, block_table_of(case), seq_lens, new_tokens=new_tokens, return_lse=True)
    assert torch.equal(out, case.run())
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()


@pytest.mark.parametrize("length", [MAX, MAX - 1, 1000, 0, MIN])
@pytest.mark.parametrize("new_tokens", [0, 1])
def test_malformed_lengths_harm_no_other_request(device: str, length: int, new_tokens: int) -> None:
    case = case_of(device)
    expected, seq_lens = case.run(), seq_lens_of(case, new_tokens)
    seq_lens[3] = length
    out = decode_blocks(case, block_table_of(case), seq_lens, new_tokens=new_tokens)
    others = [request for request in range(len(LENS)) if request != 3]
    assert torch.equal(out[others], expected[others])


def test_requests_that_share_one_row(device: str) -> None:
    case = case_of(device, kv_lens=[40])
    case.q = case.q.expand(3, -1, -1).contiguous()
    row = block_table_of(case).expand(3, -1)  # row stride 0
    seq_lens = torch.tensor([40, -1, 40], dtype=torch.int32, device=device)
    out = decode_blocks(case, row, seq_lens)
    assert torch.equal(out[0], out[2]) and (out[1] == 0).all() and out[0].isfinite().all()


def test_no_columns(device: str) -> None:
    case = case_of(device)
    empty = torch.empty(len(LENS), 0, dtype=torch.int32, device=device)
    assert (decode_blocks(case, empty, seq_lens_of(case)) == 0).all()


@pytest.mark.parametrize("new_tokens", [0, 1])
@pytest.mark.parametrize("spec", [{}, {"layout": "mixed"}, {"page_size": 1}])
def test_appends_the_same_bytes(device: str, spec: dict[str, Any], new_tokens: int) -> None:
    case, other = case_of(device, **spec), case_of(device, **spec)
    k, v = torch.randn(2, len(LENS), 2, 64, device=device).to(case.q.dtype)
    keywords: dict[str, Any] = dict(q=case.q, pos_encoding_mode=1, rope_theta=5e5)
    turned = pgqa.append_kv(k, v, *case.tensors()[1:], **keywords)
    table, seq_lens = block_table_of(case, gap=2), seq_lens_of(case, new_tokens)
    found = pgqa.append_kv_block_table(
        k, v, other.k_cache, other.v_cache, table, seq_lens, new_tokens=new_tokens, **keywords
    )
    live = [request for request, length in enumerate(LENS) if length > 0]
    assert torch.equal(found[live], turned[live])
    for cache, expected in ((other.k_cache, case.k_cache), (other.v_cache, case.v_cache)):
        assert torch.equal(bits(cache), bits(expected))


def test_appends_nothing_where_there_is_no_slot(device: str) -> None:
    """Past the row's columns, in a page that is none of the caches', or of an empty request."""
    table = torch.tensor([[3, 1], [1, 9], [99, 2], [-1, 0], [2, 0]], dtype=torch.int32, device=device)
    k_cache, v_cache = torch.randn(2, 4, 16, 2, 8, device=device).half()
    k, v = torch.randn(2, 5, 2, 8, device=device).half()
    expected = k_cache.clone()
    expected[1, 7] = k[1]  # the only one in a page that exists
    seq_lens = torch.tensor([32, 7, 4, -1, MAX], dtype=torch.int32, device=device)
    pgqa.append_kv_block_table(k, v, k_cache, v_cache, table, seq_lens, new_tokens=1)
    assert torch.equal(k_cache, expected)


def test_schedule_is_that_of_the_csr_table() -> None:
    case = case_of("cpu")
    for new_tokens in (0, 1):
        table, seq_lens = block_table_of(case), seq_lens_of(case, new_tokens)
        found = pgqa.schedule_block_table(table, seq_lens, new_tokens=new_tokens, **case.shape())
        assert found == pgqa.schedule(case.page_indptr, case.last_page_len, **case.shape())


def test_validation_names_the_request() -> None:
    case = case_of("cpu")
    table, seq_lens, pages = block_table_of(case, columns=8, gap=1), seq_lens_of(case), len(case.k_cache)
    pgqa.validate_block_table(table, seq_lens, pages, 16)
    for request, column, value, match in (
        (3, None, 129, "^seq_lens of request 3: got 129, expected at most 128: 8 columns of page_size 16"),
        (0, 2, -1, r"^block_table of request 0: got page -1 at column 2, expected 0 to num_pages - 1"),
        (3, 6, pages, f"^block_table of request 3: got page {pages} at column 6"),
    ):
        bad_table, bad_lens = table.clone(), seq_lens.clone()
        (bad_lens[request] if column is None else bad_table[request, column]).fill_(value)
        with pytest.raises(ValueError, match=match):
            pgqa.validate_block_table(bad_table, bad_lens, pages, 16)
    with pytest.raises(ValueError, match="^seq_lens of request 3: got 128, expected at most 127"):
        pgqa.validate_block_table(table, torch.full_like(seq_lens, -1).index_fill(0, torch.tensor(3), 128), pages, 16,
                                  new_tokens=1)  # fmt: skip
    with pytest.raises(ValueError, match="^block_table: got shape .*expected 2 rows"):
        pgqa.validate_block_table(table, seq_lens[:2], pages, 16)


Changes = Callable[[dict[str, Any]], dict[str, Any]]
BAD: list[tuple[str, Changes]] = [
    ("block_table", lambda a: {"block_table": a["block_table"].long()}),
    ("block_table", lambda a: {"block_table": a["block_table"][0]}),
    ("block_table", lambda a: {"block_table": a["block_table"][None]}),
    ("block_table", lambda a: {"block_table": a["block_table"][:-1]}),
    ("block_table", lambda a: {"block_table": a["block_table"].t().contiguous().t()}),
    ("block_table", lambda a: {"block_table": a["block_table"].to_sparse()}),
    ("block_table", lambda a: {"block_table": a["block_table"].to("meta")}),
    ("seq_lens", lambda a: {"seq_lens": a["seq_lens"].long()}),
    ("seq_lens", lambda a: {"seq_lens": a["seq_lens"][1:]}),
    ("seq_lens", lambda a: {"seq_lens": a["seq_lens"][:, None]}),
    ("seq_lens", lambda a: {"seq_lens": a["seq_lens"].repeat_interleave(2)[::2]}),
    ("seq_lens", lambda a: {"seq_lens": a["seq_lens"].to("meta")}),
    ("new_tokens", lambda a: {"new_tokens": 2}),
    ("new_tokens", lambda a: {"new_tokens": -1}),
]


@pytest.mark.parametrize("name, changes", BAD)
def test_refused_by_name(device: str, name: str, changes: Changes) -> None:
    case = case_of(device)
    arguments: dict[str, Any] = dict(block_table=block_table_of(case), seq_lens=seq_lens_of(case), new_tokens=0)
    arguments.update(changes(arguments))
    caches = dict(k_cache=case.k_cache, v_cache=case.v_cache)
    before, rows = case.k_cache.clone(), torch.zeros(len(LENS), 2, 64, dtype=case.q.dtype, device=device)
    with pytest.raises(ValueError, match=f"^{name}: got .*expected "):
        pgqa.decode_block_table(case.q, **caches, **arguments, sm_scale=None)
    with pytest.raises(ValueError, match=f"^{name}: got .*expected "):
        pgqa.append_kv_block_table(rows, rows, **caches, **arguments)
    assert torch.equal(bits(case.k_cache), bits(before))


def test_types_are_refused_by_name() -> None:
    case = case_of("cpu")
    good: dict[str, Any] = dict(block_table=block_table_of(case), seq_lens=seq_lens_of(case))
    for name, value in (("block_table", None), ("seq_lens", [1]), ("new_tokens", True), ("new_tokens", 1.0)):
        with pytest.raises(TypeError, match=f"^{name}: got "):
            pgqa.decode_block_table(case.q, case.k_cache, case.v_cache, **{**good, name: value}, sm_scale=None)


def test_output_shares_no_memory_with_the_table() -> None:
    case = case_of("cpu", dtype=torch.float32)
    table = block_table_of(case, columns=8 * 64)
    out = table.view(torch.float32).view(len(LENS), 8, 64)
    with pytest.raises(ValueError, match="^out: got memory that overlaps an input"):
        decode_blocks(case, table, seq_lens_of(case), out=out)


@pytest.mark.gpu
def test_replayed_for_other_lengths_and_pages() -> None:
    """Captured with every request empty; table and lengths are rewritten in place between replays."""
    case = case_of("cuda")
    table, seq_lens = block_table_of(case, columns=9), torch.full((len(LENS),), -1, dtype=torch.int32, device="cuda")
    decode_blocks(case, table, seq_lens, new_tokens=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_blocks(case, table, seq_lens, new_tokens=1)
    for seed in range(3):
        fresh = case_of("cuda", seed=seed)
        case.q.copy_(fresh.q), case.k_cache.copy_(fresh.k_cache), case.v_cache.copy_(fresh.v_cache)
        table.copy_(block_table_of(fresh, columns=9)), seq_lens.copy_(seq_lens_of(fresh, new_tokens=1))
        graph.replay()
        assert torch.equal(out, fresh.run())
