"""Judging one implementation inside its process: gates first, then both timers, then a burst for the outside clock."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import random
from dataclasses import asdict
from typing import Any, Callable

import torch

from harness import gates, verdict
from harness.inputs import Inputs, make_inputs
from harness.measurement import Measurement
from harness.spec import Case
from harness.timing import Sample, make_timer
from protocol import reference

HELD_OUTPUTS = 16  # of calls in a row: none may share memory with another
CHECKED_CALLS = 3  # of each timed series, at random, held to the reference
SERIES_TRIES = 3  # a series is repeated while its dispersion is a fault
BURST_TRIES = 3
BURST_US, BURST_MIN_CALLS, BURST_MAX_CALLS, BURST_LIMIT_S = 50_000.0, 10, 2000, 3.0


class _Failed(Exception):
    """Ends a case; carries the faults."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


class Judge:
    """Runs cases on one device and tells faults, errors and latencies; `send` carries events to the parent."""

    def __init__(self, device: torch.device, seed: int, send: Callable[..., None]) -> None:
        self.device = device
        self.timer = make_timer(device)
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self._seed = seed
        self._send = send
        # Made ahead of the judged code's import: what it replaces later shows.
        self._warm_library()
        self._patches = gates.PatchWatch()

    def _warm_library(self) -> None:
        case = Case("warm-up", 2, 1, 16, 4, "float16", (5, 0, 9), pos_encoding_mode=1, logits_soft_cap=1.0)
        inputs = make_inputs(case, self.device, 0)
        gates.accuracy(inputs.q, reference(*inputs.arguments()), "nan")

    @staticmethod
    def describe(error: BaseException) -> str:
        """One line about an exception."""
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text[:300]}"

    def judge_case(self, index: int, case: Case, function: Callable[..., torch.Tensor]) -> dict[str, Any]:
        """All gates and timers of one case; the record's faults are empty when it passes."""
        record: dict[str, Any] = {"faults": [], "error": None, "idle": None, "spin": None}
        rng = random.Random(f"{self._seed}/{index}")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            inputs = make_inputs(case, self.device, rng.getrandbits(62))
            record["error"] = self._check_calls(inputs, function, rng)
            self._time_calls(index, inputs, function, rng, record)
        except _Failed as failed:
            record["faults"] += failed.faults
        except Exception as error:
            record["faults"].append(f"error: {self.describe(error)}")
        record["faults"] += self._patches.faults()
        return record

    def _check_calls(self, inputs: Inputs, function: Callable[..., torch.Tensor], rng: random.Random) -> float:
        """Calls on new values, a new page table and other poison, at the same addresses; returns the largest error."""
        first = inputs.first_layout
        changed = first.changed(rng, inputs.case.page_size, inputs.num_pages)
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        errors = []
        for gate, layout, poison in (
            ("", None, "nan"),
            ("fresh values, ", None, "nan"),
            ("fresh page table, ", changed, "inf"),
            ("dead slots, ", first, "plausible"),
        ):
            if layout is not None:
                inputs.write_layout(layout)
            inputs.refresh(poison)
            errors.append(self._check_one(gate, inputs, function, poison, held))
        outputs: list[torch.Tensor] = []
        for _ in range(HELD_OUTPUTS):
            out = function(*inputs.arguments())
            faults = gates.structure(out, inputs) or gates.alias(out, inputs, outputs)
            if faults:
                raise _Failed(faults)
            outputs.append(out)
        return max(errors)

    def _check_one(
        self,
        gate: str,
        inputs: Inputs,
        function: Callable[..., torch.Tensor],
        poison: str,
        held: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> float:
        """One call through every gate; `held` keeps earlier outputs beside copies of them."""
        copies = gates.InputCopies(inputs)
        expected = reference(*inputs.arguments())
        out = function(*inputs.arguments())
        faults = gates.structure(out, inputs)
        if faults:
            raise _Failed([gate + fault for fault in faults])
        snapshot = out.clone()
        self.timer.synchronize()
        faults += copies.faults()
        faults += gates.alias(out, inputs, [earlier for earlier, _ in held])
        for earlier, copy in held:
            if not torch.equal(earlier, copy):
                faults.append("alias: an earlier output changed")
        result, wrong = gates.accuracy(snapshot, expected, poison)
        faults += wrong + self._patches.faults()
        if faults:
            raise _Failed([gate + fault for fault in faults])
        held.append((out, snapshot))
        return result.error

    def _time_calls(
        self,
        index: int,
        inputs: Inputs,
        function: Callable[..., torch.Tensor],
        rng: random.Random,
        record: dict[str, Any],
    ) -> None:
        arguments = inputs.arguments()

        def call() -> torch.Tensor:
            return function(*arguments)

        seconds = self.timer.warm_up(call)
        num_calls = self.timer.num_calls(seconds, inputs.refresh)
        for series in ("idle", "spin") if self.timer.has_spin else ("idle",):
            measurement, faults = self._time_series(series, inputs, call, num_calls, rng)
            record[series] = asdict(measurement)
            record["faults"] += faults
        self._burst(index, call, record["idle"]["median_us"])

    def _time_series(
        self,
        series: str,
        inputs: Inputs,
        call: Callable[[], torch.Tensor],
        num_calls: int,
        rng: random.Random,
    ) -> tuple[Measurement, list[str]]:
        """The steadiest of a few tries, with its faults; every try's outputs are checked."""
        best: tuple[Measurement, list[str]] | None = None
        for _ in range(SERIES_TRIES):
            renew, check = self._series_hooks(inputs, num_calls, rng)
            measurement = self.timer.series(call, renew, check, num_calls, series == "spin")
            faults = verdict.dispersion(series, measurement, self.device.type)
            if series == "idle":
                faults += verdict.tail(measurement, self.device.type)
            if best is None or not faults or measurement.dispersion < best[0].dispersion:
                best = measurement, faults
            if not faults:
                break
        assert best is not None
        return best

    def _series_hooks(
        self, inputs: Inputs, num_calls: int, rng: random.Random
    ) -> tuple[Callable[[int], None], Callable[[int, Sample], None]]:
        """What renews the inputs before a timed call, and what checks it: all outputs cheaply, a few calls fully."""
        chosen = set(rng.sample(range(num_calls), CHECKED_CALLS))
        all_empty = not any(inputs.case.kv_lens)
        previous: list[torch.Tensor] = []
        copies: list[gates.InputCopies] = []

        def renew(call_index: int) -> None:
            inputs.refresh()
            copies[:] = [gates.InputCopies(inputs)] if call_index in chosen else []

        def check(call_index: int, sample: Sample) -> None:
            faults = gates.structure(sample.out, inputs) or gates.alias(sample.out, inputs, previous[:1])
            if previous and not all_empty and torch.equal(previous[1], sample.snapshot):
                faults.append("fresh values: the same output as for the values before")
            if copies and not faults:
                faults += copies[0].faults()
                faults += gates.accuracy(sample.snapshot, reference(*inputs.arguments()), "nan")[1]
            if faults:
                raise _Failed([f"timed call, {fault}" for fault in faults])
            previous[:] = [sample.out, sample.snapshot]

        return renew, check

    def _burst(self, index: int, call: Callable[[], torch.Tensor], claimed_us: float) -> None:
        """Back-to-back calls between two events that the parent stamps with its own clock."""
        calls = math.ceil(BURST_US / max(claimed_us, 1e-3))
        calls = max(BURST_MIN_CALLS, min(BURST_MAX_CALLS, calls))
        for _ in range(BURST_TRIES):
            self.timer.synchronize()
            begin = self.timer.clock_ns()
            self._send("burst_begin", index=index)
            done = 0
            while done < calls and self.timer.clock_ns() - begin < BURST_LIMIT_S * 1e9:
                out = call()
                done += 1
            self.timer.synchronize()
            out.flatten()[:1].cpu()
            self._send("burst_end", index=index, calls=done)
