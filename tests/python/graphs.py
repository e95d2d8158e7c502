"""A decode problem in a captured graph, and checks of its replays."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pgqa
import torch
from cases import Case, Spec, make_case, rewrite
from reference import assert_close, assert_lse_close, reference

SMALL = {"query_heads": 8, "kv_heads": 2, "head_dim": 64}
SPIN_CYCLES = 1_000_000_000  # half a second or more


def with_room(batch: int, tokens: int = 32000, device: str = "cuda", **spec: Any) -> Case:
    """A case of `batch` requests whose pool and index array hold `tokens` tokens in all."""
    return make_case(device, Spec([tokens - 16 * (batch - 1)] + [16] * (batch - 1), **spec))


class Graphed:
    """A DecodeGraph over the tensors of `case`, with LSE."""

    def __init__(self, case: Case, **keywords: Any) -> None:
        self.case = case
        q, k_cache, v_cache, indptr, indices, last = case.tensors()
        self.graph = pgqa.DecodeGraph(
            k_cache, v_cache, q=q, page_indptr=indptr, page_indices=indices, last_page_len=last,
            sm_scale=case.options.sm_scale, return_lse=True, **{**case.options.keywords(), **keywords},
        )  # fmt: skip
        self.executable = self.graph.executable
        self.addresses = self._addresses()

    @property
    def out(self) -> torch.Tensor:
        return self.graph.out[0]

    @property
    def lse(self) -> torch.Tensor:
        return self.graph.lse[0]

    def _addresses(self) -> list[int]:
        graph = self.graph
        tensors = (*graph.q, *graph.out, *graph.lse, graph.page_indptr, graph.page_indices, graph.last_page_len)
        return [tensor.data_ptr() for tensor in tensors]

    def forget(self) -> None:
        self.out.fill_(torch.nan)
        self.lse.fill_(torch.nan)

    def check(self, kv_lens: Sequence[int], seed: int, live_batch: int | None = None) -> None:
        """Rewrites the problem, replays, and compares as `compare`."""
        rewrite(self.case, kv_lens, seed)
        self.forget()
        self.graph.replay(live_batch)
        self.compare(live_batch)

    def compare(self, live_batch: int | None = None) -> None:
        """With the reference and, bit for bit, with an eager call; rows from live_batch on are empty."""
        live = len(self.out) if live_batch is None else live_batch
        expected = reference(self.case)
        assert_close(self.out[:live], expected.out[:live])
        assert_lse_close(self.lse[:live], expected.lse[:live])
        assert (self.out[live:] == 0).all() and (self.lse[live:] == -torch.inf).all()
        if live == len(self.out):
            out, lse = self.case.run(return_lse=True)
            assert torch.equal(out, self.out) and torch.equal(lse, self.lse)
        assert self.graph.executable == self.executable, "another executable graph"
        assert self._addresses() == self.addresses, "a persistent buffer moved"
