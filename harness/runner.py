"""Runs one implementation over a spec in a fresh isolated process and collects what that process reports."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

from harness.sandbox import ENTRY_MODULE, SubmissionError, copy_submission, scan_sources
from harness.spec import Case
from harness.verdict import outside_clock

ROOT = Path(__file__).resolve().parents[1]
STARTER = ROOT / "problems" / "starter.py"
STARTER_SHA256 = "6be86f31d5f56aa0a300c65ac4fd4a0798dc64af4a56fba5671224a31750306b"
WORKER = ROOT / "harness" / "worker.py"
DEFAULT_TIMEOUT_S = 300.0  # without a word from the process

Progress = Callable[[str, int], None]  # role, cases done


@dataclass
class SideResult:
    """What one process said: a record for each case, or a fault that concerns all of them."""

    role: str
    device_name: str = ""
    faults: list[str] = field(default_factory=list)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)

    def faults_of(self, index: int) -> list[str]:
        """Everything that speaks against case `index`."""
        if self.faults and index not in self.records:
            return self.faults
        return self.records[index]["faults"] + self.faults if index in self.records else ["error: no result"]


def check_starter() -> None:
    """Refuses a starter that is not the one the evaluation is bound to."""
    digest = hashlib.sha256(STARTER.read_bytes()).hexdigest()
    if digest != STARTER_SHA256:
        raise SubmissionError(f"problems/starter.py: sha256 is {digest}, expected {STARTER_SHA256}")


def _environment(private: Path) -> dict[str, str]:
    """The parent's environment with every place for caches and temporary files inside a private folder."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PYTORCH", "TORCH", "TRITON"))
    }
    kept.update(HOME=str(private), TMPDIR=str(private), XDG_CACHE_HOME=str(private / "cache"))
    kept.update(TRITON_CACHE_DIR=str(private / "triton"))
    # Threads that wait for torch's next parallel loop must not spin on the cores that the timed call needs.
    kept.setdefault("OMP_WAIT_POLICY", "passive")
    return kept


def _torch_folder() -> str:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise SubmissionError("torch: not installed for this Python, expected `import torch` to work")
    return str(Path(found.origin).parents[1])


def run_side(
    role: str,
    submission: Path | None,
    cases: Sequence[Case],
    device: str,
    seed: int,
    progress: Progress | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> SideResult:
    """Judges the submission folder, or the starter when it is None, in a fresh process; never raises for its faults."""
    result = SideResult(role)
    with tempfile.TemporaryDirectory(prefix="evaluation-") as scratch:
        folder, private = Path(scratch, "submission"), Path(scratch, "private")
        folder.mkdir()
        private.mkdir()
        try:
            if submission is None:
                check_starter()
                shutil.copyfile(STARTER, folder / f"{ENTRY_MODULE}.py")
            else:
                copy_submission(submission, folder)
        except SubmissionError as error:
            result.faults = [f"import: {error}"]
            return result
        result.faults = [f"import: {fault}" for fault in scan_sources(folder)]
        if not result.faults:
            job = {
                "cases": [case.to_json() for case in cases],
                "device": device,
                "seed": seed,
                "folder": str(folder),
                "private_folders": [str(private)],
                "torch_folder": _torch_folder(),
            }
            _Process(job, folder, private, result, progress, timeout_s).run()
    return result


class _Process:
    """One worker process and the conversation with it."""

    def __init__(
        self,
        job: dict[str, Any],
        folder: Path,
        private: Path,
        result: SideResult,
        progress: Progress | None,
        timeout_s: float,
    ) -> None:
        self._job = job
        self._folder = folder
        self._private = private
        self._result = result
        self._progress = progress
        self._timeout_s = timeout_s
        self._bursts: dict[int, list[tuple[float, int]]] = {}
        self._burst_began = 0.0
        self._finished = False

    def run(self) -> None:
        reader, writer = os.pipe()
        self._job.update(token=secrets.token_hex(16), descriptor=writer)
        log = open(self._private / "log", "w+b")
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self._folder,
            env=_environment(self._private),
            pass_fds=(writer,),
            start_new_session=True,
        )
        os.close(writer)
        try:
            process.stdin.write(json.dumps(self._job).encode())
            process.stdin.close()
            for event in self._events(reader):
                self._handle(event)
        except BrokenPipeError:
            pass
        except TimeoutError:
            self._result.faults.append(f"timeout: no word from the process for {self._timeout_s:.0f} s")
        finally:
            self._stop(process)
            os.close(reader)
        if not self._finished and not self._result.faults:
            log.seek(0)
            tail = log.read().decode(errors="replace").strip().splitlines()[-3:]
            self._result.faults.append(f"error: the process ended with {process.returncode}: {' | '.join(tail)}")
        log.close()

    def _stop(self, process: subprocess.Popen) -> None:
        if self._finished:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()

    def _events(self, reader: int) -> Iterator[dict[str, Any]]:
        """Events as they come; what does not carry the token is ignored."""
        buffered = b""
        deadline = time.monotonic() + self._timeout_s
        while True:
            ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            data = os.read(reader, 1 << 16)
            if not data:
                return
            buffered += data
            *lines, buffered = buffered.split(b"\n")
            for line in lines:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                if isinstance(event, dict) and event.get("token") == self._job["token"]:
                    deadline = time.monotonic() + self._timeout_s
                    yield event

    def _handle(self, event: dict[str, Any]) -> None:
        now, kind = time.monotonic(), event["kind"]
        if kind == "burst_begin":
            self._burst_began = now
        elif kind == "burst_end":
            self._bursts.setdefault(event["index"], []).append((now - self._burst_began, event["calls"]))
        elif kind == "record":
            self._result.records[event["index"]] = self._confirmed(event["index"], event["record"])
            if self._progress:
                self._progress(self._result.role, len(self._result.records))
        elif kind == "ready":
            self._result.device_name = event["device"]
        elif kind == "refused":
            self._result.faults += event["faults"]
        self._finished = self._finished or kind in ("done", "refused")

    def _confirmed(self, index: int, record: dict[str, Any]) -> dict[str, Any]:
        """The record with the verdict of this process's own clock."""
        bursts = self._bursts.get(index)
        if bursts and record["idle"]:
            elapsed_s, calls = min(bursts, key=lambda burst: burst[0] / burst[1])
            kind = self._job["device"].split(":")[0]
            record["faults"] += outside_clock(record["idle"]["median_us"], calls, elapsed_s * 1e6, kind)
        elif not record["faults"]:
            record["faults"].append("timing integrity: no burst was seen by the evaluator's clock")
        return record
