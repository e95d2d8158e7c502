"""One forward pass of transformers' continuous batching: which rows decode, their page tables, the others' masks."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pgqa.integrations._hf_cache import FULL

# Elements of a mask [tokens, keys] beyond which prefilling requests are handed over in several calls.
MASK_ELEMENTS = 1 << 25

T = TypeVar("T")
Runs = tuple[slice, ...]
Csr = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def offsets_of(counts: torch.Tensor) -> torch.Tensor:
    """int32 [n + 1]: 0 and the running sums of int [n]."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def pages_of(kv_lens: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """page_indptr [n + 1] and last_page_len [n], int32, of requests of `kv_lens` tokens, int [n]."""
    counts = (kv_lens + (page_size - 1)) // page_size
    return offsets_of(counts), (kv_lens - (counts - 1) * page_size).to(torch.int32)


def take(tensor: torch.Tensor, runs: Runs, dim: int = 0) -> torch.Tensor:
    """Runs along a dimension, one after another; a view where there is one run."""
    pieces = [tensor.narrow(dim, run.start, run.stop - run.start) for run in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


@dataclass(frozen=True)
class Part:
    """Some requests of a step: their runs along the packed requests, tokens and, by layer type, keys (None: all)."""

    requests: Runs
    tokens: Runs
    keys: Mapping[str, Runs] | None

    @property
    def num_tokens(self) -> int:
        return sum(run.stop - run.start for run in self.tokens)


def runs_of(numbers: list[int]) -> Runs:
    """Ascending numbers as ranges."""
    breaks = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1]
    bounds = [0, *breaks, len(numbers)]
    return tuple(slice(numbers[a], numbers[b - 1] + 1) for a, b in zip(bounds, bounds[1:]))


def packs_of(requests: list[int], num_tokens: list[int], num_keys: list[int]) -> list[list[int]]:
    """Requests in groups whose masks have at most MASK_ELEMENTS elements, where one request alone has no more."""
    packs: list[list[int]] = []
    tokens = keys = 0
    for request, more_tokens, more_keys in zip(requests, num_tokens, num_keys):
        tokens, keys = tokens + more_tokens, keys + more_keys
        if not packs or tokens * keys > MASK_ELEMENTS:
            packs.append([])
            tokens, keys = more_tokens, more_keys
        packs[-1].append(request)
    return packs


class Step:
    """The arguments that all layers of a forward pass share, and what follows from them, each computed once.

    Steps in which every row decodes are known by max_seqlen_q and read nothing on the host. Others, and those that
    the engine fills up, read the offsets of their requests once, which waits for the device. While a graph is
    captured that is impossible: then the engine's function gets every row.
    """

    def __init__(self, block_size: int, arguments: Mapping[str, Any], num_tokens: int, in_graph: bool) -> None:
        self.decode: Part | None = None
        self.prefill: list[Part] = []
        self.num_tokens = num_tokens
        self._block_size = block_size
        self._read: list[torch.Tensor] = arguments["read_index"]
        self._write: list[torch.Tensor] = arguments["write_index"]
        self._block_table: torch.Tensor | None = arguments["block_table"]
        self._q_offsets: torch.Tensor = arguments["cu_seq_lens_q"]
        k_offsets = arguments["cu_seq_lens_k"]
        self._k_offsets: Mapping[str, torch.Tensor] = k_offsets if isinstance(k_offsets, dict) else {"": k_offsets}
        self._tables: dict[int, Csr] = {}
        self._num_cached: torch.Tensor | None = None
        self._masks: dict[tuple[int, str], torch.Tensor] = {}
        self._find_parts(arguments["max_seqlen_q"], in_graph)

    @property
    def is_fast_path(self) -> bool:
        """Whether the engine passes block tables and leaves the append to the attention function."""
        return self._block_table is not None

    def _find_parts(self, longest: int, in_graph: bool) -> None:
        num_requests = len(self._q_offsets) - 1
        everything = Part((slice(0, num_requests),), (slice(0, self.num_tokens),), None)
        reads = any(index.numel() > 0 for index in self._read)
        if self.is_fast_path or (reads and longest == 1 and self.num_tokens == num_requests):
            self.decode = everything
        elif reads and not in_graph:
            self._split(num_requests)
        else:
            self.prefill = [everything]

    def _split(self, num_requests: int) -> None:
        """Parts from the offsets' values. Requests without tokens, which only fill the batch, are in none."""
        q, *more = torch.stack([self._q_offsets, *self._k_offsets.values()]).tolist()
        k: dict[str, list[int]] = dict(zip(self._k_offsets, more))

        def part(requests: list[int]) -> Part:
            runs = runs_of(requests)
            tokens = tuple(slice(q[run.start], q[run.stop]) for run in runs)
            keys = {kind: tuple(slice(ends[run.start], ends[run.stop]) for run in runs) for kind, ends in k.items()}
            return Part(runs, tokens, keys)

        counts = [q[i + 1] - q[i] for i in range(num_requests)]
        decode = [i for i, count in enumerate(counts) if count == 1]
        self.decode = part(decode) if decode else None
        prefill = [i for i, count in enumerate(counts) if count > 1]
        num_keys = [max(ends[i + 1] - ends[i] for ends in k.values()) for i in prefill]
        packs = packs_of(prefill, [counts[i] for i in prefill], num_keys)
        self.prefill = [part(pack) for pack in packs]

    def _kind(self, by_kind: Mapping[str, T], layer_type: str) -> T:
        """The engine names layer types only where a model has more than one."""
        return by_kind[layer_type] if layer_type in by_kind else by_kind[""]

    def _lengths(self, part: Part, layer_type: str) -> torch.Tensor:
        """Keys of each request of a part, its new tokens' included; int32."""
        offsets = self._kind(self._k_offsets, layer_type)
        return take(offsets[1:] - offsets[:-1], part.requests)

    def reads(self, part: Part, group: int, layer_type: str) -> torch.Tensor:
        """Slots of the keys of a part, int64, the same for all layers of a group."""
        index = self._read[group]
        if part.keys is None or index.numel() == 0:
            return index
        return take(index, self._kind(part.keys, layer_type))

    def writes(self, part: Part, group: int) -> torch.Tensor:
        """Slots of the new tokens of a part, int64."""
        return take(self._write[group], part.tokens)

    def table(self, group: int, layer_type: str, window: int | None) -> Csr:
        """The page table of the decoding requests: of the cache's blocks, or of single slots with a window."""
        if group not in self._tables:
            assert self.decode is not None
            make = self._table_of_blocks if window is None else self._table_of_slots
            self._tables[group] = make(self.decode, group, layer_type)
        return self._tables[group]

    def _table_of_blocks(self, part: Part, group: int, layer_type: str) -> Csr:
        """A block holds consecutive slots: its id follows from every block_size-th slot of a request."""
        slots, kv_lens, size = self.reads(part, group, layer_type), self._lengths(part, layer_type), self._block_size
        indptr, last_page_len = pages_of(kv_lens, size)
        room = slots.numel() // size + len(kv_lens)  # no fewer than the blocks in use, which only the device knows
        place = torch.arange(room, device=slots.device, dtype=torch.int32)
        request = torch.searchsorted(indptr[1:], place, right=True).clamp(max=len(kv_lens) - 1)
        token = offsets_of(kv_lens)[request] + (place - indptr[request]) * size
        used = slots[token.clamp(max=slots.numel() - 1).long()]
        return indptr, (used // size).to(torch.int32), last_page_len

    def _table_of_slots(self, part: Part, group: int, layer_type: str) -> Csr:
        """The engine marks the new token by a sentinel, each request's last slot; it is stored before it is read."""
        indptr = offsets_of(self._lengths(part, layer_type))
        indices = self.reads(part, group, layer_type).to(torch.int32)
        indices[indptr[1:].long() - 1] = self.writes(part, group).to(torch.int32)
        return indptr, indices, torch.ones_like(indptr[1:])

    def block_table(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The engine's table on its decode fast path, int32 [requests, columns], and the tokens of each request
        without its new one, -1 for rows that only fill the batch."""
        assert self._block_table is not None
        if self._num_cached is None:
            offsets = self._kind(self._k_offsets, FULL)
            self._num_cached = offsets[1:] - offsets[:-1] - 1
        return self._block_table[group], self._num_cached

    def mask(self, index: int, group: int, layer_type: str, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """What the engine's function adds to the scores of prefill part `index`, [1, 1, tokens, keys].

        Causal within each request, with the window; the lowest number of `dtype` elsewhere, as in the engine's masks.
        """
        if (index, layer_type) not in self._masks:
            part = self.prefill[index]
            kv_lens = self._lengths(part, layer_type)
            q_lens = take(self._q_offsets[1:] - self._q_offsets[:-1], part.requests)
            num_keys = self.reads(part, group, layer_type).numel() or part.num_tokens  # nothing read: the new ones
            allowed = causal_mask(q_lens, kv_lens, part.num_tokens, num_keys, window)
            mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            self._masks[index, layer_type] = mask.masked_fill_(~allowed, torch.finfo(dtype).min)[None, None]
        return self._masks[index, layer_type]


def causal_mask(
    q_lens: torch.Tensor, kv_lens: torch.Tensor, num_tokens: int, num_keys: int, window: int | None
) -> torch.Tensor:
    """Bool [num_tokens, num_keys]: which keys each packed token attends to; q_lens, kv_lens int [requests].

    A request's tokens are the last of its keys. What lies past the sums of the lengths fills up the arrays.
    """
    q_ends, k_ends = q_lens.cumsum(0), kv_lens.cumsum(0)
    token = torch.arange(num_tokens, device=q_lens.device)
    request = torch.searchsorted(q_ends, token, right=True).clamp(max=len(q_lens) - 1)
    own_key = k_ends[request] - q_ends[request] + token
    first_key = k_ends[request] - kv_lens[request]
    if window is not None:
        first_key = torch.maximum(first_key, own_key - (window - 1))
    key = torch.arange(num_keys, device=q_lens.device)
    return (key >= first_key[:, None]) & (key <= own_key[:, None])
