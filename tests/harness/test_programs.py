"""The programs as a user runs them: exit status, JSON, refusals, and what `--record` writes."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest

from conftest import ROOT, TINY
from harness import history
from harness.evaluation import Evaluation
from harness.verdict import Score

UNSEEN = {**TINY, "name": "unseen", "kv_lens": [9, 30]}


def run_program(name: str, *arguments: Any, root: Path = ROOT) -> subprocess.CompletedProcess:
    command = [sys.executable, str(root / name), "--device", "cpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., Path]:
    def write(*cases: dict[str, Any]) -> Path:
        path = tmp_path / "spec.json"
        path.write_text(json.dumps({"version": 1, "cases": list(cases)}))
        return path

    return write


@pytest.fixture
def visible_only(submission: Callable[..., Path]) -> Path:
    """A submission that computes the visible shape alone."""
    return submission("return HONEST if q.shape[0] == 3 else torch.zeros_like(q)")


def test_evaluate_passes_a_right_submission(submission: Callable[..., Path], spec: Callable[..., Path]) -> None:
    done = run_program(
        "evaluate.py",
        spec(TINY),
        "--submission",
        submission("return HONEST"),
        "--json",
        "--seed",
        5,
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = report["cases"]
    assert report["passed"] and report["seed"] == 5 and report["geomean_speedup"] == pytest.approx(case["speedup"])
    assert (case["name"], case["verdict"], case["reasons"]) == ("tiny", "pass", [])
    assert case["latency_us"] > 0 and case["baseline_us"] > 0 and 0 <= case["error"] < 1e-4


def test_selfcheck_passes_what_is_right_for_visible_cases(visible_only: Path, spec: Callable[..., Path]) -> None:
    arguments = ("--spec", spec(TINY, UNSEEN), "--filter", "tiny", "--submission", visible_only)
    done = run_program("selfcheck.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tiny" in done.stdout and "unseen" not in done.stdout
    assert float(done.stdout.split("visible_geomean_speedup: ")[1].split()[0]) > 0


def test_evaluate_fails_what_is_right_for_visible_cases_only(visible_only: Path, spec: Callable[..., Path]) -> None:
    done = run_program("evaluate.py", "--spec", spec(TINY, UNSEEN), "--submission", visible_only)
    assert done.returncode == 1
    assert "unseen: accuracy:" in done.stdout and "tiny: " not in done.stdout
    assert "geomean_speedup: 0.000" in done.stdout


@pytest.mark.parametrize("program", ["evaluate.py", "selfcheck.py"])
def test_wrong_spec_is_refused_with_case_and_field(program: str, spec: Callable[..., Path]) -> None:
    done = run_program(program, "--spec", spec(TINY, {**UNSEEN, "page_size": 0}))
    assert done.returncode == 2 and done.stdout == ""
    assert "case 1 (unseen), page_size: got 0" in done.stderr


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--filter", "nothing like it"], "--filter"),
        (["--record", "note"], "--decision"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], word: str) -> None:
    done = run_program("selfcheck.py", *arguments)
    assert done.returncode == 2 and word in done.stderr


def test_changed_starter_is_refused(tmp_path: Path, spec: Callable[..., Path]) -> None:
    root = tmp_path / "copy"
    shutil.copytree(ROOT / "harness", root / "harness")
    (root / "problems").mkdir()
    for name in ("evaluate.py", "protocol.py", "problems/starter.py"):
        shutil.copy(ROOT / name, root / name)
    with open(root / "problems" / "starter.py", "a") as file:
        file.write("\n")
    done = run_program("evaluate.py", spec(TINY), root=root)
    assert done.returncode == 2 and "problems/starter.py: sha256" in done.stderr


def test_missing_submission_fails_every_case(tmp_path: Path, spec: Callable[..., Path]) -> None:
    done = run_program("selfcheck.py", "--spec", spec(TINY), "--submission", tmp_path / "none")
    assert done.returncode == 1 and "no solver.py" in done.stdout


@pytest.mark.parametrize(
    ("option", "value"), [("--timeout", 0), ("--timeout", -1), ("--json", "/no/such/folder/result.json")]
)
def test_wrong_arguments_are_refused_first(spec: Callable[..., Path], option: str, value: Any) -> None:
    done = run_program("selfcheck.py", "--spec", spec(TINY), option, value)
    assert done.returncode == 2 and f"refused: {option}: got {value}" in done.stderr


def test_log_starts_with_the_starter() -> None:
    rows = [line for line in history.LOG.read_text().splitlines() if line.startswith("| v")]
    assert rows[1].startswith("| v0 |") and "1.00x" in rows[1]


def test_record(tmp_path: Path) -> None:
    log, versions, submission = tmp_path / "log.md", tmp_path / "versions", tmp_path / "main"
    (submission / "part").mkdir(parents=True)
    (submission / "solver.py").write_text("entry")
    (submission / "part" / "plan.py").write_text("plan")
    (submission / "_native.so").write_text("binary")
    log.write_text("| version |\n|---|\n| v0 | starter |\n")
    for number, decision in ((1, "keep"), (2, "revert")):
        evaluation = Evaluation(Path("x.json"), "cpu", 1, "CPU", [], Score(True, 12.345, None))
        folder = history.record(evaluation, "a | b", decision, submission, log, versions)
        assert folder == versions / f"v{number}"
        assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == {
            "COMMIT", "solver.py", "part/plan.py",
        }  # fmt: skip
        assert (folder / "COMMIT").read_text().strip() == history.source_commit()
        row = log.read_text().splitlines()[-1]
        assert row.startswith(f"| v{number} |") and "12.35x" in row and f"| {decision} |" in row and "a \\| b" in row
