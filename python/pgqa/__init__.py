"""Grouped-query decode attention over a paged, ragged KV cache.

Shapes, for a batch of requests with one new query token each:
q [batch, query_heads, head_dim]; k_cache, v_cache [pages, page_size, kv_heads, head_dim];
page_indptr int32 [batch + 1]; page_indices int32 [>= page_indptr[batch]];
last_page_len int32 [batch]; or, in place of these three, a padded block table, block_table int32
[batch, columns], and seq_lens int32 [batch]. CUDA tensors are computed on the GPU, on the current stream and
without synchronisation; CPU tensors by the CPU executor.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import torch  # Loads the libraries that the module links by name.

from pgqa import _pgqa, _recording, ops  # ops: defines torch.ops.pgqa
from pgqa._pgqa import (
    Plan,
    PlannedCall,
    Schedule,
    build_info,
    schedule,
    schedule_block_table,
    supports_shape,
    validate_block_table,
    validate_page_table,
    workspace_bytes,
    workspace_usage,
)
from pgqa._recording import record
from pgqa._warmup import WarmupShape, warmup
from pgqa.graph import DecodeGraph
from pgqa.graph_cache import DecodeGraphCache, GraphCacheUsage

__all__ = [
    "DecodeGraph",
    "DecodeGraphCache",
    "GraphCacheUsage",
    "Plan",
    "PlannedCall",
    "Schedule",
    "WarmupShape",
    "append_kv",
    "append_kv_block_table",
    "build_info",
    "decode",
    "decode_block_table",
    "ops",
    "record",
    "schedule",
    "schedule_block_table",
    "supports",
    "supports_shape",
    "validate_block_table",
    "validate_page_table",
    "warmup",
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
    batch_invariant: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's query token over its keys and values.

    Returns a tensor [batch, query_heads, head_dim] of q's dtype: `out` where given, else a fresh
    one. With `return_lse`, also the natural-log LSE, float32 [batch, query_heads]. A request
    without pages gives output 0 and LSE -inf.

    sm_scale: factor of the scores; None: head_dim ** -0.5.
    window_left: only the last window_left + 1 tokens count; -1: all.
    logits_soft_cap: cap * tanh(s / cap) on scores when above 0.
    pos_encoding_mode: 0 none, 1 RoPE on q and on the cached keys (pairs i, i + head_dim / 2).
    workspace: uint8 tensor of at least `workspace_bytes(...)` on q's device, unused on the CPU; its
    contents do not matter, before a call or between replays, and calls that may overlap need
    different ones. By default the library's own, one for each device and stream; while torch
    captures a graph, memory of the graph's pool. In a capture that torch did not begin, give
    `workspace` and `out`: else their memory would be reused while the graph lives.
    batch_invariant: a request gives the same bits alone and in any batch, at any place in it, with any
    page ids, eager and in any graph, on one device (on the CPU, on one machine with any number of
    threads). Slower for short and uneven batches, and with a workspace that grows with the page table.

    Raises ValueError or TypeError, naming the argument, before anything is launched;
    RuntimeError when CUDA fails.
    """
    return _recording.decode(
        q, k_cache, v_cache, page_indptr, page_indices, last_page_len, sm_scale, window_left,
        logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta, out, return_lse, workspace,
        batch_invariant,
    )


def decode_block_table(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float | None,
    *,
    new_tokens: int = 0,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    pos_encoding_mode: int = 0,
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`decode` with a padded block table, read as it lies: the bits of the CSR table that says the same.

    block_table: int32 [batch, columns], rows any distance apart. seq_lens: int32 [batch].
    A request has seq_lens + new_tokens tokens: new_tokens 0 where seq_lens counts this step's token, 1 where it
    counts those before. Below 0 it is empty, whatever new_tokens: output 0, LSE -inf. Entries past a request's
    tokens are never read, so padding may be -1 or anything. Of a length beyond columns * page_size the result is
    unspecified; nothing is read out of bounds, and other requests are right.
    """
    return _pgqa.decode_block_table(
        q, k_cache, v_cache, block_table, seq_lens, sm_scale, new_tokens, window_left, logits_soft_cap,
        pos_encoding_mode, rope_scale, rope_theta, out, return_lse, workspace,
    )


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_indptr: torch.Tensor,
    page_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    *,
    q: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    pos_encoding_mode: int = 0,
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
) -> torch.Tensor | None:
    """Writes each request's new key and value into the page slot that its row of the table ends with.

    k, v: [batch, kv_heads, head_dim], of the caches' dtype, with any strides of batch and heads. The caches
    may have any strides but in the last dimension. The table counts the new token: it goes to position
    kv_len - 1. Requests without pages, and those whose last page is outside the caches, write nothing. An entry of
    last_page_len outside 1 to page_size is malformed: it is taken as the nearest position that the row has, or as none,
    and overwrites that slot; `validate_page_table` finds it.

    pos_encoding_mode 1, for engines that cache turned keys: k is turned by RoPE (pairs i, i + head_dim / 2) as it
    is written, and so is q [batch, query_heads, head_dim], where given, into `q_out`, which may be q itself;
    None: a fresh tensor. Angles are exact at any position. Rows of requests that write nothing are left as
    they are, in a fresh tensor undefined. Decode such a cache with pos_encoding_mode 0.

    Returns the turned queries, or None without q. Runs on the current stream without synchronisation; on
    CPU tensors it is done when it returns. ValueError or TypeError name the argument, before anything is
    written; RuntimeError when CUDA fails.
    """
    return _recording.append_kv(
        k, v, k_cache, v_cache, page_indptr, page_indices, last_page_len, q, q_out,
        pos_encoding_mode, rope_scale, rope_theta,
    )


def append_kv_block_table(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    new_tokens: int = 0,
    q: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    pos_encoding_mode: int = 0,
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
) -> torch.Tensor | None:
    """`append_kv` with a padded block table, as `decode_block_table` takes it.

    The new token goes to position seq_lens + new_tokens - 1. Where that is below 0 or past the row's columns, or the
    page there is outside the caches, nothing is written.
    """
    return _pgqa.append_kv_block_table(
        k, v, k_cache, v_cache, block_table, seq_lens, new_tokens, q, q_out, pos_encoding_mode, rope_scale, rope_theta,
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
