"""Timers of one call: from an idle device (the score) and behind a spin (device time), each call on new values."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Callable

import torch

from harness.measurement import Measurement, summarize

SPIN_US = 200.0
GPU_FLUSH_BYTES = 256 << 20  # read before each timed call: several times the L2 of any current GPU
CPU_FLUSH_BYTES = 64 << 20
CLOCK_WARM_UP_S = 1.0
WARM_UP_CALLS, WARM_UP_S = 30, 0.3
MIN_CALLS, MAX_CALLS = 9, 31
CALLS_BUDGET_S = 0.5  # of one series: calls, renewed values and flushes together


@dataclass(frozen=True)
class Sample:
    """One timed call."""

    elapsed_us: float
    wall_us: float
    out: torch.Tensor  # what the call returned
    snapshot: torch.Tensor  # out as the next operation on the stream saw it


class Timer:
    """Times calls on the CPU with a monotonic clock; there is no spin, so only the idle series exists.

    The clock functions are bound when the object is made, which is before any judged code is imported.
    """

    has_spin = False
    flush_bytes = CPU_FLUSH_BYTES

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clock_ns = time.perf_counter_ns
        self.clone = torch.Tensor.clone
        self._flushed = torch.zeros(self.flush_bytes // 4, dtype=torch.float32, device=device)

    def synchronize(self) -> None:
        """Waits until the device has finished all work."""

    def flush(self) -> None:
        """Drops cached data by reading; writing would leave dirty lines for the timed call to write back."""
        self._flushed.sum()

    def time_one(self, call: Callable[[], torch.Tensor], spin: bool) -> Sample:
        """Times one call from an idle device."""
        begin = self.clock_ns()
        out = call()
        elapsed_us = (self.clock_ns() - begin) / 1e3
        return Sample(elapsed_us, elapsed_us, out, self.clone(out))

    def warm_up(self, call: Callable[[], torch.Tensor]) -> float:
        """Untimed calls; returns the seconds that the last one took."""
        seconds = 0.0
        begin = self.clock_ns()
        for _ in range(WARM_UP_CALLS):
            start = self.clock_ns()
            call()
            self.synchronize()
            seconds = (self.clock_ns() - start) / 1e9
            if self.clock_ns() - begin > WARM_UP_S * 1e9:
                break
        return seconds

    def series(
        self,
        call: Callable[[], torch.Tensor],
        renew: Callable[[int], None],
        check: Callable[[int, Sample], None],
        num_calls: int,
        spin: bool,
    ) -> Measurement:
        """Times num_calls calls, call i after renew(i) and a flush; check(i, sample) sees every output."""
        elapsed_us, wall_us = [], []
        gc.collect()
        gc.disable()
        try:
            for index in range(num_calls):
                renew(index)
                self.flush()
                self.synchronize()
                sample = self.time_one(call, spin)
                elapsed_us.append(sample.elapsed_us)
                wall_us.append(sample.wall_us)
                check(index, sample)
                del sample
        finally:
            gc.enable()
        return summarize(elapsed_us, wall_us)

    def num_calls(self, seconds_a_call: float, renew: Callable[[], None]) -> int:
        """How many calls fit the budget of a series."""
        begin = self.clock_ns()
        renew()
        self.flush()
        self.synchronize()
        seconds = seconds_a_call + (self.clock_ns() - begin) / 1e9
        return max(MIN_CALLS, min(MAX_CALLS, int(CALLS_BUDGET_S / max(seconds, 1e-9))))


class CudaTimer(Timer):
    """Times calls on the current stream of a GPU with events around the call."""

    has_spin = True
    flush_bytes = GPU_FLUSH_BYTES

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._synchronize = torch.cuda.synchronize
        self._sleep = torch.cuda._sleep
        self._stream = torch.cuda.current_stream(device)
        event = torch.cuda.Event
        self._start, self._end = event(enable_timing=True), event(enable_timing=True)
        self._record, self._elapsed_ms = event.record, event.elapsed_time
        self._warm_clocks()
        self._spin_cycles = self._calibrate_spin()

    def _warm_clocks(self) -> None:
        matrix = torch.randn(4096, 4096, dtype=torch.float16, device=self.device)
        begin = self.clock_ns()
        while self.clock_ns() - begin < CLOCK_WARM_UP_S * 1e9:
            for _ in range(20):
                matrix @ matrix
            self.synchronize()

    def _calibrate_spin(self) -> int:
        trial = 1_000_000
        self._sleep(trial)
        self._record(self._start, self._stream)
        self._sleep(trial)
        self._record(self._end, self._stream)
        self.synchronize()
        return int(trial * SPIN_US / (self._elapsed_ms(self._start, self._end) * 1e3))

    def synchronize(self) -> None:
        self._synchronize(self.device)

    def time_one(self, call: Callable[[], torch.Tensor], spin: bool) -> Sample:
        """Times one call between events, behind a spin of SPIN_US when spin is set."""
        begin = self.clock_ns()
        if spin:
            self._sleep(self._spin_cycles)
        self._record(self._start, self._stream)
        out = call()
        self._record(self._end, self._stream)
        snapshot = self.clone(out)
        self.synchronize()
        wall_us = (self.clock_ns() - begin) / 1e3
        return Sample(self._elapsed_ms(self._start, self._end) * 1e3, wall_us, out, snapshot)


def make_timer(device: torch.device) -> Timer:
    """The timer of a device; on a GPU this also warms the clocks for about a second."""
    return CudaTimer(device) if device.type == "cuda" else Timer(device)
