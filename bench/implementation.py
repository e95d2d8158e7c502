"""Finds the built module and gives its entry points as calls on a case."""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Callable

import torch

from gpu_case import CaseTensors

ROOT = Path(__file__).resolve().parent.parent


def load_module(folder: str | None) -> ModuleType:
    """The module `_pgqa` of a folder, or else the one that the build has placed in python/pgqa."""
    where = Path(folder).resolve() if folder is not None else ROOT / "python" / "pgqa"
    sys.path[:0] = [str(where), str(ROOT / "python")]
    module = importlib.import_module("_pgqa")
    sys.modules["pgqa._pgqa"] = module
    return module


def module_call(
    module: ModuleType, tensors: CaseTensors, batch_invariant: bool = False
) -> Callable[[], torch.Tensor]:
    """A call of _pgqa.decode on a case."""
    decode, arguments = module.decode, (*tensors.arguments(), None, False, None)
    mode = {"batch_invariant": True} if batch_invariant else {}
    return lambda: decode(*arguments, **mode)


def package_call(tensors: CaseTensors) -> Callable[[], torch.Tensor]:
    """A call of pgqa.decode on a case; needs load_module() before."""
    decode = importlib.import_module("pgqa").decode
    scale, window_left, soft_cap, pos_encoding_mode, rope_scale, rope_theta = tensors.options()
    inputs = tensors.arguments()[:6]
    return lambda: decode(
        *inputs, scale, window_left=window_left, logits_soft_cap=soft_cap, pos_encoding_mode=pos_encoding_mode,
        rope_scale=rope_scale, rope_theta=rope_theta,
    )  # fmt: skip


def op_call(tensors: CaseTensors) -> Callable[[], torch.Tensor]:
    """A call of torch.ops.pgqa.decode on a case; needs load_module() before."""
    importlib.import_module("pgqa")
    decode, arguments = torch.ops.pgqa.decode.default, tensors.arguments()
    return lambda: decode(*arguments)


def op_out_call(tensors: CaseTensors) -> Callable[[], None]:
    """A call of torch.ops.pgqa.decode_out on a case; needs load_module() before."""
    importlib.import_module("pgqa")
    decode_out, inputs = torch.ops.pgqa.decode_out.default, tensors.arguments()
    arguments = (*inputs[:7], torch.empty_like(tensors.q), None, *inputs[7:])
    return lambda: decode_out(*arguments)


def graph_replay(tensors: CaseTensors) -> Callable[[], None]:
    """A replay of a pgqa.DecodeGraph over a case; needs load_module() before."""
    return _decode_graph(tensors).replay


def graph_replay_live(tensors: CaseTensors) -> Callable[[], None]:
    """The same, each told of another live batch than the one before."""
    graph = _decode_graph(tensors)
    replay, most = graph.replay, graph.max_batch
    turn = itertools.cycle((most - 1, most))
    return lambda: replay(next(turn))


def _decode_graph(tensors: CaseTensors) -> object:
    scale, window_left, soft_cap, pos_encoding_mode, rope_scale, rope_theta = tensors.options()
    q, k_cache, v_cache, page_indptr, page_indices, last_page_len = tensors.arguments()[:6]
    return importlib.import_module("pgqa").DecodeGraph(
        k_cache, v_cache, q=q, page_indptr=page_indptr, page_indices=page_indices, last_page_len=last_page_len,
        sm_scale=scale, window_left=window_left, logits_soft_cap=soft_cap, pos_encoding_mode=pos_encoding_mode,
        rope_scale=rope_scale, rope_theta=rope_theta,
    )  # fmt: skip


def solver_call(tensors: CaseTensors) -> Callable[[], torch.Tensor]:
    """A call of the evaluation's entry point on a case; needs load_module() before."""
    spec = importlib.util.spec_from_file_location("solver", ROOT / "methods" / "main" / "solver.py")
    solver = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(solver)
    entry, arguments = solver.paged_gqa_decode, tensors.arguments()
    return lambda: entry(*arguments)
