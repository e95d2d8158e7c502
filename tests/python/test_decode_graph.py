"""DecodeGraph replays right whatever has become of lengths, pages and live requests since its capture."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import random

import pgqa
import pytest
import torch
from cases import Spec, bits, make_case, ragged, rewrite
from fresh import run_fresh
from graphs import SMALL, Graphed, with_room
from reference import assert_close, reference

pytestmark = pytest.mark.gpu

VARIANTS = {
    "plain": {},
    "rope": {"pos_encoding_mode": 1, "head_dim": 64},
    "window and cap": {"window_left": 1000, "logits_soft_cap": 20.0, "dtype": torch.float16},
    "head dim 256": {"head_dim": 256, "query_heads": 16, "kv_heads": 2},
    "group 33, pages of 1": {"query_heads": 33, "kv_heads": 1, "head_dim": 80, "page_size": 1},
}


@pytest.mark.parametrize(
    ("captured_at", "variant"),
    [
        (1, "plain"),
        *(pytest.param(at, "plain", marks=pytest.mark.slow) for at in (0, 100)),
        *(pytest.param(1, name, marks=pytest.mark.slow) for name in VARIANTS if name != "plain"),
    ],
)
def test_lengths_grow_and_shrink(captured_at: int, variant: str) -> None:  # A1, A6, A8, A9, A11, A20, A21
    case = with_room(1, tokens=130_064, **VARIANTS[variant])
    rewrite(case, [captured_at], seed=1)
    graphed = Graphed(case)
    for seed, length in enumerate((1, 130_000, 5, 100, 101, 1600, 30_000, 0, 16, 17)):
        graphed.check([length], seed)


@pytest.mark.parametrize(("batch", "live"), [(4, 3), (256, 1), (112, 100), (2, 1), (300, 33)])
def test_padded_by_empty_rows(batch: int, live: int) -> None:  # A2, A3, A4, A17
    case = with_room(batch, **SMALL)
    graphed = Graphed(case)
    for seed in range(3):
        graphed.check([(37 * i + seed) % 90 + 1 for i in range(live)], seed)
        assert torch.isfinite(graphed.out.sum(dim=0)).all()
    graphed.check([1] * batch, 10)


@pytest.mark.parametrize(("batch", "live"), [(4, 3), (256, 1), (112, 100), (2, 1), (300, 33)])
def test_rows_past_the_live_batch_are_freed_pages(batch: int, live: int) -> None:  # A2, T25
    """The rows from `live` on keep tokens, whose pages are full of NaN."""
    case = with_room(batch, **SMALL)
    graphed = Graphed(case)
    for seed in range(3):
        lengths = [(37 * i + seed) % 90 + 1 for i in range(batch)]
        rewrite(case, lengths, seed)
        for request in range(live, batch):
            slots = case.live_slots(request)
            case.k_cache[slots // 16, slots % 16] = torch.nan
            case.v_cache[slots // 16, slots % 16] = torch.nan
        graphed.forget()
        graphed.graph.replay(live)
        graphed.compare(live)
        graphed.forget()
        graphed.graph.replay()
        graphed.compare(live)  # what was told stays
    for seed, count in enumerate((0, batch, live, 1, batch)):
        graphed.check([20] * batch, 10 + seed, live_batch=count)
    assert graphed.graph.live_batch == batch


def test_all_empty() -> None:  # A6, T46
    graphed = Graphed(with_room(16, **SMALL))
    graphed.check([], 1)
    graphed.check([5, 2000, 0, 1], 2)
    graphed.check([], 3)
    graphed.check([7] * 16, 4, live_batch=0)


def test_pages_move() -> None:  # A15
    """Physical pages are permuted, the table follows in place: the same bits."""
    case = with_room(2, tokens=4000)
    graphed = Graphed(case)
    graphed.graph.replay()
    before = graphed.out.clone()
    for _ in range(5):
        order = torch.randperm(len(case.k_cache), device="cuda")
        case.k_cache.copy_(case.k_cache[order].clone())
        case.v_cache.copy_(case.v_cache[order].clone())
        entries = int(case.page_indptr[-1])
        case.page_indices[:entries] = torch.argsort(order).int()[case.page_indices[:entries].long()]
        graphed.forget()
        graphed.graph.replay()
        assert torch.equal(graphed.out, before)


@pytest.mark.parametrize("page_size", [16, 64])
def test_only_last_page_len_changes(page_size: int) -> None:
    """Token after token through a whole page, nothing else written."""
    case = make_case("cuda", Spec([5 * page_size, 3 * page_size], **SMALL, page_size=page_size))
    graphed = Graphed(case)
    for length in range(1, page_size + 1):
        case.last_page_len.fill_(length)
        case.kv_lens = [4 * page_size + length, 2 * page_size + length]
        graphed.forget()
        graphed.graph.replay()
        graphed.compare()


@pytest.mark.parametrize("window", [0, 15, 16, 127, 4095])
def test_windows_cross_tiles(window: int) -> None:  # A12
    case = with_room(3, **SMALL, window_left=window)
    graphed = Graphed(case)
    for seed, beyond in enumerate((0, 1, 2, 15, 17, 128, 129)):
        length = window + beyond
        graphed.check([length, max(0, length - 1), 5000], seed)


def test_layers_of_their_own_windows() -> None:  # A13
    """Full and windowed layers with caches of their own in one graph."""
    windows = [-1, 127, -1, 0]
    case = with_room(5, **SMALL)
    rewrite(case, [1000, 1, 128, 129, 0], 1)
    layers = [case.with_options(window_left=window) for window in windows]
    for layer in layers:
        layer.q = layer.q.clone()
        layer.k_cache, layer.v_cache = torch.zeros_like(case.k_cache), torch.zeros_like(case.v_cache)
    graph = pgqa.DecodeGraph(
        [layer.k_cache for layer in layers], [layer.v_cache for layer in layers], num_query_heads=8, max_batch=5,
        max_pages=len(case.page_indices), window_left=windows,
    )  # fmt: skip
    for seed in range(4):
        rewrite(case, [1000 + 300 * seed, 1, 128 + seed, 129, seed], seed)
        for tensor, source in zip((graph.page_indptr, graph.page_indices, graph.last_page_len), case.tensors()[3:]):
            tensor.copy_(source)
        for i, layer in enumerate(layers):
            layer.kv_lens = case.kv_lens
            layer.k_cache.copy_(case.k_cache * (i + 1))
            layer.v_cache.copy_(case.v_cache * (i + 1))
            graph.q[i].copy_(layer.q)
        graph.replay()
        for layer, out in zip(layers, graph.out):
            assert torch.equal(out, layer.run())
            assert_close(out, reference(layer).out)


@pytest.mark.slow
def test_random_steps_of_three_buckets() -> None:  # E10
    rng = random.Random(3)
    graphs = [Graphed(with_room(batch, tokens=9000, **SMALL)) for batch in (1, 8, 64)]
    for seed in range(200):
        graphed = rng.choice(graphs)
        lengths = ragged(rng, len(graphed.out), 6000 // len(graphed.out))
        graphed.check(lengths, seed)


COLD = """
import torch
from cases import rewrite
from graphs import Graphed, with_room
case = with_room(3, tokens=20000, pos_encoding_mode={rope})
rewrite(case, [64, 3], 1)
torch.cuda.synchronize()
graphed = Graphed(case)
for seed, lengths in enumerate(([9000, 5, 300], [1], [19000, 0, 1])):
    graphed.check(lengths, seed)
