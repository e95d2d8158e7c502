"""Starting implementation: batch-vectorized PyTorch that gathers pages and pads to the longest request."""

# SPDX-License-Identifier: Apache-2.0
import torch

# Requests are taken in slices so that one padded float32 tensor stays within this many elements.
MAX_PADDED_ELEMENTS = 1 << 32


def _rotate(x, cos, sin):
    """Rotates the pairs (i, i + head_dim / 2) of x [..., head_dim]; cos and sin broadcast to [..., head_dim / 2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _gather(cache, pages):
    """Tokens [batch, tokens, kv_heads, head_dim] in float32 of the pages [batch, max_pages]."""
    _, _, kv_heads, head_dim = cache.shape
    return cache[pages].view(pages.shape[0], -1, kv_heads, head_dim).float()


def _attend(q, k_cache, v_cache, pages, kv_lens, sm_scale, window_left, logits_soft_cap, rope_frequency):
    """Attention of q [batch, query_heads, head_dim] over the tokens of pages [batch, max_pages], in float32."""
    batch, query_heads, head_dim = q.shape
    k = _gather(k_cache, pages)
    v = _gather(v_cache, pages)
    tokens, kv_heads = k.shape[1], k.shape[2]
    positions = torch.arange(tokens, device=q.device)
    live = positions < kv_lens[:, None]
    if window_left >= 0:
        live &= positions >= kv_lens[:, None] - 1 - window_left

    queries = q.float()
    if rope_frequency is not None:
        angles = positions[:, None] * rope_frequency
        k = _rotate(k, angles.cos().float()[:, None], angles.sin().float()[:, None])
        angles = (kv_lens - 1).clamp(min=0)[:, None] * rope_frequency
        queries = _rotate(queries, angles.cos().float()[:, None], angles.sin().float()[:, None])

    queries = queries.view(batch, kv_heads, query_heads // kv_heads, head_dim)
    scores = torch.einsum("bhgd,bthd->bhgt", queries, k) * sm_scale
    if logits_soft_cap > 0:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    scores = scores.masked_fill(~live[:, None, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    v = v.masked_fill(~live[:, :, None, None], 0.0)
    out = torch.einsum("bhgt,bthd->bhgd", weights, v).reshape(batch, query_heads, head_dim)
    return out.masked_fill((kv_lens == 0)[:, None, None], 0.0).to(q.dtype)


def paged_gqa_decode(
    q,
    k_cache,
    v_cache,
    page_indptr,
    page_indices,
    last_page_len,
    sm_scale,
    window_left=-1,
    logits_soft_cap=0.0,
    pos_encoding_mode=0,
    rope_scale=1.0,
    rope_theta=10000.0,
):
    """Decode attention of one query token a request; returns [batch, query_heads, head_dim] in q's dtype."""
    batch, _, head_dim = q.shape
    page_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    num_pages = (page_indptr[1:] - page_indptr[:-1]).long()
    max_pages = int(num_pages.max()) if batch else 0
    if max_pages == 0:
        return torch.zeros_like(q)

    columns = torch.arange(max_pages, device=q.device)
    used = columns < num_pages[:, None]
    entries = (page_indptr[:-1, None] + columns).masked_fill(~used, 0)
    pages = page_indices[entries].long().masked_fill(~used, 0)
    kv_lens = torch.where(num_pages > 0, (num_pages - 1) * page_size + last_page_len, 0)

    frequency = None
    if pos_encoding_mode == 1:
        pairs = torch.arange(head_dim // 2, dtype=torch.float64, device=q.device)
        frequency = rope_theta ** (-2.0 * pairs / head_dim) / rope_scale

    rows = max(1, MAX_PADDED_ELEMENTS // (max_pages * page_size * kv_heads * head_dim))
    outputs = [
        _attend(
            q[begin : begin + rows],
            k_cache,
            v_cache,
            pages[begin : begin + rows],
            kv_lens[begin : begin + rows],
            sm_scale,
            window_left,
            logits_soft_cap,
            frequency,
        )
        for begin in range(0, batch, rows)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
