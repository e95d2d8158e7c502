"""What `selfcheck.py` and `evaluate.py` share: arguments, choice of device and spec, runs, results and exit status."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

from harness.report import Progress, json_report, print_table
from harness.runner import DEFAULT_TIMEOUT_S, ROOT, SideResult, check_starter, run_side
from harness.sandbox import SubmissionError
from harness.spec import Case, SpecError, load_spec
from harness.verdict import CaseResult, Score, judge, score

VISIBLE_SPEC = ROOT / "problems" / "visible_spec.json"
CPU_SPEC = ROOT / "problems" / "cpu_spec.json"
SUBMISSION = ROOT / "methods" / "main"
EXIT_PASS, EXIT_FAIL, EXIT_REFUSED = 0, 1, 2


@dataclass
class Evaluation:
    """Results of one evaluation and what they were made with."""

    spec: Path
    device: str
    seed: int
    device_name: str
    results: list[CaseResult]
    score: Score

    def about(self) -> dict[str, Any]:
        return {
            "spec": self.spec.name,
            "device": self.device,
            "device_name": self.device_name,
            "seed": self.seed,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that both programs take."""
    parser.add_argument(
        "--spec",
        type=Path,
        help="spec file (default: the visible spec on a GPU, else the CPU spec)",
    )
    parser.add_argument("--filter", default="", metavar="TEXT", help="only cases whose name contains TEXT")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument("--submission", type=Path, default=SUBMISSION, metavar="DIR", help="folder with solver.py")
    parser.add_argument("--seed", type=int, help="seed of all inputs (default: a new one each time)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="seconds of silence allowed",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write a JSON report to FILE, or to standard output alone",
    )


def _choose_device(wanted: str | None) -> str:
    if wanted is not None:
        kind, _, number = wanted.partition(":")
        if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
            raise SpecError(f"--device: got {wanted!r}, expected cpu, cuda or cuda:N")
        if kind == "cpu":
            return "cpu"
    try:
        import torch
    except ImportError as error:
        raise SubmissionError(f"torch: {error}, expected `import torch` to work with this Python") from error
    if torch.cuda.is_available():
        return wanted or "cuda"
    if wanted is not None:
        raise SpecError(f"--device: got {wanted!r}, but torch finds no GPU")
    return "cpu"


def _choose_cases(spec: Path, text: str, device: str) -> list[Case]:
    cases = load_spec(spec)
    for index, case in enumerate(cases):
        if case.dtype == "float32" and device != "cpu":
            raise SpecError(f"case {index} ({case.name}), dtype: got float32, expected a 16-bit dtype on a GPU")
    chosen = [case for case in cases if text in case.name]
    if not chosen:
        raise SpecError(f"--filter: no case of {spec} contains {text!r}")
    return chosen


def evaluate(arguments: argparse.Namespace, roles: Sequence[str]) -> Evaluation:
    """Runs starter and candidate in the order of `roles`, each in a fresh process on inputs of the same seed."""
    device = _choose_device(arguments.device)
    spec = arguments.spec
    if spec is None:
        spec = CPU_SPEC if device == "cpu" else VISIBLE_SPEC
        if device == "cpu":
            print(f"CPU run: {spec.name} on the CPU, no GPU is used", file=sys.stderr)
    cases = _choose_cases(spec, arguments.filter, device)
    check_starter()
    seed = secrets.randbits(48) if arguments.seed is None else arguments.seed
    sides: list[SideResult] = []
    with Progress(roles, len(cases)) as progress:
        for role in roles:
            submission = arguments.submission if role == "candidate" else None
            sides.append(run_side(role, submission, cases, device, seed, progress, arguments.timeout))
    candidate = next(side for side in sides if side.role == "candidate")
    baselines = [side for side in sides if side is not candidate]
    kind = device.split(":")[0]
    results = [judge(case, index, candidate, baselines, kind) for index, case in enumerate(cases)]
    device_name = next((side.device_name for side in sides if side.device_name), "")
    return Evaluation(spec, device, seed, device_name, results, score(results))


def report(evaluation: Evaluation, json_target: str | None, score_name: str) -> None:
    """Prints the table and the score, or the JSON report."""
    if json_target:
        text = json_report(evaluation.results, evaluation.score, evaluation.about(), score_name)
        if json_target == "-":
            print(text)
            return
        Path(json_target).write_text(text + "\n", encoding="utf-8")
    where = "the CPU, no GPU is used" if evaluation.device == "cpu" else evaluation.device_name or evaluation.device
    print(f"{evaluation.spec.name} on {where}; seed {evaluation.seed}")
    print_table(evaluation.results)
    failed = sum(result.verdict != "pass" for result in evaluation.results)
    if failed:
        print(f"{failed} of {len(evaluation.results)} cases failed: the score is 0")
    print(f"{score_name}: {evaluation.score.geomean_speedup:.3f}")
    if evaluation.score.geomean_spin_speedup is not None:
        print(f"geomean_spin_speedup: {evaluation.score.geomean_spin_speedup:.3f}")


def check_arguments(arguments: argparse.Namespace) -> str | None:
    """Why the arguments are refused, before anything runs; None when they are not."""
    if arguments.timeout is not None and arguments.timeout <= 0:
        return f"--timeout: got {arguments.timeout}, expected more than 0 seconds"
    if arguments.json not in (None, "-") and not Path(arguments.json).resolve().parent.is_dir():
        return f"--json: got {arguments.json}, expected a file in a folder that exists"
    return None


def main(arguments: argparse.Namespace, roles: Sequence[str], score_name: str) -> tuple[int, Evaluation | None]:
    """Evaluates and reports; returns the exit status and, unless refused, the evaluation."""
    refusal = check_arguments(arguments)
    if refusal is not None:
        print(f"refused: {refusal}", file=sys.stderr)
        return EXIT_REFUSED, None
    try:
        evaluation = evaluate(arguments, roles)
    except (SpecError, SubmissionError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return EXIT_REFUSED, None
    report(evaluation, arguments.json, score_name)
    return EXIT_PASS if evaluation.score.passed else EXIT_FAIL, evaluation
