"""FlashInfer's wrapper for batch decode over a paged cache, with its names, layouts and base-2 LSE, computed by pgqa.

    from pgqa.compat.flashinfer import BatchDecodeWithPagedKVCacheWrapper

What pgqa can not honour is refused by name. Two differences do not show in results: `plan` neither reads lengths on
the host nor waits for the device, and workspaces are pgqa's own.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Union

import torch

import pgqa
from pgqa import _pgqa
from pgqa.compat._flashinfer_plan import (
    PLAN_NEUTRAL,
    RUN_NEUTRAL,
    DType,
    Plan,
    TableBuffers,
    check_not_capturing,
    checked_table,
    factor,
    one_of,
    options_of,
    planned_dtype,
    refuse,
    refuse_others,
    table_on,
)

__all__ = ["BatchDecodeWithPagedKVCacheWrapper"]

LOG2_E = math.log2(math.e)

Cache = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
Result = Union[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


class BatchDecodeWithPagedKVCacheWrapper:
    """Decode attention of one query token a request: `plan` once a step, `run` for each layer.

    float_workspace_buffer: its device is where results are computed; its memory is not used.
    kv_layout: "NHD", pages [page_size, kv_heads, head_dim], or "HND", pages [kv_heads, page_size, head_dim].
    use_cuda_graph: the page table lives in the three buffers, int32 [batch + 1], [most pages] and [batch], which
    `plan` writes and whose addresses stay: captured calls of `run` may be replayed after every `plan`.
    use_tensor_cores, backend ("auto", "fa2", "fa3"): FlashInfer's choice among kernels for the same result; no effect.

    ValueError or TypeError names the argument that can not be honoured, before anything is launched.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Sequence[Any] | None = None,
    ) -> None:
        one_of("kv_layout", kv_layout, ("NHD", "HND"))
        one_of("backend", backend, ("auto", "fa2", "fa3"))
        refuse_others("BatchDecodeWithPagedKVCacheWrapper", {"jit_args": jit_args}, {"jit_args": None})
        self.reset_workspace_buffer(float_workspace_buffer)
        self._is_hnd = kv_layout == "HND"
        self._use_tensor_cores = use_tensor_cores
        self._plan: Plan | None = None
        self._buffers: TableBuffers | None = None
        if use_cuda_graph:
            self._buffers = TableBuffers(
                self.device, paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
            )

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._buffers is not None

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Takes the device of the first buffer, for calls of `plan` to come; uses the memory of neither."""
        if not isinstance(float_workspace_buffer, torch.Tensor):
            kind = type(float_workspace_buffer).__name__
            raise TypeError(f"float_workspace_buffer: got {kind}, expected a torch.Tensor")
        self.device = float_workspace_buffer.device

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: DType | None = None,
        kv_data_type: DType | None = None,
        *,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        **others: Any,
    ) -> None:
        """Takes the page table and the options of the calls of `run` to come.

        indptr [batch + 1], indices [>= indptr[batch]], last_page_len [batch], int32, on any device; copied to the
        wrapper's where they are on another, on the current stream (from pinned memory, with `non_blocking`, they must
        stay as they are until then). With use_cuda_graph copied into the buffers: the same batch, no more indices
        than fit. A request without pages gives output 0 and LSE -inf. No value is read on the host.

        The dtype of q and caches is q_data_type, else data_type, else float16; float32 only on the CPU.
        sm_scale None: head_dim ** -0.5.
        """
        refuse_others("plan", others, PLAN_NEUTRAL)
        dtype = planned_dtype(q_data_type, data_type, {"kv_data_type": kv_data_type, "o_data_type": o_data_type})
        options = options_of(
            head_dim, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )
        for reason in pgqa.supports_shape(
            device=self.device.type, dtype=dtype, num_query_heads=num_qo_heads, num_kv_heads=num_kv_heads,
            head_dim=head_dim, page_size=page_size, **vars(options),
        ):  # fmt: skip
            raise ValueError(reason)
        table = checked_table(("indptr", "indices", "last_page_len"), indptr, indices, last_page_len)
        check_not_capturing(self.device, table)
        if self._buffers is not None:
            table = self._buffers.store(table, non_blocking)
        else:
            table = table_on(self.device, table, non_blocking)
        q_shape, page_shape = (len(last_page_len), num_qo_heads, head_dim), (page_size, num_kv_heads, head_dim)
        self._plan = Plan(q_shape, page_shape, dtype, table, options)

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        q_len_per_req: int | None = None,
        **others: Any,
    ) -> Result:
        """Attention of q [batch, query_heads, head_dim] as planned: a tensor of its shape and dtype, or `out`.

        paged_kv_cache: (k_cache, v_cache), or one tensor [pages, 2, ...] of both; the rest of a shape is the layout's.
        Views, never copied: strides are as free as in pgqa.decode. q_scale * k_scale is a factor of the scores;
        v_scale must be 1. With `return_lse` also the LSE to base 2, float32 [batch, query_heads], in `lse` where
        given. window_left and q_len_per_req may repeat the plan; enable_pdl has no effect.

        Current stream, no synchronisation; may be captured. RuntimeError before any `plan`.
        """
        plan = self._plan
        if plan is None:
            raise RuntimeError("run: got no plan, expected a call of plan() before")
        if args:
            refuse("args", f"{len(args)} arguments of a custom kernel", "none")
        refuse_others("run", others, RUN_NEUTRAL)
        if q_len_per_req not in (None, 1):
            refuse("q_len_per_req", q_len_per_req, "1")
        if factor("v_scale", v_scale) != 1.0:
            refuse("v_scale", v_scale, "1 or None: values are not scaled")
        if window_left is not None and window_left != plan.options.window_left:
            refuse("window_left", window_left, f"{plan.options.window_left}, as planned")
        scale = plan.options.sm_scale * factor("q_scale", q_scale) * factor("k_scale", k_scale)
        return self._run(plan, scale, q, self._caches(paged_kv_cache), out, lse, return_lse)

    def _run(
        self,
        plan: Plan,
        sm_scale: float,
        q: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
    ) -> Result:
        if not isinstance(q, torch.Tensor):
            raise TypeError(f"q: got {type(q).__name__}, expected a tensor")
        if q.shape != plan.q_shape:
            refuse("q", f"shape {list(q.shape)}", f"{list(plan.q_shape)}, as planned")
        if q.dtype != plan.dtype:
            refuse("q", q.dtype, f"{plan.dtype}, as planned")
        if caches[0].shape[1:] != plan.page_shape:
            got = f"page_size, kv_heads, head_dim {list(caches[0].shape[1:])}"
            refuse("paged_kv_cache", got, f"{list(plan.page_shape)}, as planned")
        inputs, o = (q, *caches, *plan.table, sm_scale), plan.options
        scalars = (o.window_left, o.logits_soft_cap, o.pos_encoding_mode, o.rope_scale, o.rope_theta)
        if lse is None:
            result = _pgqa.decode(*inputs, *scalars, out, return_lse)
            if not return_lse:
                return result
            out, lse = result
        else:
            out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
            torch.ops.pgqa.decode_out(*inputs, out, lse, *scalars)
        lse.mul_(LOG2_E)
        return (out, lse) if return_lse else out

    def _caches(self, paged_kv_cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as views [pages, page_size, kv_heads, head_dim]."""
        if isinstance(paged_kv_cache, torch.Tensor):
            if paged_kv_cache.dim() != 5 or paged_kv_cache.shape[1] != 2:
                shape = f"shape {list(paged_kv_cache.shape)}"
                refuse("paged_kv_cache", shape, "[pages, 2, ...] of rank 5, or a tuple (k_cache, v_cache)")
            k_cache, v_cache = paged_kv_cache.unbind(1)
        else:
            caches = tuple(paged_kv_cache) if isinstance(paged_kv_cache, Sequence) else ()
            if len(caches) != 2 or not all(isinstance(cache, torch.Tensor) for cache in caches):
                types = ", ".join(type(cache).__name__ for cache in caches)
                got = f"{type(paged_kv_cache).__name__} ({types})"
                raise TypeError(f"paged_kv_cache: got {got}, expected a tensor or a tuple (k_cache, v_cache)")
            k_cache, v_cache = caches
            for cache in (k_cache, v_cache):
                if cache.dim() != 4:
                    refuse("paged_kv_cache", f"shape {list(cache.shape)} of a cache", "rank 4")
        return (k_cache.transpose(1, 2), v_cache.transpose(1, 2)) if self._is_hnd else (k_cache, v_cache)

    def run_return_lse(self, q: torch.Tensor, paged_kv_cache: Cache, *args: Any, **keywords: Any) -> Result:
        """`run` with return_lse=True."""
        return self.run(q, paged_kv_cache, *args, return_lse=True, **keywords)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
    ) -> Result:
        """FlashInfer's older `run`: these options, defaults included, take the place of the plan's from now on."""
        if self._plan is None:
            raise RuntimeError("forward: got no plan, expected a call of begin_forward() before")
        head_dim = self._plan.q_shape[2]
        options = options_of(
            head_dim, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )
        self._plan = replace(self._plan, options=options)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse)

    def forward_return_lse(self, q: torch.Tensor, paged_kv_cache: Cache, *args: Any, **keywords: Any) -> Result:
        """`forward`, with the LSE to base 2."""
        return self.forward(q, paged_kv_cache, *args, return_lse=True, **keywords)

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer: the plan stays."""
