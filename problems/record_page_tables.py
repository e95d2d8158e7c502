#!/usr/bin/env python3
"""Records page tables from transformers' continuous batching under memory pressure, for the visible spec.

A tiny model runs on the CPU; only its scheduler and block allocator matter, so attention is replaced by a function
that writes down the page table of every decode-only step and returns zeros. Too few blocks for all requests make the
engine queue, evict and reuse them, so that pages end up scattered. Of each workload the most scattered step is kept.
Everything is seeded: the same versions give the same tables.

    python -m venv /some/place && /some/place/bin/pip install torch 'transformers==5.17.*' accelerate psutil
    /some/place/bin/python problems/record_page_tables.py            # compares with visible_spec.json
    /some/place/bin/python problems/record_page_tables.py --write    # replaces the tables there
"""
# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.spec import format_spec  # noqa: E402

SPEC = Path(__file__).resolve().parent / "visible_spec.json"
VOCABULARY = 512
ATTENTION = "paged|record"
ENGINE_VERSION = "5.17."


@dataclass(frozen=True)
class Workload:
    """Requests and the pool of pages they compete for; lengths are drawn evenly in [low, high]."""

    page_size: int
    num_pages: int
    num_requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    common_prefix: int = 0  # tokens that all prompts share, whose pages the engine shares too
    max_batch: int = 1024


WORKLOADS = {
    "recorded chat": Workload(16, 2600, 80, (20, 1800), (100, 600), max_batch=32),
    "recorded short requests fp16": Workload(16, 2300, 220, (10, 500), (50, 250), max_batch=96),
    "recorded long requests page 32": Workload(32, 1900, 34, (500, 5000), (200, 800), max_batch=16),
    "recorded shared prefix": Workload(16, 1500, 120, (20, 300), (100, 400), 800, 48),
}


@dataclass(frozen=True)
class Step:
    """The page table of one decode-only step: pages of each request in order, and its length in tokens."""

    rows: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def breaks(self) -> int:
        """Neighbouring pages of a request that do not follow each other in memory."""
        return sum(b != a + 1 for row in self.rows for a, b in zip(row, row[1:]))

    def page_table(self, page_size: int) -> dict[str, list[int]]:
        indptr = [0]
        for row in self.rows:
            indptr.append(indptr[-1] + len(row))
        return {
            "page_indptr": indptr,
            "page_indices": [page for row in self.rows for page in row],
            "last_page_len": [(length - 1) % page_size + 1 for length in self.lengths],
        }


class Recorder:
    """The attention function of the model: keeps the most scattered full step."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.best: Step | None = None

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        **engine: Any,
    ) -> tuple[torch.Tensor, None]:
        """Zeros [tokens, query_heads * head_dim]; looks at cu_seq_lens_k and read_index of decode-only steps."""
        if module.layer_idx == 0 and engine["max_seqlen_q"] == 1 and engine["read_index"][0].numel():
            bounds = engine["cu_seq_lens_k"].tolist()
            pages = engine["read_index"][0] // self.page_size
            spans = [(begin, end) for begin, end in zip(bounds, bounds[1:]) if end > begin]
            rows = tuple(tuple(pages[begin : end : self.page_size].tolist()) for begin, end in spans)
            step = Step(rows, tuple(end - begin for begin, end in spans))
            if self.best is None or step.breaks > self.best.breaks:
                self.best = step
        _, heads, tokens, head_dim = query.shape
        return torch.zeros(tokens, heads * head_dim, dtype=query.dtype), None


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16384,
    )
    return LlamaForCausalLM(config).eval()


def record(workload: Workload) -> dict[str, list[int]]:
    """Runs the engine on one workload and returns the page table of its most scattered step."""
    recorder = Recorder(workload.page_size)
    AttentionInterface.register(ATTENTION, recorder.attend)
    model = _model()
    model.set_attn_implementation(ATTENTION)
    rng = random.Random(workload.num_pages)
    common = [rng.randrange(VOCABULARY) for _ in range(workload.common_prefix)]
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1),
        continuous_batching_config=ContinuousBatchingConfig(
            block_size=workload.page_size,
            num_blocks=workload.num_pages,
            max_batch_tokens=4096,
            max_requests_per_batch=workload.max_batch,
            max_blocks_per_request=0,
            allow_block_sharing=workload.common_prefix > 0,
            use_async_batching=False,
            use_cuda_graph=False,
        ),
    )
    # All requests are queued ahead of the engine's thread, so that its schedule does not depend on the clock.
    for _ in range(workload.num_requests):
        prompt = common + [rng.randrange(VOCABULARY) for _ in range(rng.randint(*workload.prompt))]
        manager.add_request(prompt, max_new_tokens=rng.randint(*workload.output), eos_token_id=-1)
    manager.start()
    finished = 0
    while finished < workload.num_requests:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            finished += 1
        elif result is None and not manager.is_running():
            raise RuntimeError("the engine stopped early")
    manager.stop(block=True)
    assert recorder.best is not None
    print(f"{len(recorder.best.rows)} requests, {sum(recorder.best.lengths)} tokens, {recorder.best.breaks} breaks")
    return recorder.best.page_table(workload.page_size)


def main() -> int:
    from transformers import __version__

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the tables of visible_spec.json")
    arguments = parser.parse_args()
    if not __version__.startswith(ENGINE_VERSION):
        sys.exit(f"transformers {__version__}: expected {ENGINE_VERSION}*, later versions allocate pages otherwise")
    spec = json.loads(SPEC.read_text(encoding="utf-8"))
    cases = {case["name"]: case for case in spec["cases"]}
    differing = []
    for name, workload in WORKLOADS.items():
        table = record(workload)
        if cases[name].get("page_table") != table:
            differing.append(name)
        cases[name]["page_table"] = table
    if arguments.write:
        SPEC.write_text(format_spec(spec), encoding="utf-8")
    elif differing:
        sys.exit("differs from visible_spec.json: " + ", ".join(differing))
    return 0


if __name__ == "__main__":
    sys.exit(main())
