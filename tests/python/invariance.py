"""Requests of one case run alone and in batches, and the bits that each of them gives."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from cases import ABSURD_IDS, Case, Spec, bits

S = 1024  # about the tokens of a segment: lengths on both sides of its multiples
LENGTHS = (1, 5, 16, S - 1, S, S + 1, 2 * S, 2 * S + 7, 3000, 4 * S + 1, 17, 300)
SMALL = dict(query_heads=8, kv_heads=2)
SPECS = {
    "plain": Spec(LENGTHS, **SMALL),
    "rope": Spec(LENGTHS, **SMALL, pos_encoding_mode=1),
    "window": Spec(LENGTHS, **SMALL, window_left=1500, dtype=torch.float16),
    "soft cap": Spec(LENGTHS, **SMALL, logits_soft_cap=15.0, page_size=1),
    "all options": Spec(
        LENGTHS, 40, 8, 80, window_left=2047, logits_soft_cap=20.0, pos_encoding_mode=1, rope_scale=2.0, page_size=7
    ),
    "head dim 64": Spec(LENGTHS, 8, 1, 64, pos_encoding_mode=1),
    "head dim 256": Spec(LENGTHS, 4, 2, 256),
    "head dim 256, rope": Spec(LENGTHS, 16, 1, 256, pos_encoding_mode=1, dtype=torch.float16),
    "group 33": Spec(LENGTHS, 33, 1, 128, pos_encoding_mode=1),
    "group 1": Spec(LENGTHS, 4, 4, 96),
}


def batch_of(case: Case, order: Sequence[int | None], room: int = 0) -> Case:
    """A batch of some requests of `case`, once or several times; None: an empty one. `room` more absurd entries."""
    ids = case.page_indices.tolist()
    begins = case.page_indptr.tolist()
    last = case.last_page_len.tolist()
    indptr, indices, last_len = [0], [], []
    for request in order:
        if request is not None:
            indices += ids[begins[request] : begins[request + 1]]
        indptr.append(len(indices))
        last_len.append(3 if request is None else last[request])
    indices += [ABSURD_IDS[i % 4] for i in range(room)]
    device = case.q.device
    table = [torch.tensor(values, dtype=torch.int32, device=device) for values in (indptr, indices, last_len)]
    q = case.q[[0 if request is None else request for request in order]]
    lengths = [0 if request is None else case.kv_lens[request] for request in order]
    return replace(
        case, q=q, page_indptr=table[0], page_indices=table[1], last_page_len=table[2], kv_lens=lengths
    )  # fmt: skip


def other_pages(case: Case, seed: int) -> Case:
    """The same problem with its pages elsewhere in the caches."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.randperm(len(case.k_cache), generator=generator).to(case.q.device)
    k_cache, v_cache = torch.empty_like(case.k_cache), torch.empty_like(case.v_cache)
    k_cache[place], v_cache[place] = case.k_cache, case.v_cache
    inside = (case.page_indices >= 0) & (case.page_indices < len(place))
    moved = place[case.page_indices.clamp(0, len(place) - 1).long()].to(torch.int32)
    indices = torch.where(inside, moved, case.page_indices)
    return replace(case, k_cache=k_cache, v_cache=v_cache, page_indices=indices)


def rows_of(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The bytes of output and LSE, a row for each request."""
    return torch.cat((bits(out).flatten(1), bits(lse).flatten(1)), dim=1)


def results(case: Case, invariant: bool = True) -> torch.Tensor:
    return rows_of(*case.run(return_lse=True, batch_invariant=invariant))


def alone(case: Case) -> dict[int | None, torch.Tensor]:
    """The bytes that each request gives in a batch of its own, and those of an empty one."""
    rows: dict[int | None, torch.Tensor] = {
        request: results(batch_of(case, [request]))[0] for request in range(len(case.kv_lens))
    }
    rows[None] = results(batch_of(case, [None]))[0]
    return rows


def random_order(case: Case, batch: int, rng: random.Random) -> list[int | None]:
    """Requests of `case` in any order, some empty."""
    choices = [*range(len(case.kv_lens)), None]
    return [rng.choice(choices) for _ in range(batch)]


def assert_rows(got: torch.Tensor, order: Sequence[int | None], expected: dict[int | None, torch.Tensor]) -> None:
    for place, request in enumerate(order):
        assert torch.equal(got[place], expected[request]), f"request {request} at {place} of {len(order)}"
