"""The wrapper with FlashInfer's interface: its layouts, options, base-2 LSE and graph buffers."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, Spec, make_case, relayout, rewrite
from reference import assert_close, assert_lse_close, reference
from wrapping import SPECS, graph_wrapper, options_of, plan, sizes_of, wrapper_of


def cache_of(case: Case, kv_layout: str, form: str) -> Any:
    """The case's caches as a user of FlashInfer holds them."""
    if kv_layout == "HND":
        case = relayout(case, "hnd")
    caches = case.k_cache, case.v_cache
    if kv_layout == "HND":
        caches = caches[0].transpose(1, 2), caches[1].transpose(1, 2)
        assert caches[0].is_contiguous()
    return caches if form == "tuple" else torch.stack(caches, dim=1)


def check(case: Case, out: torch.Tensor, lse: torch.Tensor) -> None:
    expected = reference(case)
    assert_close(out, expected.out)
    assert_lse_close(lse * math.log(2), expected.lse)


@pytest.mark.parametrize("form", ["tuple", "one tensor"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("name", SPECS)
def test_as_planned(device: str, name: str, kv_layout: str, form: str) -> None:
    case = make_case(device, SPECS[name])
    wrapper, cache = wrapper_of(case, kv_layout), cache_of(case, kv_layout, form)
    plan(wrapper, case)
    out = wrapper.run(case.q, cache)
    assert torch.equal(out, case.run())
    for run in (wrapper.run_return_lse, lambda *inputs: wrapper.run(*inputs, return_lse=True)):
        again, lse = run(case.q, cache)
        assert torch.equal(again, out)
        check(case, out, lse)
    out, lse = wrapper.forward_return_lse(case.q, cache, **options_of(case))
    check(case, out, lse)
    assert torch.equal(wrapper.forward(case.q, cache, **options_of(case)), out)
    wrapper.end_forward()


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_caches_are_not_copied(kv_layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("cpu", SPECS["plain"])
    wrapper, cache = wrapper_of(case, kv_layout), cache_of(case, kv_layout, "one tensor")
    plan(wrapper, case)
    seen = []
    monkeypatch.setattr("pgqa.compat.flashinfer._pgqa.decode", lambda *inputs: seen.extend(inputs[1:3]))
    wrapper.run(case.q, cache)
    assert [t.data_ptr() for t in seen] == [cache[:, 0].data_ptr(), cache[:, 1].data_ptr()]
    assert [t.shape for t in seen] == [case.k_cache.shape] * 2


def test_buffers_of_the_caller(device: str) -> None:
    case = make_case(device, SPECS["rope"])
    wrapper = wrapper_of(case)
    plan(wrapper, case)
    out, lse = torch.full_like(case.q, torch.nan), torch.full(case.q.shape[:2], torch.nan, device=device)
    results = wrapper.run(case.q, (case.k_cache, case.v_cache), out=out, lse=lse, return_lse=True, enable_pdl=True)
    assert results[0] is out and results[1] is lse
    check(case, out, lse)
    assert torch.equal(wrapper.run(case.q, (case.k_cache, case.v_cache), lse=lse), out)
    assert wrapper.run(case.q, (case.k_cache, case.v_cache), out=out.zero_()) is out
    check(case, out, lse)


def test_defaults_are_those_of_flashinfer(device: str) -> None:
    """float16, scale head_dim^-0.5, no window, cap or position encoding; `forward` puts them in the plan's place."""
    case = make_case(device, replace(SPECS["plain"], dtype=torch.float16))
    wrapper, cache = wrapper_of(case), (case.k_cache, case.v_cache)
    wrapper.plan(case.page_indptr, case.page_indices, case.last_page_len, *sizes_of(case))
    expected = case.run()
    assert torch.equal(wrapper.run(case.q, cache), expected)
    plan(wrapper, case, sm_scale=0.01, window_left=3, logits_soft_cap=2.0, pos_encoding_mode="ROPE_LLAMA")
    assert not torch.equal(wrapper.run(case.q, cache), expected)
    assert torch.equal(wrapper.forward(case.q, cache), expected)
    assert torch.equal(wrapper.run(case.q, cache), expected)


@pytest.mark.parametrize("name", ["bfloat16", torch.bfloat16])
@pytest.mark.parametrize("keyword", ["q_data_type", "data_type"])
def test_dtypes_by_name(keyword: str, name: Any) -> None:
    case = make_case("cpu", SPECS["plain"])
    wrapper = wrapper_of(case)
    plan(wrapper, case, **{"q_data_type": None, keyword: name})
    assert torch.equal(wrapper.run(case.q, (case.k_cache, case.v_cache), window_left=-1, q_len_per_req=1), case.run())


def test_scales_of_q_and_k_are_factors_of_the_scores(device: str) -> None:
    case = make_case(device, SPECS["window and cap"])
    wrapper = wrapper_of(case)
    plan(wrapper, case, sm_scale=case.options.sm_scale / 6)
    out, lse = wrapper.run_return_lse(case.q, (case.k_cache, case.v_cache), q_scale=2, k_scale=3.0, v_scale=1.0)
    check(case, out, lse)
    again = wrapper.run(case.q, (case.k_cache, case.v_cache))
    assert not torch.equal(again, out), "scales hold for one call"


@pytest.mark.parametrize("from_host", [False, True])
def test_buffers_are_written_in_place(device: str, from_host: bool) -> None:
    case = make_case(device, Spec([900, 100, 100], 8, 2, 64))
    wrapper, buffers = graph_wrapper(case)
    for seed, kv_lens in enumerate(([900, 100, 100], [3, 0, 17], [0, 0, 0], [16, 800])):
        rewrite(case, kv_lens, seed)
        named = int(case.page_indptr[-1])
        table = (case.page_indptr, case.page_indices[:named], case.last_page_len)
        if from_host:
            table = tuple(t.cpu() for t in table)
        wrapper.begin_forward(*table, *sizes_of(case), q_data_type=case.q.dtype)
        check(case, *wrapper.run_return_lse(case.q, (case.k_cache, case.v_cache)))
        assert all(torch.equal(buffer[: len(t)].cpu(), t.cpu()) for buffer, t in zip(buffers, table))
        assert [t.data_ptr() for t in wrapper._plan.table] == [t.data_ptr() for t in buffers]


@pytest.mark.gpu
def test_captured_once_and_replayed_after_every_plan() -> None:
    case = make_case("cuda", Spec([900, 100, 100], 8, 2, 64))
    wrapper, _ = graph_wrapper(case)
    plan(wrapper, case)
    cache, graph = (case.k_cache, case.v_cache), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = wrapper.run_return_lse(case.q, cache)
    for seed, kv_lens in enumerate(([900, 100, 100], [3, 0, 17], [0, 0, 0], [16, 800])):
        rewrite(case, kv_lens, seed)
        plan(wrapper, case)
        graph.replay()
        check(case, out, lse)


@pytest.mark.gpu
def test_planning_from_the_host_while_capturing_is_refused() -> None:
    case = make_case("cuda", SPECS["plain"])
    wrapper, graph = wrapper_of(case), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="^indptr: got a tensor on cpu, expected one on cuda"):
            plan(wrapper, replace(case, page_indptr=torch.zeros(5, dtype=torch.int32)))
        plan(wrapper, case)
        out = wrapper.run(case.q, (case.k_cache, case.v_cache))
    graph.replay()
    assert_close(out, reference(case).out)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    case = make_case("cuda", SPECS["rope"])
    wrapper = wrapper_of(case)
    plan(wrapper, case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan(wrapper, case)
        out, lse = wrapper.run_return_lse(case.q, (case.k_cache, case.v_cache))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(case, out, lse)
