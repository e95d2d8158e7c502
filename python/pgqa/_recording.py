"""Calls kept as files: what each was given, as far as it can be read, and what became of it."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import pathlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pgqa import _pgqa
from pgqa._checks import check_at_least

FORMAT = 1
TABLE = ("page_indptr", "page_indices", "last_page_len")
INPUTS = ("q", "k", "v", "k_cache", "v_cache")
ERRORS = (ValueError, TypeError, RuntimeError)

# What pgqa.decode and pgqa.append_kv call: `record` puts others in place.
decode: Callable[..., Any] = _pgqa.decode
append_kv: Callable[..., Any] = _pgqa.append_kv

_changing = threading.Lock()


def _capturing(arguments: tuple[Any, ...]) -> bool:
    """Whether the current stream of this thread is being captured, on any device that the call concerns."""
    if not torch.cuda.is_initialized():
        return False
    devices = {argument.device for argument in arguments if isinstance(argument, torch.Tensor) and argument.is_cuda}
    for device in devices | {torch.device("cuda", torch.cuda.current_device())}:
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return True
    return False


def _read(tensor: torch.Tensor) -> dict[str, Any]:
    """A copy of the values on the host, or why there is none: an earlier fault of the device, for one."""
    try:
        return {"values": tensor.detach().cpu().contiguous().clone(), "unreadable": None}
    except RuntimeError as error:
        return {"values": None, "unreadable": str(error)}


def _describe_tensor(tensor: torch.Tensor, storages: dict[tuple[str, int], int], read: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "kind": "tensor", "dtype": str(tensor.dtype), "device": str(tensor.device), "shape": list(tensor.shape),
        "layout": str(tensor.layout), "requires_grad": tensor.requires_grad, "values": None, "unreadable": None,
    }  # fmt: skip
    if tensor.layout is not torch.strided:
        return entry
    address = (entry["device"], tensor.untyped_storage().data_ptr())
    entry["strides"] = list(tensor.stride())
    entry["storage_offset"] = tensor.storage_offset()
    entry["storage"] = storages.setdefault(address, len(storages))  # the same number: the same memory
    return {**entry, **_read(tensor)} if read else entry


def _describe_other(value: Any) -> dict[str, Any]:
    """Scalars as plain Python ones; of anything else the name of its type."""
    if value is None or isinstance(value, bool):
        return {"kind": "value", "value": value}
    for plain in (int, float, str):
        if isinstance(value, plain):
            return {"kind": "value", "value": plain(value)}
    for convert in (operator.index, float):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return {"kind": "value", "value": convert(value)}
    return {"kind": "type", "name": type(value).__name__}


class Recorder:
    """What `record` is at work on; `paths`: the files so far, `left_out`: calls of which there is none."""

    def __init__(self, folder: str | os.PathLike[str], every_call: bool, values: bool, max_calls: int) -> None:
        self.folder = pathlib.Path(folder)
        self.every_call = every_call
        self.values = values
        self.max_calls = max_calls
        self.paths: list[pathlib.Path] = []
        self.left_out = 0
        self._begun = 0
        self._lock = threading.Lock()

    def call(self, function: str, names: list[str], native: Callable[..., Any], *arguments: Any) -> Any:
        """`native(*arguments)`, recorded."""
        if _capturing(arguments):
            return native(*arguments)
        # Before the call, which may write what it is given.
        entry = self._try(self._describe, function, names, arguments) if self.every_call else None
        try:
            result = native(*arguments)
        except ERRORS as error:
            if not self.every_call:
                entry = self._try(self._describe, function, names, arguments)
            if entry is not None:
                entry["error"] = {"type": type(error).__name__, "text": str(error)}
                self._try(self._save, entry)
            raise
        if entry is not None:
            entry["result"] = self._try(self._describe_result, result)
            self._try(self._save, entry)
        return result

    def _try(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """A call is never harmed by what goes wrong in recording it."""
        try:
            return step(*arguments)
        except Exception as error:
            warnings.warn(f"pgqa.record: a call is not recorded as asked: {error}", RuntimeWarning, stacklevel=5)
            return None

    def _describe(self, function: str, names: list[str], arguments: tuple[Any, ...]) -> dict[str, Any] | None:
        with self._lock:
            if self._begun >= self.max_calls:
                self.left_out += 1
                return None
            self._begun += 1
        storages: dict[tuple[str, int], int] = {}
        described = {}
        for name, value in zip(names, arguments):
            if isinstance(value, torch.Tensor):
                read = name in TABLE or (self.values and name in INPUTS)
                described[name] = _describe_tensor(value, storages, read)
            else:
                described[name] = _describe_other(value)
        on_gpu = torch.cuda.is_initialized()
        return {
            "format": FORMAT, "function": function, "arguments": described, "error": None, "result": None,
            "grad_enabled": torch.is_grad_enabled(), "pgqa": _pgqa.build_info()["version"],
            "torch": str(torch.__version__), "gpu": torch.cuda.get_device_name() if on_gpu else None,
        }  # fmt: skip

    def _describe_result(self, result: Any) -> list[dict[str, Any]]:
        tensors = result if isinstance(result, tuple) else () if result is None else (result,)
        return [
            {
                "dtype": str(tensor.dtype), "shape": list(tensor.shape),
                **(_read(tensor) if self.values else {"values": None}),
            }
            for tensor in tensors
        ]  # fmt: skip

    def _save(self, entry: dict[str, Any]) -> None:
        with self._lock:
            number = len(self.paths)
            while True:
                path = self.folder / f"{entry['function']}-{os.getpid()}-{number}.pt"
                with contextlib.suppress(FileExistsError), open(path, "xb") as file:
                    torch.save(entry, file)
                    self.paths.append(path)
                    return
                number += 1


@contextlib.contextmanager
def record(
    path: str | os.PathLike[str], *, every_call: bool = False, values: bool = False, max_calls: int = 100
) -> Iterator[Recorder]:
    """While it is open, calls of `pgqa.decode` and `pgqa.append_kv` that raise, in any thread, leave a file each.

    path: a folder, made where it is missing; `python -m pgqa replay FILE` runs a file of it again.
    every_call: also calls that return. values: with the values of q, k, v and the caches, and of the results.
    max_calls: files at most; calls beyond them are only counted.

    A file holds the page table, the error, scalars, and of every tensor dtype, device, shape, strides and storage
    offset: plain tensors, numbers and texts, for `torch.load(weights_only=True)`. Reading a table on a GPU waits for
    the GPU. Calls while the current stream is being captured are left alone: nothing is read. Block tables, plans,
    operators and graphs are not recorded. Where recording fails, a warning says so and the call goes on.

    ValueError or TypeError for a bad argument, OSError where `path` can be no folder, RuntimeError where one is open already.
    """
    global decode, append_kv
    check_at_least("max_calls", max_calls, 1)
    import pgqa

    recorder = Recorder(path, every_call, values, max_calls)
    recorder.folder.mkdir(parents=True, exist_ok=True)

    def recorded(function: str, native: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(getattr(pgqa, function)).parameters)
        return functools.partial(recorder.call, function, names, native)

    with _changing:
        if decode is not _pgqa.decode:
            raise RuntimeError("record: got a second recording, expected one at a time")
        decode, append_kv = recorded("decode", _pgqa.decode), recorded("append_kv", _pgqa.append_kv)
    try:
        yield recorder
    finally:
        with _changing:
            decode, append_kv = _pgqa.decode, _pgqa.append_kv
