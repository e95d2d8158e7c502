"""Input generation: shuffled pages, poison in everything that is not live, values that can be renewed in place."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from harness.spec import Case

ABSURD_PAGE = 2**30  # in page_indices wherever no request looks
POISONS = {
    "nan": float("nan"),
    "inf": float("inf"),
    "plausible": None,
}  # None: dead slots look like live ones
PEAK = 4.0  # logits of every other (request, head) are this much wider, so that a soft cap shows
_POOL_SLACK = 1 << 16


@dataclass
class Layout:
    """Where the tokens of each request lie: its physical pages in order, and the tokens on the last one."""

    rows: list[list[int]]
    last_page_len: list[int]

    def kv_lens(self, page_size: int) -> list[int]:
        return [(len(row) - 1) * page_size + n if row else 0 for row, n in zip(self.rows, self.last_page_len)]

    def changed(self, rng: random.Random, page_size: int, num_pages: int) -> Layout:
        """Requests in reverse order, on other physical pages, with newly drawn last_page_len."""
        moved = rng.sample(range(num_pages), num_pages)
        rows = [[moved[page] for page in row] for row in reversed(self.rows)]
        return Layout(rows, [rng.randint(1, page_size) for _ in rows])


def _first_layout(case: Case, rng: random.Random) -> tuple[Layout, int, int, int]:
    """The layout the spec states, the number of pages, and unused page_indices entries at the front and the end."""
    table = case.page_table
    if table is not None:
        spans = zip(table.page_indptr, table.page_indptr[1:])
        rows = [list(table.page_indices[begin:end]) for begin, end in spans]
        used = [page for row in rows for page in row]
        num_pages = max(used, default=-1) + 1 + max(2, len(set(used)) // 8)
        tail = len(table.page_indices) - table.page_indptr[-1]
        return Layout(rows, list(table.last_page_len)), num_pages, table.page_indptr[0], tail
    counts = [-(-length // case.page_size) for length in case.kv_lens]
    num_pages = sum(counts) + max(2, sum(counts) // 8)
    ids = iter(rng.sample(range(num_pages), num_pages))
    rows = [[next(ids) for _ in range(count)] for count in counts]
    last = [(length - 1) % case.page_size + 1 if length else rng.randint(1, case.page_size) for length in case.kv_lens]
    return Layout(rows, last), num_pages, 0, 3


class Inputs:
    """The tensors of one call, whose values and page table are renewed in place at the same addresses.

    q [batch, query_heads, head_dim]; k_cache, v_cache [pages, page_size, kv_heads, head_dim]; page_indptr [batch + 1],
    page_indices, last_page_len [batch] are int32 slices of one buffer, aligned to 4 bytes only, as engines hold them.
    """

    def __init__(self, case: Case, device: torch.device, seed: int) -> None:
        self.case = case
        self.device = device
        self.rng = random.Random(seed)
        self._generator = torch.Generator(device).manual_seed(self.rng.getrandbits(63))
        self.first_layout, self.num_pages, self._front, self._tail = _first_layout(case, self.rng)
        dtype = getattr(torch, case.dtype)
        shape = (self.num_pages, case.page_size, case.kv_heads, case.head_dim)
        self.q = torch.empty(case.batch, case.query_heads, case.head_dim, dtype=dtype, device=device)
        self.k_cache = torch.empty(shape, dtype=dtype, device=device)
        self.v_cache = torch.empty(shape, dtype=dtype, device=device)
        self._pool = torch.empty(self.k_cache.numel() + _POOL_SLACK, dtype=dtype, device=device)
        self._pool.normal_(generator=self._generator)
        self._allocate_table(self._front + sum(map(len, self.first_layout.rows)) + self._tail)
        self._round = 0
        self.write_layout(self.first_layout)
        self.refresh()

    def _allocate_table(self, num_indices: int) -> None:
        batch = self.case.batch
        bulk = torch.full((2 * batch + num_indices + 2,), ABSURD_PAGE, dtype=torch.int32, device=self.device)
        self.page_indptr = bulk[1 : batch + 2]
        self.page_indices = bulk[batch + 2 : batch + 2 + num_indices]
        self.last_page_len = bulk[batch + 2 + num_indices :]

    def write_layout(self, layout: Layout) -> None:
        """Writes a page table in place; call refresh() before the next use, for the live slots move."""
        self.layout = layout
        indptr = [self._front]
        for row in layout.rows:
            indptr.append(indptr[-1] + len(row))
        flat = [ABSURD_PAGE] * self._front + [page for row in layout.rows for page in row] + [ABSURD_PAGE] * self._tail
        for tensor, values in (
            (self.page_indptr, indptr),
            (self.page_indices, flat),
            (self.last_page_len, layout.last_page_len),
        ):
            tensor.copy_(torch.tensor(values, dtype=torch.int32))
        self._mark_live(layout)

    def _mark_live(self, layout: Layout) -> None:
        """Finds the dead slots, and the tokens of each request whose values get a weight that shows when missing."""
        page_size, window = self.case.page_size, self.case.window_left
        dead = torch.ones(self.num_pages * page_size, dtype=torch.bool)
        heavy: list[int] = []
        factors: list[float] = []
        for row, length in zip(layout.rows, layout.kv_lens(page_size)):
            if length == 0:
                continue
            begin = max(0, length - 1 - window) if window >= 0 else 0
            slots = (torch.tensor(row)[:, None] * page_size + torch.arange(page_size)).flatten()[begin:length]
            dead[slots] = False
            picks = {
                0,
                len(slots) - 1,
                self.rng.randrange(len(slots)),
                self.rng.randrange(len(slots)),
            }
            heavy += [int(slots[pick]) for pick in picks]
            factors += [min(128.0, max(1.0, len(slots) ** 0.5))] * len(picks)
        self._dead = dead.to(self.device)[:, None, None]
        self._heavy = torch.tensor(heavy, dtype=torch.int64, device=self.device)
        self._factors = torch.tensor(factors, dtype=self.q.dtype, device=self.device)[:, None, None]

    def refresh(self, poison: str = "nan") -> None:
        """Renews every value of q, k_cache and v_cache in place; dead slots get the poison."""
        self._round += 1
        self.q.normal_(generator=self._generator)
        rows = torch.arange(self.case.batch, device=self.device)[:, None]
        heads = torch.arange(self.case.query_heads, device=self.device)
        wide = (rows + heads + self._round) % 2 == 1
        self.q.mul_(torch.where(wide, PEAK, 1.0).to(self.q.dtype)[..., None])
        for cache in (self.k_cache, self.v_cache):
            begin = self.rng.randrange(_POOL_SLACK)
            cache.copy_(self._pool[begin : begin + cache.numel()].view(cache.shape))
        slots = self.v_cache.view(-1, *self.v_cache.shape[2:])
        slots[self._heavy] = slots[self._heavy] * self._factors
        fill = POISONS[poison]
        if fill is not None:
            slots.masked_fill_(self._dead, fill)
            self.k_cache.view_as(slots).masked_fill_(self._dead, fill)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by argument name, in the order of the call."""
        names = ("q", "k_cache", "v_cache", "page_indptr", "page_indices", "last_page_len")
        return {name: getattr(self, name) for name in names}

    def arguments(self) -> tuple:
        """All positional arguments of paged_gqa_decode."""
        case = self.case
        options = (
            case.window_left,
            case.logits_soft_cap,
            case.pos_encoding_mode,
            case.rope_scale,
            case.rope_theta,
        )
        return (*self.tensors().values(), case.scale, *options)


def make_inputs(case: Case, device: torch.device | str, seed: int) -> Inputs:
    """Fresh inputs of a case; the same seed gives the same values on the same device."""
    return Inputs(case, torch.device(device), seed)
