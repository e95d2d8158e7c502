"""Grouped-query decode attention over a paged, ragged KV cache.

Shapes, for a batch of requests with one new query token each:
q [batch, query_heads, head_dim]; k_cache, v_cache [pages, page_size, kv_heads, head_dim];
page_indptr int32 [batch + 1]; page_indices int32 [>= page_indptr[batch]];
last_page_len int32 [batch]. CUDA tensors are computed on the GPU, on the current stream and
without synchronisation; CPU tensors by the CPU executor.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import torch  # Loads the libraries that the module links by name.

from pgqa import _pgqa, ops  # ops: defines torch.ops.pgqa
from pgqa._pgqa import (
    Schedule,
    build_info,
    schedule,
    supports_shape,
    validate_page_table,
    workspace_bytes,
    workspace_usage,
)

__all__ = [
    "Schedule",
    "build_info",
    "decode",
    "ops",
    "schedule",
    "supports",
    "supports_shape",
    "validate_page_table",
    "workspace_bytes",
    "workspace_usage",
]
__version__: str = build_info()["version"]


def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_indptr: torch.Tensor,
    page_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    sm_scale: float | None,
    *,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    pos_encoding_mode: int = 0,
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's query token over its keys and values.

    Returns a tensor [batch, query_heads, head_dim] of q's dtype: `out` where given, else a fresh
    one. With `return_lse`, also the natural-log LSE, float32 [batch, query_heads]. A request
    without pages gives output 0 and LSE -inf.

    sm_scale: factor of the scores; None: head_dim ** -0.5.
    window_left: only the last window_left + 1 tokens count; -1: all.
    logits_soft_cap: cap * tanh(s / cap) on scores when above 0.
    pos_encoding_mode: 0 none, 1 RoPE on q and on the cached keys (pairs i, i + head_dim / 2).
    workspace: uint8 tensor of at least `workspace_bytes(...)` on q's device, unused on the CPU; by
    default the library's own, one for each device and stream.

    Raises ValueError or TypeError, naming the argument, before anything is launched;
    RuntimeError when CUDA fails.
    """
    return _pgqa.decode(
        q, k_cache, v_cache, page_indptr, page_indices, last_page_len, sm_scale, window_left,
        logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta, out, return_lse, workspace,
    )


def supports(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_indptr: torch.Tensor,
    page_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    sm_scale: float | None = None,
    *,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    pos_encoding_mode: int = 0,
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
) -> list[str]:
    """Why `decode` would refuse these arguments: one reason each, empty when it takes them.

    Reads no values, so wrong page tables are not found: see `validate_page_table`. TypeError for
    what is no tensor or number.
    """
    return _pgqa.check_decode(
        q, k_cache, v_cache, page_indptr, page_indices, last_page_len, sm_scale, window_left,
        logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta,
    )
