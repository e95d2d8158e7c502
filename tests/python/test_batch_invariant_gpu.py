"""batch_invariant on the GPU: graphs of any capacity, workspaces, malformed tables, repeated runs."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import random
from typing import Any

import pgqa
import pytest
import torch
from cases import Case, Spec, make_case
from graphs import with_room
from invariance import SPECS, alone, assert_rows, batch_of, random_order, results, rows_of
from reference import assert_close, reference

pytestmark = pytest.mark.gpu


def decode_graph(case: Case, max_batch: int, max_pages: int, **keywords: Any) -> pgqa.DecodeGraph:
    """A graph over the caches of `case` with tensors of its own."""
    return pgqa.DecodeGraph(
        case.k_cache, case.v_cache, num_query_heads=case.q.shape[1], max_batch=max_batch, max_pages=max_pages,
        sm_scale=case.options.sm_scale, return_lse=True, batch_invariant=True,
        **{**case.options.keywords(), **keywords},
    )  # fmt: skip


def fill(graph: pgqa.DecodeGraph, case: Case) -> None:
    """Puts the batch of `case` into the graph's tensors; the rest of the table names nothing."""
    batch, named = len(case.kv_lens), len(case.page_indices)
    graph.q[0][:batch] = case.q
    graph.page_indptr[: batch + 1] = case.page_indptr
    graph.page_indptr[batch + 1 :] = case.page_indptr[-1]
    graph.page_indices[:named] = case.page_indices
    graph.page_indices[named:] = -1
    graph.last_page_len[:batch] = case.last_page_len


@pytest.mark.parametrize("name", ["plain", "all options", "head dim 256"])
def test_graphs_of_any_capacity(name: str) -> None:
    case = make_case("cuda", SPECS[name])
    rows = alone(case)
    rng = random.Random(3)
    pages = len(case.page_indices)
    for max_batch, max_pages in ((7, 7 * pages), (40, 9 * pages), (300, 64 * pages)):
        graph = decode_graph(case, max_batch, max_pages)
        for batch in (1, 2, 7):
            order = random_order(case, batch, rng)
            fill(graph, batch_of(case, order))
            graph.replay(batch)
            assert_rows(rows_of(graph.out[0], graph.lse[0]), order, rows)
            assert (graph.out[0][batch:] == 0).all()


def test_layers_one_after_another() -> None:
    """Of a step whose kernels overlap: workspace and counters are used again at once."""
    case = make_case("cuda", SPECS["rope"])
    layers = 6
    graph = pgqa.DecodeGraph(
        [case.k_cache] * layers, [case.v_cache] * layers, q=[case.q] * layers, page_indptr=case.page_indptr,
        page_indices=case.page_indices, last_page_len=case.last_page_len, sm_scale=case.options.sm_scale,
        return_lse=True, batch_invariant=True, **case.options.keywords(),
    )  # fmt: skip
    expected = results(case)
    for _ in range(20):
        graph.replay()
    for layer in range(layers):
        assert torch.equal(rows_of(graph.out[layer], graph.lse[layer]), expected)


def test_rebinding_takes_no_larger_table() -> None:
    case = make_case("cuda", SPECS["plain"])
    graph = pgqa.DecodeGraph(
        case.k_cache, case.v_cache, q=case.q, page_indptr=case.page_indptr, page_indices=case.page_indices,
        last_page_len=case.last_page_len, batch_invariant=True,
    )  # fmt: skip
    longer = torch.cat((case.page_indices, case.page_indices[:1]))
    with pytest.raises(ValueError, match="^max_pages: got .*batch_invariant"):
        graph.rebind(page_indices=longer)
    graph.rebind(page_indices=case.page_indices.clone())
    graph.replay()
    assert_close(graph.out[0], reference(case).out)


def test_captured_by_torch() -> None:
    case = make_case("cuda", SPECS["all options"])
    expected = results(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = case.run(return_lse=True, batch_invariant=True)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(rows_of(out, lse), expected)


@pytest.mark.parametrize("spec", [
    Spec([131072], 8, 2, 128, pos_encoding_mode=1),
    Spec([40000, 0, 3000], 71, 1, 64, page_size=1),
    Spec([1024 * i + i for i in range(12)], 32, 8, 128),
    Spec([1 + 37 * i for i in range(100)], 8, 2, 64),
], ids=["one long", "one KV head", "uneven", "100 requests"])  # fmt: skip
def test_repeated_beside_other_work(spec: Spec) -> None:
    case = make_case("cuda", spec)
    assert_close(case.run(batch_invariant=True), reference(case).out)
    first = results(case)
    last = len(spec.kv_lens) - 1
    assert torch.equal(results(batch_of(case, [last]))[0], first[last])
    noise = torch.randn(2048, 2048, device="cuda")
    other = torch.cuda.Stream()
    for run in range(20):
        if run % 2 == 0:
            with torch.cuda.stream(other):
                torch.mm(noise, noise)
        assert torch.equal(results(case), first), f"run {run}"


@pytest.mark.parametrize("name", ["plain", "group 33"])
def test_exact_workspace_with_guards(name: str) -> None:
    case = make_case("cuda", SPECS[name])
    expected = case.run(batch_invariant=True)
    size = pgqa.workspace_bytes(
        **case.shape(), device=0, batch_invariant=True, batch=len(case.kv_lens), num_indices=len(case.page_indices)
    )
    buffer = torch.full((size + 8192,), 0xA5, dtype=torch.uint8, device="cuda")
    workspace = buffer[4096:-4096]
    for value in (0xFF, 0x7F, 0x00):
        workspace.fill_(value)
        for _ in range(2):
            assert torch.equal(case.run(batch_invariant=True, workspace=workspace), expected)
    assert (buffer[:4096] == 0xA5).all() and (buffer[-4096:] == 0xA5).all()
    with pytest.raises(ValueError, match=f"^workspace: got {size - 1} bytes, expected at least {size}"):
        case.run(batch_invariant=True, workspace=workspace[:-1])


def test_the_modes_share_a_workspace() -> None:
    """Counters of one call lie where another left partials."""
    case = make_case("cuda", SPECS["plain"])
    other = make_case("cuda", Spec([9000, 70], 32, 8, 128))
    expected = results(case), results(case, invariant=False), results(other)
    workspace = torch.zeros(1 << 26, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        for each, invariant, rows in zip((case, case, other), (True, False, True), expected):
            got = each.run(return_lse=True, batch_invariant=invariant, workspace=workspace)
            assert torch.equal(rows_of(*got), rows)


@pytest.mark.parametrize("batch", [9, 100])
def test_overlapping_rows_stay_in_bounds(batch: int) -> None:
    """More segments than a workspace for such a table holds: still right, and counters are left as they were."""
    case = with_room(1, tokens=6400, query_heads=8, kv_heads=2, head_dim=128)
    expected = reference(case).out[0]
    malformed = batch_of(case, [0] * batch)
    pages = int(case.page_indptr[1])
    malformed.page_indptr.copy_(torch.tensor([0, pages] * batch, dtype=torch.int32)[: batch + 1])
    malformed.page_indices = case.page_indices
    for _ in range(2):
        out = malformed.run(batch_invariant=True)
        for request in range(0, batch, 2):
            assert_close(out[request : request + 1], expected[None])
        assert (out[1::2] == 0).all()
        assert_close(case.run(batch_invariant=True)[0:1], expected[None])
