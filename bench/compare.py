"""Compares pgqa with every installed peer on the same tensors, in interleaved rounds of one process.

    python bench/compare.py --out DIR [--peers-site DIR] [--peers fi_tc,fa3] [--cases REGEX | --quick | --panel]
    python bench/compare.py --out DIR --report        (tables and plots of an earlier run again)

Times are those of bench.py: replayed graphs, cold L2, medians with deciles. Peers plan before the graph is captured;
that time stands in a column of its own. pgqa plans inside its call. Writes compare.jsonl, compare.md and, with
matplotlib, plots.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Callable, Iterator

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cases
import compare_report
import peers
import plots
from gpu_case import CapturedCall, CaseReference, CaseTensors, ReplayTimer, make_reference, make_tensors
from harness.spec import Case
from implementation import load_module, module_call
from protocol import make_timer
from read_ceiling import ReadCeiling, capture, find_library
from report import Json, machine_record

OURS = compare_report.OURS
_PLAN_ROUNDS = 15
_STEP_LIMIT_S = 60.0  # a step that takes longer hangs
_CONTEXT_LOST = 3  # exit status of a process whose GPU context is broken


class Journal:
    """The log of a run and, beside it, the step under way: what a process was doing when a peer has ended it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "compare.jsonl"
        self._now = folder / "compare.now"

    def records(self) -> list[dict]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]

    @contextlib.contextmanager
    def step(self, case: str, name: str) -> Iterator[None]:
        """Marks a step; ends the process when it takes too long. The mark of a failed step stays."""
        self._now.write_text(json.dumps({"case": case, "name": name}), encoding="utf-8")
        watchdog = threading.Timer(_STEP_LIMIT_S, os._exit, (4,))
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()
        self._now.unlink()

    def take_interrupted(self) -> dict | None:
        """The step that did not end, or None."""
        if not self._now.exists():
            return None
        step = json.loads(self._now.read_text(encoding="utf-8"))
        self._now.unlink()
        return step