print("right")
"""


@pytest.mark.parametrize("rope", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_capture_from_cold(rope: int) -> None:  # E4
    """The first call of the process is the graph's."""
    assert run_fresh(COLD.format(rope=rope)) == "right"


def test_graph_of_own_tensors() -> None:
    """Tensors that the graph allocates are persistent, aliased by what it hands out, and at first an empty table."""
    case = make_case("cuda", Spec([300, 5, 0], **SMALL))
    graph = pgqa.DecodeGraph(
        case.k_cache, case.v_cache, num_query_heads=8, max_batch=4, max_pages=64, return_lse=True
    )
    assert graph.q[0].shape == (4, 8, 64) and graph.q[0] is graph.q[0]
    assert graph.max_batch == 4 and graph.max_pages == 64 and graph.device_bytes > 0
    graph.replay()
    assert (graph.out[0] == 0).all() and (graph.lse[0] == -torch.inf).all()
    graph.q[0][:3] = case.q
    graph.page_indptr[:4] = case.page_indptr
    graph.page_indptr[4] = case.page_indptr[3]
    graph.page_indices[: len(case.page_indices)] = case.page_indices
    graph.last_page_len[:3] = case.last_page_len
    graph.replay()
    assert torch.equal(graph.out[0][:3], case.run()) and (graph.out[0][3] == 0).all()


