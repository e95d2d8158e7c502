"""One case on the GPU: tensors on randomly scattered pages, its reference, and captured calls to time."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from typing import Callable

import torch

from harness.spec import Case
from harness.timing import Timer
from protocol import Accuracy, compare, reference

POOL_FACTOR = 1.3  # physical pages for each page in use
WARM_UP_LAUNCHES = 30
MIN_LAUNCHES = 31
NUM_REFERENCE_REQUESTS = 256  # larger batches are checked at so many requests, spread evenly


@dataclass
class CaseTensors:
    """Inputs of a case on the GPU and what is known of its page table on the host."""

    case: Case
    q: torch.Tensor  # [batch, query_heads, head_dim]
    k_cache: torch.Tensor  # [pages, page_size, kv_heads, head_dim]
    v_cache: torch.Tensor
    page_indptr: torch.Tensor  # int32 [batch + 1]
    page_indices: torch.Tensor  # int32 [page_indptr[batch]]
    last_page_len: torch.Tensor  # int32 [batch]
    host_indptr: torch.Tensor  # int32 [batch + 1] on the CPU
    host_indices: torch.Tensor  # int32 on the CPU
    host_last: torch.Tensor  # int32 [batch] on the CPU

    def options(self) -> tuple[float, int, float, int, float, float]:
        """The scalars of a call, in its order."""
        c = self.case
        return (c.scale, c.window_left, c.logits_soft_cap, c.pos_encoding_mode, c.rope_scale, c.rope_theta)

    def arguments(self) -> tuple:
        """All positional arguments of the evaluation's entry point."""
        table = (self.page_indptr, self.page_indices, self.last_page_len)
        return (self.q, self.k_cache, self.v_cache, *table, *self.options())


def make_tensors(case: Case, seed: int = 0) -> CaseTensors:
    """Normal values; physical pages drawn at random from a pool POOL_FACTOR times larger than what is in use."""
    lens = torch.tensor(case.kv_lens, dtype=torch.int64)
    counts = (lens + case.page_size - 1) // case.page_size
    indptr = torch.zeros(case.batch + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    num_used = int(indptr[-1])
    num_pages = int(num_used * POOL_FACTOR) + 1
    indices = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))[:num_used].to(torch.int32)
    last = torch.where(lens > 0, (lens - 1) % case.page_size + 1, 1).to(torch.int32)
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda").normal_(generator=generator)

    cache_shape = (num_pages, case.page_size, case.kv_heads, case.head_dim)
    q = normal(case.batch, case.query_heads, case.head_dim)
    return CaseTensors(
        case, q, normal(*cache_shape), normal(*cache_shape), indptr.cuda(), indices.cuda(), last.cuda(),
        indptr, indices, last,
    )  # fmt: skip


@dataclass
class CaseReference:
    """The float32 result of some requests of a case."""

    requests: torch.Tensor  # int64 [checked]
    expected: torch.Tensor  # float32 [checked, query_heads, head_dim]

    def check(self, out: torch.Tensor) -> Accuracy:
        """Error of an output [batch, query_heads, head_dim] against the tolerance of its dtype."""
        return compare(out[self.requests], self.expected)


def make_reference(tensors: CaseTensors) -> CaseReference:
    """Reference of every request, or of NUM_REFERENCE_REQUESTS of them, the first and the last included."""
    batch = tensors.case.batch
    requests = torch.linspace(0, batch - 1, min(batch, NUM_REFERENCE_REQUESTS), dtype=torch.float64).round().long()
    rows = [tensors.host_indices[tensors.host_indptr[r] : tensors.host_indptr[r + 1]] for r in requests.tolist()]
    indptr = torch.zeros(len(rows) + 1, dtype=torch.int32)
    indptr[1:] = torch.tensor([len(row) for row in rows]).cumsum(0)
    requests = requests.cuda()
    expected = reference(
        tensors.q[requests], tensors.k_cache, tensors.v_cache, indptr, torch.cat(rows).cuda(),
        tensors.last_page_len[requests], *tensors.options(),
    )  # fmt: skip
    return CaseReference(requests, expected)


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


class CapturedCall:
    """One call in a CUDA graph. `out` is what the captured call returned: each replay writes it anew."""

    def __init__(self, call: Callable[[], torch.Tensor | None]) -> None:
        self._call = call  # keeps alive what the graph points to
        call()
        call()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(_capture_stream()):
            self._graph.capture_begin()
            try:
                self.out = call()
            finally:
                self._graph.capture_end()

    def replay(self) -> torch.Tensor | None:
        self._graph.replay()
        return self.out


@dataclass(frozen=True)
class Times:
    """Times of one series of replays, microseconds."""

    median_us: float
    p10_us: float
    p90_us: float
    launches: int


def summarize(elapsed_us: list[float]) -> Times:
    """Median and deciles of at least two launches."""
    deciles = statistics.quantiles(elapsed_us, n=10, method="inclusive")
    return Times(statistics.median(elapsed_us), deciles[0], deciles[-1], len(elapsed_us))


def warm_up(calls: list[CapturedCall]) -> None:
    """Untimed launches, a few times each call in turn."""
    for _ in range(WARM_UP_LAUNCHES):
        for call in calls:
            call.replay()
    torch.cuda.synchronize()


class ReplayTimer:
    """Times replays behind a spin, each with an L2 cache that was flushed by reading."""

    def __init__(self, timer: Timer) -> None:
        self._timer = timer
        self._token = torch.zeros(1, device="cuda")

    def time_one(self, call: CapturedCall) -> float:
        """Microseconds between the events around one replay."""
        self._timer.flush()
        self._timer.synchronize()
        return self._timer.time_one(lambda: self._replay(call), spin=True).elapsed_us

    def _replay(self, call: CapturedCall) -> torch.Tensor:
        call.replay()
        return self._token

    def floor_us(self) -> float:
        """Median time of a graph that holds one tiny kernel."""
        return self.rounds([CapturedCall(lambda: self._token.add_(1))])[0].median_us

    def rounds(self, calls: list[CapturedCall], launches: int = MIN_LAUNCHES) -> list[Times]:
        """Interleaved series: every round times each call once."""
        warm_up(calls)
        elapsed: list[list[float]] = [[] for _ in calls]
        for _ in range(launches):
            for call, series in zip(calls, elapsed):
                series.append(self.time_one(call))
        return [summarize(series) for series in elapsed]
