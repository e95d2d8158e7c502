"""FlashAttention's call for paged decoding, over pgqa: padded block tables are read as they lie.

Nothing here synchronises or needs another stream than the current one, so all of it may be captured into CUDA graphs.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

import torch

import pgqa


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Appends a token to each request's cache, where one is given, and attends over the result.

    The contract of FlashAttention's function of that name for one token a request. q [batch, 1, query_heads,
    head_dim]; k, v [batch, 1, kv_heads, head_dim] or both None; k_cache, v_cache [pages, page_size, kv_heads,
    head_dim], written in place; cache_seqlens int32 [batch], tokens before the append, -1 for rows that only fill the
    batch (output 0, nothing written); block_table int32 [batch, max_blocks], entries past a row's tokens anything. Of
    a row whose new token lies past its blocks, or in a block outside the caches, nothing is written and the output is
    unspecified. `causal` changes nothing for one token. window_size: (left, right), -1 unlimited. Returns [batch, 1,
    query_heads, head_dim].

    Current stream, no synchronisation, may be captured. ValueError for more than one token, k without v, or sinks.
    """
    if q.dim() != 4 or q.shape[1] != 1:
        raise ValueError(f"q: got shape {list(q.shape)}, expected [batch, 1, query_heads, head_dim]: one token")
    if (k is None) != (v is None):
        raise ValueError(f"k and v: got only {'v' if k is None else 'k'}, expected both or neither")
    if s_aux is not None:
        raise ValueError("s_aux: got a tensor, expected None: attention sinks are not supported")
    if not isinstance(cache_seqlens, torch.Tensor):
        raise TypeError(f"cache_seqlens: got {type(cache_seqlens).__name__}, expected a tensor")
    if len(window_size) != 2:
        raise ValueError(f"window_size: got {window_size}, expected (left, right)")
    if window_size[1] > 0:
        raise ValueError(f"window_size: got {window_size}, expected a right side of 0 or -1")
    if cache_seqlens.dtype != torch.int32 or cache_seqlens.shape != q.shape[:1]:
        got = f"{cache_seqlens.dtype} of shape {list(cache_seqlens.shape)}"
        raise ValueError(f"cache_seqlens: got {got}, expected torch.int32 of shape {list(q.shape[:1])}")
    table = block_table, cache_seqlens
    if k is not None and v is not None:
        pgqa.append_kv_block_table(k[:, 0], v[:, 0], k_cache, v_cache, *table, new_tokens=1)
    out: Any = pgqa.decode_block_table(
        q[:, 0], k_cache, v_cache, *table, softmax_scale, new_tokens=int(k is not None), window_left=window_size[0],
        logits_soft_cap=softcap,
    )  # fmt: skip
    return out[:, None]
