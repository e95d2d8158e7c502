"""A second account of every running request's keys and values, without pages, and the check of outputs against it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Sequence

import torch

from .engine import EngineConfig
from .workload import Request

# ||out - expected|| <= ROW_TOLERANCE * ||expected|| in every (request, head)
ROW_TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4}


class WrongOutput(RuntimeError):
    """A step's output differs from what plain attention gives."""


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [query_heads, head_dim] over k, v [tokens, kv_heads, head_dim], all float32; scores times head_dim^-0.5."""
    grouped = q.view(k.shape[1], -1, q.shape[-1])
    weights = torch.softmax(torch.einsum("hgd,nhd->hgn", grouped, k) * q.shape[-1] ** -0.5, dim=-1)
    return torch.einsum("hgn,nhd->hgd", weights, v).reshape(q.shape)


class Ledger:
    """Each running request has a seat of its own: rows [max_tokens, kv_heads, head_dim] of K and of V."""

    def __init__(self, config: EngineConfig, max_tokens: int, device: str) -> None:
        shape = (2, config.max_batch, max_tokens, config.kv_heads, config.head_dim)
        self._kv = torch.full(shape, torch.nan, dtype=config.dtype, device=device)
        self._seats: dict[int, int] = {}  # of each request's number
        self._free = list(range(config.max_batch))
        self._tolerance = ROW_TOLERANCE[config.dtype]
        self.num_checked = 0  # rows (request, head)
        self.worst = 0.0  # of ||out - expected|| / ||expected||

    def keep(self, requests: Sequence[Request]) -> None:
        """Forgets all others."""
        running = {request.number for request in requests}
        for number in [number for number in self._seats if number not in running]:
            self._free.append(self._seats.pop(number))

    def begin(self, request: Request, kv: torch.Tensor) -> None:
        """The prefilled tokens of a request that has no seat; kv [2, tokens, kv_heads, head_dim]."""
        seat = self._seats[request.number] = self._free.pop()
        self._kv[:, seat] = torch.nan
        self._kv[:, seat, : kv.shape[1]] = kv

    def append(self, requests: Sequence[Request], k: torch.Tensor, v: torch.Tensor) -> None:
        """The new token of request i: row i of k and v."""
        seats = torch.tensor([self._seats[request.number] for request in requests], device=self._kv.device)
        tokens = torch.tensor([request.length - 1 for request in requests], device=self._kv.device)
        self._kv[0, seats, tokens] = k[: len(requests)]
        self._kv[1, seats, tokens] = v[: len(requests)]

    def check(self, requests: Sequence[Request], q: torch.Tensor, out: torch.Tensor) -> None:
        """WrongOutput unless out is right in the rows of `requests` and 0 in those past them."""
        if out[len(requests) :].count_nonzero():
            raise WrongOutput(f"row {len(requests)} or one past it is not 0, but {len(requests)} requests run")
        expected = torch.stack([self._attend(request, q[row]) for row, request in enumerate(requests)])
        errors = (out[: len(requests)].float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        self.num_checked += errors.numel()
        self.worst = max(self.worst, float(errors.max()))
        wrong = (~(errors <= self._tolerance)).nonzero().tolist()  # NaN is wrong as well
        if wrong:
            row, head = wrong[0]
            raise WrongOutput(
                f"request {requests[row].number} of {requests[row].length} tokens, query head {head}: ||error|| is "
                f"{float(errors[row, head]):.3g} of ||expected||, allowed {self._tolerance:g}; {len(wrong)} such rows"
            )

    def _attend(self, request: Request, q: torch.Tensor) -> torch.Tensor:
        k, v = self._kv[:, self._seats[request.number], : request.length].float()
        return attention(q.float(), k, v)
