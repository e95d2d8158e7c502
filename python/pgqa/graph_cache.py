"""Decode graphs of growing capacities, captured when a step first needs them, the least recently used out first."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Protocol, TypedDict, TypeVar

import torch

from pgqa import _pgqa
from pgqa._checks import check_at_least
from pgqa.graph import DecodeGraph, LayerTensors


class GraphCacheUsage(TypedDict):
    """What a cache holds, and what was asked of it since it was made."""

    count: int
    bytes: int  # device_bytes of what is kept
    hits: int
    misses: int  # a graph was captured, or refused
    evictions: int  # for one of the limits


class _Sized(Protocol):
    @property
    def device_bytes(self) -> int: ...


Value = TypeVar("Value", bound=_Sized)


# In Python, not GraphCache of C++: graphs are Python objects here, alive for whoever still holds one.
class LeastRecentlyUsed(Generic[Value]):
    """Values by key within a count and a sum of bytes; of one value at least, unless it alone exceeds the bytes."""

    def __init__(self, max_count: int, max_bytes: int | None) -> None:
        self.max_count = max_count
        self.max_bytes = max_bytes
        self.usage = GraphCacheUsage(count=0, bytes=0, hits=0, misses=0, evictions=0)
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()  # the last used last

    def get_or_make(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """What `make` raises changes nothing; a value above the bytes is handed out and not kept."""
        if (found := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
            self.usage["hits"] += 1
            return found[0]
        self.usage["misses"] += 1
        value = make()
        size = value.device_bytes
        if self.max_bytes is None or size <= self.max_bytes:
            self._entries[key] = value, size
            self._count(1, size)
            while len(self._entries) > 1 and self._is_over():
                _, (_, dropped) = self._entries.popitem(last=False)
                self._count(-1, -dropped)
                self.usage["evictions"] += 1
        return value

    def clear(self) -> None:
        self._entries.clear()
        self.usage["count"] = self.usage["bytes"] = 0

    def _count(self, count: int, size: int) -> None:
        self.usage["count"] += count
        self.usage["bytes"] += size

    def _is_over(self) -> bool:
        too_large = self.max_bytes is not None and self.usage["bytes"] > self.max_bytes
        return too_large or self.usage["count"] > self.max_count


def _first(tensors: Any) -> torch.Tensor | None:
    first = tensors[0] if isinstance(tensors, Sequence) and tensors else tensors
    return first if isinstance(first, torch.Tensor) and first.dim() > 0 else None


class DecodeGraphCache:
    """DecodeGraphs of one step for growing capacities, so that a small batch does not pay for a large one.

    k_cache, v_cache and all other arguments are those of `pgqa.DecodeGraph`, baked into every graph. max_batch and
    max_pages, or max_columns of a block table, are the most that a step may have; None where q and page_indices, or
    block_table, are given. Capacities are powers of two up to these.

    Tensors that are given (q, out, lse, k, v and the table) have room for the most that a step may have; all graphs
    share them, each the front of them that its capacity takes. Without, every graph has its own, and a step is written
    into those of the graph that `get` returns.

    max_count, max_bytes: graphs that are kept, and their device_bytes in all (None: any); beyond, the least recently
    used go. One is kept whatever max_count says; one that alone exceeds max_bytes is handed out and not kept.

    A graph that falls out lives on for whoever holds it: hold those that an outer capture has recorded. The last
    reference frees its memory, which waits for the device. Not for several threads at a time. ValueError or TypeError
    name the argument.
    """

    def __init__(
        self,
        k_cache: LayerTensors,
        v_cache: LayerTensors,
        *,
        max_batch: int | None = None,
        max_pages: int | None = None,
        max_columns: int | None = None,
        max_count: int = 32,
        max_bytes: int | None = None,
        **graph_arguments: Any,
    ) -> None:
        for name in graph_arguments:
            if name not in inspect.signature(DecodeGraph.__init__).parameters or name == "self":
                raise TypeError(f"DecodeGraphCache: got an argument {name}, expected those of DecodeGraph")
        check_at_least("max_count", max_count, 1)
        if max_bytes is not None:
            check_at_least("max_bytes", max_bytes, 0)
        q, indices, table = (_first(graph_arguments.get(name)) for name in ("q", "page_indices", "block_table"))
        if max_batch is None and q is not None:
            max_batch = q.shape[0]
        if max_pages is None and indices is not None:
            max_pages = indices.shape[0]
        if max_columns is None and table is not None:
            max_columns = table.shape[-1]
        self._is_csr = max_columns is None
        if not self._is_csr:
            check_at_least("max_columns", max_columns, 0)
            if max_pages is not None:
                raise ValueError("max_pages: got a number with a block table, expected none")
        self._limit: tuple[Any, Any] = max_batch, max_pages if self._is_csr else max_columns
        self._capacity(0, 0)
        given = {"k_cache": k_cache, "v_cache": v_cache, **graph_arguments}
        # Copies: what a caller's list holds later is not what the graphs have baked in.
        self._arguments = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
        self._front(*self._limit)
        self._graphs = LeastRecentlyUsed[DecodeGraph](max_count, max_bytes)

    def get(self, live_batch: int, num_pages: int) -> DecodeGraph:
        """The graph of the smallest capacity that holds a step of `live_batch` requests and `num_pages` page entries.

        Of a block table num_pages are those of the longest request.
        Where it is new it is captured as by `pgqa.DecodeGraph`: on the current stream, behind which replays on other
        streams have to be ordered, and not while that is being captured. ValueError where the step exceeds max_batch,
        max_pages or max_columns.
        """
        capacity = self._capacity(live_batch, num_pages)

        def make() -> DecodeGraph:
            pages = {"max_pages" if self._is_csr else "max_columns": capacity[1]}
            return DecodeGraph(max_batch=capacity[0], **pages, **self._front(*capacity))

        # The rest of what a graph has baked in is the same for every graph of this cache.
        return self._graphs.get_or_make(capacity, make)

    def usage(self) -> GraphCacheUsage:
        """Numbers of now, as a copy."""
        return self._graphs.usage.copy()

    def clear(self) -> None:
        """Drops all graphs; hits, misses and evictions stay counted."""
        self._graphs.clear()

    @property
    def max_batch(self) -> int:
        return self._limit[0]

    @property
    def max_pages(self) -> int:
        """0 of a block table."""
        return self._limit[1] if self._is_csr else 0

    @property
    def max_columns(self) -> int | None:
        return None if self._is_csr else self._limit[1]

    def _capacity(self, live_batch: int, num_pages: int) -> tuple[int, int]:
        return _pgqa.graph_capacity(*self._limit, live_batch, num_pages)

    def _front(self, max_batch: int, max_pages: int) -> dict[str, Any]:
        """The arguments of a graph, its tensors cut to this capacity; ValueError where one has not the room."""
        sizes = {"page_indptr": max_batch + 1, "page_indices": max_pages}
        names = ("q", "out", "lse", "k", "v", "last_page_len", "block_table", "seq_lens")
        sizes |= dict.fromkeys(names, max_batch)

        def cut(name: str, tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
                return tensor  # refused by the graph
            if len(tensor) < sizes[name]:
                raise ValueError(f"{name}: got room for {len(tensor)}, expected at least {sizes[name]}")
            front = tensor[: sizes[name]]
            if name != "block_table" or front.dim() != 2:
                return front
            if front.shape[1] < max_pages:
                raise ValueError(f"block_table: got {front.shape[1]} columns, expected at least {max_pages}")
            return front[:, :max_pages]

        arguments = dict(self._arguments)
        for name in sizes.keys() & arguments.keys():
            value = arguments[name]
            arguments[name] = [cut(name, t) for t in value] if isinstance(value, Sequence) else cut(name, value)
        return arguments
