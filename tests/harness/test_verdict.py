"""Verdicts without tensors: spread, drift, clocks, and a score that any failed case zeroes."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from harness import evaluation, report, verdict
from harness.measurement import summarize
from harness.runner import SideResult
from harness.spec import parse_case

from conftest import TINY


def record(idle_us: float, faults: tuple[str, ...] = ()) -> dict[str, Any]:
    idle = asdict(summarize([idle_us] * 9, [idle_us] * 9))
    return {"faults": list(faults), "error": 1e-3, "idle": idle, "spin": None}


def side(role: str, *records: dict[str, Any], faults: tuple[str, ...] = ()) -> SideResult:
    return SideResult(role, "device", list(faults), dict(enumerate(records)))


def results_of(before: float, candidate: dict[str, Any], after: float, device: str = "cuda") -> verdict.CaseResult:
    baselines = [side("starter before", record(before)), side("starter after", record(after))]
    return verdict.judge(parse_case(TINY, 0), 0, side("candidate", candidate), baselines, device)


def test_speedup_is_the_bracketed_baseline_over_the_candidate() -> None:
    result = results_of(800.0, record(30.0), 1000.0)
    assert result.verdict == "pass" and result.speedup == pytest.approx((800 * 1000) ** 0.5 / 30)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_drifting_baseline(device: str) -> None:
    result = results_of(1000.0, record(30.0), 4000.0, device)
    assert result.verdict == "fail" and result.reasons[0].startswith("baseline drift:")


def test_fault_of_a_baseline_fails_the_case() -> None:
    baselines = [side("starter", record(100.0, faults=("accuracy: off",)))]
    result = verdict.judge(parse_case(TINY, 0), 0, side("candidate", record(10.0)), baselines, "cpu")
    assert (result.verdict, result.reasons) == ("fail", ["baseline, accuracy: off"])


def test_case_without_a_record_fails() -> None:
    baselines = [side("starter", record(100.0))]
    for candidate in (side("candidate"), side("candidate", faults=("timeout: no word",))):
        assert verdict.judge(parse_case(TINY, 0), 0, candidate, baselines, "cpu").verdict == "fail"


def test_any_failed_case_zeroes_the_score() -> None:
    good, bad = results_of(100.0, record(10.0), 100.0), results_of(100.0, record(10.0, faults=("alias: x",)), 100.0)
    assert verdict.score([good, good]).geomean_speedup == pytest.approx(10.0)
    assert verdict.score([good, bad]) == verdict.Score(False, 0.0, None)
    assert verdict.score([]).passed is False


def test_dispersion() -> None:
    steady, scattered = [100.0 + i % 3 for i in range(20)], [100.0, 1000.0] * 10
    for device in ("cpu", "cuda"):
        assert verdict.dispersion("idle", summarize(steady, steady), device) == []
        assert verdict.dispersion("idle", summarize(scattered, scattered), device)[0].startswith("dispersion: idle")


def test_work_that_goes_on_after_the_end_event() -> None:
    assert verdict.tail(summarize([30.0] * 9, [80.0] * 9), "cuda") == []
    assert verdict.tail(summarize([30.0] * 9, [900.0] * 9), "cuda")[0].startswith("timing integrity:")


def test_outside_clock() -> None:
    assert verdict.outside_clock(30.0, 1600, 50_000.0, "cuda") == []
    assert verdict.outside_clock(0.5, 2000, 80_000.0, "cuda")[0].startswith("timing integrity:")


def test_drift_reaches_the_evaluation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    latencies = {"starter before": 1000.0, "candidate": 50.0, "starter after": 9000.0}

    def canned(role: str, submission: Path | None, *_: Any) -> SideResult:
        assert (submission is None) == role.startswith("starter")
        return side(role, *[record(latencies[role])] * 11)

    monkeypatch.setattr(evaluation, "run_side", canned)
    parser = argparse.ArgumentParser()
    evaluation.add_arguments(parser)
    arguments = parser.parse_args(["--device", "cpu"])
    result = evaluation.evaluate(arguments, tuple(latencies))
    assert not result.score.passed
    assert all(case.reasons[0].startswith("baseline drift:") for case in result.results)


@pytest.mark.parametrize("with_rich", [True, False])
def test_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, with_rich: bool) -> None:
    if not with_rich:
        monkeypatch.setattr(report, "rich", None)
    elif report.rich is None:
        pytest.skip("rich is not installed")
    report.print_table([results_of(1200.0, record(48.0, ("accuracy: off",)), 1200.0)])
    printed = capsys.readouterr().out
    for text in ("tiny", "fail", "1,200.0", "48.0", "25.00", "1.0e-03", "tiny: accuracy: off"):
        assert text in printed
