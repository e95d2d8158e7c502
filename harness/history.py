"""The experiment log and the saved sources of every recorded version."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import datetime
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from harness.runner import ROOT

if TYPE_CHECKING:
    from harness.evaluation import Evaluation

DECISIONS = ("keep", "revert")
LOG = ROOT / "methods" / "experiment_log.md"
VERSIONS = ROOT / "methods" / "versions"
_ROW = re.compile(r"^\| v(\d+) \|", re.MULTILINE)


def source_commit(root: Path = ROOT) -> str:
    """The commit of the working tree, with `-dirty` when tracked files differ from it; `none` outside a repository."""
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--abbrev=40",
        "--exclude=*",
        "--dirty",
    ]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return "none"
    return found.stdout.strip() or "none"


def _next_version(log_text: str, versions: Path) -> int:
    used = [int(number) for number in _ROW.findall(log_text)]
    used += [int(path.name[1:]) for path in versions.glob("v*") if path.name[1:].isdigit()]
    return max(used, default=0) + 1


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def record(
    evaluation: Evaluation,
    note: str,
    decision: str,
    submission: Path,
    log: Path = LOG,
    versions: Path = VERSIONS,
    commit: str | None = None,
) -> Path:
    """Appends one row to the log and copies the submission's sources into a new folder, which it returns."""
    text = log.read_text(encoding="utf-8")
    version = f"v{_next_version(text, versions)}"
    commit = commit or source_commit()
    score = evaluation.score
    spin = "-" if score.geomean_spin_speedup is None else f"{score.geomean_spin_speedup:.2f}x"
    idle = f"{score.geomean_speedup:.2f}x" if score.passed else "0 (failed)"
    cells = [
        version,
        datetime.date.today().isoformat(),
        f"{evaluation.spec.name} ({len(evaluation.results)})",
        evaluation.device_name or evaluation.device,
        idle,
        spin,
        decision,
        commit[:12] + ("-dirty" if commit.endswith("-dirty") else ""),
        note,
    ]
    folder = versions / version
    folder.mkdir(parents=True)
    for path in sorted(submission.rglob("*.py")):
        target = folder / path.relative_to(submission)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    (folder / "COMMIT").write_text(commit + "\n", encoding="utf-8")
    row = "| " + " | ".join(map(_cell, cells)) + " |\n"
    log.write_text(text.rstrip("\n") + "\n" + row, encoding="utf-8")
    return folder
