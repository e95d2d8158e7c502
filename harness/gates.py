"""Gates on one call: structure, finite values, accuracy, untouched inputs, no shared memory, nothing patched."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import builtins
import gc
import math
import os
import statistics
import sys
import time
from typing import Any, Iterable

import torch

from harness.inputs import Inputs
from protocol import Accuracy, compare


def structure(out: Any, inputs: Inputs) -> list[str]:
    """Faults of type, shape, dtype, device and layout."""
    if type(out) is not torch.Tensor:
        return [f"structure: returned {type(out).__name__}, expected torch.Tensor"]
    q = inputs.q
    for what, got, expected in (
        ("shape", tuple(out.shape), tuple(q.shape)),
        ("dtype", out.dtype, q.dtype),
        ("device", out.device, q.device),
        ("layout", out.layout, q.layout),
        ("is_contiguous", out.is_contiguous(), True),
        ("requires_grad", out.requires_grad, False),
    ):
        if got != expected:
            return [f"structure: {what} is {got}, expected {expected}"]
    return []


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def alias(out: torch.Tensor, inputs: Inputs, earlier: Iterable[torch.Tensor]) -> list[str]:
    """Faults of memory shared with an input or with an earlier output that is still held."""
    begin, end = _span(out)
    others = [*inputs.tensors().items(), *(("an earlier output", tensor) for tensor in earlier)]
    for name, tensor in others:
        other_begin, other_end = _span(tensor)
        if begin < other_end and other_begin < end:
            return [f"alias: the output shares memory with {name}"]
    return []


def accuracy(out: torch.Tensor, expected: torch.Tensor, poison: str) -> tuple[Accuracy, list[str]]:
    """Faults of values that are not finite or too far from the reference."""
    num_bad = int((~torch.isfinite(out)).sum())
    if num_bad:
        text = f"finite: {num_bad} of {out.numel()} values are not finite (what is not live holds {poison} values)"
        return Accuracy(float("inf"), text), [text]
    result = compare(out, expected)
    return result, [f"accuracy: {result.fault}"] if result.fault else []


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


class InputCopies:
    """Copies of the inputs, to be compared bit by bit after a call."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._addresses = {name: tensor.data_ptr() for name, tensor in inputs.tensors().items()}
        self._shapes = {name: (tensor.shape, tensor.stride()) for name, tensor in inputs.tensors().items()}
        self._copies = {name: _bits(tensor).clone() for name, tensor in inputs.tensors().items()}

    def faults(self) -> list[str]:
        for name, tensor in self._inputs.tensors().items():
            if tensor.data_ptr() != self._addresses[name] or (tensor.shape, tensor.stride()) != self._shapes[name]:
                return [f"input immutability: {name} was given other memory or another shape"]
            if not torch.equal(_bits(tensor), self._copies[name]):
                return [f"input immutability: {name} was changed"]
        return []


class PatchWatch:
    """Remembers the functions that timing and judging rest on; `faults` names those that were replaced since."""

    _REPLACED_BY_TORCH_ITSELF = frozenset(("manual_seed",))  # when torch.compile is first used
    _NAMES = {
        time: "monotonic monotonic_ns perf_counter perf_counter_ns process_time time time_ns sleep",
        gc: "collect disable enable",
        os: "write read close",
        math: "ceil exp isfinite log",
        statistics: "median quantiles geometric_mean",
        builtins: "abs all any float getattr int isinstance len max min sum tuple type zip __import__",
    }

    def __init__(self) -> None:
        watched = [(owner, name) for owner, names in self._NAMES.items() for name in names.split()]
        for owner in (torch.Tensor, torch.cuda.Event, torch.cuda.Stream):
            watched += [(owner, name) for name in dir(owner) if callable(getattr(owner, name, None))]
        watched += [(torch._C, name) for name in dir(torch._C) if name.startswith("_cuda")]
        own = [m for name, m in sys.modules.items() if name == "protocol" or name.split(".")[0] == "harness"]
        for module in (torch, torch.cuda, *own):
            watched += [(module, name) for name, value in vars(module).items() if callable(value)]
        self._known = [
            (owner, name, getattr(owner, name))
            for owner, name in watched
            if hasattr(owner, name) and name not in self._REPLACED_BY_TORCH_ITSELF
        ]

    def faults(self) -> list[str]:
        for owner, name, value in self._known:
            now = getattr(owner, name, None)
            if now is not value and now != value:
                label = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
                return [f"timing integrity: {label}.{name} was replaced"]
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            return ["timing integrity: a mode that redefines torch functions was left active"]
        return []
