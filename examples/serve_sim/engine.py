"""Decode steps over paged caches: replays of one captured graph on a GPU, plain calls on the CPU."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import pgqa

from .workload import Request


@dataclass(frozen=True)
class EngineConfig:
    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    max_batch: int
    num_pages: int  # of the caches
    max_entries: int  # of the page table; above num_pages where requests share pages
    pad_by_rows: bool  # a step covers max_batch requests, those that are not there have empty rows


class Engine:
    """What both engines have: caches, all NaN at first, and the tensors of a step for max_batch requests.

    q, out [max_batch, query_heads, head_dim]; k, v [max_batch, kv_heads, head_dim]: the caller writes q, k and v before
    a step and reads out behind it.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor

    def __init__(self, config: EngineConfig, device: str) -> None:
        self.config = config
        self.device = device
        shape = (config.num_pages, config.page_size, config.kv_heads, config.head_dim)
        self.k_cache = torch.full(shape, torch.nan, dtype=config.dtype, device=device)
        self.v_cache = torch.full_like(self.k_cache, torch.nan)

        def staged(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, pin_memory=device == "cuda")

        # page_indptr, page_indices, last_page_len on the host
        self._staged = (staged(config.max_batch + 1), staged(config.max_entries), staged(config.max_batch))

    def poison(self, pages: Sequence[int]) -> None:
        """Fills pages with NaN."""
        if pages:
            index = torch.tensor(pages, device=self.device)
            self.k_cache[index] = torch.nan
            self.v_cache[index] = torch.nan

    def write(self, pages: Sequence[int], first: int, kv: torch.Tensor) -> None:
        """Puts the tokens from `first` on into a request's pages; kv [2, tokens, kv_heads, head_dim]."""
        tokens = torch.arange(first, first + kv.shape[1], device=self.device)
        page = torch.tensor(pages, device=self.device)[tokens // self.config.page_size]
        self.k_cache[page, tokens % self.config.page_size] = kv[0]
        self.v_cache[page, tokens % self.config.page_size] = kv[1]

    def step(self, requests: Sequence[Request]) -> float:
        """Appends row i of k and v to request i, decodes row i of q into out; milliseconds, table copies included."""
        raise NotImplementedError

    def _stage_table(self, requests: Sequence[Request]) -> tuple[int, int, int]:
        """Writes the table on the host; returns how much of each array the step needs."""
        batch, page_size = len(requests), self.config.page_size
        indptr, indices, last_page_len = self._staged
        ids = [page for request in requests for page in request.pages]
        ends = torch.tensor([len(request.pages) for request in requests], dtype=torch.int32).cumsum(0)
        indptr[1 : batch + 1] = ends
        indptr[batch + 1 :] = len(ids)
        indices[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        last = [request.length - (len(request.pages) - 1) * page_size for request in requests]
        last_page_len[:batch] = torch.tensor(last, dtype=torch.int32)
        rows = self.config.max_batch if self.config.pad_by_rows else batch
        return rows + 1, len(ids), batch


class GraphEngine(Engine):
    """One pgqa.DecodeGraph, captured for the capacity; the tables are rewritten in place.

    Not padded by rows, the graph is told the live batch, and the rows of its table past it stay as earlier steps left
    them, naming pages that are poison by then.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, "cuda")
        self.graph = pgqa.DecodeGraph(
            self.k_cache, self.v_cache, num_query_heads=config.query_heads, max_batch=config.max_batch,
            max_pages=config.max_entries, append=True, live_batch=not config.pad_by_rows,
        )  # fmt: skip
        self.q, self.k, self.v, self.out = (
            rows[0] for rows in (self.graph.q, self.graph.k, self.graph.v, self.graph.out)
        )
        self._table = (self.graph.page_indptr, self.graph.page_indices, self.graph.last_page_len)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def step(self, requests: Sequence[Request]) -> float:
        sizes = self._stage_table(requests)
        self._begin.record()
        for device, host, size in zip(self._table, self._staged, sizes):
            device[:size].copy_(host[:size], non_blocking=True)
        self.graph.replay(None if self.config.pad_by_rows else len(requests), num_pages=sizes[1])
        self._end.record()
        self._end.synchronize()  # the host writes its table anew for the next step
        return self._begin.elapsed_time(self._end)


class EagerEngine(Engine):
    """pgqa.append_kv, then pgqa.decode, on CPU tensors."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, "cpu")
        self.q = torch.zeros(config.max_batch, config.query_heads, config.head_dim, dtype=config.dtype)
        self.k = torch.zeros(config.max_batch, config.kv_heads, config.head_dim, dtype=config.dtype)
        self.v = torch.zeros_like(self.k)
        self.out = torch.zeros_like(self.q)

    def step(self, requests: Sequence[Request]) -> float:
        begin = time.monotonic_ns()
        self._stage_table(requests)
        rows = self.config.max_batch if self.config.pad_by_rows else len(requests)
        indptr, indices, last_page_len = self._staged
        table = (indptr[: rows + 1], indices, last_page_len[:rows])
        pgqa.append_kv(self.k[:rows], self.v[:rows], self.k_cache, self.v_cache, *table)
        pgqa.decode(self.q[:rows], self.k_cache, self.v_cache, *table, None, out=self.out[:rows])
        self.out[rows:] = 0  # as a graph leaves them
        return (time.monotonic_ns() - begin) / 1e6
