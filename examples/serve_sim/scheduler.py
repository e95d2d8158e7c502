"""Which requests run in a step and which pages hold their tokens."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from .page_pool import PagePool
from .workload import Request


@dataclass(frozen=True)
class Prefill:
    """Tokens [first, end) of a request have to be written before the step; those before lie in shared pages."""

    request: Request
    first: int
    end: int


@dataclass(frozen=True)
class Step:
    running: list[Request]  # oldest first; `length` counts the token that the step appends
    prefills: list[Prefill]  # in an order in which shared pages are written before they are shared
    num_preempted: int


@dataclass
class Counters:
    finished: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0  # prefilled once more after a preemption
    shared_pages: int = 0  # taken from another request in place of an own copy


class Scheduler:
    """First come, first served, one token a step.

    A request is admitted when its prompt and a token more find pages. When a running one needs a page and none is free,
    the youngest is put back to the head of the queue; its pages are freed, and it is prefilled with all that it had
    when it is admitted again. Requests that begin with the same system prompt share its full pages for as long as one
    of them runs.
    """

    def __init__(self, pool: PagePool, page_size: int, max_batch: int, system_prompt_tokens: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.max_batch = max_batch
        self.waiting: deque[Request] = deque()  # in order of arrival
        self.running: list[Request] = []  # in order of arrival, all before those that wait
        self.counters = Counters()
        self._shareable_pages = system_prompt_tokens // page_size
        self._resident: dict[int, list[int]] = {}  # full pages of each system prompt that a running request holds

    def add(self, requests: Iterable[Request]) -> None:
        """Queues arrivals. ValueError for one that would not fit into the pool if it ran alone."""
        for request in requests:
            needed = self._pages_of(request.prompt_tokens + request.output_tokens)
            if needed > self.pool.num_pages:
                raise ValueError(f"request {request.number} needs {needed} pages, the pool has {self.pool.num_pages}")
            self.waiting.append(request)

    def begin_step(self) -> Step:
        """Room for one token more in every running request, then admissions unless a request had to go for it."""
        num_preempted = self._grow()
        prefills = [] if num_preempted else self._admit()
        return Step(list(self.running), prefills, num_preempted)

    def end_step(self) -> list[Request]:
        """Counts the tokens of the step; frees the pages of those that are done, and returns them."""
        for request in self.running:
            request.generated += 1
        done = [request for request in self.running if request.generated == request.output_tokens]
        self.running = [request for request in self.running if request.generated < request.output_tokens]
        for request in done:
            self._release(request)
        self.counters.finished += len(done)
        return done

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _grow(self) -> int:
        """Oldest first; returns how many requests were put back."""
        before, grown = len(self.running), 0
        while grown < len(self.running):
            request = self.running[grown]
            if request.length == len(request.pages) * self.page_size:
                if self.pool.num_free == 0:
                    self._preempt(self.running.pop())
                    continue
                request.pages.append(self.pool.allocate())
            request.length += 1
            grown += 1
        return before - len(self.running)

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self) -> list[Prefill]:
        prefills = []
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            tokens = request.prompt_tokens + request.generated
            shared = self._resident.get(request.system_prompt, []) if request.system_prompt is not None else []
            if self._pages_of(tokens + 1) - len(shared) > self.pool.num_free:
                break
            self.running.append(self.waiting.popleft())
            request.pages = [self.pool.share(page) for page in shared]
            while len(request.pages) < self._pages_of(tokens + 1):
                request.pages.append(self.pool.allocate())
            request.length = tokens + 1
            if request.system_prompt is not None and self._shareable_pages > 0:
                self._resident.setdefault(request.system_prompt, request.pages[: self._shareable_pages])
            self.counters.shared_pages += len(shared)
            first = len(shared) * self.page_size
            if request.preemptions > 0:
                self.counters.recomputed_tokens += tokens - first
            prefills.append(Prefill(request, first, tokens))
        return prefills

    def _release(self, request: Request) -> None:
        for page in request.pages:
            self.pool.release(page)
        request.pages, request.length = [], 0
        for system_prompt, pages in list(self._resident.items()):
            if self.pool.references(pages[0]) == 0:
                del self._resident[system_prompt]
