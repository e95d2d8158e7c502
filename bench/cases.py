"""The axes of the benchmarks: named cases, as the harness describes them, in groups.

Unless a name says otherwise: bfloat16, 32 query heads on 8 KV heads, head_dim 128, page size 16.
Names: `32x4k` is 32 requests of 4096 tokens; `48rag1-6k` 48 of 1 to 6000 tokens drawn uniformly; `rope`, `winN`, `capN`
an option; `gN` a group size; `dN` a head_dim; `pN` a page size; `8q1kv` 8 query heads on 1 KV head.
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

from harness.spec import Case


def uniform(num_requests: int, tokens: int) -> tuple[int, ...]:
    return (tokens,) * num_requests


def ragged(num_requests: int, low: int, high: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(7919 * seed + num_requests)
    return tuple(rng.randint(low, high) for _ in range(num_requests))


def make(name: str, kv_lens: tuple[int, ...], query_heads: int = 32, kv_heads: int = 8, **fields: Any) -> Case:
    """A case with the defaults of the benchmarks; further fields as in harness.spec.Case."""
    defaults: dict[str, Any] = {"head_dim": 128, "page_size": 16, "dtype": "bfloat16"}
    return Case(name, query_heads, kv_heads, kv_lens=kv_lens, **(defaults | fields))


BATCHES = [
    make("1x64", uniform(1, 64)),
    make("1x1k", uniform(1, 1024)),
    make("1x4k", uniform(1, 4096)),
    make("1x32k", uniform(1, 32768)),
    make("1x128k", uniform(1, 131072)),
    make("2x300", uniform(2, 300)),
    make("8x1k", uniform(8, 1024)),
    make("8x4k", uniform(8, 4096)),
    make("8x32k", uniform(8, 32768)),
    make("16x1k", uniform(16, 1024)),
    make("24x700", uniform(24, 700)),
    make("32x4k", uniform(32, 4096)),
    make("64x1k", uniform(64, 1024)),
    make("64x8k", uniform(64, 8192)),
    make("128x1k", uniform(128, 1024)),
    make("256x512", uniform(256, 512)),
]
RAGGED = [
    make("5rag20-1500", ragged(5, 20, 1500, 104)),
    make("32rag100-4k", ragged(32, 100, 4000, 201)),
    make("32rag200-3k fp16", ragged(32, 200, 3000, 102), dtype="float16"),
    make("48rag1-6k", ragged(48, 1, 6000, 101)),
    make("64rag1-8k", ragged(64, 1, 8192, 202)),
    make("200rag1-700", ragged(200, 1, 700, 103)),
    make("1x100k+30x2k", (100000, *uniform(30, 2048))),
    make("1x128k+40x1k", (131072, *uniform(40, 1024))),
]
# The same tokens in 32 requests, ever less evenly.
SPREAD = [
    make("spread 32x2k", uniform(32, 2048)),
    make("spread 32x1-3k", tuple(1024 + 66 * i + i % 2 for i in range(32))),
    make("spread 32x0-4k", tuple(1 + 132 * i for i in range(32))),
    make("spread 1x16k+31x1.6k", (16384, *uniform(31, 1585))),
    make("spread 1x32k+31x1k", (32768, *uniform(31, 1057))),
    make("spread 1x62k+31x64", (63552, *uniform(31, 64))),
]
SHORT = [
    make("64x16", uniform(64, 16)),
    make("64rag1-64", ragged(64, 1, 64, 203)),
    make("4096x16", uniform(4096, 16)),
    make("4096rag1-64", ragged(4096, 1, 64, 204)),
]
ODD = [
    make("3x1k", uniform(3, 1024)),
    make("7x4k", uniform(7, 4096)),
    make("13x1k", uniform(13, 1024)),
    make("33x4k", uniform(33, 4096)),
    make("67x1k", uniform(67, 1024)),
    make("131x1k", uniform(131, 1024)),
]
# The x4k rows hold the bytes of 32x4k or, for d96, three quarters of them.
HEADS = [
    make("d64 32x4k", uniform(32, 4096), 64, 16, head_dim=64),
    make("d96 32x4k", uniform(32, 4096), head_dim=96),
    make("d256 32x4k", uniform(32, 4096), 16, 4, head_dim=256),
    make("g1 32x4k", uniform(32, 4096), 8),
    make("g5 32x4k", uniform(32, 4096), 40),
    make("g7 32x4k", uniform(32, 4096), 56),
    make("g8 32x4k", uniform(32, 4096), 64),
    make("g16 32x4k", uniform(32, 4096), 128),
    make("g32 32x4k", uniform(32, 4096), 256),
    make("8q1kv 256x4k", uniform(256, 4096), 8, 1),
    make("8q1kv 1x4k", uniform(1, 4096), 8, 1),
    make("8q1kv 48x3k", uniform(48, 3000), 8, 1),
    make("g1 24rag1-2k", ragged(24, 1, 2000, 106), 16, 16),
    make("g7 32rag1-3k", ragged(32, 1, 3000, 107), 28, 4),
    make("g8 24rag1-5k", ragged(24, 1, 5000, 105), 64),
    make("d64 24rag1-5k", ragged(24, 1, 5000, 108), 64, head_dim=64),
    make("d256 16rag1-3k", ragged(16, 1, 3000, 109), 16, head_dim=256),
]
PAGES = [
    make("p1 32x4k", uniform(32, 4096), page_size=1),
    make("p5 32x4k", uniform(32, 4096), page_size=5),
    make("p64 32x4k", uniform(32, 4096), page_size=64),
    make("p1 24rag1-5k", ragged(24, 1, 5000, 110), page_size=1),
    make("p64 24rag1-5k", ragged(24, 1, 5000, 111), page_size=64),
]
MASKS = [
    make("win1023 64rag1-8k", ragged(64, 1, 8192, 202), window_left=1023),
    make("win511 48rag1-6k", ragged(48, 1, 6000, 113), window_left=511),
    make(
        "win4095cap50 24x12k d256",
        uniform(24, 12000), 16, head_dim=256, window_left=4095, logits_soft_cap=50.0,
    ),
    make("cap30 32x4k", uniform(32, 4096), logits_soft_cap=30.0),
    make("cap30 24rag1-5k fp16", ragged(24, 1, 5000, 114), dtype="float16", logits_soft_cap=30.0),
]  # fmt: skip
_PLAIN = {case.name: case for case in (*BATCHES, *RAGGED, *HEADS)}
ROPE_OF = (
    "1x64", "1x1k", "1x4k", "1x32k", "8x1k", "8x4k", "8x32k", "16x1k", "32rag100-4k", "32x4k", "64rag1-8k", "64x8k",
    "1x128k+40x1k", "d64 32x4k", "d256 32x4k",
)  # fmt: skip
ROPE = [
    *(replace(_PLAIN[name], name=f"rope {name}", pos_encoding_mode=1) for name in ROPE_OF),
    make("rope 48rag1-6k", ragged(48, 1, 6000, 112), pos_encoding_mode=1, rope_scale=2.0, rope_theta=1e6),
    make(
        "rope+win1023+cap fp16",
        ragged(24, 1, 5000, 115),
        dtype="float16", pos_encoding_mode=1, window_left=1023, logits_soft_cap=30.0,
    ),
]  # fmt: skip
GROUPS = {
    "batches": BATCHES, "ragged": RAGGED, "spread": SPREAD, "short": SHORT, "odd batches": ODD, "heads": HEADS,
    "page sizes": PAGES, "windows and caps": MASKS, "rope": ROPE,
}  # fmt: skip
QUICK = (
    "1x64", "1x1k", "1x4k", "1x32k", "8x1k", "8x4k", "16x1k", "32x4k", "64x8k", "32rag100-4k", "64rag1-8k",
    "1x128k+40x1k", "64x16", "4096x16", "d64 32x4k", "d256 32x4k", "g8 32x4k", "8q1kv 256x4k", "p1 32x4k", "p5 32x4k",
    "win1023 64rag1-8k", "rope 1x1k", "rope 8x4k", "rope 32x4k",
)  # fmt: skip
# Rows that the prebuilt kernels of other projects were compiled for, and that comparisons are averaged over.
PEER_PANEL = (
    "1x64", "1x1k", "1x4k", "1x32k", "1x128k", "2x300", "8x1k", "8x4k", "8x32k", "16x1k", "24x700", "32x4k", "64x1k",
    "64x8k", "128x1k", "256x512", "48rag1-6k", "32rag200-3k fp16", "1x100k+30x2k", "200rag1-700", "5rag20-1500",
    "g8 24rag1-5k", "g1 24rag1-2k", "g7 32rag1-3k", "8q1kv 48x3k", "d64 24rag1-5k", "d256 16rag1-3k", "p1 24rag1-5k",
    "p64 24rag1-5k", "rope 1x1k", "rope 8x4k", "rope 32x4k", "rope 48rag1-6k", "win511 48rag1-6k",
    "win4095cap50 24x12k d256", "cap30 24rag1-5k fp16", "rope+win1023+cap fp16",
)  # fmt: skip

# Cost of planning: (many requests, few requests) of the same live bytes, with so few heads that q and the output count
# for little. With empty requests the work is the same, piece by piece; short ones also end a piece each.
_SLIM: dict[str, Any] = {"query_heads": 1, "kv_heads": 1, "head_dim": 64}
PLANNING = [
    (make("64 short", uniform(64, 256), **_SLIM), make("4 long", uniform(4, 4096), **_SLIM)),
    (
        make("4 long, 60 empty", (*uniform(4, 4096), *uniform(60, 0)), **_SLIM),
        make("4 long", uniform(4, 4096), **_SLIM),
    ),
    (make("4096 short", uniform(4096, 16), **_SLIM), make("16 long", uniform(16, 4096), **_SLIM)),
    (
        make("16 long, 4080 empty", (*uniform(16, 4096), *uniform(4080, 0)), **_SLIM),
        make("16 long", uniform(16, 4096), **_SLIM),
    ),
]
HOST_COST = make("64x64", uniform(64, 64))  # so short that the GPU keeps up with the host


def select(pattern: str | None, quick: bool, names: tuple[str, ...] | None = None) -> list[Case]:
    """Cases in the order of GROUPS: those whose name holds a match of `pattern`, of the quick set, of `names`."""
    chosen = []
    for case in (case for group in GROUPS.values() for case in group):
        if pattern is not None and not re.search(pattern, case.name):
            continue
        if quick and case.name not in QUICK or names is not None and case.name not in names:
            continue
        chosen.append(case)
    return chosen
