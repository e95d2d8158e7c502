"""The serving simulator's page pool, scheduler and workload, without any tensors."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace

import pytest
from serve_sim.page_pool import PagePool
from serve_sim.scheduler import Scheduler, Step
from serve_sim.workload import TRACES, Request, Trace, Workload, WorkloadConfig

PAGE_SIZE = 4
SYSTEM_TOKENS = 10  # two full pages and two tokens
WORKLOAD = WorkloadConfig(
    Trace(20, 8), sigma=0.8, rate=0.7, backlog=5, max_tokens=64, shared_fraction=0.5, num_system_prompts=2,
    system_prompt_tokens=SYSTEM_TOKENS,
)  # fmt: skip


def make(num_pages: int, max_batch: int = 6) -> Scheduler:
    return Scheduler(PagePool(num_pages), PAGE_SIZE, max_batch, SYSTEM_TOKENS)


def check_pages(scheduler: Scheduler) -> None:
    """Every page has as many holders as it has references, and several only where a system prompt is shared."""
    pool = scheduler.pool
    holders = Counter(page for request in scheduler.running for page in request.pages)
    assert [pool.references(page) for page in range(pool.num_pages)] == [holders[p] for p in range(pool.num_pages)]
    assert pool.num_free == pool.num_pages - len(holders)
    assert pool.num_shared == sum(count > 1 for count in holders.values())
    shareable = SYSTEM_TOKENS // PAGE_SIZE
    for request in scheduler.running:
        assert len(set(request.pages)) == len(request.pages) == -(-request.length // PAGE_SIZE)
        assert all(holders[page] == 1 for page in request.pages[shareable:])
    for page, count in holders.items():
        prompts = {request.system_prompt for request in scheduler.running if page in request.pages}
        assert count == 1 or (len(prompts) == 1 and None not in prompts)


def check_prefills(scheduler: Scheduler, step: Step, written: dict[int, int]) -> None:
    """Prefills and the step's tokens write every slot of a request in order, and nobody's before it is written."""
    assert [request.number for request in step.running] == sorted(request.number for request in step.running)
    prefilled = {}
    for prefill in step.prefills:
        request = prefill.request
        assert prefill.end == request.prompt_tokens + request.generated == request.length - 1
        assert prefill.first % PAGE_SIZE == 0
        shared = request.pages[: prefill.first // PAGE_SIZE]
        assert all(written.get(page) == PAGE_SIZE for page in shared)
        for index, page in enumerate(request.pages[len(shared) :], len(shared)):
            written[page] = max(0, min(PAGE_SIZE, prefill.end - index * PAGE_SIZE))
        prefilled[request.number] = prefill
    for request in step.running:
        page, offset = request.pages[(request.length - 1) // PAGE_SIZE], (request.length - 1) % PAGE_SIZE
        assert offset == 0 or written[page] == offset
        written[page] = offset + 1
        assert request.length == request.prompt_tokens + request.generated + 1


def drain(scheduler: Scheduler, workload: Workload, steps: int) -> list[Request]:
    """Arrivals for some steps, then until all is done, with every invariant checked; all requests, in order."""
    requests: list[Request] = []
    written: dict[int, int] = {}  # tokens in each page
    number = 0
    while number < steps or scheduler.waiting or scheduler.running:
        assert number < steps + 20_000, "requests are never done"
        arrivals = workload.arrivals(number) if number < steps else []
        requests += arrivals
        scheduler.add(arrivals)
        step = scheduler.begin_step()
        for page in scheduler.pool.take_freed():
            written.pop(page, None)
        check_pages(scheduler)
        check_prefills(scheduler, step, written)
        scheduler.end_step()
        check_pages(scheduler)
        number += 1
    return requests


@pytest.mark.parametrize("num_pages", [16, 23, 40, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_finishes_and_every_page_comes_back(num_pages: int, seed: int) -> None:
    scheduler = make(num_pages)
    requests = drain(scheduler, Workload(replace(WORKLOAD, seed=seed)), 200)
    assert len(requests) > 100 and scheduler.counters.finished == len(requests)
    assert all(request.generated == request.output_tokens for request in requests)
    assert all(not request.pages for request in requests)
    assert scheduler.pool.num_free == num_pages and scheduler.pool.num_shared == 0
    preempted = sum(request.preemptions for request in requests)
    assert scheduler.counters.preemptions == preempted
    assert (preempted > 0) == (num_pages < 1000)
    assert (scheduler.counters.recomputed_tokens > 0) == (preempted > 0)
    assert scheduler.counters.shared_pages > 0


def test_youngest_is_put_back_and_prefilled_with_all_it_had() -> None:
    scheduler = make(num_pages=5)
    old, young = Request(0, 4, 12), Request(1, 4, 5)
    scheduler.add([old, young])
    for _ in range(4):
        assert scheduler.begin_step().num_preempted == 0
        scheduler.end_step()
    assert scheduler.pool.num_free == 1  # both have two full pages
    step = scheduler.begin_step()
    assert step.num_preempted == 1 and step.running == [old] and step.prefills == []
    assert list(scheduler.waiting) == [young] and young.pages == [] and young.generated == 4
    scheduler.end_step()
    (prefill,) = next(step for step in iter_steps(scheduler) if step.prefills).prefills
    assert prefill.request is young and (prefill.first, prefill.end) == (0, 8)
    assert scheduler.counters.recomputed_tokens == 8 and young.preemptions == 1


def iter_steps(scheduler: Scheduler):  # noqa: ANN201  endless
    while True:
        yield scheduler.begin_step()
        scheduler.end_step()


def test_system_prompts_share_their_full_pages_alone() -> None:
    scheduler = make(num_pages=20)
    first, second, other, plain = Request(0, 12, 1, 0), Request(1, 12, 9, 0), Request(2, 12, 9, 1), Request(3, 12, 9)
    scheduler.add([first, second, other, plain])
    prefills = scheduler.begin_step().prefills
    assert [prefill.first for prefill in prefills] == [0, 8, 0, 0]
    assert first.pages[:2] == second.pages[:2] and scheduler.pool.num_shared == 2
    assert scheduler.counters.shared_pages == 2
    assert len({*first.pages, *second.pages, *other.pages, *plain.pages}) == 14
    kept = list(second.pages)
    scheduler.end_step()  # the first is done; what it shared lives on
    freed = scheduler.pool.take_freed()
    assert scheduler.running == [second, other, plain] and len(freed) == 2 and not set(freed) & set(kept)
    third = Request(4, 10, 1, 0)
    scheduler.add([third])
    scheduler.begin_step()
    assert third.pages[:2] == kept[:2] and third.pages[2] == freed[-1]  # most recently freed first


def test_system_prompt_is_written_anew_when_nobody_held_it() -> None:
    scheduler = make(num_pages=8)
    for number in range(2):
        scheduler.add([Request(number, 12, 1, 0)])
        assert [prefill.first for prefill in scheduler.begin_step().prefills] == [0]
        scheduler.end_step()
    assert scheduler.counters.shared_pages == 0


def test_request_larger_than_the_pool_is_refused() -> None:
    scheduler = make(num_pages=4)
    scheduler.add([Request(0, 12, 4)])
    with pytest.raises(ValueError, match="request 1 needs 5 pages, the pool has 4"):
        scheduler.add([Request(1, 12, 5)])


def test_pool_refuses_what_would_give_a_page_two_owners() -> None:
    pool = PagePool(2)
    page = pool.allocate()
    pool.share(page)
    pool.release(page)
    assert pool.references(page) == 1 and pool.num_free == 1 and pool.take_freed() == []
    pool.release(page)
    assert pool.take_freed() == [page] and pool.take_freed() == []
    with pytest.raises(RuntimeError, match="free already"):
        pool.release(page)
    with pytest.raises(RuntimeError, match="can not be shared"):
        pool.share(page)
    assert pool.allocate() == page
    pool.allocate()
    with pytest.raises(RuntimeError, match="all 2 pages are held"):
        pool.allocate()


@pytest.mark.parametrize("name", TRACES)
def test_workload_has_the_medians_and_the_rate_that_were_asked_for(name: str) -> None:
    config = replace(WORKLOAD, trace=TRACES[name], rate=5.0, backlog=7, max_tokens=10**6, shared_fraction=0.0)
    workload = Workload(config)
    assert len(workload.arrivals(0)) == 7
    requests = [request for step in range(1, 2001) for request in workload.arrivals(step)]
    assert len(requests) == pytest.approx(10_000, rel=0.05)
    assert statistics.median(r.prompt_tokens for r in requests) == pytest.approx(TRACES[name].prompt, rel=0.05)
    assert statistics.median(r.output_tokens for r in requests) == pytest.approx(TRACES[name].output, rel=0.1)


def test_workload_shares_and_cuts_as_asked_for() -> None:
    workload = Workload(replace(WORKLOAD, rate=10.0, sigma=2.0))
    requests = [request for step in range(200) for request in workload.arrivals(step)]
    assert all(0 < r.output_tokens and r.prompt_tokens + r.output_tokens <= 64 for r in requests)
    shared = [request for request in requests if request.system_prompt is not None]
    assert len(shared) == pytest.approx(0.5 * len(requests), rel=0.15)
    assert all(r.prompt_tokens >= SYSTEM_TOKENS for r in shared) and {r.system_prompt for r in shared} == {0, 1}
    assert [vars(r) for r in Workload(WORKLOAD).arrivals(0)] == [vars(r) for r in Workload(WORKLOAD).arrivals(0)]
