"""Decode steps captured in CUDA graphs."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pgqa import _pgqa

if TYPE_CHECKING:
    _Native = _pgqa.DecodeGraph
else:
    _Native = getattr(_pgqa, "DecodeGraph", object)  # not there without CUDA

LayerTensors = torch.Tensor | Sequence[torch.Tensor]


def _by_layer(tensors: LayerTensors | None, num_layers: int) -> Sequence[torch.Tensor] | None:
    """A single tensor is that of every layer; what is of another type is refused by name later."""
    return tensors if tensors is None or isinstance(tensors, Sequence) else [tensors] * num_layers


class DecodeGraph(_Native):
    """A decode step of one or more layers, captured once for a capacity and replayed for every later step.

    Rewrite the tensors of the graph in place, on the stream of the replay or ordered before it, and replay: lengths,
    pages and requests may be any that fit; nothing is planned or copied on the host. The graph holds its tensors
    and a workspace of its own. Tensors that are not given are allocated, the table filled with zeros:

    q, out: [max_batch, query_heads, head_dim], and lse float32 [max_batch, query_heads] (natural log) with
    return_lse; k, v: [max_batch, kv_heads, head_dim] with append; each a tuple with one tensor a layer.
    page_indptr int32 [max_batch + 1], page_indices int32 [max_pages], last_page_len int32 [max_batch]; or, where
    max_columns or block_table is given, block_table int32 [max_batch, max_columns] and seq_lens int32 [max_batch],
    -1 at first.

    Requests beyond those of a step are empty: page_indptr repeated, seq_lens below 0, or `replay(live_batch)`. They
    read nothing, append nothing, and give output 0 and LSE -inf.

    k_cache, v_cache: a tensor [pages, page_size, kv_heads, head_dim] for one layer, or a sequence for several.
    max_batch, max_pages, max_columns: the capacity, requests and entries of page_indices, or columns of block_table.
    num_query_heads, max_batch, max_pages, max_columns: None where q, q, page_indices, block_table are given.
    new_tokens: as for `pgqa.decode_block_table`, for appends too.
    sm_scale, window_left, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta: as for `pgqa.decode`; window_left
    may be a sequence, one for each layer.
    append: every layer first writes k and v into its caches, as `pgqa.append_kv`; the table counts the new token.
    rotate_appended: and turns them, and q, by RoPE, for caches of turned keys; pos_encoding_mode is 0 then.
    live_batch: whether `replay` takes a live batch, which costs one small kernel a step.
    dependent_launch: kernels of a step begin before the one before has ended (programmatic dependent launch, compute
    capability 9.0), as far as they read nothing of it; the results are the same.
    batch_invariant: as for `pgqa.decode`. The workspace is for max_pages entries: `rebind` takes no more of them.

    The constructor runs the step once on the current stream for no live request (outputs become 0, LSE -inf) and
    captures it on a stream of its own; no other thread has to wait. Replays on a stream other than that one must be
    ordered behind it. ValueError or TypeError name the argument; RuntimeError when CUDA fails.
    """

    def __init__(
        self,
        k_cache: LayerTensors,
        v_cache: LayerTensors,
        *,
        num_query_heads: int | None = None,
        max_batch: int | None = None,
        max_pages: int | None = None,
        max_columns: int | None = None,
        new_tokens: int = 0,
        sm_scale: float | None = None,
        window_left: int | Sequence[int] = -1,
        logits_soft_cap: float = 0.0,
        pos_encoding_mode: int = 0,
        rope_scale: float = 1.0,
        rope_theta: float = 10000.0,
        return_lse: bool = False,
        append: bool = False,
        rotate_appended: bool = False,
        live_batch: bool = True,
        dependent_launch: bool = True,
        batch_invariant: bool = False,
        q: LayerTensors | None = None,
        page_indptr: torch.Tensor | None = None,
        page_indices: torch.Tensor | None = None,
        last_page_len: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        out: LayerTensors | None = None,
        lse: LayerTensors | None = None,
        k: LayerTensors | None = None,
        v: LayerTensors | None = None,
    ) -> None:
        if _Native is object:
            raise RuntimeError("DecodeGraph: this pgqa was built without CUDA")
        layers = len(k_cache) if isinstance(k_cache, Sequence) else 1
        by_layer = {"k_cache": k_cache, "v_cache": v_cache, "q": q, "out": out, "lse": lse, "k": k, "v": v}
        tensors = {name: _by_layer(value, layers) for name, value in by_layer.items()}
        first_q = tensors["q"][0] if tensors["q"] else None
        if isinstance(first_q, torch.Tensor) and first_q.dim() == 3:
            max_batch = first_q.shape[0] if max_batch is None else max_batch
            num_query_heads = first_q.shape[1] if num_query_heads is None else num_query_heads
        if isinstance(page_indices, torch.Tensor) and max_pages is None:
            max_pages = page_indices.numel()
        if isinstance(block_table, torch.Tensor) and max_columns is None:
            max_columns = block_table.shape[-1] if block_table.dim() > 0 else 0
        table = {
            "page_indptr": page_indptr, "page_indices": page_indices, "last_page_len": last_page_len,
            "block_table": block_table, "seq_lens": seq_lens,
        }  # fmt: skip
        super().__init__(
            {**tensors, **table}, num_query_heads=num_query_heads, max_batch=max_batch, max_pages=max_pages,
            max_columns=max_columns, new_tokens=new_tokens, sm_scale=sm_scale,
            window_left=list(window_left) if isinstance(window_left, Sequence) else [window_left] * layers,
            logits_soft_cap=logits_soft_cap, pos_encoding_mode=pos_encoding_mode, rope_scale=rope_scale,
            rope_theta=rope_theta, return_lse=return_lse, append=append, rotate_appended=rotate_appended,
            live_batch=live_batch, dependent_launch=dependent_launch, batch_invariant=batch_invariant,
        )  # fmt: skip

    def rebind(
        self,
        *,
        q: LayerTensors | None = None,
        k_cache: LayerTensors | None = None,
        v_cache: LayerTensors | None = None,
        page_indptr: torch.Tensor | None = None,
        page_indices: torch.Tensor | None = None,
        last_page_len: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        out: LayerTensors | None = None,
        lse: LayerTensors | None = None,
        k: LayerTensors | None = None,
        v: LayerTensors | None = None,
    ) -> None:
        """Other tensors for later replays; None keeps those that are there.

        They have the dtypes and shapes of the captured ones, up to the number of pages, of entries of
        page_indices and of columns of block_table, and any strides that `pgqa.decode` takes. The executable stays
        the same: its nodes get other parameters. Replays that are enqueued keep theirs: keep those tensors alive
        until they are done.
        A refusal changes nothing.
        """
        layers = len(self.k_cache)
        for name, value in (("k_cache", k_cache), ("v_cache", v_cache), ("out", out), ("lse", lse)):
            if layers > 1 and isinstance(value, torch.Tensor):
                raise ValueError(f"{name}: got one tensor, expected a sequence of {layers}, one for each layer")
        by_layer = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "out": out, "lse": lse, "k": k, "v": v}
        self._rebind({
            **{name: _by_layer(value, layers) for name, value in by_layer.items()},
            "page_indptr": page_indptr, "page_indices": page_indices, "last_page_len": last_page_len,
            "block_table": block_table, "seq_lens": seq_lens,
        })  # fmt: skip
