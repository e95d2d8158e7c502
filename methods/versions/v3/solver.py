"""Entry of the evaluation: hands the call to the native module `_pgqa` that the build puts beside this file."""

# SPDX-License-Identifier: Apache-2.0
import torch  # loads the libraries that _pgqa links to

import _pgqa

_decode = _pgqa.decode


def paged_gqa_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_indptr: torch.Tensor,
    page_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    sm_scale: float,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    pos_encoding_mode: int = 0,
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
) -> torch.Tensor:
    """Decode attention of one query token a request over a paged cache.

    q [batch, query_heads, head_dim]; k_cache, v_cache [pages, page_size, kv_heads, head_dim], float16 or bfloat16
    (float32 too on the CPU); page_indptr [batch + 1], page_indices, last_page_len [batch] int32. Returns a new tensor
    of q's shape and dtype. On a GPU it runs on the current stream and does not synchronize.
    """
    return _decode(
        q,
        k_cache,
        v_cache,
        page_indptr,
        page_indices,
        last_page_len,
        sm_scale,
        window_left,
        logits_soft_cap,
        pos_encoding_mode,
        rope_scale,
        rope_theta,
        None,
        False,
        None,
    )
