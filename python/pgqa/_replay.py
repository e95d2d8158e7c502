"""A recorded call, rebuilt and run by the pgqa at hand: `python -m pgqa replay FILE`."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import pgqa
from pgqa import _recording

WORKS, FAILS, UNREADABLE = 0, 1, 2
FUNCTIONS = {"decode": pgqa.decode, "append_kv": pgqa.append_kv}


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The entry in a file of `pgqa.record`; ValueError for any other file."""
    try:
        entry = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch names no types for what a damaged file gives
        raise ValueError(f"{path}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from None
    if not isinstance(entry, dict) or entry.get("format") != _recording.FORMAT:
        raise ValueError(f"{path}: got no call of pgqa.record, format {_recording.FORMAT}")
    return entry


def device_for(recorded: str, override: str | None) -> torch.device:
    """The recorded device, or the nearest thing that is here."""
    device = torch.device(recorded if override is None else override)
    if override is not None or device.type != "cuda":
        return device
    if not (pgqa.build_info()["cuda"] and torch.cuda.is_available()):
        return torch.device("cpu")
    return device if (device.index or 0) < torch.cuda.device_count() else torch.device("cuda", 0)


def dtype_of(entry: dict[str, Any]) -> torch.dtype:
    dtype = getattr(torch, entry["dtype"].removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: got {entry['dtype']}")
    return dtype


def end_of(entry: dict[str, Any]) -> int:
    """Bytes of a storage that holds the tensor."""
    if 0 in entry["shape"]:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(entry["shape"], entry["strides"]))
    return (entry["storage_offset"] + last + 1) * dtype_of(entry).itemsize


def fill(storage: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Normal values where the dtype has them, else zeros."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        storage.zero_()
        return
    whole = len(storage) // dtype.itemsize * dtype.itemsize
    storage[:whole].view(dtype).normal_(generator=generator)


def copy_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:  # one element, named over and over
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


class Rebuilt:
    """The arguments of a recorded call, by name; tensors that shared memory share it again."""

    def __init__(self, entry: dict[str, Any], override: str | None, seed: int) -> None:
        self._override = override
        self._seed = seed
        described = entry["arguments"]
        self._storages = self._allocate([one for one in described.values() if "storage" in one])
        self.arguments = {name: self._argument(one) for name, one in described.items()}

    def _allocate(self, tensors: list[dict[str, Any]]) -> dict[int, torch.Tensor]:
        storages: dict[int, torch.Tensor] = {}
        for number in sorted({one["storage"] for one in tensors}):
            users = [one for one in tensors if one["storage"] == number]
            device = device_for(users[0]["device"], self._override)
            storages[number] = torch.empty(max(end_of(one) for one in users), dtype=torch.uint8, device=device)
            generator = torch.Generator(device).manual_seed(self._seed + number)
            fill(storages[number], dtype_of(users[0]), generator)
        return storages

    def _argument(self, one: dict[str, Any]) -> Any:
        if one["kind"] == "value":
            return one["value"]
        if one["kind"] == "type":
            return type(one["name"], (), {})()  # what it was is not known, only that it was refused
        dtype, device = dtype_of(one), device_for(one["device"], self._override)
        if "storage" not in one:
            return torch.zeros(one["shape"], dtype=dtype, device=device).to_sparse()
        storage = self._storages[one["storage"]].untyped_storage()
        tensor = torch.empty(0, dtype=dtype, device=device)
        tensor.set_(storage, one["storage_offset"], one["shape"], one["strides"])
        if one["values"] is not None:
            copy_values(tensor, one["values"])
        return tensor.requires_grad_(one["requires_grad"])


def verdict_on_table(arguments: dict[str, Any], described: dict[str, Any]) -> str:
    for name in _recording.TABLE:
        if described[name].get("values") is None:
            return f"not recorded: {name} {described[name].get('unreadable') or 'is no dense tensor'}"
    cache = arguments["k_cache"]
    if not isinstance(cache, torch.Tensor) or cache.dim() != 4:
        return "not checked: k_cache has no pages"
    try:
        pgqa.validate_page_table(*[arguments[name] for name in _recording.TABLE], cache.shape[0], cache.shape[1])
    except (ValueError, TypeError) as error:
        return str(error)
    return "valid"


def run(entry: dict[str, Any], arguments: dict[str, Any]) -> tuple[list[torch.Tensor] | None, dict[str, str] | None]:
    """The results of the call, or its error as recordings hold it."""
    try:
        with torch.set_grad_enabled(entry["grad_enabled"]):
            result = FUNCTIONS[entry["function"]](**arguments)
        if any(isinstance(value, torch.Tensor) and value.is_cuda for value in arguments.values()):
            torch.cuda.synchronize()
    except _recording.ERRORS as error:
        return None, {"type": type(error).__name__, "text": str(error)}
    return list(result) if isinstance(result, tuple) else [] if result is None else [result], None


def text_of(results: list[Any] | None, error: dict[str, str] | None) -> str:
    """One line; `results` are tensors or what a file says of some."""
    if error is not None:
        return f"{error['type']}: {error['text']}"
    if results is None:
        return "neither a result nor an error"
    lines = []
    for result in results:
        dtype, shape = (result["dtype"], result["shape"]) if isinstance(result, dict) else (result.dtype, result.shape)
        finite = ""
        if isinstance(result, torch.Tensor):
            finite = ", finite" if bool(torch.isfinite(result).all()) else ", not finite"
        lines.append(f"{str(dtype).removeprefix('torch.')} {list(shape)}{finite}")
    return "; ".join(lines) or "nothing returned"


def matches(entry: dict[str, Any], results: list[torch.Tensor] | None, error: dict[str, str] | None) -> str:
    """Whether this run ended as the recorded one; values are compared where they and all inputs were kept."""
    if error != entry["error"]:
        return "no"
    if results is None or entry["result"] is None:
        return "yes"
    recorded = entry["result"]
    shapes = [(str(one.dtype), list(one.shape)) for one in results]
    if shapes != [(one["dtype"], one["shape"]) for one in recorded]:
        return "no"
    kept = [(one["values"], now.cpu()) for one, now in zip(recorded, results) if one["values"] is not None]
    if not kept:
        return "yes, in shape"
    if all(torch.equal(before, now) for before, now in kept):
        return "yes, every bit"
    return "yes, within 2 %" if all(torch.allclose(b, n, rtol=0.02, atol=0.02) for b, n in kept) else "no: other values"


def print_call(path: str, entry: dict[str, Any], arguments: dict[str, Any]) -> None:
    where = f", on {entry['gpu']}" if entry["gpu"] else ""
    print(f"{path}: pgqa.{entry['function']}, recorded with pgqa {entry['pgqa']}, torch {entry['torch']}{where}")
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            print(f"  {name:<17} {value if isinstance(value, (int, float, str, type(None))) else type(value).__name__}")
            continue
        one = entry["arguments"][name]
        text = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
        if "storage" in one:
            text += f", strides {one['strides']}, offset {one['storage_offset']}"
        print(f"  {name:<17} {text}, {'recorded values' if one['values'] is not None else 'made up'}")


def replay(path: str, device: str | None = None, seed: int = 0) -> int:
    """Runs the call of a file of `pgqa.record` again and prints what happens: 0 works, 1 fails, 2 cannot be replayed."""
    try:
        entry = load(path)
        rebuilt = Rebuilt(entry, device, seed)
        print_call(path, entry, rebuilt.arguments)
        table = verdict_on_table(rebuilt.arguments, entry["arguments"])
        recorded = text_of(entry["result"], entry["error"])
        results, error = run(entry, rebuilt.arguments)
        match = matches(entry, results, error)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as fault:
        print(f"cannot be replayed: {type(fault).__name__}: {fault}", file=sys.stderr)
        return UNREADABLE
    print(f"page table: {table}\nrecorded: {recorded}\nnow: {text_of(results, error)}\nmatches: {match}")
    return FAILS if error is not None else WORKS
