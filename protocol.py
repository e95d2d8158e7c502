"""What an implementation is held to: data contract, reference semantics, accuracy, inputs and timers.

Reference and accuracy stand here; `harness/inputs.py` makes the inputs and `harness/timing.py` measures, both exported
from here too. `docs/harness.md` tells how a case is judged.

Contract of `paged_gqa_decode(q, k_cache, v_cache, page_indptr, page_indices, last_page_len, sm_scale, window_left=-1,
logits_soft_cap=0.0, pos_encoding_mode=0, rope_scale=1.0, rope_theta=10000.0)`:

- q [batch, query_heads, head_dim]; k_cache, v_cache [pages, page_size, kv_heads, head_dim]; all of one dtype
  (float16, bfloat16; float32 on the CPU). Query head h reads KV head h // (query_heads // kv_heads).
- page_indptr [batch + 1], page_indices [>= page_indptr[batch]], last_page_len [batch]: int32, aligned to 4 bytes only.
  Request r holds kv_len = (page_indptr[r + 1] - page_indptr[r] - 1) * page_size + last_page_len[r] tokens; one without
  pages holds none, whatever its last_page_len, and its output is 0.
- pos_encoding_mode 1 rotates pairs (i, i + head_dim / 2): q at position kv_len - 1, key j at position j, by the angle
  position * rope_theta ** (-2 i / head_dim) / rope_scale. 0 rotates nothing.
- Logits are (q . k) * sm_scale, then cap * tanh(logit / cap) when logits_soft_cap is above 0; only the last
  window_left + 1 tokens count when window_left >= 0; softmax in each query head; weighted sum of the values.
- The result is a new contiguous tensor of q's shape and dtype that shares no memory with anything; inputs stay as
  they are.
- Slots past last_page_len, tokens left of the window, pages that nothing names and entries of page_indices outside
  [page_indptr[0], page_indptr[batch]) may hold anything, NaN, Inf and absurd page ids included.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator

import torch

from harness.inputs import Inputs, Layout, make_inputs
from harness.measurement import Measurement
from harness.spec import Case, SpecError, load_spec, parse_spec
from harness.timing import Timer, make_timer

__all__ = [
    "Accuracy", "Case", "Inputs", "Layout", "Measurement", "SpecError", "TOLERANCES", "Timer", "Tolerance",
    "compare", "load_spec", "make_inputs", "make_timer", "parse_spec", "reference",
]  # fmt: skip


@dataclass(frozen=True)
class Tolerance:
    """|err| <= element + element * |ref| everywhere, and ||err|| <= row * ||ref|| in every (request, head)."""

    element: float
    row: float


TOLERANCES = {
    torch.float16: Tolerance(2e-3, 5e-3),
    torch.bfloat16: Tolerance(1.6e-2, 2e-2),
    torch.float32: Tolerance(1e-4, 1e-4),
}


@dataclass(frozen=True)
class Accuracy:
    """How far an output is from the reference."""

    error: float  # largest ||err|| / ||ref|| of a (request, head); infinite where ref is 0 and the output is not
    fault: str | None  # what breaks the tolerance, None when nothing does


@contextmanager
def _full_precision() -> Iterator[None]:
    """float32 products in float32, whatever the process has chosen."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)


def _rotated(x: torch.Tensor, positions: torch.Tensor, rope_scale: float, rope_theta: float) -> torch.Tensor:
    """x [tokens, heads, head_dim] float32 rotated to its positions [tokens]; angles in float64."""
    half = x.shape[-1] // 2
    pairs = torch.arange(half, dtype=torch.float64, device=x.device)
    angles = positions.double()[:, None] * (rope_theta ** (-pairs / half) / rope_scale)
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]
    turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def _attend_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, logits_soft_cap: float
) -> torch.Tensor:
    """q [query_heads, head_dim] over live k, v [tokens, kv_heads, head_dim], float32, one KV head's group at a time."""
    group = q.shape[0] // k.shape[1]
    heads = []
    for head in range(k.shape[1]):
        logits = q[head * group : (head + 1) * group] @ k[:, head].T * sm_scale
        if logits_soft_cap > 0:
            logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
        weights = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
        heads.append(weights @ v[:, head] / weights.sum(dim=-1, keepdim=True))
    return torch.cat(heads)


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_indptr: torch.Tensor,
    page_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    sm_scale: float,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    pos_encoding_mode: int = 0,
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
) -> torch.Tensor:
    """The result in float32 [batch, query_heads, head_dim], one request at a time over its live tokens only."""
    page_size = k_cache.shape[1]
    indptr, last = page_indptr.tolist(), last_page_len.tolist()
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    with _full_precision():
        for r, (begin, end) in enumerate(zip(indptr, indptr[1:])):
            if begin == end:
                continue
            kv_len = (end - begin - 1) * page_size + last[r]
            first = max(0, kv_len - 1 - window_left) if window_left >= 0 else 0
            positions = torch.arange(first, kv_len, device=q.device)
            pages = page_indices[begin:end].long()[positions // page_size]
            k = k_cache[pages, positions % page_size].float()
            v = v_cache[pages, positions % page_size].float()
            query = q[r].float()
            if pos_encoding_mode == 1:
                k = _rotated(k, positions, rope_scale, rope_theta)
                query = _rotated(query[None], positions[-1:], rope_scale, rope_theta)[0]
            out[r] = _attend_one(query, k, v, sm_scale, logits_soft_cap)
    return out


def compare(out: torch.Tensor, expected: torch.Tensor) -> Accuracy:
    """Holds an output [batch, query_heads, head_dim] to the tolerance of its dtype against a float32 reference."""
    if out.numel() == 0:
        return Accuracy(0.0, None)
    tolerance = TOLERANCES[out.dtype]
    difference = (out.float() - expected).abs()
    row_error, row_size = difference.norm(dim=-1), expected.norm(dim=-1)
    relative = torch.where(row_error == 0, 0.0, row_error / row_size)
    error = float(relative.max())
    request, head = divmod(int(relative.argmax()), out.shape[1])
    if not error <= tolerance.row:
        where = f"request {request}, head {head}"
        return Accuracy(error, f"||err|| is {error:.3g} of ||ref|| at {where}, allowed {tolerance.row:g}")
    excess = difference / (tolerance.element * (1 + expected.abs()))
    worst = float(excess.max())
    if not worst <= 1:
        request = int(excess.argmax()) // (out.shape[1] * out.shape[2])
        return Accuracy(error, f"an element is off by {worst:.3g} times the tolerance at request {request}")
    return Accuracy(error, None)
