"""Both timers: what happens around a timed call, in which order, on new values each time."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from harness import timing
from harness.measurement import summarize


def test_cpu_timer_measures_the_call_alone() -> None:
    timer = timing.make_timer(torch.device("cpu"))
    order: list[str] = []

    def call() -> torch.Tensor:
        order.append("call")
        time.sleep(0.002)
        return torch.zeros(1)

    def renew(index: int) -> None:
        order.append("renew")
        time.sleep(0.02)

    measured = timer.series(call, renew, lambda index, sample: order.append(f"check {index}"), 3, spin=False)
    assert order == [
        "renew",
        "call",
        "check 0",
        "renew",
        "call",
        "check 1",
        "renew",
        "call",
        "check 2",
    ]
    assert not timer.has_spin and 2000 <= measured.min_us < 20000


def test_number_of_calls_follows_their_cost() -> None:
    timer = timing.make_timer(torch.device("cpu"))
    assert timer.num_calls(10.0, lambda: None) == timing.MIN_CALLS
    assert timing.MIN_CALLS <= timer.num_calls(0.0, lambda: None) <= timing.MAX_CALLS


def test_summary() -> None:
    measured = summarize([5.0, 1.0, 3.0, 2.0, 4.0], [6.0] * 5)
    assert (measured.calls, measured.min_us, measured.median_us, measured.wall_us) == (
        5,
        1.0,
        3.0,
        6.0,
    )
    assert (measured.p25_us, measured.p75_us) == (
        2.0,
        4.0,
    ) and measured.dispersion == pytest.approx(2 * 2 / 6)


class _Events:
    """Stands in for torch.cuda and writes down what is enqueued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[Any] = []
        events = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: Any) -> None:
                assert stream == "stream"
                events.order.append("record")

            def elapsed_time(self, end: Any) -> float:
                return 0.5

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.order.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.order.append(("spin", cycles)))
        monkeypatch.setattr(timing, "CLOCK_WARM_UP_S", 0.0)
        monkeypatch.setattr(timing.CudaTimer, "flush", lambda timer: self.order.append("flush"))


@pytest.mark.parametrize("spin", [False, True])
def test_gpu_timer_order(monkeypatch: pytest.MonkeyPatch, spin: bool) -> None:
    events = _Events(monkeypatch)
    timer = timing.CudaTimer(torch.device("cpu"))
    events.order.clear()

    def call() -> torch.Tensor:
        events.order.append("call")
        return torch.zeros(1)

    measured = timer.series(call, lambda index: events.order.append("renew"), lambda index, sample: None, 2, spin)
    spun = [("spin", 400_000)] if spin else []  # the calibration took 500 us for a million cycles
    once = ["renew", "flush", "synchronize", *spun, "record", "call", "record", "synchronize"]
    assert events.order == once * 2
    assert measured.median_us == 500.0


def test_timer_keeps_its_functions_when_they_are_replaced_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = _Events(monkeypatch)
    timer = timing.CudaTimer(torch.device("cpu"))
    for name in ("Event", "synchronize", "_sleep", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, None)
    monkeypatch.setattr(time, "perf_counter_ns", None)
    sample = timer.time_one(lambda: torch.zeros(1), spin=True)
    assert sample.elapsed_us == 500.0 and events.order[-1] == "synchronize"
