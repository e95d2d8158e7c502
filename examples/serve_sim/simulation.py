"""The loop: schedule, poison what was freed, prefill, step, check; and what was measured on the way."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import pgqa

from .engine import EagerEngine, Engine, EngineConfig, GraphEngine
from .ledger import Ledger
from .page_pool import PagePool
from .scheduler import Counters, Prefill, Scheduler
from .workload import Workload, WorkloadConfig

MEMORY_BASELINE_STEP = 50  # memory must not grow from here on; half of a run that is shorter than twice this


@dataclass(frozen=True)
class SimulationConfig:
    engine: EngineConfig
    workload: WorkloadConfig
    device: str  # cuda or cpu
    steps: int
    check_every: int  # steps with requests; 0: none is checked


@dataclass(frozen=True)
class StepRecord:
    batch: int
    live_tokens: int
    step_ms: float
    waiting: int
    shared_pages: int  # pages with several holders


@dataclass
class Result:
    records: list[StepRecord] = field(default_factory=list)  # of steps with requests
    counters: Counters = field(default_factory=Counters)
    num_checked: int = 0  # rows (request, head)
    worst_error: float = 0.0  # of ||out - expected|| / ||expected||
    # Bytes between the baseline and the end: what torch holds, what pgqa holds for eager calls. None on the CPU.
    torch_growth: int | None = None
    workspace_growth: int | None = None

    @property
    def memory_grew(self) -> bool:
        return (self.torch_growth or 0) > 0 or (self.workspace_growth or 0) > 0


def memory_in_use() -> tuple[int, int]:
    """Bytes of device tensors, and of pgqa's workspaces for eager calls."""
    return torch.cuda.memory_allocated(), pgqa.workspace_usage().get("bytes", 0)


class Simulation:
    """A run over a workload. `run` raises WrongOutput where a checked step's output is wrong."""

    def __init__(self, config: SimulationConfig) -> None:
        engine, workload = config.engine, config.workload
        self.config = config
        self.pool = PagePool(engine.num_pages)
        self.scheduler = Scheduler(self.pool, engine.page_size, engine.max_batch, workload.system_prompt_tokens)
        self.engine: Engine = GraphEngine(engine) if config.device == "cuda" else EagerEngine(engine)
        self._workload = Workload(workload)
        self._ledger = Ledger(engine, workload.max_tokens, config.device) if config.check_every else None
        self._generator = torch.Generator(config.device).manual_seed(workload.seed)
        self._system_prompts = self._random(workload.num_system_prompts, 2, workload.system_prompt_tokens)

    def run(self) -> Result:
        result = Result()
        baseline_step = min(MEMORY_BASELINE_STEP, self.config.steps // 2)
        baseline = None
        for number in range(self.config.steps):
            if number == baseline_step and self.config.device == "cuda":
                baseline = memory_in_use()
            self.scheduler.add(self._workload.arrivals(number))
            record = self._step(len(result.records))
            if record is not None:
                result.records.append(record)
        if baseline is not None:
            growth = [after - before for before, after in zip(baseline, memory_in_use())]
            result.torch_growth, result.workspace_growth = growth
        result.counters = self.scheduler.counters
        if self._ledger is not None:
            result.num_checked, result.worst_error = self._ledger.num_checked, self._ledger.worst
        return result

    def _step(self, number: int) -> StepRecord | None:
        """One step, or None where no request runs; `number` counts those with requests."""
        step = self.scheduler.begin_step()
        requests = step.running
        self.engine.poison(self.pool.take_freed())
        if self._ledger is not None:
            self._ledger.keep(requests)
        for prefill in step.prefills:
            self._prefill(prefill)
        if not requests:
            return None
        for rows in (self.engine.q, self.engine.k, self.engine.v):
            rows[: len(requests)].normal_(generator=self._generator)
        step_ms = self.engine.step(requests)
        if self._ledger is not None:
            self._ledger.append(requests, self.engine.k, self.engine.v)
            if number % self.config.check_every == 0:
                self._ledger.check(requests, self.engine.q, self.engine.out)
        live_tokens = sum(request.length for request in requests)
        record = StepRecord(len(requests), live_tokens, step_ms, len(self.scheduler.waiting), self.pool.num_shared)
        self.scheduler.end_step()
        return record

    def _prefill(self, prefill: Prefill) -> None:
        """Random K and V for the tokens of a prompt, those of its system prompt as every such request has them."""
        kv = self._random(2, prefill.end)
        if prefill.request.system_prompt is not None:
            kv[:, : self.config.workload.system_prompt_tokens] = self._system_prompts[prefill.request.system_prompt]
        self.engine.write(prefill.request.pages, prefill.first, kv[:, prefill.first :])
        if self._ledger is not None:
            self._ledger.begin(prefill.request, kv)

    def _random(self, *sizes: int) -> torch.Tensor:
        """Normal values [*sizes, kv_heads, head_dim] of the caches' dtype."""
        config = self.config.engine
        values = torch.empty(*sizes, config.kv_heads, config.head_dim, dtype=config.dtype, device=self.config.device)
        return values.normal_(generator=self._generator)
