"""Process that judges one implementation: reads a job from standard input, writes events to the given descriptor."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, Callable


def _prepare_path(job: dict[str, Any]) -> None:
    """Makes the harness importable, and torch where only the parent's path has it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if importlib.util.find_spec("torch") is None:
        sys.path.append(job["torch_folder"])


def _event_writer(job: dict[str, Any]) -> Callable[..., None]:
    """A function that sends one event; the token proves to the parent that the harness sent it."""
    write, dumps = os.write, json.dumps
    descriptor, token = job["descriptor"], job["token"]

    def send(kind: str, **fields: Any) -> None:
        data = (dumps({"token": token, "kind": kind, **fields}) + "\n").encode()
        while data:
            data = data[write(descriptor, data) :]

    return send


def main() -> int:
    job = json.loads(sys.stdin.read())
    _prepare_path(job)
    send = _event_writer(job)

    import torch

    from harness.judge import Judge
    from harness.sandbox import Guard
    from harness.spec import parse_case

    device = torch.device(job["device"])
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    cases = [parse_case(raw, index) for index, raw in enumerate(job["cases"])]
    judge = Judge(device, job["seed"], send)
    guard = Guard(Path(job["folder"]), [Path(path) for path in job["private_folders"]])
    sys.path.pop(0)
    send("ready", device=judge.device_name)
    try:
        function = guard.load()
    except BaseException as error:
        send(
            "refused",
            faults=[f"import: {fault}" for fault in guard.faults] or [f"import: {judge.describe(error)}"],
        )
        return 0
    with torch.no_grad():
        for index, case in enumerate(cases):
            send("case", index=index)
            record = judge.judge_case(index, case, function)
            record["faults"] += [f"import: {fault}" for fault in guard.faults]
            send("record", index=index, record=record)
    send("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
