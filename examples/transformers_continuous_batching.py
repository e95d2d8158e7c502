"""Continuous batching of transformers with and without pgqa: speed, agreement, and what pgqa has served.

    python examples/transformers_continuous_batching.py                     # a small random Llama, GPU or CPU
    python examples/transformers_continuous_batching.py --model MODEL_ID    # any model, in bfloat16 on a GPU
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig

import pgqa.integrations.transformers as integration

SMALL_LLAMA = LlamaConfig(
    vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, initializer_range=0.1,
)  # fmt: skip


def load(model_id: str | None) -> Any:
    """On the GPU in bfloat16 where there is one, else on the CPU in float32."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    if model_id is not None:
        return AutoModelForCausalLM.from_pretrained(model_id, dtype=dtype).to(device).eval()
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(SMALL_LLAMA, dtype=dtype).to(device).eval()


def generate(model: Any, implementation: str, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy continuations under an attention implementation; prints their speed."""
    model.set_attn_implementation(implementation)
    longest = max(map(len, prompts)) + new_tokens
    # Both sizes are given: the engine would reckon with masks that pgqa does not make.
    config = ContinuousBatchingConfig(
        block_size=32, num_blocks=2 * len(prompts) * -(-longest // 32), max_batch_tokens=512,
        use_cuda_graph=(False, torch.cuda.is_available()),
    )  # fmt: skip
    choice = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)
    start = time.perf_counter()
    results = model.generate_batch(prompts, generation_config=choice, continuous_batching_config=config)
    seconds = time.perf_counter() - start
    print(f"{implementation:<22} {len(prompts) * new_tokens / seconds:8.0f} tokens/s")
    return [result.generated_tokens for result in results.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model of the hub, or a folder")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=40)
    arguments = parser.parse_args()
    model, rng = load(arguments.model), random.Random(0)
    vocabulary = model.config.get_text_config().vocab_size
    prompts = [rng.choices(range(3, vocabulary), k=rng.randint(5, 200)) for _ in range(arguments.requests)]
    expected = generate(model, "paged|sdpa", prompts, arguments.new_tokens)
    for name in dict.fromkeys([integration.register(), integration.register(fast_path=torch.cuda.is_available())]):
        integration.counters.reset()
        tokens = generate(model, name, prompts, arguments.new_tokens)
        print(f"  same tokens for {sum(map(list.__eq__, tokens, expected))} of {len(prompts)} requests")
        print(f"  {integration.counters}")


if __name__ == "__main__":
    main()
