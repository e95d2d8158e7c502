"""What the wrapper with FlashInfer's interface can not honour is refused by name, and does no harm."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, make_case
from wrapping import SPECS, Wrapper, graph_wrapper, plan, wrapper_of

BAD_CONSTRUCTIONS = [
    ("kv_layout", dict(kv_layout="NDH")),
    ("backend", dict(backend="trtllm-gen")),
    ("jit_args", dict(jit_args=["kernel"])),
    ("paged_kv_indices_buffer", dict(paged_kv_indices_buffer=torch.zeros(9, dtype=torch.int64))),
    ("paged_kv_indptr_buffer", dict(paged_kv_indptr_buffer=torch.zeros(4, dtype=torch.int32))),
    ("paged_kv_last_page_len_buffer", dict(paged_kv_last_page_len_buffer=torch.zeros(4, 1, dtype=torch.int32))),
    ("paged_kv_indptr_buffer", dict(paged_kv_indptr_buffer=torch.zeros(10, dtype=torch.int32)[::2])),
    ("paged_kv_indices_buffer", dict(paged_kv_indices_buffer=torch.zeros(9, dtype=torch.int32, device="meta"))),
]


@pytest.mark.parametrize(("argument", "changes"), BAD_CONSTRUCTIONS)
def test_constructions_refused_by_name(argument: str, changes: dict[str, Any]) -> None:
    good = dict(
        float_workspace_buffer=torch.zeros(1),
        use_cuda_graph=True,
        paged_kv_indptr_buffer=torch.zeros(5, dtype=torch.int32),
        paged_kv_indices_buffer=torch.zeros(9, dtype=torch.int32),
        paged_kv_last_page_len_buffer=torch.zeros(4, dtype=torch.int32),
    )
    Wrapper(**good)
    with pytest.raises(ValueError, match=f"^{argument}: got .*expected "):
        Wrapper(**{**good, **changes})


def test_constructions_without_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match="^float_workspace_buffer: got NoneType, expected "):
        Wrapper(None)
    with pytest.raises(TypeError, match="^paged_kv_indptr_buffer: got NoneType, expected "):
        Wrapper(torch.zeros(1), use_cuda_graph=True)
    assert not Wrapper(torch.zeros(1)).is_cuda_graph_enabled
    assert Wrapper(torch.zeros(1), use_tensor_cores=True).use_tensor_cores


BAD_PLANS: list[tuple[str, dict[str, Any]]] = [
    ("pos_encoding_mode", dict(pos_encoding_mode="ALIBI")),
    ("kv_data_type", dict(kv_data_type=torch.float8_e4m3fn)),
    ("kv_data_type", dict(kv_data_type="float16")),
    ("o_data_type", dict(o_data_type=torch.float32)),
    ("dtype", dict(q_data_type=torch.float8_e4m3fn)),
    ("q_data_type", dict(q_data_type="half precision")),
    ("window_left", dict(window_left=-3)),
    ("window_right", dict(window_right=4)),
    ("rope_theta", dict(rope_theta=0.0, pos_encoding_mode="ROPE_LLAMA")),
    ("disable_split_kv", dict(disable_split_kv=True)),
    ("q_len_per_req", dict(q_len_per_req=2)),
    ("block_tables", dict(block_tables=torch.zeros(4, 3))),
    ("seq_lens", dict(seq_lens=torch.zeros(4))),
    ("fixed_split_size", dict(fixed_split_size=16)),
]


@pytest.mark.parametrize(("argument", "changes"), BAD_PLANS)
def test_plans_refused_by_name(device: str, argument: str, changes: dict[str, Any]) -> None:
    case = make_case(device, SPECS["plain"])
    wrapper = wrapper_of(case)
    with pytest.raises(ValueError, match=f"^{argument}: got .*expected "):
        plan(wrapper, case, **changes)
    plan(wrapper, case, window_right=0, disable_split_kv=False, q_len_per_req=1, block_tables=None, non_blocking=False)


def test_tables_refused_by_name() -> None:
    case = make_case("cpu", SPECS["plain"])
    wrapper, buffers = graph_wrapper(case)
    before = [buffer.clone() for buffer in buffers]
    longer = torch.zeros(len(case.page_indices) + 1, dtype=torch.int32)
    for name, changes in (
        ("indptr", dict(page_indptr=case.page_indptr[:-1])),
        ("indptr", dict(page_indptr=case.page_indptr.long())),
        ("last_page_len", dict(last_page_len=case.last_page_len[None])),
        ("last_page_len", dict(last_page_len=case.last_page_len[:-1], page_indptr=case.page_indptr[:-1])),
        ("indices", dict(page_indices=longer)),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got .*expected "):
            plan(wrapper, replace(case, **changes))
    with pytest.raises(ValueError, match="^num_query_heads: got "):
        wrapper.plan(case.page_indptr, case.page_indices, case.last_page_len, 3, 2, 64, 16)
    with pytest.raises(TypeError, match="unexpected argument custom_mask"):
        plan(wrapper, case, custom_mask=torch.zeros(1))
    assert all(torch.equal(buffer, copy) for buffer, copy in zip(buffers, before))


Change = Callable[[Case, Any], tuple[tuple[Any, ...], dict[str, Any]]]
BAD_RUNS: list[tuple[str, Change]] = [
    ("q", lambda c, kv: ((c.q[:-1], kv), {})),
    ("q", lambda c, kv: ((c.q.repeat(2, 1, 1), kv), {})),
    ("q", lambda c, kv: ((c.q[:, None], kv), {})),
    ("q", lambda c, kv: ((c.q.half(), kv), {})),
    ("k_cache", lambda c, kv: ((c.q, (kv[0].to(torch.float8_e4m3fn), kv[1])), {})),
    ("v_cache", lambda c, kv: ((c.q, (kv[0], kv[1][:-1])), {})),
    ("paged_kv_cache", lambda c, kv: ((c.q, (kv[0][0], kv[1][0])), {})),
    ("paged_kv_cache", lambda c, kv: ((c.q, kv[0]), {})),
    ("paged_kv_cache", lambda c, kv: ((c.q, torch.stack(kv)), {})),
    ("paged_kv_cache", lambda c, kv: ((c.q, (kv[0].transpose(1, 2), kv[1].transpose(1, 2))), {})),
    ("v_scale", lambda c, kv: ((c.q, kv), {"v_scale": 0.5})),
    ("window_left", lambda c, kv: ((c.q, kv), {"window_left": 7})),
    ("sinks", lambda c, kv: ((c.q, kv), {"sinks": torch.zeros(8)})),
    ("kv_cache_sf", lambda c, kv: ((c.q, kv), {"kv_cache_sf": torch.zeros(8)})),
    ("skip_softmax_threshold_scale_factor",
     lambda c, kv: ((c.q, kv), {"skip_softmax_threshold_scale_factor": 0.1})),
    ("q_len_per_req", lambda c, kv: ((c.q, kv), {"q_len_per_req": 2})),
    ("args", lambda c, kv: ((c.q, kv, torch.zeros(1)), {})),
    ("out", lambda c, kv: ((c.q, kv), {"out": torch.zeros(2)})),
    ("lse", lambda c, kv: ((c.q, kv), {"lse": torch.zeros(2, device=c.q.device)})),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "change"), BAD_RUNS)
def test_runs_refused_by_name(device: str, argument: str, change: Change) -> None:
    case = make_case(device, SPECS["plain"])
    wrapper, cache = wrapper_of(case), (case.k_cache, case.v_cache)
    plan(wrapper, case)
    inputs, keywords = change(case, cache)
    with pytest.raises(ValueError, match=f"^{argument}: got .*expected "):
        wrapper.run(*inputs, **keywords)
    assert torch.equal(wrapper.run(case.q, cache), case.run())


def test_other_misuse_is_refused() -> None:
    case = make_case("cpu", SPECS["plain"])
    wrapper, cache = wrapper_of(case), (case.k_cache, case.v_cache)
    for run in (wrapper.run, wrapper.run_return_lse, wrapper.forward, wrapper.forward_return_lse):
        with pytest.raises(RuntimeError, match="^(run|forward): got no plan, expected a call of "):
            run(case.q, cache)
    plan(wrapper, case)
    with pytest.raises(TypeError, match="^q_scale: got a tensor, expected a number"):
        wrapper.run(case.q, cache, q_scale=torch.tensor(2.0))
    with pytest.raises(TypeError, match="unexpected argument custom_mask"):
        wrapper.run(case.q, cache, custom_mask=None)
    with pytest.raises(ValueError, match="^pos_encoding_mode: got 'ALIBI', expected 'NONE' or 'ROPE_LLAMA'"):
        wrapper.forward(case.q, cache, pos_encoding_mode="ALIBI")


def test_caches_of_other_types_are_refused() -> None:
    case = make_case("cpu", SPECS["plain"])
    wrapper, cache = wrapper_of(case), (case.k_cache, case.v_cache)
    plan(wrapper, case)
    expected = "expected a tensor or a tuple \\(k_cache, v_cache\\)"
    for caches, got in ((7, "int"), ((*cache, case.v_cache), "tuple"), ((case.k_cache, None), "tuple")):
        with pytest.raises(TypeError, match=f"^paged_kv_cache: got {got} .*{expected}"):
            wrapper.run(case.q, caches)
    parameters = [torch.nn.Parameter(tensor, requires_grad=False) for tensor in cache]  # a subclass of Tensor
    assert torch.equal(wrapper.run(case.q, parameters), case.run())
