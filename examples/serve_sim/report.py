"""What a run prints, and its plot."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence

from .simulation import Result, SimulationConfig, StepRecord


def percentile(values: Sequence[float], percent: int) -> float:
    """Between the two nearest values; of at least one."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def print_summary(config: SimulationConfig, result: Result) -> None:
    engine, workload, counters = config.engine, config.workload, result.counters
    dtype = str(engine.dtype).removeprefix("torch.")
    print(
        f"{config.device}, {dtype}, {engine.query_heads} query and {engine.kv_heads} KV heads of {engine.head_dim}, "
        f"{engine.num_pages} pages of {engine.page_size} tokens, at most {engine.max_batch} requests"
    )
    print(
        f"median prompt {workload.trace.prompt}, output {workload.trace.output}, sigma {workload.sigma:g}, "
        f"{workload.rate:.3g} arrivals a step, seed {workload.seed}"
    )
    if not result.records:
        print(f"no request arrived in {config.steps} steps")
        return
    times = [record.step_ms for record in result.records]
    tokens = sum(record.batch for record in result.records)
    mean_batch = statistics.mean(record.batch for record in result.records)
    most_tokens = max(record.live_tokens for record in result.records)
    print(f"steps           {len(times)} of {config.steps} with requests, {mean_batch:.1f} on average")
    print(f"step time       median {statistics.median(times):.4f} ms, p99 {percentile(times, 99):.4f} ms")
    print(f"tokens/s        {tokens / sum(times) * 1e3:.0f} of attention alone, {tokens} tokens in {sum(times):.1f} ms")
    print(f"live tokens     at most {most_tokens}")
    print(f"finished        {counters.finished} requests")
    print(f"preemptions     {counters.preemptions}, {counters.recomputed_tokens} tokens prefilled once more")
    most_shared = max(record.shared_pages for record in result.records)
    print(f"shared pages    {counters.shared_pages} taken without a copy, at most {most_shared} with several holders")
    if config.check_every:
        print(f"checked         {result.num_checked} rows, ||error|| at most {result.worst_error:.2g} of ||expected||")
    else:
        print("checked         nothing")
    if result.torch_growth is None:
        print("memory growth   not measured on the CPU")
    else:
        print(f"memory growth   {result.torch_growth} bytes of tensors, {result.workspace_growth} of workspaces")


def plot(records: Sequence[StepRecord], path: str) -> None:
    """Batch, live tokens and step time over the steps, as a PNG; a note where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        print("plot            skipped: matplotlib is not installed")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots(3, sharex=True)
    series = (
        ("requests", [record.batch for record in records]),
        ("live tokens", [record.live_tokens for record in records]),
        ("step time [ms]", [record.step_ms for record in records]),
    )
    for axis, (label, values) in zip(axes, series):
        axis.plot(values, linewidth=1)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].plot([record.waiting for record in records], linewidth=1, color="tab:orange")
    axes[0].legend(("running", "waiting"))
    axes[-1].set_xlabel("step")
    figure.savefig(path, format="png", dpi=120)
    print(f"plot            {path}")
