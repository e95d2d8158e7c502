"""The padded block tables that say the same as a case's CSR table, with poison past every row's pages."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

import pgqa
import torch
from cases import ABSURD_IDS, Case


def block_table_of(case: Case, columns: int | None = None, fill: int | None = None, gap: int = 0) -> torch.Tensor:
    """int32 [batch, columns], rows `gap` entries apart; by default two columns more than the longest request has pages.

    fill: what entries of no page hold, those between rows too; None: absurd numbers.
    """
    starts, ids = case.page_indptr.tolist(), case.page_indices.tolist()
    rows = [ids[begin:end] for begin, end in zip(starts, starts[1:])]
    if columns is None:
        columns = max(map(len, rows), default=0) + 2
    absurd = list(ABSURD_IDS) * (columns + gap)
    padding = absurd if fill is None else [fill] * len(absurd)
    padded = [(row + padding)[: columns + gap] for row in rows]
    entries = torch.tensor(padded, dtype=torch.int32, device=case.q.device).reshape(len(rows), columns + gap)
    return entries[:, :columns]


def seq_lens_of(case: Case, new_tokens: int = 0, empty: int = -1) -> torch.Tensor:
    """int32 [batch]; `empty` for requests without tokens."""
    lengths = [length - new_tokens if length > 0 else empty for length in case.kv_lens]
    return torch.tensor(lengths, dtype=torch.int32, device=case.q.device)


def decode_blocks(case: Case, block_table: torch.Tensor, seq_lens: torch.Tensor, **keywords: Any) -> Any:
    """pgqa.decode_block_table of the case."""
    return pgqa.decode_block_table(
        case.q, case.k_cache, case.v_cache, block_table, seq_lens, case.options.sm_scale, **case.options.keywords(),
        **keywords,
    )  # fmt: skip
