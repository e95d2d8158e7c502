"""Other implementations of paged decode attention, where installed: planned calls on the same tensors.

FlashInfer's kernels come from its package, FlashAttention-3 from the library in vLLM's wheel. A folder given by
--peers-site is looked in first: flashinfer/ with precompiled modules, and vllm_fa3/ with the library alone.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import torch

from gpu_case import CaseTensors
from harness.spec import Case

ABOUT = {
    "fi_tc": "FlashInfer, decode wrapper on tensor cores (backend fa2), planned for these lengths",
    "fi_tc_cg": "the same, planned as for a captured graph",
    "fi_cc": "FlashInfer, decode wrapper on CUDA cores",
    "fi_cc_cg": "the same, planned as for a captured graph",
    "fi_persist": "FlashInfer, BatchAttention (persistent kernel)",
    "fi_xqa": "FlashInfer, xqa_batch_decode_with_kv_cache",
    "fi_cudnn": "FlashInfer, decode wrapper with backend cudnn",
    "fa3": "FlashAttention-3 of vLLM's wheel, scheduler metadata computed before",
    "fa3_cg": "the same with 32 splits, as for a captured graph",
}
_WORKSPACE_BYTES = 768 << 20
_FA3_LIBRARY = "_vllm_fa3_C.abi3.so"


@dataclass
class PeerCall:
    """A planned call; plan() plans it anew and is None where nothing is planned."""

    call: Callable[[], torch.Tensor]
    plan: Callable[[], None] | None


def use_site(folder: str | None) -> None:
    """Makes the peers of a folder visible; to be called before anything of theirs is imported."""
    if folder is None:
        return
    site = Path(folder).resolve()
    if not site.is_dir():
        raise SystemExit(f"--peers-site: {site} is no folder")
    sys.path.insert(0, str(site))
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(site / "ws"))
    os.environ.setdefault("FLASHINFER_DISABLE_JIT", "1")


def unsupported(name: str, case: Case) -> str | None:
    """Why a peer can not take a case, as far as it is known without trying."""
    group = case.query_heads // case.kv_heads
    if case.pos_encoding_mode and not name.startswith(("fi_tc", "fi_cc")):
        return "no RoPE on cached keys"
    if min(case.kv_lens) == 0:
        return "not tried with empty requests"
    if name.startswith("fi_cc") and group not in (1, 2, 3, 4, 6, 8, 16):
        return f"no group of {group}"
    if name.startswith("fi_tc") and case.head_dim == 96:
        return "head_dim 96: illegal memory access"
    if name == "fi_persist" and (case.window_left >= 0 or case.head_dim == 96):
        return "no window, no head_dim 96"
    if name in ("fi_xqa", "fi_cudnn") and case.logits_soft_cap > 0:
        return "no soft cap"
    if name == "fi_xqa" and case.page_size not in (16, 32, 64, 128):
        return f"no page size {case.page_size}"
    return None


@functools.cache
def _workspace(family: str) -> torch.Tensor:
    """Zeroed once: what needs zeros leaves zeros behind."""
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _kv_lens(tensors: CaseTensors) -> torch.Tensor:
    return torch.tensor(tensors.case.kv_lens, dtype=torch.int32)


def _block_table(tensors: CaseTensors) -> torch.Tensor:
    """int32 [batch, most pages of a request], padded with page 0."""
    counts = tensors.host_indptr.diff()
    table = torch.zeros(tensors.case.batch, int(counts.max()), dtype=torch.int32)
    table[torch.arange(table.shape[1]) < counts[:, None]] = tensors.host_indices
    return table.cuda()


def _wrapper(tensors: CaseTensors, tensor_cores: bool, backend: str, for_graph: bool) -> PeerCall:
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    case = tensors.case
    fixed: dict[str, Any] = {}
    if for_graph:
        fixed = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": tensors.page_indptr.clone(),
            "paged_kv_indices_buffer": tensors.page_indices.clone(),
            "paged_kv_last_page_len_buffer": tensors.last_page_len.clone(),
        }
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        _workspace("wrapper"), "NHD", use_tensor_cores=tensor_cores, backend=backend, **fixed
    )

    def plan() -> None:
        wrapper.plan(
            tensors.host_indptr, tensors.page_indices, tensors.host_last,
            case.query_heads, case.kv_heads, case.head_dim, case.page_size,
            pos_encoding_mode="ROPE_LLAMA" if case.pos_encoding_mode else "NONE", window_left=case.window_left,
            logits_soft_cap=case.logits_soft_cap, sm_scale=case.scale, rope_scale=case.rope_scale,
            rope_theta=case.rope_theta, q_data_type=tensors.q.dtype, kv_data_type=tensors.k_cache.dtype,
        )  # fmt: skip

    return PeerCall(lambda: wrapper.run(tensors.q, (tensors.k_cache, tensors.v_cache)), plan)


def _persistent(tensors: CaseTensors) -> PeerCall:
    from flashinfer.attention import BatchAttention

    case, dtype = tensors.case, tensors.q.dtype
    attention = BatchAttention("NHD", device="cuda")
    attention.float_workspace_buffer = _workspace("wrapper")  # its own is too small for 16 KV heads
    query_indptr, kv_lens = torch.arange(case.batch + 1, dtype=torch.int32), _kv_lens(tensors)

    def plan() -> None:
        attention.plan(
            query_indptr, tensors.host_indptr, tensors.page_indices, kv_lens, case.query_heads, case.kv_heads,
            case.head_dim, case.head_dim, case.page_size, False, case.scale, case.logits_soft_cap, dtype, dtype,
        )  # fmt: skip

    def call() -> torch.Tensor:
        return attention.run(
            tensors.q, (tensors.k_cache, tensors.v_cache), logits_soft_cap=case.logits_soft_cap
        )[0]  # fmt: skip

    return PeerCall(call, plan)


def _xqa(tensors: CaseTensors) -> PeerCall:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    case, workspace, table = tensors.case, _workspace("xqa"), _block_table(tensors)
    kv_lens = _kv_lens(tensors).cuda().to(torch.uint32)

    def call() -> torch.Tensor:
        return xqa_batch_decode_with_kv_cache(
            tensors.q, (tensors.k_cache, tensors.v_cache), workspace, table, kv_lens, max(case.kv_lens), case.scale,
            1.0, case.window_left, kv_layout="NHD",
        )  # fmt: skip

    return PeerCall(call, None)


@functools.cache
def _fa3_operators() -> Any:
    found: list[Path] = []
    for package, folder in (("vllm_fa3", ""), ("vllm", "vllm_flash_attn")):
        spec = importlib.util.find_spec(package)
        if spec is not None:
            found += [Path(root) / folder / _FA3_LIBRARY for root in spec.submodule_search_locations or ()]
    library = next((path for path in found if path.exists()), None)
    if library is None:
        raise ImportError(f"no {_FA3_LIBRARY}")
    torch.ops.load_library(str(library))
    return torch.ops._vllm_fa3_C


def _fa3(tensors: CaseTensors, num_splits: int) -> PeerCall:
    operators, case, table = _fa3_operators(), tensors.case, _block_table(tensors)
    kv_lens = _kv_lens(tensors).cuda()
    query_indptr = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda")
    longest, dtype = max(case.kv_lens), tensors.q.dtype
    mask = (True, case.window_left, 0) if case.window_left >= 0 else (False, -1, -1)  # causal, left, right
    state: dict[str, torch.Tensor] = {}

    def plan() -> None:
        state["metadata"] = operators.get_scheduler_metadata(
            case.batch, 1, longest, case.query_heads, case.kv_heads, case.head_dim, case.head_dim, dtype, kv_lens,
            query_indptr, None, None, None, None, case.page_size, 0, *mask, case.logits_soft_cap > 0, num_splits,
            None, 0,
        )  # fmt: skip

    def call() -> torch.Tensor:
        return operators.fwd(
            tensors.q, tensors.k_cache, tensors.v_cache, None, None, None, None, query_indptr, None, None, None,
            kv_lens, 1, longest, table, None, None, None, None, None, None, None, None, case.scale, *mask,
            case.logits_soft_cap, True, state["metadata"], num_splits, None, 0, None, 1, 0, None,
        )[0]  # fmt: skip

    return PeerCall(call, plan)


_BUILDERS: dict[str, Callable[[CaseTensors], PeerCall]] = {
    "fi_tc": lambda x: _wrapper(x, True, "fa2", False),
    "fi_tc_cg": lambda x: _wrapper(x, True, "fa2", True),
    "fi_cc": lambda x: _wrapper(x, False, "fa2", False),
    "fi_cc_cg": lambda x: _wrapper(x, False, "fa2", True),
    "fi_persist": _persistent,
    "fi_xqa": _xqa,
    "fi_cudnn": lambda x: _wrapper(x, False, "cudnn", False),
    "fa3": lambda x: _fa3(x, 0),
    "fa3_cg": lambda x: _fa3(x, 32),
}


def build(name: str, tensors: CaseTensors) -> PeerCall:
    """A planned call of one peer; raises whatever the peer raises where it is absent or refuses the case."""
    peer = _BUILDERS[name](tensors)
    if peer.plan is not None:
        peer.plan()
    return peer


def reason(error: BaseException) -> str:
    """An exception as one line without the peer's folders."""
    text = re.sub(r"\S*/(flashinfer|vllm)/", r"\1/", f"{type(error).__name__}: {error}")
    return re.sub(r"\s+", " ", text)[:200]
