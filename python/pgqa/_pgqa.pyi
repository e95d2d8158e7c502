# Types of the compiled module; what pgqa/__init__.py and pgqa/graph.py wrap is documented there.
# SPDX-License-Identifier: Apache-2.0

from collections.abc import Sequence
from typing import Any, Final, TypedDict

import torch

class BuildInfo(TypedDict):
    version: str
    cuda: bool
    cuda_architectures: str
    torch: str

class Piece(TypedDict):
    """A worker's run of tiles of one request; slot -1: the piece is the whole request."""

    request: int
    head_group: int
    first_tile: int
    num_tiles: int
    request_tiles: int
    slot: int

class WorkspaceUsage(TypedDict, total=False):
    """What the library holds for eager calls; empty without CUDA."""

    workspaces: int
    bytes: int

class Schedule:
    """The work partition of one page table; str() prints it."""

    @property
    def batch(self) -> int: ...
    @property
    def num_workers(self) -> int: ...
    @property
    def num_pieces(self) -> int: ...
    @property
    def num_workers_with_partials(self) -> int: ...
    @property
    def heads_per_worker(self) -> int: ...
    @property
    def tile_tokens(self) -> int: ...
    @property
    def segment_tokens(self) -> int:
        """With batch_invariant, tokens of a piece, its request's last one aside; else 0."""

    @property
    def active_workers_per_axis(self) -> int: ...
    def pieces(self, worker: int) -> list[Piece]:
        """The worker's pieces in order. IndexError outside [0, num_workers)."""

class PlannedCall:
    """A call of a planned step, its tensors checked and bound."""

    def run(self) -> Any:
        """Computes it on the current stream; returns out, or (out, lse), the same tensors every time."""

