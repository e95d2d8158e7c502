"""Operators of torch, for torch.compile and callers in C++: torch.ops.pgqa.decode and its kin, and append_kv.

The first six arguments of those that decode are the tensors of `pgqa.decode`, then sm_scale (None: head_dim ** -0.5);
the scalars and their defaults are those of `pgqa.decode` too, and so are stream, synchronisation and errors.

decode(q, k_cache, v_cache, page_indptr, page_indices, last_page_len, sm_scale, window_left=-1,
       logits_soft_cap=0.0, pos_encoding_mode=0, rope_scale=1.0, rope_theta=10000.0,
       batch_invariant=False) -> Tensor
    A fresh tensor [batch, query_heads, head_dim] of q's dtype.
decode_with_lse(the same arguments) -> (Tensor, Tensor)
    With it the natural-log LSE, float32 [batch, query_heads].
decode_out(q, k_cache, v_cache, page_indptr, page_indices, last_page_len, sm_scale, out, lse=None,
           window_left=-1, logits_soft_cap=0.0, pos_encoding_mode=0, rope_scale=1.0, rope_theta=10000.0,
           batch_invariant=False) -> ()
    Writes `out`, contiguous, of q's shape and dtype, and where given `lse`, contiguous float32 [batch, query_heads],
    natural log; neither may share memory with an input. Allocates no tensor, but a workspace while torch captures a
    graph.
append_kv(k, v, k_cache, v_cache, page_indptr, page_indices, last_page_len, q=None, q_out=None,
          pos_encoding_mode=0, rope_scale=1.0, rope_theta=10000.0) -> ()
    As `pgqa.append_kv`, but returns nothing: turned queries go to `q_out`, which has to be given beside q and may be
    q itself. Marked as written: k_cache, v_cache, q_out. Allocates nothing.

Defined by `import pgqa`. Arguments may be given by position, which costs least. There is no backward: tensors that
require grad are refused while grad mode is on. ValueError names the argument, before anything is launched.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import torch

from pgqa import _pgqa

_pgqa.register_ops()


@torch.library.register_fake("pgqa::decode")
def _decode(q: torch.Tensor, *_: object) -> torch.Tensor:
    return q.new_empty(q.shape)


@torch.library.register_fake("pgqa::decode_with_lse")
def _decode_with_lse(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.register_fake("pgqa::decode_out")
def _decode_out(q: torch.Tensor, *_: object) -> None:
    return None


@torch.library.register_fake("pgqa::append_kv")
def _append_kv(*_: object) -> None:
    return None
