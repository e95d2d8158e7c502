"""Host cost of each way into a call, in a hot loop, output allocation included where not said otherwise."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import statistics
import time
from types import ModuleType
from typing import Callable

import torch

from gpu_case import CapturedCall, make_tensors
from harness.spec import Case
from implementation import (
    graph_replay,
    graph_replay_live,
    module_call,
    op_call,
    op_out_call,
    package_call,
    solver_call,
)
from report import Json, first_line

_CALLS = 200  # fewer than the launch queue holds
_ROUNDS = 31


def nanoseconds_a_call(call: Callable[[], object]) -> list[float]:
    """Host time of a call in each of _ROUNDS loops, each begun on an idle GPU."""
    rounds = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(_CALLS):
            call()
        rounds.append((time.perf_counter_ns() - begin) / _CALLS)
    torch.cuda.synchronize()
    return rounds


def run(module: ModuleType, case: Case, log: Json) -> None:
    """Prints and logs the table."""
    tensors = make_tensors(case)
    paths: list[tuple[str, Callable[[], Callable[[], object]]]] = [
        ("pgqa.decode", lambda: package_call(tensors)),
        ("_pgqa.decode", lambda: module_call(module, tensors)),
        ("solver entry", lambda: solver_call(tensors)),
        ("torch.ops.pgqa.decode", lambda: op_call(tensors)),
        ("torch.ops.pgqa.decode_out, no allocation", lambda: op_out_call(tensors)),
        ("pgqa.DecodeGraph.replay()", lambda: graph_replay(tensors)),
        ("pgqa.DecodeGraph.replay(live_batch), changing", lambda: graph_replay_live(tensors)),
        ("replay of a torch graph", lambda: CapturedCall(module_call(module, tensors)).replay),
        ("torch.empty_like alone", lambda: lambda: torch.empty_like(tensors.q)),
        ("empty call", lambda: lambda: None),
    ]
    print(f"\n| host cost, batch {case.batch} | ns a call | p10 | p90 |\n|---|---:|---:|---:|")
    for name, make in paths:
        try:
            rounds = nanoseconds_a_call(make())
        except Exception as error:
            print(f"| {name} | failed: {first_line(error)} |", flush=True)
            continue
        deciles = statistics.quantiles(rounds, n=10, method="inclusive")
        median = statistics.median(rounds)
        log.write({"kind": "host", "path": name, "ns": median, "p10_ns": deciles[0], "p90_ns": deciles[-1]})
        print(f"| {name} | {median:.0f} | {deciles[0]:.0f} | {deciles[-1]:.0f} |", flush=True)