class Plan(PlannedCall):
    """The calls of a decode step, planned once a step for all layers that share the page table and the window."""

    def __init__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_indptr: torch.Tensor,
        page_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        sm_scale: float | None = None,
        *,
        window_left: int = -1,
        logits_soft_cap: float = 0.0,
        pos_encoding_mode: int = 0,
        rope_scale: float = 1.0,
        rope_theta: float = 10000.0,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> None: ...
    def plan(self) -> None:
        """Plans the step from the table as it stands; after every change of it, before the next run() of any call."""

    def bind(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        sm_scale: float | None = None,
        *,
        logits_soft_cap: float = 0.0,
        rope_scale: float = 1.0,
        rope_theta: float = 10000.0,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> PlannedCall: ...

class DecodeGraph:
    """What pgqa.DecodeGraph is made of; only where the module was built with CUDA.

    Not for several threads at a time.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor | Sequence[torch.Tensor] | None],
        *,
        num_query_heads: int,
        max_batch: int,
        max_pages: int | None,
        max_columns: int | None,
        new_tokens: int,
        sm_scale: float | None,
        window_left: list[int],
        logits_soft_cap: float,
        pos_encoding_mode: int,
        rope_scale: float,
        rope_theta: float,
        return_lse: bool,
        append: bool,
        rotate_appended: bool,
        live_batch: bool,
        dependent_launch: bool,
        batch_invariant: bool = False,
    ) -> None: ...
    def replay(self, live_batch: int | None = None, *, num_pages: int | None = None) -> None:
        """Launches the step on the current stream; does not synchronise.

        live_batch: requests from there on are empty, from this replay on; None: as told last, at first
        max_batch. num_pages: refused above max_pages, or max_columns. While the current stream is being captured,
        the launches are recorded there; the graph's tensors must then outlive that capture's graph.

        ValueError, before anything is launched, for numbers above the capacity, or a live batch where the graph
        takes none; RuntimeError where the memory of a tensor was freed or replaced.
        """

    def _rebind(self, tensors: dict[str, torch.Tensor | Sequence[torch.Tensor] | None]) -> None: ...
    # Of the table, None where it is of the other kind.
    page_indptr: Final[torch.Tensor]
    page_indices: Final[torch.Tensor]
    last_page_len: Final[torch.Tensor]
    block_table: Final[torch.Tensor]
    seq_lens: Final[torch.Tensor]
    max_columns: Final[int | None]
    @property
    def q(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def k_cache(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def v_cache(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def out(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def lse(self) -> tuple[torch.Tensor, ...]:
        """Empty without return_lse."""

    @property
    def k(self) -> tuple[torch.Tensor, ...]:
        """Empty without append."""

    @property
    def v(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def max_batch(self) -> int: ...
    @property
    def max_pages(self) -> int: ...
    @property
    def live_batch(self) -> int:
        """As told last."""

    @property
    def device_bytes(self) -> int:
        """Memory that the graph has allocated: tensors and workspace."""

    @property
    def node_types(self) -> list[str]:
        """Of the captured nodes, in order; "kernel" each."""

    @property
    def executable(self) -> int:
        """The cudaGraphExec_t, the same for every replay."""

def build_info() -> BuildInfo: ...
def decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_indptr: torch.Tensor,
    page_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    sm_scale: float | None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    pos_encoding_mode: int = 0,
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    workspace: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def decode_block_table(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float | None,
    new_tokens: int = 0,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    pos_encoding_mode: int = 0,
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_indptr: torch.Tensor,
    page_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    q: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    pos_encoding_mode: int = 0,
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
) -> torch.Tensor | None: ...
def append_kv_block_table(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    new_tokens: int = 0,
    q: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    pos_encoding_mode: int = 0,
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
) -> torch.Tensor | None: ...
def check_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_indptr: torch.Tensor,
    page_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    pos_encoding_mode: int = 0,
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
) -> list[str]: ...
def schedule(
    page_indptr: torch.Tensor,
    last_page_len: torch.Tensor,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype | str = "bfloat16",
    window_left: int = -1,
    pos_encoding_mode: int = 0,
    num_sms: int = 132,
    device: int | str | None = None,
    batch_invariant: bool = False,
) -> Schedule:
    """The partition of this page table: for `device`, a CUDA device's number or "cpu"; by default
    for an H200 with `num_sms` SMs.

    Copies device tensors to the host, which waits for the device.
    """

def schedule_block_table(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    new_tokens: int = 0,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype | str = "bfloat16",
    window_left: int = -1,
    pos_encoding_mode: int = 0,
    num_sms: int = 132,
    device: int | str | None = None,
    batch_invariant: bool = False,
) -> Schedule:
    """`schedule` of a block table, of which only the shape is read."""

def supports_shape(
    *,
    device: str = "cuda",
    dtype: torch.dtype | str = "bfloat16",
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    sm_scale: float = 1.0,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    pos_encoding_mode: int = 0,
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
) -> list[str]:
    """Why calls of this shape are refused on `device`, "cuda" or "cpu"; empty: they are taken."""

def workspace_bytes(
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    dtype: torch.dtype | str = "bfloat16",
    pos_encoding_mode: int = 0,
    device: int | str | None = None,
    batch_invariant: bool = False,
    batch: int | None = None,
    num_indices: int | None = None,
) -> int:
    """Bytes of a caller's workspace on CUDA device `device`, whatever the batch; None: an H200.

    With batch_invariant, for page tables of at most `batch` requests and `num_indices` elements of
    page_indices, which must be given then.
    """

def validate_page_table(
    page_indptr: torch.Tensor,
    page_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_pages: int,
    page_size: int,
) -> None:
    """Raises ValueError that names the first fault and its request.

    Copies device tensors to the host, which waits for the device.
    """

def validate_block_table(
    block_table: torch.Tensor, seq_lens: torch.Tensor, num_pages: int, page_size: int, *, new_tokens: int = 0
) -> None:
    """`validate_page_table` of a block table: lengths beyond its columns, and the pages that hold tokens."""

def workspace_usage() -> WorkspaceUsage: ...
def graph_capacity(max_batch: int, max_pages: int, live_batch: int, num_pages: int) -> tuple[int, int]:
    """Batch and page entries of the graph that serves such a step: rounded up to powers of two, at most the first two.

    ValueError where the step exceeds them.
    """

def register_ops() -> None:
    """Defines the operators of pgqa.ops, once a process."""
