"""Requests and how they arrive: Poisson, with log-normal lengths about the medians of production traces."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field


@dataclass
class Request:
    """A request and what it holds while it runs."""

    number: int  # in order of arrival
    prompt_tokens: int
    output_tokens: int
    system_prompt: int | None = None  # which of the common ones its prompt begins with
    generated: int = 0
    length: int = 0  # tokens in its pages, 0 while it waits
    pages: list[int] = field(default_factory=list)
    preemptions: int = 0


@dataclass(frozen=True)
class Trace:
    """Median lengths in tokens, as published for the Azure LLM inference traces with Splitwise (ISCA 2024)."""

    prompt: int
    output: int


TRACES = {"conversation": Trace(1020, 129), "coding": Trace(1500, 13)}


@dataclass(frozen=True)
class WorkloadConfig:
    trace: Trace
    sigma: float  # of the logarithm of both lengths; the mean is the median times exp(sigma^2 / 2)
    rate: float  # arrivals a step, on average
    backlog: int  # requests that wait when the first step begins
    max_tokens: int  # prompt and output of a request together
    shared_fraction: float  # of the requests that begin with a system prompt
    num_system_prompts: int
    system_prompt_tokens: int
    seed: int = 0


class Workload:
    """An endless sequence of requests; the same configuration gives the same one."""

    def __init__(self, config: WorkloadConfig) -> None:
        self._config = config
        self._rng = random.Random(config.seed)
        self._next_arrival = self._gap()  # in steps
        self._count = 0

    def arrivals(self, step: int) -> list[Request]:
        """Requests that arrive before step `step` begins and after the one before it began."""
        requests = [self._make() for _ in range(self._config.backlog)] if step == 0 else []
        while self._next_arrival <= step:
            requests.append(self._make())
            self._next_arrival += self._gap()
        return requests

    def _gap(self) -> float:
        return self._rng.expovariate(self._config.rate) if self._config.rate > 0 else math.inf

    def _length(self, median: int, limit: int) -> int:
        return max(1, min(limit, round(self._rng.lognormvariate(math.log(median), self._config.sigma))))

    def _make(self) -> Request:
        config = self._config
        output = self._length(config.trace.output, config.max_tokens // 2)
        prompt = self._length(config.trace.prompt, config.max_tokens - output)
        system_prompt = None
        if self._rng.random() < config.shared_fraction and config.system_prompt_tokens <= config.max_tokens - output:
            system_prompt = self._rng.randrange(config.num_system_prompts)
            prompt = max(prompt, config.system_prompt_tokens)
        self._count += 1
        return Request(self._count - 1, prompt, output, system_prompt)
