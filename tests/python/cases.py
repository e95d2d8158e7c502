"""Decode problems whose every element that must not be used is poison, and the call that solves one."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pgqa
import torch

ABSURD_IDS = (2147480000, -1, 2147483647, -2147483648)


@dataclass(frozen=True)
class Options:
    """The scalars of a call."""

    sm_scale: float
    window_left: int = -1
    logits_soft_cap: float = 0.0
    pos_encoding_mode: int = 0
    rope_scale: float = 1.0
    rope_theta: float = 10000.0

    def keywords(self) -> dict[str, Any]:
        """All but sm_scale, as keyword arguments of pgqa.decode."""
        return {name: value for name, value in vars(self).items() if name != "sm_scale"}


@dataclass(frozen=True)
class Spec:
    """What make_case builds. Poison: free slots, tokens left of the window, pages that nobody names."""

    kv_lens: Sequence[int]
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    sm_scale: float | None = None  # None: head_dim^-0.5
    window_left: int = -1
    logits_soft_cap: float = 0.0
    pos_encoding_mode: int = 0
    rope_scale: float = 1.0
    rope_theta: float = 10000.0
    q_scale: float = 1.0  # large: peaked weights
    first_entry: int = 0  # page_indptr[0]; the entries before it are absurd
    shared_pages: int = 0  # above 0: requests share this many pages, named over and over
    layout: str = "nhd"  # see caches_of
    seed: int = 0

    def options(self) -> Options:
        scale = self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale
        names = [name for name in Options.__dataclass_fields__ if name != "sm_scale"]
        return Options(sm_scale=scale, **{name: getattr(self, name) for name in names})


@dataclass
class Case:
    """The tensors of one call. The index arrays may be rewritten in place; kv_lens must then follow."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_indptr: torch.Tensor
    page_indices: torch.Tensor
    last_page_len: torch.Tensor
    kv_lens: list[int]
    options: Options
    spec: Spec = field(repr=False, default_factory=lambda: Spec(()))

    @property
    def page_size(self) -> int:
        return self.k_cache.shape[1]

    def live_slots(self, request: int) -> torch.Tensor:
        """Slots (page * page_size + offset) of the tokens that count, in order; int64."""
        begin = int(self.page_indptr[request])
        length = self.kv_lens[request]
        window = self.options.window_left
        first = max(0, length - 1 - window) if window >= 0 else 0
        tokens = torch.arange(first, length, device=self.q.device)
        pages = self.page_indices[begin + tokens // self.page_size].long()
        return pages * self.page_size + tokens % self.page_size

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensor arguments, in order."""
        return (self.q, self.k_cache, self.v_cache, self.page_indptr, self.page_indices, self.last_page_len)

    def with_options(self, **changes: Any) -> Case:
        return replace(self, options=replace(self.options, **changes))

    def run(self, **keywords: Any) -> Any:
        """pgqa.decode of the case."""
        return pgqa.decode(*self.tensors(), self.options.sm_scale, **self.options.keywords(), **keywords)

    def shape(self) -> dict[str, Any]:
        """What plans depend on, as keyword arguments."""
        _, page_size, kv_heads, head_dim = self.k_cache.shape
        return {
            "num_query_heads": self.q.shape[1],
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "page_size": page_size,
            "dtype": str(self.q.dtype),
            "pos_encoding_mode": self.options.pos_encoding_mode,
        }

    def schedule(self) -> Any:
        """The partition of the page table on this GPU, or on one of 132 SMs for a case on the CPU."""
        num_sms = 132
        if self.q.is_cuda:
            num_sms = torch.cuda.get_device_properties(self.q.device).multi_processor_count
        window = self.options.window_left
        return pgqa.schedule(
            self.page_indptr, self.last_page_len, **self.shape(), window_left=window, num_sms=num_sms
        )

    def workspace_bytes(self) -> int:
        """Bytes that a call of this shape works in on its GPU, or on an H200 for a case on the CPU."""
        device = self.q.get_device() if self.q.is_cuda else None
        return pgqa.workspace_bytes(**self.shape(), device=device)


def table_of(
    kv_lens: Sequence[int], page_size: int, first_entry: int, shared_pages: int, rng: random.Random
) -> tuple[list[int], list[int], list[int], int]:
    """page_indptr, page_indices with absurd entries around the rows, last_page_len, pages of the pool."""
    counts = [-(-length // page_size) for length in kv_lens]
    indptr = [first_entry]
    for count in counts:
        indptr.append(indptr[-1] + count)
    named = sum(counts)
    num_pages = shared_pages or named + max(2, named // 8)
    ids = rng.choices(range(num_pages), k=named) if shared_pages else rng.sample(range(num_pages), named)
    before = [ABSURD_IDS[i % 4] for i in range(first_entry)]
    after = [ABSURD_IDS[i % 4] for i in range(5)]
    last = [length - (count - 1) * page_size if length else rng.randint(-3, page_size + 3)
            for length, count in zip(kv_lens, counts)]  # fmt: skip
    return indptr, before + ids + after, last, num_pages


def caches_of(
    layout: str, shape: tuple[int, int, int, int], dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [pages, page_size, kv_heads, head_dim], NaN in every byte that they or their pools hold.

    nhd: contiguous. hnd: a head's page is contiguous. rows: K and V rows side by side. mixed: K as nhd and V as
    hnd, of larger pools, with gaps between V's rows.
    """
    pages, page_size, heads, head_dim = shape

    def pool(*sizes: int) -> torch.Tensor:
        return torch.full(sizes, torch.nan, dtype=dtype, device=device)

    if layout == "nhd":
        return pool(*shape), pool(*shape)
    if layout == "hnd":
        return (
            pool(pages, heads, page_size, head_dim).transpose(1, 2),
            pool(pages, heads, page_size, head_dim).transpose(1, 2),
        )
    if layout == "rows":
        both = pool(pages, page_size, heads, 2 * head_dim)
        return both[..., :head_dim], both[..., head_dim:]
    if layout == "mixed":
        k = pool(pages + 3, page_size + 1, heads, head_dim)[2:-1, :page_size]
        v = pool(pages, heads + 1, page_size, head_dim + 16)[:, 1:, :, 8 : 8 + head_dim].transpose(1, 2)
        return k, v
    raise ValueError(f"layout: got {layout}, expected nhd, hnd, rows or mixed")


def poison(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """NaN, +inf, -inf and NaN in turn along the rows."""
    rows = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan], dtype=dtype, device=device)
    count = 1
    for size in shape[:-1]:
        count *= size
    return rows.repeat(-(-count // 4))[:count, None].expand(count, shape[-1]).reshape(tuple(shape))


def fill_live(case: Case, generator: torch.Generator, value_offset: float = 0.0) -> None:
    """Poison everywhere in the caches, then fresh normal values in the slots that count."""
    device, dtype = case.q.device, case.q.dtype
    slots = [case.live_slots(request) for request, length in enumerate(case.kv_lens) if length > 0]
    for cache in (case.k_cache, case.v_cache):
        cache.copy_(poison(cache.shape, dtype, device))
        if not slots:
            continue
        live = torch.cat(slots)
        page, offset = live // case.page_size, live % case.page_size
        values = torch.randn(len(live), *cache.shape[2:], generator=generator, device=device)
        cache[page, offset] = (values + (value_offset if cache is case.v_cache else 0.0)).to(dtype)


def make_case(device: str, spec: Spec, value_offset: float = 0.0) -> Case:
    """A fresh problem; the same spec and device give the same values."""
    rng = random.Random(spec.seed)
    generator = torch.Generator(device).manual_seed(spec.seed)
    indptr, indices, last, num_pages = table_of(
        spec.kv_lens, spec.page_size, spec.first_entry, spec.shared_pages, rng
    )
    shape = (num_pages, spec.page_size, spec.kv_heads, spec.head_dim)
    k_cache, v_cache = caches_of(spec.layout, shape, spec.dtype, device)
    q = torch.randn(len(spec.kv_lens), spec.query_heads, spec.head_dim, generator=generator, device=device)

    def on_device(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    case = Case(
        (q * spec.q_scale).to(spec.dtype), k_cache, v_cache, on_device(indptr), on_device(indices), on_device(last),
        list(spec.kv_lens), spec.options(), spec,
    )  # fmt: skip
    fill_live(case, generator, value_offset)
    return case


def relayout(case: Case, layout: str) -> Case:
    """The same problem with copies of the caches in another layout."""
    k_cache, v_cache = caches_of(layout, tuple(case.k_cache.shape), case.q.dtype, str(case.q.device))
    return replace(case, k_cache=k_cache.copy_(case.k_cache), v_cache=v_cache.copy_(case.v_cache))


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, to compare tensors that hold NaN."""
    return t.detach().contiguous().view(torch.uint8)


def rewrite(case: Case, kv_lens: Sequence[int], seed: int) -> None:
    """New lengths, page table and values in the tensors of `case`, whose batch is at least len(kv_lens).

    The rest of the batch becomes empty requests, the rest of the caches poison, the rest of the index array absurd.
    """
    rng = random.Random(seed)
    generator = torch.Generator(case.q.device).manual_seed(seed)
    case.kv_lens = [*kv_lens, *[0] * (len(case.q) - len(kv_lens))]
    indptr, indices, last, _ = table_of(case.kv_lens, case.page_size, 0, len(case.k_cache), rng)
    named = indptr[-1]
    indices[:named] = rng.sample(range(len(case.k_cache)), named)
    room = len(case.page_indices)
    padded = (indices[:named] + [ABSURD_IDS[i % 4] for i in range(room - named)])[:room]
    for tensor, values in ((case.page_indptr, indptr), (case.page_indices, padded), (case.last_page_len, last)):
        tensor.copy_(torch.tensor(values, dtype=torch.int32))
    case.q.copy_(torch.randn(case.q.shape, generator=generator, device=case.q.device) * case.spec.q_scale)
    fill_live(case, generator)


def ragged(rng: random.Random, batch: int, longest: int) -> list[int]:
    """Lengths with empties, ones and everything up to `longest`, most of them short."""
    return [0 if rng.random() < 0.1 else 1 + int(longest * rng.random() ** 3) for _ in range(batch)]
