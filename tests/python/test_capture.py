"""A captured call replays right after lengths, page table and values have changed in place."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from cases import Case, Spec, make_case, rewrite
from fresh import run_fresh
from reference import assert_close, assert_lse_close, reference

pytestmark = pytest.mark.gpu

POOL_TOKENS = 32000


def with_room(batch: int, tokens: int = POOL_TOKENS, **spec: object) -> Case:
    """A case of `batch` requests whose pool and index array hold `tokens` tokens in all."""
    return make_case("cuda", Spec([tokens - 16 * (batch - 1)] + [16] * (batch - 1), **spec))


class Captured:
    """One call with LSE in a graph of torch, over the tensors of `case`."""

    def __init__(self, case: Case, warm: bool = True, **keywords: object) -> None:
        self.case = case
        self.graph = torch.cuda.CUDAGraph()
        if warm:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                case.run(return_lse=True)
            torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.graph):
            self.out, self.lse = case.run(return_lse=True, **keywords)

    def check(self, kv_lens: Sequence[int], seed: int) -> None:
        """Rewrites the problem, replays, and compares with the reference and, bit for bit, with an eager call."""
        rewrite(self.case, kv_lens, seed)
        self.out.fill_(torch.nan)
        self.lse.fill_(torch.nan)
        self.graph.replay()
        expected = reference(self.case)
        assert_close(self.out, expected.out)
        assert_lse_close(self.lse, expected.lse)
        out, lse = self.case.run(return_lse=True)
        assert torch.equal(out, self.out) and torch.equal(lse, self.lse)


VARIANTS = {
    "plain": {},
    "rope": {"pos_encoding_mode": 1, "head_dim": 64},
    "window and cap": {"window_left": 1000, "logits_soft_cap": 20.0, "dtype": torch.float16},
    "head dim 256": {"head_dim": 256, "query_heads": 16, "kv_heads": 2},
    "group 33": {"query_heads": 33, "kv_heads": 1, "head_dim": 80},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("captured_at", [1, 100, 30000])
def test_one_request_of_changing_length(captured_at: int, variant: str) -> None:  # T21, T22, T23
    case = with_room(1, **VARIANTS[variant])
    rewrite(case, [captured_at], seed=1)
    captured = Captured(case)
    for seed, length in enumerate((1, 30000, 5, 100, 101, 1600, 0, 16, 17)):
        captured.check([length], seed)


@pytest.mark.parametrize("batch", [16, 32, 33, 256, 300])
def test_live_requests_in_a_larger_batch(batch: int) -> None:  # T5, T24, T25, 28
    case = with_room(batch, query_heads=8, kv_heads=2, head_dim=64)
    rewrite(case, [100] * (batch // 2), seed=1)
    captured = Captured(case)
    for seed, live in enumerate((1, 3, 17, batch, 0, batch - 1)):
        captured.check([(37 * i + seed) % 90 + 1 for i in range(min(live, batch))], seed)
    captured.check([9000, 1], 50)
    captured.check([0, 0, 1, 9000], 51)


def test_captured_with_every_length_zero() -> None:  # 29
    case = with_room(16, query_heads=8, kv_heads=2)
    rewrite(case, [], seed=1)
    captured = Captured(case)
    captured.check([], 2)
    captured.check([5, 2000, 0, 1], 3)


def test_captured_short_and_replayed_far_longer() -> None:  # 8, 39, 40, 42
    case = with_room(2, tokens=150_000)
    rewrite(case, [64, 1], seed=1)
    captured = Captured(case)
    for seed, length in enumerate((4096, 144_000, 144_128, 1)):
        captured.check([length, 7], seed)


def test_permuted_pages() -> None:
    """Pages move, the table follows in place: the same bits."""
    case = with_room(2, tokens=4000)
    captured = Captured(case)
    captured.graph.replay()
    before = captured.out.clone()
    order = torch.randperm(len(case.k_cache), device="cuda")
    case.k_cache.copy_(case.k_cache[order].clone())
    case.v_cache.copy_(case.v_cache[order].clone())
    entries = int(case.page_indptr[-1])
    case.page_indices[:entries] = torch.argsort(order).int()[case.page_indices[:entries].long()]
    captured.graph.replay()
    assert torch.equal(captured.out, before)


COLD = """
import torch
from cases import Spec, make_case, rewrite
from reference import assert_close, reference
case = make_case("cuda", Spec([20000, 16, 16], {heads}, 128, pos_encoding_mode={rope}))
rewrite(case, [64, 3], 1)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="{mode}"):
    out = case.run()
for seed, lengths in enumerate(([9000, 5, 300], [1], [19000, 0, 1])):
    rewrite(case, lengths, seed)
    graph.replay()
    assert_close(out, reference(case).out)
