"""DecodeGraphCache: capacities, what it keeps, what its graphs are given, and on a GPU that their replays are right."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pgqa
import pytest
import torch
from blocks import block_table_of, seq_lens_of
from cases import Spec, make_case, rewrite
from graphs import SMALL, with_room
from pgqa.graph_cache import LeastRecentlyUsed
from reference import assert_close, reference


class Sized:
    def __init__(self, device_bytes: int = 1) -> None:
        self.device_bytes = device_bytes


class Fake(Sized):
    """A graph by its arguments alone."""

    def __init__(self, k_cache: Any, v_cache: Any, *, max_batch: int, max_pages: int = 0, q: Any = None,
                 page_indptr: Any = None, page_indices: Any = None, last_page_len: Any = None,
                 max_columns: int | None = None, block_table: Any = None, seq_lens: Any = None,
                 window_left: Any = -1) -> None:  # fmt: skip
        super().__init__(max_batch * 1000 + max_pages)
        self.arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pgqa.graph_cache, "DecodeGraph", Fake)


CACHES = (torch.zeros(4, 16, 2, 64), torch.ones(4, 16, 2, 64))


def usage(count: int, size: int, hits: int, misses: int, evictions: int) -> dict[str, int]:
    return {"count": count, "bytes": size, "hits": hits, "misses": misses, "evictions": evictions}


def test_capacities_hold_the_step_and_are_few() -> None:
    for max_batch, max_pages in ((1, 0), (1, 1), (7, 100), (256, 5000)):
        found = set()
        for live in range(max_batch + 1):
            for pages in {0, max_pages // 3, max_pages}:
                batch, entries = pgqa._pgqa.graph_capacity(max_batch, max_pages, live, pages)
                assert live <= batch <= max(1, min(max_batch, 2 * live - 1))
                assert pages <= entries <= max_pages
                found.add(batch)
        assert len(found) <= max_batch.bit_length() + 1


def test_the_least_recently_used_goes_first() -> None:
    lru = LeastRecentlyUsed[Sized](2, None)
    made = {key: lru.get_or_make(key, Sized) for key in "ab"}
    assert lru.get_or_make("a", Sized) is made["a"]
    lru.get_or_make("c", Sized)  # b goes
    assert lru.get_or_make("a", Sized) is made["a"]
    assert lru.get_or_make("b", Sized) is not made["b"]
    assert lru.usage == usage(2, 2, 2, 4, 2)
    lru.clear()
    assert lru.usage == usage(0, 0, 2, 4, 2)


def test_bytes_are_bounded() -> None:
    lru = LeastRecentlyUsed[Sized](10, 100)
    for size in (40, 50, 30):
        lru.get_or_make(size, lambda size=size: Sized(size))
    assert lru.usage == usage(2, 80, 0, 3, 1)
    lru.get_or_make(101, lambda: Sized(101))  # alone too large: handed out, nothing dropped
    assert lru.usage == usage(2, 80, 0, 4, 1)
    lru.get_or_make(100, lambda: Sized(100))
    assert lru.usage == usage(1, 100, 0, 5, 3)


def test_a_failure_changes_nothing() -> None:
    lru = LeastRecentlyUsed[Sized](1, None)
    kept = lru.get_or_make("a", Sized)

    def refuse() -> Sized:
        raise ValueError

    with pytest.raises(ValueError):
        lru.get_or_make("b", refuse)
    assert lru.get_or_make("a", Sized) is kept and lru.usage == usage(1, 1, 1, 2, 0)


def test_against_a_list(fake: None) -> None:
    """Random steps: the graphs that are kept, in order, are those of a list that does the same."""
    rng = random.Random(5)
    cache = pgqa.DecodeGraphCache(*CACHES, max_batch=100, max_pages=900, max_count=5)
    kept: list[tuple[tuple[int, int], Any]] = []
    hits = 0
    for _ in range(500):
        live, pages = rng.randint(0, 100), rng.randint(0, 900)
        graph: Any = cache.get(live, pages)
        capacity = (graph.arguments["max_batch"], graph.arguments["max_pages"])
        assert live <= capacity[0] and pages <= capacity[1]
        known = [entry for entry in kept if entry[0] == capacity]
        assert not known or known[0][1] is graph
        hits += len(known)
        kept = [*[entry for entry in kept if entry[0] != capacity], (capacity, graph)][-5:]
    now = cache.usage()
    assert now["hits"] == hits > 20 and now["misses"] == 500 - hits and now["evictions"] == 500 - hits - 5
    assert now["count"] == 5 and now["bytes"] == sum(graph.device_bytes for _, graph in kept)


def test_who_falls_out_lives_for_who_holds_it(fake: None) -> None:
    cache = pgqa.DecodeGraphCache(*CACHES, max_batch=8, max_pages=8, max_count=1)
    held, dropped = cache.get(1, 1), weakref.ref(cache.get(2, 1))
    cache.get(4, 1)
    gc.collect()
    assert dropped() is None and held.device_bytes == 1001
    assert cache.get(1, 1) is not held
    cache.clear()
    assert cache.usage() == usage(0, 0, 0, 4, 3)


def test_given_tensors_are_shared_by_their_fronts(fake: None) -> None:
    """And lists are copied: a graph made later is of the tensors that were given."""
    q = [torch.zeros(9, 8, 64) for _ in range(2)]
    indptr, indices, last = (torch.zeros(size, dtype=torch.int32) for size in (10, 40, 12))
    caches = [[cache, cache] for cache in CACHES]
    cache = pgqa.DecodeGraphCache(
        *caches, q=q, page_indptr=indptr, page_indices=indices, last_page_len=last, window_left=[5, -1]
    )
    assert (cache.max_batch, cache.max_pages) == (9, 40)
    first = q[0]
    q.clear()
    caches[0].clear()
    small: Any = cache.get(3, 17)
    large: Any = cache.get(9, 33)
    for graph, batch, pages in ((small, 4, 32), (large, 9, 40)):
        given = graph.arguments
        assert (given["max_batch"], given["max_pages"]) == (batch, pages)
        assert [tuple(one.shape) for one in given["q"]] == [(batch, 8, 64)] * 2 and len(given["k_cache"]) == 2
        assert given["q"][0].data_ptr() == first.data_ptr() and given["page_indptr"].data_ptr() == indptr.data_ptr()
        assert given["k_cache"][1] is CACHES[0] and list(given["window_left"]) == [5, -1]
        lengths = (len(given["page_indptr"]), len(given["page_indices"]), len(given["last_page_len"]))
        assert lengths == (batch + 1, pages, batch)


def test_block_tables_are_cut_in_rows_and_columns(fake: None) -> None:
    table, lengths = torch.zeros(9, 40, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    cache = pgqa.DecodeGraphCache(*CACHES, q=torch.zeros(9, 8, 64), block_table=table, seq_lens=lengths)
    assert (cache.max_batch, cache.max_pages, cache.max_columns) == (9, 0, 40)
    for step, batch, columns in (((3, 17), 4, 32), ((9, 33), 9, 40)):
        graph: Any = cache.get(*step)
        given = graph.arguments
        assert (given["max_batch"], given["max_pages"], given["max_columns"]) == (batch, 0, columns)
        assert given["block_table"].shape == (batch, columns) and given["seq_lens"].shape == (batch,)
        assert given["block_table"].data_ptr() == table.data_ptr()
    with pytest.raises(ValueError, match="^num_pages: got 41"):
        cache.get(1, 41)


REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown": ({"windows": 3}, TypeError, "^DecodeGraphCache: got an argument windows"),
    "no batch": ({"max_batch": None}, TypeError, "^max_batch: got NoneType, expected an int"),
    "batch": ({"max_batch": 0}, ValueError, "^max_batch: got 0, expected 1 to"),
    "pages": ({"max_pages": -1}, ValueError, "^max_pages: got -1, expected 0 to"),
    "count": ({"max_count": 0}, ValueError, "^max_count: got 0, expected at least 1"),
    "bytes": ({"max_bytes": 0.5}, TypeError, "^max_bytes: got float, expected an int"),
    "both tables": ({"max_columns": 3}, ValueError, "^max_pages: got a number with a block table, expected none"),
    "columns": ({"max_pages": None, "max_columns": -1}, ValueError, "^max_columns: got -1, expected at least 0"),
    "room of columns": (
        {"max_pages": None, "max_columns": 5, "block_table": torch.zeros(8, 4)},
        ValueError, "^block_table: got 4 columns, expected at least 5",
    ),
    "room": ({"q": torch.zeros(7, 8, 64)}, ValueError, "^q: got room for 7, expected at least 8"),
    "room of indptr": ({"page_indptr": torch.zeros(8)}, ValueError, "^page_indptr: got room for 8, expected at l"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_by_name(name: str, fake: None) -> None:
    change, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        pgqa.DecodeGraphCache(*CACHES, **{"max_batch": 8, "max_pages": 8, **change})


def test_steps_beyond_the_limit_are_refused(fake: None) -> None:
    cache = pgqa.DecodeGraphCache(*CACHES, max_batch=8, max_pages=8)
    for live, pages, fault in ((9, 1, "live_batch: got 9"), (1, 9, "num_pages: got 9"), (-1, 1, "live_batch: got -1")):
        with pytest.raises(ValueError, match=f"^{fault}"):
            cache.get(live, pages)
    with pytest.raises(TypeError, match="^num_pages: got float, expected an int"):
        cache.get(1, 1.0)  # type: ignore[arg-type]
    assert cache.usage() == usage(0, 0, 0, 0, 0)


@pytest.mark.skipif(pgqa.build_info()["cuda"], reason="built with CUDA")
def test_without_cuda_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="^DecodeGraph: this pgqa was built without CUDA"):
        pgqa.DecodeGraphCache(*CACHES, max_batch=8, max_pages=8).get(1, 1)


@pytest.mark.gpu
def test_replays_of_growing_and_shrinking_steps() -> None:
    """One set of tensors, graphs of several capacities over it: each step as the reference and as an eager call."""
    case = with_room(20, tokens=9000, **SMALL)
    q, k_cache, v_cache, indptr, indices, last = case.tensors()
    out = torch.empty_like(q)
    cache = pgqa.DecodeGraphCache(
        k_cache, v_cache, q=q, page_indptr=indptr, page_indices=indices, last_page_len=last, out=out, max_count=3,
    )  # fmt: skip
    for seed, lengths in enumerate(([5], [100, 3, 40], [100, 3, 41], [30] * 20, [7, 0, 2000], [8])):
        rewrite(case, lengths, seed)
        out.fill_(torch.nan)
        graph = cache.get(len(lengths), int(indptr[len(lengths)]))
        assert graph.max_batch < 2 * len(lengths)
        graph.replay(len(lengths))
        assert_close(out[: len(lengths)], reference(case).out[: len(lengths)])
        assert torch.equal(out[: len(lengths)], case.run()[: len(lengths)])
    now = cache.usage()
    assert (now["count"], now["hits"], now["misses"], now["evictions"]) == (3, 1, 5, 2) and now["bytes"] > 0


@pytest.mark.gpu
def test_replays_over_one_block_table() -> None:
    case = with_room(8, tokens=2000, **SMALL)
    out, columns = torch.empty_like(case.q), 16
    table = torch.zeros(8, columns, dtype=torch.int32, device="cuda")
    lengths = torch.full((8,), -1, dtype=torch.int32, device="cuda")
    cache = pgqa.DecodeGraphCache(case.k_cache, case.v_cache, q=case.q, out=out, block_table=table, seq_lens=lengths)
    for seed, kv_lens in enumerate(([200, 5], [16] * 8, [0, 33, 256])):
        rewrite(case, kv_lens, seed)
        table.copy_(block_table_of(case, columns=columns))
        lengths.copy_(seq_lens_of(case))
        graph = cache.get(len(kv_lens), -(-max(kv_lens) // 16))
        graph.replay(len(kv_lens))
        assert torch.equal(out[: len(kv_lens)], case.run()[: len(kv_lens)])
    assert cache.usage()["misses"] == 3


@pytest.mark.gpu
def test_graphs_of_their_own_tensors() -> None:
    case = make_case("cuda", Spec([300, 5, 0], **SMALL))
    cache = pgqa.DecodeGraphCache(case.k_cache, case.v_cache, num_query_heads=8, max_batch=64, max_pages=512)
    used = int(case.page_indptr[3])
    small, large = cache.get(3, used), cache.get(40, used)
    assert small is cache.get(3, used) and small.out[0].data_ptr() != large.out[0].data_ptr()
    assert (small.max_batch, large.max_batch) == (4, 64)
    assert cache.usage() == usage(2, small.device_bytes + large.device_bytes, 1, 2, 0)
    for graph in (small, large):
        graph.q[0][:3] = case.q
        graph.page_indptr[:4] = case.page_indptr
        graph.page_indices[:used] = case.page_indices[:used]
        graph.last_page_len[:3] = case.last_page_len
        graph.replay(3)
        assert torch.equal(graph.out[0][:3], case.run())
        assert (graph.out[0][3:] == 0).all()


@pytest.mark.gpu
def test_what_falls_out_may_still_be_in_use() -> None:
    """Replays that are enqueued when their graph goes end right."""
    case = make_case("cuda", Spec([300, 5, 0], **SMALL))
    q, k_cache, v_cache, indptr, indices, last = case.tensors()
    out = torch.zeros_like(q)
    cache = pgqa.DecodeGraphCache(
        k_cache, v_cache, q=q, page_indptr=indptr, page_indices=indices, last_page_len=last, out=out, max_count=1,
    )  # fmt: skip
    torch.cuda._sleep(100_000_000)
    cache.get(3, len(indices)).replay(3)
    cache.clear()
    gc.collect()
    assert_close(out, reference(case).out)


@pytest.mark.gpu
def test_new_graphs_are_refused_while_capturing() -> None:
    case = make_case("cuda", Spec([40], **SMALL))
    cache = pgqa.DecodeGraphCache(case.k_cache, case.v_cache, num_query_heads=8, max_batch=4, max_pages=8)
    kept = cache.get(1, 8)
    outer = torch.cuda.CUDAGraph()
    with torch.cuda.graph(outer):
        with pytest.raises(ValueError, match="^stream: got one that is being captured"):
            cache.get(4, 8)
        assert cache.get(1, 8) is kept
        kept.replay()
    kept.out[0].fill_(torch.nan)
    outer.replay()
    assert (kept.out[0] == 0).all()
