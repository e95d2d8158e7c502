"""What pgqa knows of the paged cache of transformers 5.17, in one place."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

import torch

FULL, SLIDING = "full_attention", "sliding_attention"


class HfCacheView:
    """A `PagedAttentionCache` as pgqa sees it. Layers of a group share a page table; a *slot* is a token's place.

    Layers with a sliding window keep their last tokens in a ring of slots, so their pages are no page table: they are
    read slot by slot.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.block_size: int = cache.block_size

    def group(self, layer: int) -> int:
        return self._cache.layer_index_to_group_indices[layer][0]

    def window(self, layer: int) -> int | None:
        """Tokens that a layer attends to, its own included; None: all."""
        window = self._cache.sliding_windows[layer]
        return None if window == 1 else window  # the engine writes "none" as 1

    def layer_type(self, layer: int) -> str:
        """The key of this layer's entry where the engine passes one value for each kind of attention."""
        return FULL if self.window(layer) is None else SLIDING

    def _tensors(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        index = self._cache.layer_index_to_group_indices[layer][1]
        return self._cache.key_cache[index], self._cache.value_cache[index]

    def pages(self, layer: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [pages, page_size, kv_heads, head_dim], views of the cache; page_size: block_size or 1."""
        k, v = self._tensors(layer)
        shape = (-1, page_size, *k.shape[1:])
        return k.view(shape), v.view(shape)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores rows [tokens, kv_heads, head_dim] in slots, int64 [tokens]."""
        k, v = self._tensors(layer)
        k.index_copy_(0, slots, key)
        v.index_copy_(0, slots, value)
