#!/usr/bin/env python3
"""Visible evaluation of methods/main: every case checked and timed beside the starter, and `--record` for the log."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import evaluation, history  # noqa: E402

ROLES = ("starter", "candidate")


def main() -> int:
    """Exit status 0 when every case passes, 1 when one fails, 2 when the spec or an argument is refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    evaluation.add_arguments(parser)
    parser.add_argument(
        "--record",
        metavar="NOTE",
        help="append the result to methods/experiment_log.md and save sources",
    )
    parser.add_argument("--decision", choices=history.DECISIONS, help="what --record writes down as decided")
    parser.add_argument("--commit", help="what --record notes as the commit built from (default: the working tree's)")
    arguments = parser.parse_args()
    if (arguments.record is None) != (arguments.decision is None):
        parser.error("--record NOTE and --decision keep|revert go together")
    if arguments.record is not None and arguments.submission.resolve() != evaluation.SUBMISSION:
        parser.error("--record saves the sources of methods/main: leave --submission out")
    status, result = evaluation.main(arguments, ROLES, "visible_geomean_speedup")
    if result and arguments.record is not None:
        folder = history.record(
            result, arguments.record, arguments.decision, evaluation.SUBMISSION, commit=arguments.commit
        )
        print(f"recorded as {folder.name}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
