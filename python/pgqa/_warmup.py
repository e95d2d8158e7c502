"""First calls made early: what a shape's first call loads and allocates is there before the first real one."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn

import torch

from pgqa import _pgqa
from pgqa._checks import check_int


@dataclass(frozen=True)
class WarmupShape:
    """What of a decode call decides which kernel runs it; the field names and defaults are those of pgqa.

    batch: requests. max_pages: elements of page_indices; only tables of some millions of entries run another kernel.
    """

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int = 1
    page_size: int = 16
    dtype: torch.dtype | str = "bfloat16"
    pos_encoding_mode: int = 0
    max_pages: int = 1


DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
REQUIRED = ("num_query_heads", "num_kv_heads", "head_dim")


def _refuse(index: int, fault: str) -> NoReturn:
    raise ValueError(f"shapes[{index}].{fault}")


def _read(index: int, given: WarmupShape | Mapping[str, Any]) -> WarmupShape:
    """A description as a WarmupShape with whole numbers and a torch.dtype; TypeError and ValueError name the field."""
    if not isinstance(given, (WarmupShape, Mapping)):
        raise TypeError(f"shapes[{index}]: got {type(given).__name__}, expected a dict or pgqa.WarmupShape")
    values = asdict(given) if isinstance(given, WarmupShape) else dict(given)
    names = [field.name for field in fields(WarmupShape)]
    for name in values:
        if name not in names:
            _refuse(index, f"{name}: got a field of this name, expected {', '.join(names)}")
    for name in REQUIRED:
        if name not in values:
            _refuse(index, f"{name}: got none, expected a number")
    dtype = str(values.pop("dtype", WarmupShape.dtype)).removeprefix("torch.")
    if dtype not in DTYPES:
        _refuse(index, f"dtype: got {dtype}, expected {', '.join(DTYPES)}")
    for name, value in values.items():
        check_int(f"shapes[{index}].{name}", value)
        if name in ("batch", "max_pages") and not 0 <= value < 2**31:
            _refuse(index, f"{name}: got {value}, expected 0 to 2147483647")
        if not -(2**31) <= value < 2**31:
            _refuse(index, f"{name}: got {value}, expected a 32-bit integer")
    return WarmupShape(dtype=DTYPES[dtype], **values)


def _check(index: int, shape: WarmupShape, device: torch.device) -> None:
    values = {name: value for name, value in asdict(shape).items() if name not in ("batch", "max_pages")}
    faults = _pgqa.supports_shape(device=device.type, **values)
    if faults:
        _refuse(index, faults[0])


def _run_empty(shape: WarmupShape, device: torch.device) -> None:
    """Appends and decodes for requests without pages: writes zeros to a fresh output, reads no cache."""

    def empty(*sizes: int, dtype: Any = shape.dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=device)

    q = empty(shape.batch, shape.num_query_heads, shape.head_dim)
    k = empty(shape.batch, shape.num_kv_heads, shape.head_dim)
    k_cache, v_cache = empty(2, 1, shape.page_size, shape.num_kv_heads, shape.head_dim)
    indptr = torch.zeros(shape.batch + 1, dtype=torch.int32, device=device)
    table = (indptr, empty(shape.max_pages, dtype=torch.int32), indptr[1:])
    _pgqa.append_kv(k, k, k_cache, v_cache, *table)
    if shape.head_dim % 2 == 0:  # for caches of turned keys, which are decoded without RoPE
        _pgqa.append_kv(k, k, k_cache, v_cache, *table, pos_encoding_mode=1)
    _pgqa.decode(q, k_cache, v_cache, *table, None, pos_encoding_mode=shape.pos_encoding_mode)


def _device(device: torch.device | int | str | None) -> torch.device:
    with_cuda = _pgqa.build_info()["cuda"]
    if device is None:
        return torch.device("cuda" if with_cuda and torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device: got {device}, expected cuda or cpu") from None
    if where.type == "cuda" and with_cuda and (where.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: got {where}, expected one of {torch.cuda.device_count()} visible CUDA devices")
    if where.type == "cpu" or where.type == "cuda" and with_cuda:
        return where
    raise ValueError(f"device: got {where}, expected {'cuda or cpu' if with_cuda else 'cpu: built without CUDA'}")


def warmup(
    shapes: Iterable[WarmupShape | Mapping[str, Any]], *, device: torch.device | int | str | None = None
) -> None:
    """Makes the first real `decode` and `append_kv` of each shape cost what later ones cost.

    shapes: `pgqa.WarmupShape` objects or dicts with its fields: batch, num_query_heads, num_kv_heads, head_dim,
    page_size, dtype, pos_encoding_mode, max_pages. device: where the calls will be made; None: the current CUDA
    device where there is one and pgqa was built with CUDA, else the CPU.

    Each shape is run once on the current stream of the device for a batch without pages, whose output, zeros, is
    dropped: that makes its plan, loads its kernels and allocates the workspace of this stream. Call it on every
    stream that will decode, before graphs are captured. Launches are not waited for; loading and allocating may wait
    for the device. On the CPU there is little to save: its threads are started anew by every call.

    ValueError or TypeError name the shape and its field; only a batch that is too large for the GPU is found after the
    shapes before it have run. RuntimeError while the current stream is being captured, and when CUDA fails.
    """
    if isinstance(shapes, (WarmupShape, Mapping, str)) or not isinstance(shapes, Iterable):
        raise TypeError(f"shapes: got {type(shapes).__name__}, expected a sequence of dicts or pgqa.WarmupShape")
    where = _device(device)
    read = [_read(index, shape) for index, shape in enumerate(shapes)]
    for index, shape in enumerate(read):
        _check(index, shape, where)
    with torch.cuda.device(where) if where.type == "cuda" else nullcontext():
        if where.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("stream: got one that is being captured, expected one that is not: warm up before")
        for index, shape in enumerate(read):
            try:
                _run_empty(shape, where)
            except ValueError as error:
                _refuse(index, str(error))
