"""Calls of the wrapper with FlashInfer's interface on the problems of cases.py."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

import torch
from cases import Case, Spec

from pgqa.compat.flashinfer import BatchDecodeWithPagedKVCacheWrapper as Wrapper

MODES = ("NONE", "ROPE_LLAMA")
SPECS = {
    "plain": Spec([40, 0, 7, 100], 8, 2, 64),
    "page size 1": Spec([40, 0, 7, 100], 8, 2, 64, page_size=1, dtype=torch.float16),
    "window and cap": Spec([300, 1, 0, 90], 8, 2, 64, window_left=50, logits_soft_cap=20.0),
    "rope": Spec([300, 1, 0, 90], 28, 4, 128, pos_encoding_mode=1, rope_scale=2.0, rope_theta=5e5, sm_scale=0.2),
}


def wrapper_of(case: Case, kv_layout: str = "NHD", **keywords: Any) -> Wrapper:
    return Wrapper(torch.zeros(16, dtype=torch.uint8, device=case.q.device), kv_layout, **keywords)


def sizes_of(case: Case) -> tuple[int, int, int, int]:
    """The last positional arguments of `plan` that have no default."""
    _, page_size, kv_heads, head_dim = case.k_cache.shape
    return case.q.shape[1], kv_heads, head_dim, page_size


def options_of(case: Case) -> dict[str, Any]:
    options = case.options.keywords()
    options["pos_encoding_mode"] = MODES[options["pos_encoding_mode"]]
    return {**options, "sm_scale": case.options.sm_scale}


def plan(wrapper: Wrapper, case: Case, **changes: Any) -> None:
    table = (case.page_indptr, case.page_indices, case.last_page_len)
    keywords = {"q_data_type": case.q.dtype, **options_of(case), **changes}
    wrapper.plan(*table, *sizes_of(case), **keywords)


def graph_wrapper(case: Case) -> tuple[Wrapper, list[torch.Tensor]]:
    """A wrapper on buffers with room for the case's table, absurd until it is planned."""
    sizes = (case.page_indptr, case.page_indices, case.last_page_len)
    buffers = [torch.full_like(t, 2147480000) for t in sizes]
    wrapper = wrapper_of(
        case, use_cuda_graph=True, paged_kv_indptr_buffer=buffers[0], paged_kv_indices_buffer=buffers[1],
        paged_kv_last_page_len_buffer=buffers[2],
    )  # fmt: skip
    assert wrapper.is_cuda_graph_enabled
    return wrapper, buffers
