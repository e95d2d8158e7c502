"""Independent dense attention in float64, one request at a time, and the accuracy that results are held to."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import dataclass

import torch

from cases import Case


@dataclass(frozen=True)
class Tolerance:
    """|err| <= element + element * |ref| everywhere; ||err|| <= row * ||ref|| in every (request, head)."""

    element: float
    row: float


TOLERANCES = {
    torch.float16: Tolerance(2e-3, 5e-3),
    torch.bfloat16: Tolerance(1.6e-2, 2e-2),
    torch.float32: Tolerance(1e-4, 1e-4),
}
LSE_TOLERANCE = 2e-3  # absolute, plus 1e-5 of the magnitude


@dataclass(frozen=True)
class Reference:
    out: torch.Tensor  # float64 [batch, query_heads, head_dim]
    lse: torch.Tensor  # float64 [batch, query_heads], natural log; -inf for an empty request


def turn(x: torch.Tensor, positions: torch.Tensor, theta: float, scale: float) -> torch.Tensor:
    """x [tokens, heads, head_dim] with the pairs (i, i + head_dim / 2) turned by position * frequency i."""
    half = x.shape[-1] // 2
    exponents = -2.0 * torch.arange(half, dtype=torch.float64, device=x.device) / x.shape[-1]
    angles = positions.double()[:, None] * (theta**exponents / scale)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1)


def attend(case: Case, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [query_heads, head_dim] and LSE [query_heads] of one request that has live tokens."""
    options = case.options
    slots = case.live_slots(request)  # reads nothing else of the caches
    page, offset = slots // case.page_size, slots % case.page_size
    q = case.q[request].double()
    k, v = case.k_cache[page, offset].double(), case.v_cache[page, offset].double()
    if options.pos_encoding_mode == 1:
        length = case.kv_lens[request]
        positions = torch.arange(length - len(slots), length, device=q.device)
        k = turn(k, positions, options.rope_theta, options.rope_scale)
        q = turn(q[None], positions[-1:], options.rope_theta, options.rope_scale)[0]
    grouped = q.view(k.shape[1], -1, q.shape[-1])
    scores = torch.einsum("hgd,nhd->hgn", grouped, k) * options.sm_scale
    if options.logits_soft_cap > 0:
        scores = options.logits_soft_cap * torch.tanh(scores / options.logits_soft_cap)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.einsum("hgn,nhd->hgd", torch.exp(scores - lse[..., None]), v)
    return out.reshape(q.shape), lse.flatten()


def reference(case: Case) -> Reference:
    """The exact result of a case, up to float64."""
    out = torch.zeros(case.q.shape, dtype=torch.float64, device=case.q.device)
    lse = torch.full(case.q.shape[:2], -torch.inf, dtype=torch.float64, device=case.q.device)
    for request, length in enumerate(case.kv_lens):
        if length > 0:
            out[request], lse[request] = attend(case, request)
    return Reference(out, lse)


def fault(out: torch.Tensor, expected: torch.Tensor) -> str | None:
    """What breaks the tolerance of out's dtype, or None. Both [batch, query_heads, head_dim]."""
    if out.shape != expected.shape:
        return f"shape {tuple(out.shape)}, expected {tuple(expected.shape)}"
    if out.numel() == 0:
        return None
    bound = TOLERANCES[out.dtype]
    finite = torch.isfinite(out)
    if not finite.all():
        return f"not finite at {(~finite).nonzero()[0].tolist()} and {int((~finite).sum()) - 1} more"
    error = (out.double() - expected).abs()
    excess = error - bound.element * (1 + expected.abs())
    if excess.max() > 0:
        at = (excess == excess.max()).nonzero()[0].tolist()
        return f"element {at}: got {out[tuple(at)].item()}, expected {expected[tuple(at)].item()}"
    norms, row_errors = expected.norm(dim=-1), error.norm(dim=-1)
    bad = row_errors > bound.row * norms
    if bad.any():
        at = bad.nonzero()[0].tolist()
        return f"(request, head) {at}: error {row_errors[tuple(at)].item()} of norm {norms[tuple(at)].item()}"
    return None


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Fails unless `out` meets the tolerance of its dtype."""
    found = fault(out, expected)
    assert found is None, found


def assert_lse_close(lse: torch.Tensor, expected: torch.Tensor) -> None:
    """Fails unless `lse`, float32 [batch, query_heads], is the natural log of the sum of exponentials."""
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected, rtol=1e-5, atol=LSE_TOLERANCE)
