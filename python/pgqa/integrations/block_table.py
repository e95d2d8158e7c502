"""Padded block tables, as engines hold them: append and decode by compositions of torch operators and pgqa.decode.

A block table is int32 [batch, max_blocks]; entries past a request's length are -1 or anything else. Nothing here
synchronises, reads device values on the host or needs another stream than the current one, so all of it may be
captured into CUDA graphs.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

import torch

import pgqa

Csr = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def offsets_of(counts: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1]: 0 and the running sums of int [n]."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def pages_of(kv_lens: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """page_indptr [n + 1] and last_page_len [n], int32, of requests of `kv_lens` tokens, int [n]."""
    counts = (kv_lens + (page_size - 1)) // page_size
    return offsets_of(counts), (kv_lens - (counts - 1) * page_size).to(torch.int32)


class BlockTable:
    """The block table of one step, for every layer whose cache it describes.

    block_table: int32 [batch, max_blocks]. cached: int32 [batch], tokens in the cache before the step's; below 0 for
    rows that only fill the batch: these have no tokens, read nothing and write nothing. A row whose next token lies
    past its blocks, or in a block outside [0, num_pages), counts as such a row. With `appends`, every other row gets
    one token more.
    """

    def __init__(
        self, block_table: torch.Tensor, cached: torch.Tensor, page_size: int, num_pages: int, appends: bool
    ) -> None:
        batch, max_blocks = block_table.shape
        column = cached.clamp(min=0) // page_size
        page = block_table.gather(1, column.clamp(max=max_blocks - 1).long()[:, None])[:, 0]
        live = cached >= 0
        if appends:
            live &= (column < max_blocks) & (page >= 0) & (page < num_pages)
            # Rows that only fill the batch repeat the write of the first live one. Without any, the first slot of the
            # cache gets its own values again.
            rows = torch.arange(batch, device=cached.device)
            first_live = live.int().argmax(0, keepdim=True)
            self._source = torch.where(live, rows, first_live)
            self._any_live = live.any()
            self._page = (page * live)[self._source].long()
            self._offset = ((cached % page_size) * live)[self._source].long()
        self.csr = self._csr(block_table, torch.where(live, cached + int(appends), 0), page_size)

    def _csr(self, block_table: torch.Tensor, kv_lens: torch.Tensor, page_size: int) -> Csr:
        """Each row's used entries moved to their place in page_indices; the others share a last place of their own."""
        batch, max_blocks = block_table.shape
        indptr, last_page_len = pages_of(kv_lens, page_size)
        column = torch.arange(max_blocks, device=kv_lens.device, dtype=torch.int32)
        place = indptr[:-1, None] + column
        place = torch.where(place < indptr[1:, None], place, batch * max_blocks)
        indices = torch.zeros(batch * max_blocks + 1, dtype=torch.int32, device=kv_lens.device)
        indices.scatter_(0, place.flatten().long(), block_table.flatten())
        return indptr, indices, last_page_len

    def append(self, cache: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes each live row of `rows` into its slot; no other slot changes. Of a table made with `appends`.

        cache [pages, page_size, kv_heads, head_dim], rows [batch, kv_heads, head_dim].
        """
        kept = cache[self._page, self._offset]
        cache[self._page, self._offset] = torch.where(self._any_live, rows[self._source], kept)


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
    batch (output 0, nothing written); block_table int32 [batch, max_blocks]. `causal` changes nothing for one token.
    window_size: (left, right), -1 unlimited. Returns [batch, 1, query_heads, head_dim].

    Current stream, no synchronisation, may be captured. ValueError for more than one token, k without v, or sinks.
    """
    if q.dim() != 4 or q.shape[1] != 1:
        raise ValueError(f"q: got shape {list(q.shape)}, expected [batch, 1, query_heads, head_dim]: one token")
    if (k is None) != (v is None):
        raise ValueError(f"k and v: got only {'v' if k is None else 'k'}, expected both or neither")
    if s_aux is not None:
        raise ValueError("s_aux: got a tensor, expected None: attention sinks are not supported")
    if window_size[1] > 0:
        raise ValueError(f"window_size: got {window_size}, expected a right side of 0 or -1")
    num_pages, page_size = k_cache.shape[:2]
    table = BlockTable(block_table, cache_seqlens, page_size, num_pages, appends=k is not None)
    if k is not None and v is not None:
        table.append(k_cache, k[:, 0])
        table.append(v_cache, v[:, 0])
    out: Any = pgqa.decode(
        q[:, 0], k_cache, v_cache, *table.csr, softmax_scale, window_left=window_size[0], logits_soft_cap=softcap
    )
    return out[:, None]
