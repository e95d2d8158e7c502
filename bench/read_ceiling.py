"""What the memory gives a case: times of kernels that only read its live tokens, from its own random pages."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch

from gpu_case import CapturedCall, CaseTensors

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "libpgqa_read_ceiling.so"
# Bytes of a bulk copy and CTAs an SM: three stages of a K and a V copy each fill most of the shared memory.
PAGE_SHAPES = ((8192, 4), (8192, 3), (16384, 2))
MAX_CHUNKS_A_STAGE = 32  # one for each lane of the producer warp
ROW_HEAD_DIMS = (64, 96, 128, 256)
_ROW_TILE = 16  # tokens


def find_library(path: str | None) -> Path | None:
    """The library named, or the newest one in a build folder, or None."""
    if path is not None:
        if not Path(path).is_file():
            raise SystemExit(f"--read-ceiling: {path} is no file")
        return Path(path).resolve()
    built = sorted(ROOT.glob(f"build/*/read-ceiling/{LIBRARY}"), key=lambda p: p.stat().st_mtime)
    return built[-1] if built else None


def live_slots(tensors: CaseTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Token slots (page * page_size + offset) that the case reads, in order, and each token's position; on the CPU."""
    case = tensors.case
    slots, positions = [], []
    for r, length in enumerate(case.kv_lens):
        begin = max(0, length - 1 - case.window_left) if case.window_left >= 0 else 0
        position = torch.arange(begin, length)
        pages = tensors.host_indices[int(tensors.host_indptr[r]) + position // case.page_size].long()
        slots.append(pages * case.page_size + position % case.page_size)
        positions.append(position)
    return torch.cat(slots), torch.cat(positions)


def make_chunks(slots: torch.Tensor, positions: torch.Tensor, page_size: int, chunk_tokens: int) -> torch.Tensor:
    """int32 [chunks, 2]: first slot and tokens of runs that stay in one page and hold at most chunk_tokens tokens."""
    offset = positions % page_size
    starts = offset % chunk_tokens == 0
    starts[0] = True
    starts[1:] |= positions[1:] != positions[:-1] + 1
    first = starts.nonzero().flatten()
    ends = torch.cat((first[1:], torch.tensor([len(slots)])))
    return torch.stack((slots[first], ends - first), dim=1).to(torch.int32)


def tile_slots(slots: torch.Tensor) -> torch.Tensor:
    """int32 [tiles * 16]: the slots, padded with -1 to whole tiles."""
    padding = -len(slots) % _ROW_TILE
    return torch.cat((slots, torch.full((padding,), -1))).to(torch.int32)


@dataclass
class ReadKernel:
    """A kernel that reads the case once; run(sums) launches it, with a buffer for its checksum or without."""

    name: str
    run: Callable[[torch.Tensor | None], None]


class ReadCeiling:
    """The read-only kernels of the library."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        pointer, integer = ctypes.c_void_p, ctypes.c_int32
        self._library.pgqa_read_pages.argtypes = [pointer] * 3 + [integer] * 5 + [pointer] * 2
        self._library.pgqa_read_rows.argtypes = [pointer] * 3 + [integer] * 3 + [pointer] * 2
        self._library.pgqa_read_error_text.argtypes = [integer]
        self._library.pgqa_read_error_text.restype = ctypes.c_char_p
        self._sums = torch.empty(self._library.pgqa_read_num_sums(), dtype=torch.int32, device="cuda")

    def kernels(self, tensors: CaseTensors) -> list[ReadKernel]:
        """Every kernel that takes the case, its checksum verified."""
        case = tensors.case
        slots, positions = live_slots(tensors)
        if len(slots) == 0:
            return []
        token_bytes = case.kv_heads * case.head_dim * 2
        kernels = []
        for chunk_bytes, ctas_an_sm in PAGE_SHAPES:
            chunk_tokens = max(1, min(case.page_size, chunk_bytes // token_bytes))
            chunks = make_chunks(slots, positions, case.page_size, chunk_tokens).cuda()
            a_stage = max(1, min(MAX_CHUNKS_A_STAGE, chunk_bytes // (chunk_tokens * token_bytes)))
            kernels.append(self._pages(tensors, chunks, chunk_tokens * token_bytes, a_stage, ctas_an_sm))
        if case.head_dim in ROW_HEAD_DIMS:
            kernels.append(self._rows(tensors, tile_slots(slots).cuda()))
        expected = self._expected_sum(tensors, slots)
        for kernel in kernels:
            self._verify(kernel, expected)
        return kernels

    def _pages(
        self, tensors: CaseTensors, chunks: torch.Tensor, chunk_bytes: int, a_stage: int, ctas_an_sm: int
    ) -> ReadKernel:
        token_bytes = tensors.case.kv_heads * tensors.case.head_dim * 2

        def run(sums: torch.Tensor | None) -> None:
            self._check(
                self._library.pgqa_read_pages(
                    tensors.k_cache.data_ptr(), tensors.v_cache.data_ptr(), chunks.data_ptr(), len(chunks),
                    token_bytes, chunk_bytes, a_stage, ctas_an_sm, None if sums is None else sums.data_ptr(),
                    torch.cuda.current_stream().cuda_stream,
                )
            )  # fmt: skip

        return ReadKernel(f"pages, {a_stage} x {chunk_bytes} B, {ctas_an_sm} CTAs an SM", run)

    def _rows(self, tensors: CaseTensors, slots: torch.Tensor) -> ReadKernel:
        case = tensors.case

        def run(sums: torch.Tensor | None) -> None:
            self._check(
                self._library.pgqa_read_rows(
                    tensors.k_cache.data_ptr(), tensors.v_cache.data_ptr(), slots.data_ptr(), len(slots) // _ROW_TILE,
                    case.kv_heads, case.head_dim * 2, None if sums is None else sums.data_ptr(),
                    torch.cuda.current_stream().cuda_stream,
                )
            )  # fmt: skip

        return ReadKernel("rows", run)

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(f"read ceiling: {self._library.pgqa_read_error_text(status).decode()}")

    def _expected_sum(self, tensors: CaseTensors, slots: torch.Tensor) -> int:
        """Sum of the live 32-bit words of K and V, modulo 2^32."""
        total = 0
        index = slots.cuda()
        for cache in (tensors.k_cache, tensors.v_cache):
            words = cache.view(-1, tensors.case.kv_heads * tensors.case.head_dim).view(torch.int32)
            for part in index.split(1 << 16):
                total += int(words[part].sum(dtype=torch.int64))
        return total % 2**32

    def _verify(self, kernel: ReadKernel, expected: int) -> None:
        self._sums.zero_()
        kernel.run(self._sums)
        found = int(self._sums.sum(dtype=torch.int64)) % 2**32
        if found != expected:
            raise RuntimeError(f"read ceiling: kernel '{kernel.name}' has read {found:#x}, expected {expected:#x}")


def capture(kernel: ReadKernel) -> CapturedCall:
    """The kernel in a graph, without its checksum's stores."""
    return CapturedCall(lambda: kernel.run(None))
