"""What a plan of FlashInfer's wrapper says, in pgqa's terms, and the refusal of what pgqa can not honour."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Union

import torch

POS_ENCODING_MODES = {"NONE": 0, "ROPE_LLAMA": 1}
PLAN_NEUTRAL = {
    "window_right": 0, "disable_split_kv": False, "q_len_per_req": 1, "block_tables": None, "seq_lens": None,
    "fixed_split_size": None,
}  # fmt: skip
RUN_NEUTRAL = {"sinks": None, "skip_softmax_threshold_scale_factor": None, "kv_cache_sf": None}

DType = Union[torch.dtype, str]
Table = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # indptr, indices, last_page_len


def refuse(argument: str, got: object, expected: str) -> NoReturn:
    """Raises ValueError in the words of the rest of pgqa. Of a tensor it tells the shape: values are on a device."""
    text = f"a tensor of shape {list(got.shape)}" if isinstance(got, torch.Tensor) else str(got)
    raise ValueError(f"{argument}: got {text}, expected {expected}")


def refuse_others(method: str, arguments: Mapping[str, object], neutral: Mapping[str, object]) -> None:
    """Arguments of FlashInfer's that can be honoured at one value only, `neutral`. TypeError for any further one."""
    for name, value in arguments.items():
        if name not in neutral:
            raise TypeError(f"{method}: got an unexpected argument {name}")
        if isinstance(value, torch.Tensor) or value != neutral[name]:
            refuse(name, value, f"{neutral[name]}: not supported by pgqa")


def one_of(argument: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        refuse(argument, repr(value), " or ".join(map(repr, choices)))


def factor(argument: str, scale: float | None) -> float:
    """1 for None. TypeError for a tensor: its value would have to be read from the device."""
    if scale is None:
        return 1.0
    if isinstance(scale, torch.Tensor):
        raise TypeError(f"{argument}: got a tensor, expected a number or None")
    return float(scale)


def dtype_of(argument: str, dtype: DType) -> torch.dtype:
    """From torch.bfloat16 or "bfloat16"."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return found if isinstance(found, torch.dtype) else refuse(argument, repr(dtype), "a dtype or its name")


def planned_dtype(
    q_data_type: DType | None, data_type: DType | None, others: Mapping[str, DType | None]
) -> torch.dtype:
    """The dtype of q, which is that of the caches and of the output too."""
    dtype = dtype_of("q_data_type", q_data_type or data_type or torch.float16)
    for name, other in {**others, "data_type": data_type}.items():
        if other is not None and dtype_of(name, other) != dtype:
            refuse(name, other, f"that of q, {dtype}")
    return dtype


@dataclass(frozen=True)
class Options:
    """What scores and weights depend on, as pgqa.decode takes it."""

    pos_encoding_mode: int
    window_left: int
    logits_soft_cap: float
    sm_scale: float
    rope_scale: float
    rope_theta: float


def options_of(
    head_dim: int,
    pos_encoding_mode: str,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
) -> Options:
    """FlashInfer's defaults filled in; a soft cap that is not positive is none."""
    one_of("pos_encoding_mode", pos_encoding_mode, tuple(POS_ENCODING_MODES))
    if not isinstance(head_dim, int) or head_dim < 1:
        raise ValueError(f"head_dim: got {head_dim}, expected an int of at least 1")
    return Options(
        pos_encoding_mode=POS_ENCODING_MODES[pos_encoding_mode],
        window_left=window_left,
        logits_soft_cap=max(0.0, logits_soft_cap or 0.0),
        sm_scale=head_dim**-0.5 if sm_scale is None else sm_scale,
        rope_scale=1.0 if rope_scale is None else rope_scale,
        rope_theta=1e4 if rope_theta is None else rope_theta,
    )


@dataclass(frozen=True)
class Plan:
    """What `plan` was told, and the page table that `run` reads."""

    q_shape: tuple[int, int, int]  # batch, query_heads, head_dim
    page_shape: tuple[int, int, int]  # page_size, kv_heads, head_dim
    dtype: torch.dtype
    table: Table
    options: Options


def checked_table(names: tuple[str, str, str], indptr: Any, indices: Any, last_page_len: Any) -> Table:
    """The three as a table: int32, rank 1 and of matching sizes, else TypeError or ValueError. Reads no values."""
    table = indptr, indices, last_page_len
    for name, tensor in zip(names, table):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
        if tensor.dtype != torch.int32:
            refuse(name, tensor.dtype, "torch.int32")
        if tensor.dim() != 1:
            refuse(name, f"shape {list(tensor.shape)}", "rank 1")
    if len(indptr) != len(last_page_len) + 1:
        refuse(names[0], f"{len(indptr)} elements", f"{len(last_page_len) + 1} (batch + 1)")
    return table


def check_not_capturing(device: torch.device, table: Table) -> None:
    """A graph would keep a copy's host address, which nobody keeps alive."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        for name, tensor in zip(("indptr", "indices", "last_page_len"), table):
            if tensor.device != device:
                refuse(name, f"a tensor on {tensor.device}", f"one on {device} while a graph is captured")


def table_on(device: torch.device, table: Table, non_blocking: bool) -> Table:
    """Copies, on the current stream, of what is elsewhere or strided."""
    indptr, indices, last_page_len = (t.to(device, non_blocking=non_blocking).contiguous() for t in table)
    return indptr, indices, last_page_len


class TableBuffers:
    """A caller's tensors that hold the page table of captured calls; their addresses stay."""

    NAMES = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")

    def __init__(self, device: torch.device, indptr: Any, indices: Any, last_page_len: Any) -> None:
        self.table = checked_table(self.NAMES, indptr, indices, last_page_len)
        for name, tensor in zip(self.NAMES, self.table):
            if not tensor.is_contiguous():
                refuse(name, f"stride {tensor.stride(0)}", "a contiguous tensor")
            if tensor.device != device:
                refuse(name, f"a tensor on {tensor.device}", f"one on {device}, as float_workspace_buffer")

    def store(self, table: Table, non_blocking: bool) -> Table:
        """Copies a page table of the same batch, on the current stream."""
        indptr, indices, last_page_len = self.table
        if len(table[2]) != len(last_page_len):
            refuse("last_page_len", f"{len(table[2])} requests", f"{len(last_page_len)}, the size of its buffer")
        if len(table[1]) > len(indices):
            refuse("indices", f"{len(table[1])} elements", f"at most {len(indices)}, the size of its buffer")
        indptr.copy_(table[0], non_blocking=non_blocking)
        indices[: len(table[1])].copy_(table[1], non_blocking=non_blocking)
        last_page_len.copy_(table[2], non_blocking=non_blocking)
        return self.table
