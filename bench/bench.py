"""Benchmark of pgqa on one GPU: time, bandwidth, fraction of the memory's read ceiling and error of every case.

    python bench/bench.py [--cases REGEX] [--quick] [--json FILE] [--module DIR] [--read-ceiling FILE]
    python bench/bench.py --batch-invariant [--cases REGEX] [--quick] [--json FILE] [--module DIR]

Each time is the median over launches of a CUDA graph that holds one whole call (planning, attention, merge), with an
L2 cache flushed by reading, random physical pages, and a GPU that is kept busy until the start event. TB/s counts live
bytes of K and V. R is the time of the faster of two kernels that only read those bytes from the same pages, interleaved
with ours; `aim` is 1.04 R + 3.5 us from 30 MB up, 1.04 R + 5.5 us below. With --batch-invariant, what that mode costs:
the times of both modes, interleaved, and their ratio.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from types import ModuleType

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cases
import host_cost
from gpu_case import CapturedCall, ReplayTimer, make_reference, make_tensors
from harness.spec import Case
from implementation import load_module, module_call
from protocol import make_timer
from read_ceiling import ReadCeiling, capture, find_library
from report import Json, first_line, machine_record, print_notes, print_row, table_head


def allowed_us(live_bytes: int, ceiling_us: float) -> float:
    """The time aimed at: close to the read ceiling, plus what a launch, planning and merging may add."""
    return 1.04 * ceiling_us + (3.5 if live_bytes >= 30e6 else 5.5)


def measure(
    case: Case, module: ModuleType, timer: ReplayTimer, ceiling: ReadCeiling | None, launches: int
) -> dict:
    """One record: times, bandwidth, read ceiling and error of a case."""
    tensors = make_tensors(case)
    ours = CapturedCall(module_call(module, tensors))
    kernels = ceiling.kernels(tensors) if ceiling is not None else []
    times, *reads = timer.rounds([ours, *map(capture, kernels)], launches)
    record = {
        "kind": "case", "case": case.name, "batch": case.batch, "tokens": sum(case.kv_lens),
        "live_bytes": case.live_kv_bytes, "us": times.median_us, "p10_us": times.p10_us, "p90_us": times.p90_us,
        "launches": times.launches, "tb_s": case.live_kv_bytes / times.median_us / 1e6,
    }  # fmt: skip
    if reads:
        best = min(range(len(reads)), key=lambda i: reads[i].median_us)
        ceiling_us = reads[best].median_us
        record |= {
            "ceiling_us": ceiling_us, "ceiling_kernel": kernels[best].name,
            "ceilings_us": {k.name: t.median_us for k, t in zip(kernels, reads)},
            "of_ceiling": ceiling_us / times.median_us, "allowed_us": allowed_us(case.live_kv_bytes, ceiling_us),
        }  # fmt: skip
    ours.out.fill_(float("nan"))
    accuracy = make_reference(tensors).check(ours.replay())
    return record | {"error": accuracy.error, "fault": accuracy.fault}


def run_cases(
    chosen: list[Case], module: ModuleType, timer: ReplayTimer, ceiling: ReadCeiling | None, launches: int, log: Json
) -> None:
    """Measures and prints case by case; one that raises gets its message as the row."""
    for line in table_head():
        print(line, flush=True)
    for case in chosen:
        try:
            record = measure(case, module, timer, ceiling, launches)
        except Exception as error:
            record = {"kind": "case", "case": case.name, "failed": first_line(error)}
        torch.cuda.empty_cache()
        log.write(record)
        print_row(record)


def run_planning(module: ModuleType, timer: ReplayTimer, launches: int, log: Json) -> None:
    """What many requests add to the time of few ones of the same bytes."""
    print("\n| planning | us | same bytes | us | added us |\n|---|---:|---|---:|---:|")
    for many, few in cases.PLANNING:
        try:
            calls = [CapturedCall(module_call(module, make_tensors(case))) for case in (many, few)]
            times = timer.rounds(calls, launches)
        except Exception as error:
            print(f"| {many.name} | failed: {first_line(error)} |")
            continue
        many_us, few_us = (t.median_us for t in times)
        log.write({"kind": "planning", "many": many.name, "few": few.name, "many_us": many_us, "few_us": few_us})
        print(f"| {many.name} | {many_us:.2f} | {few.name} | {few_us:.2f} | {many_us - few_us:+.2f} |", flush=True)


def run_invariance(
    chosen: list[Case], module: ModuleType, timer: ReplayTimer, launches: int, log: Json
) -> None:
    """What batch_invariant costs: each case in both modes."""
    print("\n| case | us | batch_invariant us | ratio |\n|---|---:|---:|---:|")
    ratios = []
    for case in chosen:
        try:
            tensors = make_tensors(case)
            calls = [CapturedCall(module_call(module, tensors, invariant)) for invariant in (False, True)]
            normal, invariant = (t.median_us for t in timer.rounds(calls, launches))
            fault = make_reference(tensors).check(calls[1].replay()).fault
        except Exception as error:
            log.write({"kind": "batch_invariant", "case": case.name, "failed": first_line(error)})
            print(f"| {case.name} | failed: {first_line(error)} |")
            continue
        ratios.append(invariant / normal)
        log.write({
            "kind": "batch_invariant", "case": case.name, "us": normal, "invariant_us": invariant, "fault": fault,
        })  # fmt: skip
        wrong = "" if fault is None else f" **{fault}**"
        print(f"| {case.name} | {normal:.2f} | {invariant:.2f} | {ratios[-1]:.3f}{wrong} |", flush=True)
        torch.cuda.empty_cache()
    if ratios:
        print(f"| geometric mean of {len(ratios)} | | | {statistics.geometric_mean(ratios):.3f} |")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--cases", metavar="REGEX", help="only cases whose name holds a match")
    parser.add_argument("--quick", action="store_true", help="about 25 of the cases")
    parser.add_argument("--launches", type=int, default=51, help="timed launches of each case")
    parser.add_argument("--json", metavar="FILE", help="append one JSON record a line")
    parser.add_argument("--only", choices=("cases", "planning", "host"), help="only one of the three parts")
    parser.add_argument("--batch-invariant", action="store_true", help="compare the two modes, and nothing else")
    parser.add_argument("--module", metavar="DIR", help="folder of the built _pgqa; default: where the build puts it")
    parser.add_argument("--read-ceiling", metavar="FILE", help="the built read ceiling library; default: in build/")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    arguments = parser.parse_args()
    if arguments.launches < 31:
        parser.error(f"--launches: got {arguments.launches}, expected at least 31")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    chosen = cases.select(arguments.cases, arguments.quick)
    if arguments.list:
        print("\n".join(f"{case.name:28s}{case.live_kv_bytes / 1e6:9.1f} MB" for case in chosen))
        return 0
    if not chosen:
        print(f"--cases: nothing matches {arguments.cases!r}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("bench.py needs a GPU; there is none", file=sys.stderr)
        return 2
    module = load_module(arguments.module)
    library = find_library(arguments.read_ceiling)
    ceiling = ReadCeiling(library) if library is not None else None
    log = Json(arguments.json)
    timer = ReplayTimer(make_timer(torch.device("cuda")))
    machine = machine_record(module) | {"floor_us": timer.floor_us()}
    log.write(machine)
    print_notes(machine, library)
    if arguments.batch_invariant:
        run_invariance(chosen, module, timer, arguments.launches, log)
        return 1 if log.num_bad else 0
    if arguments.only in (None, "cases"):
        run_cases(chosen, module, timer, ceiling, arguments.launches, log)
    if arguments.only == "planning" or arguments.only is None and arguments.cases is None:
        run_planning(module, timer, arguments.launches, log)
    if arguments.only == "host" or arguments.only is None and arguments.cases is None:
        host_cost.run(module, cases.HOST_COST, log)
    return 1 if log.num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
