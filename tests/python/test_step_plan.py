"""pgqa.Plan: calls bound to a step that is planned once."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pgqa
import pytest
import torch
from cases import Spec, make_case, rewrite
from graphs import SMALL, with_room
from reference import assert_close, reference

MANY = [1 + 37 * i % 90 for i in range(200)]  # more requests than a warp plans alone


def make_plan(case, **keywords):
    q, k_cache, v_cache, *table = case.tensors()
    options = {**case.options.keywords(), **keywords}
    return pgqa.Plan(q, k_cache, v_cache, *table, case.options.sm_scale, **options)


@pytest.mark.parametrize("kv_lens", [[100, 0, 33], MANY], ids=["few", "many"])
@pytest.mark.parametrize(
    "options", [{}, {"window_left": 40}, {"pos_encoding_mode": 1}, {"logits_soft_cap": 20.0}], ids=str
)
def test_every_layer_is_a_decode_call(device: str, kv_lens: list[int], options: dict) -> None:
    case = make_case(device, Spec(kv_lens, **SMALL, **options))
    first = make_plan(case, return_lse=True)
    q, k_cache, v_cache, *table = case.tensors()
    q2, k2, v2 = torch.randn_like(q), v_cache.clone(), k_cache.clone()
    keywords = case.options.keywords()
    own = {name: keywords[name] for name in ("logits_soft_cap", "rope_scale", "rope_theta") if name in keywords}
    second = first.bind(q2, k2, v2, 0.5, **own)
    first.plan()
    out, lse = first.run()
    expected = case.run(return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert_close(out, reference(case).out)
    assert torch.equal(second.run(), pgqa.decode(q2, k2, v2, *table, 0.5, **case.options.keywords()))


def test_plans_anew_for_a_rewritten_table(device: str) -> None:
    case = with_room(3, 3000, device, **SMALL)
    plan = make_plan(case)
    for seed, kv_lens in enumerate([[1, 1, 1], [2900, 16, 1], [0, 0, 0], [5, 0, 1000]]):
        rewrite(case, kv_lens, seed)
        plan.plan()
        assert torch.equal(plan.run(), case.run())


def test_out_is_written_and_handed_out_again(device: str) -> None:
    case = make_case(device, Spec([20], **SMALL))
    out = torch.empty_like(case.tensors()[0])
    plan = make_plan(case, out=out)
    plan.plan()
    assert plan.run() is plan.run() and plan.run().data_ptr() == out.data_ptr()
    assert torch.equal(out, case.run())


def test_run_before_plan_is_refused(device: str) -> None:
    case = make_case(device, Spec([20], **SMALL))
    plan = make_plan(case)
    with pytest.raises(RuntimeError, match=r"^plan: got none yet, expected plan\(\) before run\(\)"):
        plan.run()
    plan.plan()
    assert torch.equal(plan.run(), case.run())


def test_other_shapes_are_refused_by_name(device: str) -> None:
    case = make_case(device, Spec([20, 5], **SMALL))
    q, k_cache, v_cache, *_ = case.tensors()
    plan = make_plan(case)
    with pytest.raises(ValueError, match="^query_heads: got 4, expected 8 as planned"):
        plan.bind(q[:, :4], k_cache, v_cache)
    with pytest.raises(ValueError, match="^page_size: got 8, expected 16 as planned"):
        plan.bind(q, *(cache.view(-1, 8, *cache.shape[2:]) for cache in (k_cache, v_cache)))
    with pytest.raises(ValueError, match="^q: got dtype Half, expected dtype BFloat16 as planned"):
        plan.bind(q.half(), k_cache.half(), v_cache.half())
    with pytest.raises(ValueError, match="^page_indptr: got 3 elements, expected 2"):
        plan.bind(q[:1], k_cache, v_cache)
    with pytest.raises(TypeError, match="^q: "):
        plan.bind(None, k_cache, v_cache)
    plan.plan()
    assert torch.equal(plan.run(), case.run())


def test_lost_memory_is_noticed(device: str) -> None:
    case = make_case(device, Spec([20], **SMALL))
    plan = make_plan(case)
    plan.plan()
    case.q.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="^q: got a tensor whose memory was freed or replaced"):
        plan.run()
    case = make_case(device, Spec([20], **SMALL))
    plan = make_plan(case)
    case.last_page_len.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="^last_page_len: got a tensor whose memory was freed or replaced"):
        plan.plan()


def test_no_requests(device: str) -> None:
    case = make_case(device, Spec([], **SMALL))
    plan = make_plan(case, return_lse=True)
    plan.plan()
    out, lse = plan.run()
    assert out.shape == (0, 8, 64) and lse.shape == (0, 8)


@pytest.mark.gpu
def test_a_captured_step_replays_for_other_tables() -> None:
    case = with_room(80, 6000, **SMALL)
    plan = make_plan(case)
    q, k_cache, v_cache, *table = case.tensors()
    other = plan.bind(q, v_cache, k_cache)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        plan.plan()
        out, other_out = plan.run(), other.run()
    for seed, kv_lens in enumerate([[1] * 80, [4000] + [3] * 79, [0] * 80, [17 * i % 70 for i in range(80)]]):
        rewrite(case, kv_lens, seed)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, case.run())
        assert torch.equal(other_out, pgqa.decode(q, v_cache, k_cache, *table, None))


@pytest.mark.parametrize("kv_lens", [[1, 1, 1], [0, 0, 0], [2900, 2, 2900]], ids=["shorter", "empty", "longer"])
def test_a_forgotten_plan_neither_hangs_nor_lingers(device: str, kv_lens: list[int]) -> None:
    """What it computes is undefined; the next planned step is right."""
    case = with_room(3, 12000, device, **SMALL)
    plan = make_plan(case)
    rewrite(case, [2900, 16, 300], 1)
    plan.plan()
    plan.run()
    rewrite(case, kv_lens, 2)
    for _ in range(3):
        plan.run()
    plan.plan()
    assert torch.equal(plan.run(), case.run())
