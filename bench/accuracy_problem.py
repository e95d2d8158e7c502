"""Problems whose error is measured, and their results in float64 or float32, chunk by chunk of tokens."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

PAGE_SIZE = 16
ROPE_THETA = 10000.0
PEAK = 4.0  # q is so many times larger where weights are to be peaked; a power of two, so that nothing is rounded
CHUNK_TOKENS = 16384  # held in the wide type at a time
NUM_REQUESTS = {17: 8, 1000: 4, 8192: 2}  # of a case by length; one request where it is longer

Decode = Callable[..., torch.Tensor]  # as pgqa.decode


@dataclass(frozen=True)
class AccuracyCase:
    """A call with unit-normal keys, values and queries, or queries PEAK times as large."""

    dtype: str
    group: int  # query heads for each KV head
    head_dim: int
    length: int  # tokens of every request
    rope: bool
    peaked: bool

    @property
    def name(self) -> str:
        words = [self.dtype, f"group {self.group}", f"dim {self.head_dim}", f"{self.length} tokens"]
        return ", ".join(words + ["rope"] * self.rope + ["peaked"] * self.peaked)

    @property
    def batch(self) -> int:
        return NUM_REQUESTS.get(self.length, 1)

    @property
    def kv_heads(self) -> int:
        """So that a request has eight query heads or more."""
        return max(1, 8 // self.group)


@dataclass(frozen=True)
class Problem:
    """Tensors of a case, its pages scattered."""

    case: AccuracyCase
    q: torch.Tensor  # [batch, query_heads, head_dim]
    k_cache: torch.Tensor  # [pages, PAGE_SIZE, kv_heads, head_dim]
    v_cache: torch.Tensor
    page_indptr: torch.Tensor  # int32 [batch + 1]
    page_indices: torch.Tensor  # int32 [pages]
    last_page_len: torch.Tensor  # int32 [batch]

    def tokens(self, cache: torch.Tensor, request: int, begin: int, end: int) -> torch.Tensor:
        """Rows [end - begin, kv_heads, head_dim] of a request's tokens [begin, end)."""
        token = torch.arange(begin, end, device=cache.device)
        page = self.page_indices[self.page_indptr[request] + token // PAGE_SIZE].long()
        return cache[page, token % PAGE_SIZE]

    def solve(self, decode: Decode) -> torch.Tensor:
        """What `decode` gives, in the case's dtype."""
        return decode(
            self.q, self.k_cache, self.v_cache, self.page_indptr, self.page_indices, self.last_page_len, self.scale,
            pos_encoding_mode=int(self.case.rope), rope_theta=ROPE_THETA,
        )  # fmt: skip

    @property
    def scale(self) -> float:
        return self.case.head_dim**-0.5


def make_problem(case: AccuracyCase, device: str, seed: int = 0) -> Problem:
    """The same case, device and seed give the same values."""
    generator = torch.Generator(device).manual_seed(seed)
    pages = -(-case.length // PAGE_SIZE)
    num_pages = pages * case.batch

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, case.dtype), device=device).normal_(generator=generator)

    cache_shape = (num_pages, PAGE_SIZE, case.kv_heads, case.head_dim)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    last = case.length - (pages - 1) * PAGE_SIZE
    return Problem(
        case,
        normal(case.batch, case.kv_heads * case.group, case.head_dim) * (PEAK if case.peaked else 1.0),
        normal(*cache_shape),
        normal(*cache_shape),
        torch.arange(0, num_pages + 1, pages, dtype=torch.int32, device=device),
        order.to(torch.int32).to(device),
        torch.full((case.batch,), last, dtype=torch.int32, device=device),
    )


def turned(x: torch.Tensor, first_position: int) -> torch.Tensor:
    """x [tokens, heads, head_dim], its rows turned to the positions from the first one on.

    Angles are float64 whatever x is; their sines and cosines are rounded to x's dtype.
    """
    half = x.shape[-1] // 2
    frequencies = ROPE_THETA ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    positions = torch.arange(first_position, first_position + len(x), dtype=torch.float64, device=x.device)
    angles = (positions[:, None] * frequencies)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1)


def attention(problem: Problem, dtype: torch.dtype) -> torch.Tensor:
    """The result computed in `dtype` throughout, [batch, query_heads, head_dim]."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return torch.stack([_attend(problem, request, dtype) for request in range(problem.case.batch)])
    finally:
        torch.set_float32_matmul_precision(chosen)


def _attend(problem: Problem, request: int, dtype: torch.dtype) -> torch.Tensor:
    case = problem.case
    q = problem.q[request].to(dtype)
    if case.rope:
        q = turned(q[None], case.length - 1)[0]
    grouped = q.view(case.kv_heads, case.group, case.head_dim)
    chunks = [(begin, min(begin + CHUNK_TOKENS, case.length)) for begin in range(0, case.length, CHUNK_TOKENS)]
    scores = []
    for begin, end in chunks:
        k = problem.tokens(problem.k_cache, request, begin, end).to(dtype)
        k = turned(k, begin) if case.rope else k
        scores.append(torch.einsum("hgd,nhd->hgn", grouped, k) * problem.scale)
    weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1)
    out = torch.zeros_like(grouped)
    for begin, end in chunks:
        v = problem.tokens(problem.v_cache, request, begin, end).to(dtype)
        out += torch.einsum("hgn,nhd->hgd", weights[..., begin:end], v)
    return out.reshape(q.shape)
