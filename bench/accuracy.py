"""Error of pgqa against float64, beside that of a float32 computation which is rounded at its end.

    python bench/accuracy.py [--device cuda|cpu] [--cases REGEX] [--longest TOKENS] [--json FILE] [--list]

The error of a (request, head) row is the root mean square, over its head_dim elements, of the difference to float64
with angles in float64. The yardstick is the same error of a computation in float32 throughout from the same 16-bit
inputs, its angles in float64 too, rounded to the output type at the end: what no kernel with that output type can
avoid, up to chance.

The statistic of a case is `ratio`: the root mean square of the row errors over all rows of the case, divided by that of
the yardstick. It is held to BOUNDS. A single row is no statistic: its error is the rounding of some 64 to 256 numbers,
so the median and the worst of the rows' own ratios are printed, and held to nothing.

Exit status 1 where a case is beyond its bound.
"""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import itertools
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from accuracy_problem import AccuracyCase, Decode, attention, make_problem
from report import Json, first_line

BOUNDS = ((8, 1.2), (128, 1.5))  # (largest group, largest ratio)
COLUMNS = ("case", "rows", "ratio", "median row", "worst row", "bound", "of bound")

CASES = [
    AccuracyCase(*values)
    for values in itertools.product(
        ("float16", "bfloat16"),
        (1, 4, 8, 16, 32),
        (64, 128, 256),
        (17, 1000, 8192, 131072),
        (False, True),
        (False, True),
    )
]


@dataclass(frozen=True)
class Errors:
    """Root mean square error of each row, float64 [batch, query_heads]."""

    ours: torch.Tensor
    yardstick: torch.Tensor

    def row_ratios(self) -> torch.Tensor:
        """1 where both are exact."""
        exact = (self.ours == 0) & (self.yardstick == 0)
        return torch.where(exact, 1.0, self.ours / self.yardstick)

    def ratio(self) -> float:
        """The statistic of the case; NaN where an output is no number."""
        return float(self.ours.square().mean().sqrt() / self.yardstick.square().mean().sqrt())


def bound_of(group: int) -> float:
    return next(bound for largest, bound in BOUNDS if group <= largest)


def errors_of(out: torch.Tensor, expected: torch.Tensor, yardstick: torch.Tensor) -> Errors:
    """All [batch, query_heads, head_dim]; `expected` float64, the others of the output type."""

    def rows(values: torch.Tensor) -> torch.Tensor:
        return (values.double() - expected).square().mean(dim=-1).sqrt()

    return Errors(rows(out), rows(yardstick))


def measure(case: AccuracyCase, device: str, decode: Decode) -> dict:
    """The record of a case, solved by `decode`. `fault` says what is beyond the bound."""
    problem = make_problem(case, device)
    out = problem.solve(decode)
    errors = errors_of(out, attention(problem, torch.float64), attention(problem, torch.float32).to(out.dtype))
    ratio, bound, by_row = errors.ratio(), bound_of(case.group), errors.row_ratios()
    return {
        "kind": "accuracy", "case": case.name, **asdict(case), "rows": by_row.numel(), "ratio": ratio,
        "median_row": float(by_row.median()), "worst_row": float(by_row.max()), "bound": bound,
        "of_bound": ratio / bound,
        "fault": None if ratio <= bound else f"ratio {ratio:.3f}, allowed {bound:g}",
    }  # fmt: skip


def table_row(record: dict) -> str:
    if "failed" in record:
        return f"| {record['case']} | failed: {record['failed']} |"
    mark = " BEYOND" if record["fault"] else ""
    numbers = [f"{record[name]:.3f}" for name in ("ratio", "median_row", "worst_row", "bound", "of_bound")]
    return f"| {record['case']} | {record['rows']} | " + " | ".join(numbers) + mark + " |"


def run(cases: list[AccuracyCase], device: str, decode: Decode, log: Json) -> None:
    """Measures, prints and logs case by case; one that raises gets its message as the row."""
    print("| " + " | ".join(COLUMNS) + " |\n|---" + "|---:" * (len(COLUMNS) - 1) + "|")
    worst = 0.0
    for case in cases:
        try:
            record = measure(case, device, decode)
            worst = max(worst, record["of_bound"])
        except Exception as error:
            record = {"kind": "accuracy", "case": case.name, "failed": first_line(error)}
        log.write(record)
        print(table_row(record), flush=True)
    print(f"\n{len(cases)} cases, the largest at {worst:.3f} of its bound, {log.num_bad} beyond it or failed.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device, help="default: cuda where there is one")
    parser.add_argument("--cases", metavar="REGEX", default="", help="only cases whose name holds a match")
    parser.add_argument("--longest", type=int, metavar="TOKENS", help="default: 131072 on a GPU, 1000 on the CPU")
    parser.add_argument("--json", metavar="FILE", help="append one JSON record a line")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    arguments = parser.parse_args()
    if arguments.longest is None:
        arguments.longest = 131072 if arguments.device == "cuda" else 1000
    return arguments


def main() -> int:
    arguments = parse_arguments()
    chosen = [case for case in CASES if case.length <= arguments.longest and re.search(arguments.cases, case.name)]
    if not chosen:
        print(f"--cases, --longest: nothing matches {arguments.cases!r} up to {arguments.longest}", file=sys.stderr)
        return 2
    if arguments.list:
        print("\n".join(case.name for case in chosen))
        return 0
    sys.path.append(str(Path(__file__).resolve().parent.parent / "python"))
    import pgqa

    log = Json(arguments.json)
    run(chosen, arguments.device, pgqa.decode, log)
    return 1 if log.num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
