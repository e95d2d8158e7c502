"""DecodeGraph among streams, threads, devices and other graphs."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import gc
import threading

import pytest
import torch
from cases import rewrite
from graphs import SMALL, SPIN_CYCLES, Graphed, with_room
from reference import assert_close, reference

pytestmark = pytest.mark.gpu


def test_captured_on_one_stream_and_replayed_on_others() -> None:
    side = [torch.cuda.Stream() for _ in range(3)]
    case = with_room(4, **SMALL)
    rewrite(case, [3000, 5, 300, 17], 1)
    expected = reference(case).out
    torch.cuda.synchronize()
    with torch.cuda.stream(side[0]):
        graphed = Graphed(case)
    for stream in (side[1], torch.cuda.current_stream(), side[2], side[1]):
        stream.wait_stream(side[0])
        with torch.cuda.stream(stream):
            graphed.forget()
            graphed.graph.replay()
        stream.synchronize()
        assert_close(graphed.out, expected)


def test_replays_run_on_the_current_stream() -> None:
    graphed = Graphed(with_room(4, **SMALL))
    side, done, behind = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    behind.record()
    with torch.cuda.stream(side):
        graphed.graph.replay()
        done.record()
    done.synchronize()
    assert not behind.query(), "the replay waited for the default stream"


def test_replays_without_synchronisation_in_between() -> None:  # A1, E1, T20
    """A blocked stream; then table, live batch and replay, five times over, with the results kept."""
    lengths = [[2000, 5, 300, 1], [40, 3000, 0, 9], [1, 1, 5000, 2], [0, 0, 0, 0], [16, 16, 16, 16]]
    lives = [4, 3, 4, 4, 2]
    cases = [with_room(4, **SMALL) for _ in lengths]
    for seed, (case, lens) in enumerate(zip(cases, lengths)):
        rewrite(case, lens, seed)
    expected = [reference(case).out for case in cases]
    shared = with_room(4, **SMALL)
    graphed = Graphed(shared)
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outs = []
        for case, live in zip(cases, lives):
            for tensor, source in zip(shared.tensors(), case.tensors()):
                tensor.copy_(source)
            graphed.graph.replay(live)
            outs.append(graphed.out.clone())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for out, exact, live in zip(outs, expected, lives):
        assert_close(out[:live], exact[:live])
        assert (out[live:] == 0).all()


@pytest.mark.slow
def test_producers_right_before_a_thousand_replays() -> None:  # T43
    cases = [with_room(2, tokens=1200, **SMALL, seed=i) for i in range(2)]
    rewrite(cases[0], [400, 3], 1)
    rewrite(cases[1], [17, 700], 2)
    expected = [case.run() for case in cases]
    now = with_room(2, tokens=1200, **SMALL)
    graphed = Graphed(now)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        pairs = list(zip(now.tensors(), cases[i % 2].tensors()))
        for tensor, source in pairs[i % 6 :] + pairs[: i % 6]:
            tensor.copy_(source)
        graphed.graph.replay()
        wrong += (graphed.out != expected[i % 2]).sum()
    assert wrong.item() == 0


def test_two_graphs_of_different_shapes_share_nothing() -> None:  # B6, E3
    graphs = [Graphed(with_room(4, head_dim=dim, query_heads=8, kv_heads=2)) for dim in (128, 256)]
    for graphed in graphs:
        rewrite(graphed.case, [9000, 5, 3000, 700], 1)
    expected = [graphed.case.run() for graphed in graphs]
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(50):
        for graphed, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graphed.graph.replay()
        torch.cuda.synchronize()
        for graphed, exact in zip(graphs, expected):
            assert torch.equal(graphed.out, exact)


def test_one_graph_outlives_another() -> None:  # E3
    first, second = (Graphed(with_room(4, seed=i)) for i in range(2))
    first.check([9000, 1], 1)
    del first
    gc.collect()
    torch.cuda.empty_cache()
    third = Graphed(with_room(4, seed=2))
    for seed in range(3):
        second.check([9000, 1, 2000], seed)
        third.check([100, 12000], seed)


@pytest.mark.slow
def test_another_thread_allocates_meanwhile() -> None:  # E8
    case = with_room(4, **SMALL)
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            del block
            torch.cuda.empty_cache()

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        graphs = [Graphed(case) for _ in range(20)]
    finally:
        stop.set()
        thread.join()
    graphs[-1].check([9000, 0, 3], 1)


def test_recorded_into_graphs_of_torch_that_share_a_pool() -> None:
    """The caller's stream is being captured: the launches go there, with workspaces of their own."""
    graphs = [Graphed(with_room(4, **SMALL, seed=i)) for i in range(2)]
    pool = torch.cuda.graph_pool_handle()
    outer, copies = [], []
    for graphed in graphs:
        outer.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(outer[-1], pool=pool):
            graphed.graph.replay(3)
            copies.append(graphed.out * 2)
    for seed in range(3):
        for graphed in graphs:
            rewrite(graphed.case, [2000 + seed, 1, 0, 50], seed)
        for graph in outer:
            graph.replay()
        for graphed, copy in zip(graphs, copies):
            graphed.compare(3)
            assert torch.equal(copy, graphed.out * 2)
    graphs[0].check([1, 2, 3, 4], 9)  # was not told of three


def test_steps_neither_synchronise_nor_allocate() -> None:
    graphed = Graphed(with_room(8, **SMALL))
    graphed.graph.replay(8)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(100):
            graphed.graph.replay(i % 9 if i % 3 == 0 else None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert set(graphed.graph.node_types) == {"kernel"}


def test_without_a_head_node() -> None:
    graphed = Graphed(with_room(4, **SMALL), live_batch=False)
    with_head = Graphed(with_room(4, **SMALL))
    assert len(with_head.graph.node_types) == len(graphed.graph.node_types) + 1
    graphed.check([3000, 0, 5], 1)
    with pytest.raises(ValueError, match="^live_batch: got 2, expected none"):
        graphed.graph.replay(2)
    graphed.check([30, 10, 5, 1], 2)


@pytest.mark.slow
def test_memory_is_flat_over_a_hundred_graphs() -> None:
    case = with_room(4, **SMALL)

    def used() -> int:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def make(count: int) -> None:
        for i in range(count):
            graphed = Graphed(case)
            graphed.graph.replay(i % 5)

    make(10)
    before = used()
    make(100)
    assert used() <= before + (16 << 20)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one() -> None:  # E13
    graphs = [Graphed(with_room(4, device=f"cuda:{i}", **SMALL)) for i in range(2)]
    for seed in range(3):
        for graphed in graphs:
            graphed.check([3000, 1, 0, 50], seed, live_batch=4)
    assert torch.cuda.current_device() == 0
