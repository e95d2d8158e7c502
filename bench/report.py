"""Output of the benchmarks: JSON lines and rows of a Markdown table."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import platform
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_COLUMNS = ("case", "MB", "us", "p10", "p90", "TB/s", "R us", "R TB/s", "R / us", "aim us", "error")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


class Json:
    """Appends records to a file, one a line, as they come; counts those that failed or were wrong."""

    def __init__(self, path: str | None) -> None:
        self._file = open(path, "a", encoding="utf-8", buffering=1) if path is not None else None
        self.num_bad = 0

    def write(self, record: dict) -> None:
        self.num_bad += bool(record.get("failed") or record.get("fault"))
        if self._file is not None:
            self._file.write(json.dumps(_rounded(record)) + "\n")


def first_line(error: BaseException) -> str:
    """Type and first line of an exception, short enough for a table."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"


def machine_record(module: ModuleType | None) -> dict:
    """What ran, and on what."""
    gpu = torch.cuda.get_device_properties(0)
    return {
        "kind": "machine", "gpu": gpu.name, "num_sms": gpu.multi_processor_count, "l2_bytes": gpu.L2_cache_size,
        "torch": torch.__version__, "python": platform.python_version(),
        "build": module.build_info() if module is not None else None,
    }  # fmt: skip


def print_notes(machine: dict, library: Path | None) -> None:
    print(f"{machine['gpu']}, {machine['num_sms']} SMs, torch {machine['torch']}; {machine['build']}")
    print(f"One tiny kernel in a replayed graph: {machine['floor_us']:.2f} us.")
    if library is None:
        print("No read ceiling: its library is not built (target pgqa_read_ceiling, needs nvcc).")
    print()


def table_head() -> list[str]:
    """The two head lines of the table of cases."""
    return ["| " + " | ".join(_COLUMNS) + " |", "|---" + "|---:" * (len(_COLUMNS) - 1) + "|"]


def print_row(record: dict) -> None:
    """One row of the table of cases; a time beyond the aim is marked with `>`, a wrong result says so."""
    if "failed" in record:
        print(f"| {record['case']} | failed: {record['failed']} |", flush=True)
        return
    mega = record["live_bytes"] / 1e6
    cells = [
        record["case"], f"{mega:.1f}" if mega < 100 else f"{mega:.0f}", f"{record['us']:.2f}",
        f"{record['p10_us']:.1f}", f"{record['p90_us']:.1f}", f"{record['tb_s']:.2f}",
    ]  # fmt: skip
    if "ceiling_us" in record:
        mark = ">" if record["us"] > record["allowed_us"] else ""
        ceiling = record["live_bytes"] / record["ceiling_us"] / 1e6
        cells += [f"{record['ceiling_us']:.2f}", f"{ceiling:.2f}", f"{record['of_ceiling']:.3f}"]
        cells.append(f"{mark}{record['allowed_us']:.1f}")
    else:
        cells += ["-"] * 4
    cells.append(f"{record['error']:.1e}" + (f" WRONG: {record['fault']}" if record["fault"] else ""))
    print("| " + " | ".join(cells) + " |", flush=True)