print("right")
"""


@pytest.mark.parametrize(
    ("rope", "mode"),
    [
        (0, "global"),
        pytest.param(1, "thread_local", marks=pytest.mark.slow),
        pytest.param(1, "relaxed", marks=pytest.mark.slow),
    ],
)
def test_capture_from_cold(rope: int, mode: str) -> None:
    """The first call of the process is a captured one."""
    assert run_fresh(COLD.format(heads="32, 8" if rope else "8, 8", rope=rope, mode=mode)) == "right"


def test_caller_workspace_filled_between_replays() -> None:  # T41
    case = with_room(4)
    workspace = torch.full((case.workspace_bytes(),), 0xFF, dtype=torch.uint8, device="cuda")
    captured = Captured(case, workspace=workspace)
    for seed, fill in enumerate((0xFF, 0x7F, 0x00, 0xFF)):
        workspace.fill_(fill)
        captured.check([20000, 0, 1000, 3], seed)


def test_many_calls_in_one_graph() -> None:
    """Layers of different windows and shapes, as a decode step has them, capture and replay as one."""
    case = with_room(8, head_dim=64)
    other = with_room(3, head_dim=256, query_heads=8, kv_heads=2)
    layers = [case.with_options(window_left=-1 if i % 2 else 127) for i in range(6)] + [other]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [layer.run() for layer in layers]
    for seed in range(3):
        rewrite(case, [5000, 1, 0, 300 + seed, 128, 129], seed)
        rewrite(other, [100 * seed, 7000], seed)
        graph.replay()
        for layer, out in zip(layers, outs):
            layer.kv_lens = (other if layer is other else case).kv_lens
            assert_close(out, reference(layer).out)


def test_other_work_of_the_graph_overwrites_the_workspace() -> None:
    """The workspace of a captured call is memory of the graph's pool: later work puts its own values there."""
    case = with_room(4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = []
        for fill in (255, 127, 0, 1):
            outs.append(case.run())
            torch.full((2 * case.workspace_bytes(),), fill, dtype=torch.uint8, device="cuda")
            torch.full((case.workspace_bytes(),), fill, dtype=torch.uint8, device="cuda")
    for seed in range(4):
        rewrite(case, [20000 - 900 * seed, 300, 3000 + seed], seed)
        graph.replay()
        expected = case.run()
        assert_close(expected, reference(case).out)
        for out in outs:
            assert torch.equal(out, expected)


def test_graphs_of_one_pool() -> None:
    cases = [with_room(4, seed=i, head_dim=64 * (i + 1)) for i in range(2)]
    pool = torch.cuda.graph_pool_handle()
    graphs, outs = [], []
    for case in cases:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool):
            outs.append(case.run())
    for seed in range(6):
        for case, graph, out in zip(cases, graphs, outs):
            rewrite(case, [9000 + 700 * seed, 5, 0, 2000], seed)
            graph.replay()
            assert_close(out, reference(case).out)


def test_branches_of_one_graph() -> None:
    """Two calls that a graph may run at the same time."""
    cases = [with_room(4, seed=i) for i in range(2)]
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            first = [cases[0].run() for _ in range(3)]
        second = [cases[1].run() for _ in range(3)]
        torch.cuda.current_stream().wait_stream(side)
    for seed in range(5):
        for case in cases:
            rewrite(case, [9000 - 1000 * seed, 300, 20, 6000], seed)
        graph.replay()
        for outs, case in zip((first, second), cases):
            expected = reference(case).out
            for out in outs:
                assert_close(out, expected)


def test_graphs_replayed_at_once_beside_eager_calls() -> None:
    cases = [with_room(4, seed=i) for i in range(3)]
    for case in cases:
        rewrite(case, [9000, 5, 3000, 700], 1)
    expected = [case.run() for case in cases]
    graphs = [Captured(case) for case in cases[:2]]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(50):
        for captured, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                captured.graph.replay()
        with torch.cuda.stream(streams[2]):
            out = cases[2].run()
        torch.cuda.synchronize()
        for result, exact in zip((graphs[0].out, graphs[1].out, out), expected):
            assert torch.equal(result, exact)


def test_one_graph_outlives_another() -> None:
    cases = [with_room(4, seed=i) for i in range(2)]
    first, second = (Captured(case) for case in cases)
    first.check([9000, 1], 1)
    del first
    gc.collect()
    torch.cuda.empty_cache()
    third = Captured(cases[0])
    for seed in range(3):
        second.check([9000, 1, 2000], seed)
        third.check([100, 12000], seed)


def test_batch_of_none_captured() -> None:  # T46
    case = make_case("cuda", Spec([], 8, 2, 64))
    other = with_room(2, head_dim=64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run()
        after = other.run()
    graph.replay()
    assert out.shape == (0, 8, 64)
    assert_close(after, reference(other).out)


def test_refused_call_leaves_the_capture_usable() -> None:
    case = with_room(2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="^rope_theta: got"):
            case.with_options(rope_theta=-1.0).run()
        out = case.run()
    graph.replay()
    assert_close(out, reference(case).out)
