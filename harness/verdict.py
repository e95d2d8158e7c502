"""Verdicts that need no tensors: spread, drift, the outside clock, speedups and the score."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Sequence

from harness.measurement import Measurement
from harness.spec import Case

if TYPE_CHECKING:
    from harness.runner import SideResult

# Largest interquartile range over the middle of the quartiles, and the microseconds up to which spread is no fault.
DISPERSION = {"cuda": (0.40, 8.0), "cpu": (1.0, 150.0)}
# Largest change of a baseline between its two runs, as a factor, and the microseconds up to which it is no fault.
DRIFT = {"cuda": (1.35, 10.0), "cpu": (2.5, 200.0)}
# A burst watched by the other process's clock may take this factor of the claimed latency, plus microseconds in all.
OUTSIDE_CLOCK = {"cuda": (2.0, 5_000.0), "cpu": (3.0, 20_000.0)}
# The device may be busy after the end event for this factor of the latency plus a constant in microseconds.
TAIL = {"cuda": (2.0, 300.0), "cpu": (2.0, 300.0)}


def dispersion(series: str, measurement: Measurement, device: str) -> list[str]:
    """Faults of a series whose calls scatter too much for its median to mean anything."""
    limit, floor_us = DISPERSION[device]
    spread_us = measurement.p75_us - measurement.p25_us
    if spread_us <= floor_us or measurement.dispersion <= limit:
        return []
    return [f"dispersion: {series} quartiles span {measurement.dispersion:.2f} of their middle, allowed {limit:.2f}"]


def tail(measurement: Measurement, device: str) -> list[str]:
    """Faults of work that goes on after the call's end has been recorded."""
    factor, constant_us = TAIL[device]
    if measurement.wall_us <= factor * measurement.median_us + constant_us:
        return []
    return [
        f"timing integrity: the device was busy for {measurement.wall_us:.0f} us,"
        f" the events around the call say {measurement.median_us:.0f} us"
    ]


def outside_clock(claimed_us: float, calls: int, elapsed_us: float, device: str) -> list[str]:
    """Faults of a claimed latency that a clock in another process does not confirm over a burst of calls."""
    factor, constant_us = OUTSIDE_CLOCK[device]
    if elapsed_us <= calls * factor * claimed_us + constant_us:
        return []
    return [
        f"timing integrity: {calls} calls took {elapsed_us / calls:.1f} us each by the evaluator's clock,"
        f" {claimed_us:.1f} us were measured inside"
    ]


def drift(before_us: float, after_us: float, device: str) -> list[str]:
    """Faults of a baseline that changed between its runs before and after the candidate."""
    factor, floor_us = DRIFT[device]
    slow, fast = max(before_us, after_us), min(before_us, after_us)
    if slow - fast <= floor_us or slow <= factor * fast:
        return []
    return [f"baseline drift: the starter took {before_us:.1f} us before and {after_us:.1f} us after the candidate"]


@dataclass(frozen=True)
class CaseResult:
    """One row of an evaluation; latencies in microseconds, None where nothing was measured."""

    name: str
    verdict: str  # "pass" or "fail"
    reasons: list[str]
    baseline_us: float | None
    latency_us: float | None
    speedup: float | None
    baseline_spin_us: float | None
    spin_us: float | None
    spin_speedup: float | None
    dispersion: float | None
    achieved_tbps: float | None  # live K and V bytes over the spin latency, or the idle one where there is no spin
    error: float | None  # largest ||err|| / ||ref|| of a (request, head)


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive values; 0 for none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 0.0


def _median(side: SideResult, index: int, series: str) -> float | None:
    measured = side.records.get(index, {}).get(series)
    return measured["median_us"] if measured else None


def _ratio(baseline: float | None, latency: float | None) -> float | None:
    return baseline / latency if baseline and latency else None


def judge(case: Case, index: int, candidate: SideResult, baselines: Sequence[SideResult], device: str) -> CaseResult:
    """Combines the candidate's record with the baselines that were run around it."""
    reasons = list(candidate.faults_of(index))
    for side in baselines:
        reasons += [f"baseline, {fault}" for fault in side.faults_of(index)]
    medians: dict[str, float | None] = {}
    for series in ("idle", "spin"):
        known = [value for side in baselines if (value := _median(side, index, series))]
        medians[series] = geometric_mean(known) if len(known) == len(baselines) else None
        if series == "idle" and len(known) == 2:
            reasons += drift(*known, device)
    record = candidate.records.get(index, {})
    idle, spin = _median(candidate, index, "idle"), _median(candidate, index, "spin")
    best = spin or idle
    speedup = _ratio(medians["idle"], idle)
    if speedup is None and not reasons:
        reasons.append("error: not measured")
    return CaseResult(
        name=case.name,
        verdict="fail" if reasons else "pass",
        reasons=list(dict.fromkeys(reasons)),
        baseline_us=medians["idle"],
        latency_us=idle,
        speedup=speedup,
        baseline_spin_us=medians["spin"],
        spin_us=spin,
        spin_speedup=_ratio(medians["spin"], spin),
        dispersion=Measurement(**record["idle"]).dispersion if record.get("idle") else None,
        achieved_tbps=case.live_kv_bytes / best / 1e6 if best else None,
        error=record.get("error"),
    )


@dataclass(frozen=True)
class Score:
    """Geometric means over all cases; 0 when any case failed."""

    passed: bool
    geomean_speedup: float
    geomean_spin_speedup: float | None


def score(results: Sequence[CaseResult]) -> Score:
    """The score of an evaluation: any failed case zeroes it."""
    passed = bool(results) and all(result.verdict == "pass" for result in results)
    spins = [result.spin_speedup for result in results if result.spin_speedup]
    spin = geometric_mean(spins) if passed else 0.0
    return Score(
        passed,
        geometric_mean([result.speedup for result in results if result.speedup]) if passed else 0.0,
        spin if spins else None,
    )
