#!/usr/bin/env python3
"""Sealed evaluation of a submission on any spec file: starter, candidate, starter, each in a fresh isolated process."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import evaluation  # noqa: E402

ROLES = ("starter before", "candidate", "starter after")


def main() -> int:
    """Exit status 0 when every case passes, 1 when one fails, 2 when the spec or an argument is refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec_file", nargs="?", type=Path, metavar="SPEC", help="same as --spec")
    evaluation.add_arguments(parser)
    arguments = parser.parse_args()
    arguments.spec = arguments.spec or arguments.spec_file
    status, _ = evaluation.main(arguments, ROLES, "geomean_speedup")
    return status


if __name__ == "__main__":
    sys.exit(main())
