"""DecodeGraph over padded block tables: any lengths and pages, live batches, appending, rebinding, refusals."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

import pgqa
import pytest
import torch
from blocks import block_table_of, decode_blocks, seq_lens_of
from cases import Case, bits, rewrite
from graphs import SMALL, with_room

pytestmark = pytest.mark.gpu
COLUMNS = 64
STEPS = [[300, 5, 0, 17], [1, 0, 0, 1000], [0, 0, 0, 0], [16, 33, 64, 1]]


def graph_of(case: Case, **keywords: Any) -> pgqa.DecodeGraph:
    return pgqa.DecodeGraph(
        case.k_cache, case.v_cache, q=case.q, sm_scale=case.options.sm_scale, **{"max_columns": COLUMNS, **keywords}
    )


def write_table(graph: pgqa.DecodeGraph, case: Case, new_tokens: int) -> None:
    graph.block_table.copy_(block_table_of(case, columns=graph.max_columns))
    graph.seq_lens.copy_(seq_lens_of(case, new_tokens))


@pytest.mark.parametrize("new_tokens", [0, 1])
def test_replays_for_any_lengths_and_pages(new_tokens: int) -> None:
    case = with_room(4, 4000, **SMALL)
    graph = graph_of(case, new_tokens=new_tokens, return_lse=True)
    executable = graph.executable
    graph.replay()
    assert (graph.out[0] == 0).all() and (graph.lse[0] == -torch.inf).all(), "a fresh table has tokens"
    for seed, kv_lens in enumerate(STEPS):
        rewrite(case, kv_lens, seed)
        write_table(graph, case, new_tokens)
        graph.replay(num_pages=COLUMNS)
        out, lse = case.run(return_lse=True)
        assert torch.equal(graph.out[0], out) and torch.equal(graph.lse[0], lse)
    rewrite(case, STEPS[0], 9)
    write_table(graph, case, new_tokens)
    graph.replay(2)
    assert torch.equal(graph.out[0][:2], case.run()[:2])
    assert (graph.out[0][2:] == 0).all() and (graph.lse[0][2:] == -torch.inf).all()
    assert graph.executable == executable and graph.node_types == ["kernel"] * 2


def test_appends_as_the_eager_calls_do() -> None:
    case = with_room(4, 4000, **SMALL)
    graph = graph_of(case, new_tokens=1, append=True)
    rewrite(case, [300, 5, 0, 17], 1)
    write_table(graph, case, 1)
    for rows in (graph.k[0], graph.v[0]):
        rows.normal_()
    caches = case.k_cache.clone(), case.v_cache.clone()
    pgqa.append_kv_block_table(graph.k[0], graph.v[0], *caches, graph.block_table, graph.seq_lens, new_tokens=1)
    before = bits(case.k_cache).clone()
    graph.replay(0)
    assert torch.equal(bits(case.k_cache), before), "a request past the live batch was appended to"
    graph.replay(4)
    assert torch.equal(bits(case.k_cache), bits(caches[0])) and torch.equal(bits(case.v_cache), bits(caches[1]))
    assert torch.equal(graph.out[0], decode_blocks(case, graph.block_table, graph.seq_lens, new_tokens=1))


def test_rebinds_to_other_tables() -> None:
    case = with_room(4, 4000, **SMALL)
    graph = graph_of(case)
    rewrite(case, [300, 5, 0, 1000], 2)
    table, seq_lens = block_table_of(case, columns=COLUMNS + 30, gap=3), seq_lens_of(case)
    graph.rebind(block_table=table, seq_lens=seq_lens)
    graph.replay()
    assert graph.max_columns == COLUMNS + 30 and torch.equal(graph.out[0], case.run())
    with pytest.raises(ValueError, match="^page_indptr: got a tensor, expected none"):
        graph.rebind(page_indptr=case.page_indptr)
    seq_lens.copy_(torch.tensor([-1, 5, -1, -1]))
    graph.replay()
    assert (graph.out[0][0] == 0).all() and torch.equal(graph.out[0][1], case.run()[1])


def test_bound_from_the_start() -> None:
    case = with_room(4, 4000, **SMALL)
    rewrite(case, [300, 5, 0, 17], 3)
    table, seq_lens = block_table_of(case, columns=COLUMNS, gap=5), seq_lens_of(case)
    graph = graph_of(case, block_table=table, seq_lens=seq_lens, max_columns=None)
    graph.replay()
    assert torch.equal(graph.out[0], case.run())
    assert graph.block_table.data_ptr() == table.data_ptr() and graph.page_indptr is None


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "both capacities": (dict(max_pages=64), "^max_pages: got a number with a block table, expected none"),
    "no columns": (dict(max_columns=-1), "^max_columns: got -1, expected 0 to"),
    "new tokens": (dict(new_tokens=2), "^new_tokens: got 2, expected 0 or 1"),
    "new tokens of a CSR table": (
        dict(max_columns=None, max_pages=64, new_tokens=1), "^new_tokens: got 1, expected 0 without a block table",
    ),
    "lengths of int64": (dict(seq_lens=torch.zeros(4, dtype=torch.int64)), "^seq_lens: got dtype Long"),
    "a table of rank 1": (
        dict(block_table=torch.zeros(4, dtype=torch.int32), max_columns=None), "^block_table: got shape",
    ),
    "other columns": (dict(block_table=torch.zeros(4, 9, dtype=torch.int32)), "^max_columns: got 64, expected 9"),
    "both tables": (dict(page_indptr=torch.zeros(5, dtype=torch.int32)), "^page_indptr: got a tensor with a block"),
    "a length of another kind": (
        dict(seq_lens=torch.zeros(4, dtype=torch.int32), max_columns=None, max_pages=64),
        "^seq_lens: got a tensor without max_columns",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_by_name(name: str) -> None:
    case = with_room(4, 400, **SMALL)
    keywords, message = REFUSALS[name]
    on_device = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in keywords.items()}
    with pytest.raises(ValueError, match=message):
        graph_of(case, **on_device)


def test_pages_over_capacity() -> None:
    graph = graph_of(with_room(4, 400, **SMALL))
    with pytest.raises(ValueError, match=f"^num_pages: got {COLUMNS + 1}, expected 0 to {COLUMNS}"):
        graph.replay(num_pages=COLUMNS + 1)