def test_guards_around_bound_tensors() -> None:  # A3, A22
    case = with_room(100, **SMALL)
    buffer = torch.full((102, 8, 64), 7.0, dtype=case.q.dtype, device="cuda")
    lse = torch.full((102, 8), 7.0, device="cuda")
    graphed = Graphed(case, out=buffer[1:101], lse=lse[1:101])
    graphed.check([50] * 97, 1)
    graphed.check([1] * 100, 2)
    for guard in (buffer[0], buffer[101], lse[0], lse[101]):
        assert (guard == 7.0).all()


def test_appending_at_the_head_of_every_layer() -> None:
    """Forty steps of four requests in two layers: caches byte for byte, outputs as eager calls."""
    lengths = [3, 16, 0, 31]
    case = with_room(4, tokens=2000, **SMALL)
    caches = [[torch.randn_like(case.k_cache) for _ in range(2)] for _ in range(2)]
    graph = pgqa.DecodeGraph(
        caches[0], caches[1], num_query_heads=8, max_batch=4, max_pages=len(case.page_indices), append=True
    )
    assert graph.node_types == ["kernel"] * 6  # live rows, the shared plan, and two a layer
    for step in range(40):
        lengths = [length + 1 if step % 7 != i else length for i, length in enumerate(lengths)]
        live = 4 if step % 3 else 2
        write_table(graph, lengths)
        for rows in (*graph.k, *graph.v, *graph.q):
            rows.normal_()
        expected = [[cache.clone() for cache in layer] for layer in caches]
        for kind, rows in enumerate((graph.k, graph.v)):
            for layer in range(2):
                for request in range(live):
                    if lengths[request] > 0:
                        slot = page_of(request, lengths[request] - 1), (lengths[request] - 1) % 16
                        expected[kind][layer][slot] = rows[layer][request]
        graph.replay(live)
        for kind in range(2):
            for layer in range(2):
                assert torch.equal(bits(caches[kind][layer]), bits(expected[kind][layer]))
        table = (graph.page_indptr, graph.page_indices, graph.last_page_len)
        for layer in range(2):
            eager = pgqa.decode(graph.q[layer], caches[0][layer], caches[1][layer], *table, None)
            assert_close(graph.out[layer][:live], eager[:live].double())


def page_of(request: int, position: int) -> int:
    """Pages of 16 tokens, five a request, backwards."""
    return 5 * request + 4 - position // 16


def write_table(graph: pgqa.DecodeGraph, lengths: list[int]) -> None:
    counts = [-(-length // 16) for length in lengths]
    indptr = [sum(counts[:i]) for i in range(len(counts) + 1)]
    ids = [page_of(request, 16 * i) for request, count in enumerate(counts) for i in range(count)]
    last = [length - 16 * (count - 1) for length, count in zip(lengths, counts)]
    graph.page_indptr.copy_(torch.tensor(indptr, dtype=torch.int32))
    graph.page_indices[: len(ids)] = torch.tensor(ids, dtype=torch.int32, device="cuda")
    graph.last_page_len.copy_(torch.tensor(last, dtype=torch.int32))


def test_turned_keys_appended_equal_rope_on_plain_ones() -> None:
    """Caches of turned keys, decoded without RoPE, against caches of plain keys, decoded with it."""
    spec = {"num_query_heads": 8, "max_batch": 4, "max_pages": 20, "append": True}
    caches = torch.zeros(4, 20, 16, 2, 64, dtype=torch.float16, device="cuda")
    plain = pgqa.DecodeGraph(caches[0], caches[1], pos_encoding_mode=1, **spec)
    turned = pgqa.DecodeGraph(caches[2], caches[3], rotate_appended=True, **spec)
    for length in range(1, 70):
        for graph in (plain, turned):
            write_table(graph, [length, 1, 0, length // 2])
        for name in ("q", "k", "v"):
            getattr(plain, name)[0].normal_()
            getattr(turned, name)[0].copy_(getattr(plain, name)[0])
        plain.replay()
        turned.replay()
        assert_close(turned.out[0], plain.out[0].double())
