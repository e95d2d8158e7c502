"""Markdown tables of a comparison, from its records."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import statistics
from typing import Iterable

import cases
import peers

OURS = "pgqa"
_NOISE = 1.02  # what a time may exceed another's without being slower


def times_by_case(records: list[dict]) -> dict[str, dict[str, dict]]:
    """{case: {name: record}} of every finished row, in the order measured."""
    rows: dict[str, dict[str, dict]] = {r["case"]: {} for r in records if r["kind"] == "row" and "failed" not in r}
    for record in records:
        if record["kind"] == "time" and record["case"] in rows:
            rows[record["case"]][record["name"]] = record
    return rows


def is_right(record: dict) -> bool:
    return "us" in record and not record["fault"]


def best_peer(row: dict[str, dict]) -> dict | None:
    """The record of the fastest peer whose result is right."""
    right = [record for name, record in row.items() if name != OURS and is_right(record)]
    return min(right, key=lambda record: record["us"], default=None)


def geomean(values: Iterable[float]) -> float:
    values = list(values)
    return statistics.geometric_mean(values) if values else math.nan


def _cell(record: dict | None, best: dict | None) -> str:
    if record is None or "skipped" in record:
        return "-"
    if "failed" in record:
        return "failed"
    mark = "!" if record["fault"] else "*" if record is best else ""
    return f"{record['us']:.1f}{mark} ({record['error']:.0e})"


def _times_table(rows: dict[str, dict[str, dict]], ceilings: dict[str, dict], names: list[str]) -> list[str]:
    head = ["case", "MB", "R", OURS, "R / us", "peer / ours", *names]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for case, row in rows.items():
        ours, best, bound = row.get(OURS), best_peer(row), ceilings[case]["ceiling_us"]
        timed = ours is not None and "us" in ours
        cells = [case, f"{ceilings[case]['live_bytes'] / 1e6:.1f}", f"{bound:.1f}" if bound else "-", _cell(ours, None)]
        cells.append(f"{bound / ours['us']:.3f}" if timed and bound else "-")
        cells.append(f"{best['us'] / ours['us']:.3f}" if timed and best else "-")
        cells += [_cell(row.get(name), best) for name in names]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _details_table(rows: dict[str, dict[str, dict]]) -> list[str]:
    lines = [
        "| case | of | us | p10 | p90 | TB/s | plan us | error |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for case, row in rows.items():
        for name, r in row.items():
            if "us" in r:
                plan = f"{r['plan_us']:.0f}" if r["plan_us"] is not None else "-"
                times = f"{r['us']:.2f} | {r['p10_us']:.2f} | {r['p90_us']:.2f} | {r['tb_s']:.2f}"
                lines.append(f"| {case} | {name} | {times} | {plan} | {r['error']:.1e} |")
    return lines


def summary(records: list[dict]) -> str:
    """Geometric means of peer time over ours on the panel, and the rows where a peer is faster."""
    rows = {case: row for case, row in times_by_case(records).items() if is_right(row.get(OURS, {}))}
    panel = [row for case, row in rows.items() if case in cases.PEER_PANEL]
    ratios = [best["us"] / row[OURS]["us"] for row in panel if (best := best_peer(row)) is not None]
    num_rows = len(cases.PEER_PANEL)
    lines = [f"best peer of each row over ours: {geomean(ratios):.3f} on {len(ratios)} of {num_rows} rows"]
    for name in peers.ABOUT:
        ratios = [row[name]["us"] / row[OURS]["us"] for row in panel if is_right(row.get(name, {}))]
        if ratios:
            lines.append(f"{name} over ours: {geomean(ratios):.3f} on {len(ratios)} rows")
    for case, row in rows.items():
        best = best_peer(row)
        if best is not None and row[OURS]["us"] > _NOISE * best["us"]:
            lines.append(f"slower than a peer: {case}: {row[OURS]['us']:.1f} us, {best['name']} {best['us']:.1f} us")
    return "\n".join(lines)


def _notes(records: list[dict]) -> list[str]:
    """What is missing, failed or wrong; a reason that many rows share stands once."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for r in records:
        why = r.get("failed") or r.get("skipped") or (r.get("fault") and "outside the tolerance")
        if r["kind"] in ("time", "row") and why:
            by_reason.setdefault((r.get("name", "row"), why), []).append(r["case"])
    lines = []
    for (name, why), found in by_reason.items():
        found = list(dict.fromkeys(found))
        shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
        lines.append(f"- {name}: {why} ({shown})")
    return lines


def markdown(records: list[dict]) -> str:
    """The whole report."""
    rows = times_by_case(records)
    ceilings = {r["case"]: r for r in records if r["kind"] == "row"}
    names = [name for name in peers.ABOUT if any("us" in row.get(name, {}) for row in rows.values())]
    machine = next((r for r in records if r["kind"] == "machine"), {})
    parts = [
        "# Comparison",
        f"{machine.get('gpu')}, torch {machine.get('torch')}. Microseconds a replayed call, cold L2, median; in "
        "brackets the largest relative error of a (request, head). R: the faster read-only kernel on the row's pages. "
        "`*` best peer, `!` outside the tolerance, `-` not supported or not installed.",
        "\n".join(f"- {name}: {peers.ABOUT[name]}" for name in names),
        "\n".join(_times_table(rows, ceilings, names)),
        "## Means",
        "\n".join(f"- {line}" for line in summary(records).splitlines()),
        "## Spread and planning",
        "\n".join(_details_table(rows)),
        "## Notes",
        "\n".join(_notes(records)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
