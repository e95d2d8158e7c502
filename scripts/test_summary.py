"""Adds up the JUnit files of a test run: what was skipped and why, then one line of totals.

usage: test_summary.py FOLDER [COUNT=REASON...]
FOLDER holds the JUnit files; COUNT tests were skipped for REASON without a line in any of them.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import collections
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree


def skip_reason(case: ElementTree.Element, skipped: ElementTree.Element) -> str:
    """The reason as the test gave it; GoogleTest prints it, pytest keeps it as the message."""
    output = case.findtext("system-out") or ""
    printed = re.search(r"Skipped\n(.+?)\n", output)
    if printed:
        return printed.group(1).strip()
    return (skipped.get("message") or "no reason given").strip()


def main() -> int:
    results = pathlib.Path(sys.argv[1])
    skipped: collections.Counter[str] = collections.Counter()
    for note in sys.argv[2:]:
        count, reason = note.split("=", 1)
        skipped[reason] = int(count)
    passed = failed = 0
    for path in sorted(results.glob("*.xml")):
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed += 1
            elif (element := case.find("skipped")) is not None:
                skipped[skip_reason(case, element)] += 1
            elif case.get("status") != "notrun":  # else left out by a GoogleTest filter
                passed += 1

    print("\nskipped:" if skipped else "\nskipped: nothing")
    for reason, count in skipped.most_common():
        print(f"  {count} x {reason}" if count else f"  {reason}")
    print(f"{passed} passed, {failed} failed, {sum(skipped.values())} skipped")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
