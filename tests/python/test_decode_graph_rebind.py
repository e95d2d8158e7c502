"""DecodeGraph rebound to other tensors, and everything that it refuses."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pgqa
import pytest
import torch
from cases import Case, Spec, make_case, rewrite
from graphs import SMALL, SPIN_CYCLES, Graphed, with_room
from reference import assert_close, reference

pytestmark = pytest.mark.gpu


def rebound(graphed: Graphed, case: Case) -> dict[str, torch.Tensor]:
    names = ("q", "k_cache", "v_cache", "page_indptr", "page_indices", "last_page_len")
    return dict(zip(names, case.tensors()))


def test_rebinding_equals_a_fresh_capture() -> None:
    graphed = Graphed(with_room(4, **SMALL))
    others = [with_room(4, tokens=tokens, **SMALL, seed=i, layout=layout)
              for i, (tokens, layout) in enumerate(((9000, "mixed"), (32000, "hnd"), (20000, "rows")))]  # fmt: skip
    for seed, case in enumerate(others):
        rewrite(case, [3000, 1, 0, 700 + seed], seed)
        fresh = Graphed(case)
        fresh.graph.replay()
        graphed.graph.rebind(**rebound(graphed, case))
        graphed.forget()
        graphed.graph.replay()
        assert torch.equal(graphed.out, fresh.out) and torch.equal(graphed.lse, fresh.lse)
        assert_close(graphed.out, reference(case).out)
        assert graphed.graph.executable == graphed.executable
    out = torch.empty_like(graphed.out)
    graphed.graph.rebind(out=out)
    graphed.graph.replay(2)
    assert_close(out[:2], reference(others[-1]).out[:2])
    assert (out[2:] == 0).all()


def test_rebinding_while_replays_are_queued() -> None:
    """What is enqueued keeps its tensors."""
    cases = [with_room(2, tokens=4000, **SMALL, seed=i) for i in range(3)]
    outs = [torch.zeros_like(case.q) for case in cases]
    graphed = Graphed(cases[0])
    torch.cuda._sleep(SPIN_CYCLES)
    for case, out in zip(cases, outs):
        graphed.graph.rebind(out=out, **rebound(graphed, case))
        graphed.graph.replay()
    for case, out in zip(cases, outs):
        assert_close(out, reference(case).out)


Change = Callable[[Graphed], dict[str, Any]]

REBIND_REFUSALS: dict[str, tuple[Change, str]] = {
    "dtype": (lambda g: {"k_cache": g.case.k_cache.half()}, "^k_cache: got dtype Half, expected dtype BFloat16 as"),
    "batch": (lambda g: {"q": g.case.q[:3]}, "^q: got shape .*, expected shape .* as captured"),
    "heads": (lambda g: {"q": g.case.q[:, :4]}, "^q: got shape .*, expected shape .* as captured"),
    "layers": (lambda g: {"k_cache": [g.case.k_cache] * 2}, "^k_cache: got 2 tensors, expected 1"),
    "short table": (lambda g: {"page_indptr": g.case.page_indptr[:-1]}, "^page_indptr: got shape"),
    "int64 table": (lambda g: {"page_indptr": g.case.page_indptr.long()}, "^page_indptr: got dtype Long"),
    "pages of K alone": (lambda g: {"k_cache": g.case.k_cache[1:].clone()}, "^v_cache: got shape"),
    "host": (lambda g: {"out": g.out.cpu()}, "^out: got a tensor on cpu, expected one on cuda:0"),
    "strided out": (lambda g: {"out": g.out.mT.contiguous().mT}, "^out: got"),
    "out over q": (lambda g: {"out": g.case.q}, "^out: got memory that overlaps an input"),
}


@pytest.mark.parametrize("name", REBIND_REFUSALS)
def test_rebinding_refuses(name: str) -> None:
    graphed = Graphed(with_room(4, **SMALL))
    change, message = REBIND_REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        graphed.graph.rebind(**change(graphed))
    graphed.check([300, 5, 0, 17], 1)


def test_wrong_types() -> None:
    graphed = Graphed(with_room(4, **SMALL))
    with pytest.raises(TypeError, match="^q: got int, expected a torch.Tensor"):
        graphed.graph.rebind(q=3)
    with pytest.raises(TypeError, match="^live_batch: got float, expected an int"):
        graphed.graph.replay(2.0)
    with pytest.raises(TypeError, match="^max_batch: got NoneType, expected an int"):
        pgqa.DecodeGraph(graphed.case.k_cache, graphed.case.v_cache, num_query_heads=8)


@pytest.mark.parametrize("live", [5, -1, 1 << 40])
def test_live_batch_over_capacity(live: int) -> None:
    graphed = Graphed(with_room(4, **SMALL))
    graphed.forget()
    with pytest.raises(ValueError, match="^live_batch: got .*, expected 0 to 4"):
        graphed.graph.replay(live)
    torch.cuda.synchronize()
    assert graphed.out.isnan().all(), "a refused replay ran"
    graphed.check([300, 5, 0, 17], 1)


def test_pages_over_capacity() -> None:
    graphed = Graphed(with_room(4, **SMALL))
    pages = graphed.graph.max_pages
    graphed.graph.replay(num_pages=pages)
    with pytest.raises(ValueError, match=f"^num_pages: got {pages + 1}, expected 0 to {pages}"):
        graphed.graph.replay(2, num_pages=pages + 1)
    assert graphed.graph.live_batch == 4
    graphed.check([300, 5, 0, 17], 1)


def test_destroyed_tensors_are_noticed() -> None:  # E11
    graphed = Graphed(with_room(4, **SMALL))
    graphed.graph.out[0].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="^out: got a tensor whose memory was freed or replaced"):
        graphed.graph.replay()
    graphed.graph.rebind(out=torch.empty_like(graphed.case.q))
    graphed.graph.replay()
    assert_close(graphed.graph.out[0], reference(graphed.case).out)
    moved = graphed.case.q
    moved.data = moved.data.clone()
    with pytest.raises(RuntimeError, match="^q: got a tensor whose memory was freed or replaced"):
        graphed.graph.replay()


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "max_batch": ({"max_batch": 0}, "^max_batch: got 0, expected 1 to"),
    "max_pages": ({"max_pages": -1}, "^max_pages: got -1, expected 0 to"),
    "num_query_heads": ({"num_query_heads": 7}, "^num_query_heads: got 7, expected a multiple"),
    "windows": ({"window_left": [1, 2]}, "^window_left: got 2 numbers, expected 1"),
    "window": ({"window_left": -2}, "^window_left: got -2"),
    "rotation without append": ({"rotate_appended": True}, "^rotate_appended: got true without append"),
    "two rotations": (
        {"rotate_appended": True, "append": True, "pos_encoding_mode": 1}, "^rotate_appended: got true with pos",
    ),
    "lse unasked": ({"lse": torch.zeros(4, 8)}, "^lse: got 1 tensors, expected 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_graphs_that_are_refused(name: str) -> None:
    case = make_case("cuda", Spec([300, 5, 0, 1], **SMALL))
    keywords, message = REFUSALS[name]
    spec = {"num_query_heads": 8, "max_batch": 4, "max_pages": 64, **keywords}
    with pytest.raises(ValueError, match=message):
        pgqa.DecodeGraph(case.k_cache, case.v_cache, **spec)
    assert_close(case.run(), reference(case).out)


def test_no_graph_is_made_during_a_capture() -> None:
    case = make_case("cuda", Spec([300, 5, 0, 1], **SMALL))
    torch_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(torch_graph):
        with pytest.raises(ValueError, match="^stream: got one that is being captured"):
            pgqa.DecodeGraph(case.k_cache, case.v_cache, num_query_heads=8, max_batch=4, max_pages=64)
        out = case.run()
    torch_graph.replay()
    assert_close(out, reference(case).out)
