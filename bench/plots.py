"""Plots of a comparison: bandwidth over bytes, time over raggedness, the latency floor."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import cases
from compare_report import OURS, is_right, times_by_case
from harness.spec import Case

_SMALL_BYTES = 40e6


def _skew(case: Case) -> float:
    """Longest request over the mean one."""
    return max(case.kv_lens) * case.batch / sum(case.kv_lens)


def _megabytes(case: Case) -> float:
    return case.live_kv_bytes / 1e6


def _bandwidth(us: float, case: Case) -> float:
    return case.live_kv_bytes / us / 1e6


def _time(us: float, case: Case) -> float:
    return us


def _plot(axes: Any, points: dict[str, list[tuple[float, float]]]) -> None:
    for name, series in points.items():
        series.sort()
        style: dict[str, Any] = {"linewidth": 2.2, "color": "black"} if name in (OURS, "R") else {"linewidth": 1.0}
        style["linestyle"] = ":" if name == "R" else "-"
        axes.plot(*zip(*series), marker="o", markersize=3, label=name, **style)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _collect(
    records: list[dict], chosen: list[Case], x: Callable[[Case], float], y: Callable[[float, Case], float]
) -> dict[str, list[tuple[float, float]]]:
    """Points of every implementation and of the read ceiling R; x(case), y(microseconds, case)."""
    rows = times_by_case(records)
    ceilings = {r["case"]: r.get("ceiling_us") for r in records if r["kind"] == "row"}
    points: dict[str, list[tuple[float, float]]] = {}
    for case in chosen:
        if ceilings.get(case.name):
            points.setdefault("R", []).append((x(case), y(ceilings[case.name], case)))
        for name, record in rows.get(case.name, {}).items():
            if is_right(record):
                points.setdefault(name, []).append((x(case), y(record["us"], case)))
    return points


def draw(records: list[dict], folder: Path) -> str:
    """Writes the PNG files; returns a line that says what was written."""
    try:
        import matplotlib
    except ImportError:
        return "no plots: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    small = [case for case in cases.BATCHES if case.live_kv_bytes < _SMALL_BYTES]
    figures = (
        ("bandwidth", cases.BATCHES, _megabytes, _bandwidth, "live MB of K and V", "TB/s", "log"),
        ("raggedness", cases.SPREAD, _skew, _time, "longest request over mean", "us", "log"),
        ("latency", small, _megabytes, _time, "live MB of K and V", "us", "log"),
    )
    written = []
    for name, chosen, x, y, x_label, y_label, scale in figures:
        points = _collect(records, chosen, x, y)
        if not points:
            continue
        figure, axes = pyplot.subplots(figsize=(8, 5))
        _plot(axes, points)
        axes.set(xlabel=x_label, ylabel=y_label, xscale=scale, title=name, ylim=(0, None))
        figure.savefig(folder / f"{name}.png", dpi=120, bbox_inches="tight")
        pyplot.close(figure)
        written.append(f"{name}.png")
    return f"plots: {', '.join(written)}" if written else "no plots: no measured case belongs to one"
