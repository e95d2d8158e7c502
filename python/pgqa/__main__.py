"""Command line of the package: `python -m pgqa info` and `python -m pgqa replay FILE`."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import os
import platform
import sys

import torch

import pgqa
from pgqa import _replay


def device_lines() -> list[str]:
    """One line for each visible GPU, or one that says that there is none."""
    if not torch.cuda.is_available():
        return ["none visible"]
    lines = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        lines.append(
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} SMs, {properties.total_memory >> 20} MiB"
        )
    return lines


def info() -> None:
    """Prints what was built, and what it finds on this machine."""
    build = pgqa.build_info()
    rows = [
        ("pgqa", build["version"]),
        ("module", pgqa._pgqa.__file__),
        ("CUDA kernels", f"for {build['cuda_architectures']}" if build["cuda"] else "not built"),
        ("built with torch", build["torch"]),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("CPU threads", str(os.cpu_count())),
    ]
    rows += [("GPU", line) for line in device_lines()]
    for name, value in rows:
        print(f"{name:<17} {value}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pgqa", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help=info.__doc__)
    replay = commands.add_parser("replay", help=_replay.replay.__doc__, description=_replay.replay.__doc__)
    replay.add_argument("file", help="one that pgqa.record has written")
    replay.add_argument("--device", help="cpu, cuda or cuda:N; by default the recorded one where it is there")
    replay.add_argument("--seed", type=int, default=0, help="of the values that were not recorded")
    arguments = parser.parse_args()
    if arguments.command == "replay":
        return _replay.replay(arguments.file, arguments.device, arguments.seed)
    info()
    return 0


if __name__ == "__main__":
    sys.exit(main())
