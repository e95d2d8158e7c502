"""Tables, progress and JSON of an evaluation; rich draws them where it is installed, plain text elsewhere."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any, Sequence

from harness.verdict import CaseResult, Score

try:
    import rich.console
    import rich.progress
    import rich.table
except ImportError:
    rich = None

_COLUMNS = (
    "case", "verdict", "idle us", "starter us", "speedup", "spin us", "starter spin", "spin speedup", "TB/s", "error",
)  # fmt: skip
_PLAIN_STEPS = 8  # progress lines of one run without a terminal
_PIPED_WIDTH = 150


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None else format(value, pattern)


def _row(result: CaseResult) -> list[str]:
    return [
        result.name,
        result.verdict,
        _number(result.latency_us, ",.1f"),
        _number(result.baseline_us, ",.1f"),
        _number(result.speedup, ".2f"),
        _number(result.spin_us, ",.1f"),
        _number(result.baseline_spin_us, ",.1f"),
        _number(result.spin_speedup, ".2f"),
        _number(result.achieved_tbps, ".4f" if (result.achieved_tbps or 0) < 0.1 else ".2f"),
        _number(result.error, ".1e"),
    ]


def print_table(results: Sequence[CaseResult]) -> None:
    """One row a case on standard output, then the reasons of those that failed."""
    if rich:
        console = rich.console.Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
        table = rich.table.Table()
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column in ("case", "verdict") else "right", no_wrap=True)
        for result in results:
            table.add_row(*_row(result), style=None if result.verdict == "pass" else "red")
        console.print(table)
    else:
        rows = [list(_COLUMNS), *map(_row, results)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        for row in rows:
            cells = [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
            print("  ".join(cells).rstrip())
    for result in results:
        for reason in result.reasons:
            print(f"{result.name}: {reason}")


def json_report(results: Sequence[CaseResult], score: Score, about: dict[str, Any], score_name: str) -> str:
    """One JSON object: a record a case, the geometric means and what was run."""
    report = {
        **about,
        "passed": score.passed,
        score_name: score.geomean_speedup,
        "geomean_spin_speedup": score.geomean_spin_speedup,
        "cases": [asdict(result) for result in results],
    }
    return json.dumps(report, indent=1)


class Progress:
    """Cases done of each run, on standard error."""

    def __init__(self, roles: Sequence[str], num_cases: int) -> None:
        self._num_cases = num_cases
        self._bar = None
        if rich and sys.stderr.isatty():
            self._bar = rich.progress.Progress(console=rich.console.Console(stderr=True), transient=True)
            self._tasks = {role: self._bar.add_task(role, total=num_cases) for role in roles}

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, role: str, done: int) -> None:
        if self._bar:
            self._bar.update(self._tasks[role], completed=done)
        elif done == self._num_cases or done % -(-self._num_cases // _PLAIN_STEPS) == 0:
            print(f"{role}: {done} of {self._num_cases} cases", file=sys.stderr, flush=True)