def plan_us(plan: Callable[[], None] | None) -> float | None:
    """Median host time of planning until the GPU is done, page table lengths on the host."""
    if plan is None:
        return None
    times = []
    for _ in range(_PLAN_ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        plan()
        torch.cuda.synchronize()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(times)


def prepare(
    name: str, tensors: CaseTensors, expected: CaseReference, module: ModuleType
) -> tuple[CapturedCall, dict]:  # fmt: skip
    """A captured call of ours or of a peer, and what is known of it before it is timed."""
    if name == OURS:
        call, plan = module_call(module, tensors), None
    else:
        peer = peers.build(name, tensors)
        call, plan = peer.call, peer.plan
    planning = plan_us(plan)
    captured = CapturedCall(call)
    captured.out.fill_(float("nan"))
    accuracy = expected.check(captured.replay().reshape(tensors.q.shape))
    return captured, {"plan_us": planning, "error": accuracy.error, "fault": accuracy.fault}


class Comparison:
    """One process of the run: goes through the cases that the journal lacks."""

    def __init__(self, arguments: argparse.Namespace, journal: Journal) -> None:
        self._journal = journal
        self._names = arguments.peers
        self._launches = arguments.launches
        self._module = load_module(arguments.module)
        peers.use_site(arguments.peers_site)
        library = find_library(arguments.read_ceiling)
        self._ceiling = ReadCeiling(library) if library is not None else None
        self._timer = ReplayTimer(make_timer(torch.device("cuda")))
        self._known = journal.records()
        self._log = Json(str(journal.path))
        if not self._known:
            self._log.write(machine_record(self._module))

    def run(self, chosen: list[Case]) -> None:
        done = {record["case"] for record in self._known if record["kind"] == "row"}
        for case in chosen:
            if case.name not in done:
                self._run_case(case)
                torch.cuda.empty_cache()

    def _given_up(self, case: str) -> set[str]:
        """What an earlier process has found not to run this case."""
        return {r["name"] for r in self._known if r["kind"] == "time" and r["case"] == case and "us" not in r}

    def _end_if_context_is_lost(self) -> None:
        """After an illegal access every call fails: the supervisor goes on with a new process."""
        self._journal.take_interrupted()
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(_CONTEXT_LOST)

    def _run_case(self, case: Case) -> None:
        tensors = make_tensors(case)
        expected = make_reference(tensors)
        ready: dict[str, tuple[CapturedCall, dict]] = {}
        given_up = self._given_up(case.name)
        for name in (OURS, *self._names):
            if name in given_up:
                continue
            record = {"kind": "time", "case": case.name, "name": name}
            why = peers.unsupported(name, case) if name != OURS else None
            try:
                if why is None:
                    with self._journal.step(case.name, name):
                        ready[name] = prepare(name, tensors, expected, self._module)
            except ImportError as error:
                why = f"not installed: {peers.reason(error)}"
                self._journal.take_interrupted()
            except Exception as error:
                self._log.write(record | {"failed": peers.reason(error)})
                self._end_if_context_is_lost()
            if why is not None:
                self._log.write(record | {"skipped": why})
        with self._journal.step(case.name, "*"):
            self._time_case(case, tensors, ready)

    def _time_case(self, case: Case, tensors: CaseTensors, ready: dict[str, tuple[CapturedCall, dict]]) -> None:
        kernels = self._ceiling.kernels(tensors) if self._ceiling is not None else []
        calls = [call for call, _ in ready.values()] + [capture(kernel) for kernel in kernels]
        times = self._timer.rounds(calls, self._launches) if calls else []
        for (name, (_, known)), t in zip(ready.items(), times):
            spread = {"us": t.median_us, "p10_us": t.p10_us, "p90_us": t.p90_us}
            rate = case.live_kv_bytes / t.median_us / 1e6
            self._log.write({"kind": "time", "case": case.name, "name": name, **spread, "tb_s": rate, **known})
        reads = {kernel.name: t.median_us for kernel, t in zip(kernels, times[len(ready) :])}
        row = {
            "kind": "row", "case": case.name, "live_bytes": case.live_kv_bytes, "ceilings_us": reads,
            "ceiling_us": min(reads.values(), default=None),
        }  # fmt: skip
        self._log.write(row)
        shown = "  ".join(f"{name} {t.median_us:.1f}" for name, t in zip(ready, times))
        print(f"{case.name:28s} {shown}  R {row['ceiling_us'] or float('nan'):.1f}", flush=True)


def supervise(journal: Journal) -> None:
    """Runs the comparison in processes of its own: a peer that ends one costs only itself."""
    while True:
        status = subprocess.run([sys.executable, *sys.argv, "--worker"], check=False).returncode
        step = journal.take_interrupted()
        if step is None and status == _CONTEXT_LOST:
            continue
        if step is None:
            if status != 0:
                print(f"the run has ended early, with status {status}", file=sys.stderr)
            return
        log = Json(str(journal.path))
        text = f"the process ended with status {status}"
        if step["name"] == "*":
            log.write({"kind": "row", "case": step["case"], "failed": text})
        else:
            log.write({"kind": "time", **step, "failed": text})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="DIR", default="build/compare", help="folder of the results")
    parser.add_argument("--peers-site", metavar="DIR", help="folder that holds the peers' packages")
    parser.add_argument("--peers", default=",".join(peers.ABOUT), help="comma-separated; default: all")
    parser.add_argument("--cases", metavar="REGEX", help="only cases whose name holds a match")
    parser.add_argument("--quick", action="store_true", help="about 25 of the cases")
    parser.add_argument("--panel", action="store_true", help="only the cases that the means are taken over")
    parser.add_argument("--launches", type=int, default=51, help="timed launches of each call")
    parser.add_argument("--module", metavar="DIR", help="folder of the built _pgqa")
    parser.add_argument("--read-ceiling", metavar="FILE", help="the built read ceiling library")
    parser.add_argument("--resume", action="store_true", help="go on with the run in the folder")
    parser.add_argument("--report", action="store_true", help="only write tables and plots of the run in the folder")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.peers = [name for name in arguments.peers.split(",") if name]
    unknown = [name for name in arguments.peers if name not in peers.ABOUT]
    if unknown:
        parser.error(f"--peers: got {unknown[0]}, expected some of {', '.join(peers.ABOUT)}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    journal = Journal(folder)
    if arguments.worker:
        chosen = cases.select(arguments.cases, arguments.quick, cases.PEER_PANEL if arguments.panel else None)
        Comparison(arguments, journal).run(chosen)
        return 0
    if not arguments.report:
        if not torch.cuda.is_available():
            print("compare.py needs a GPU; there is none", file=sys.stderr)
            return 2
        if not arguments.resume:
            journal.path.unlink(missing_ok=True)
        supervise(journal)
    records = journal.records()
    (folder / "compare.md").write_text(compare_report.markdown(records), encoding="utf-8")
    print(compare_report.summary(records))
    print(plots.draw(records, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
