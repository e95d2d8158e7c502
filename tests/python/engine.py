"""Small random models under transformers' continuous batching, what each step held, and exact logits."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("psutil")

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    Gemma2Config,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
)
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs  # noqa: E402

VOCABULARY = 256
NUM_LAYERS = 4
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=NUM_LAYERS, num_attention_heads=8,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=512, initializer_range=0.15,
)  # fmt: skip
GROUP_OF_7 = dict(hidden_size=56, num_attention_heads=7, num_key_value_heads=1)
WINDOW = 21  # no multiple of a block
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama, 7 query heads a KV head": LlamaConfig(**{**SIZES, **GROUP_OF_7}),
    "mistral, windows": MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma 2, windows and soft caps": Gemma2Config(
        **SIZES, sliding_window=WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=3.0,
        final_logit_softcapping=None,
    ),
    "gemma 2, soft caps": Gemma2Config(
        **SIZES, layer_types=["full_attention"] * NUM_LAYERS, query_pre_attn_scalar=16, attn_logit_softcapping=3.0,
        final_logit_softcapping=None,
    ),
}  # fmt: skip
PROMPT_LENGTHS = (11, 23, 40, 1, 77, 60, 5, 33)


def prompts_of(lengths: Sequence[int]) -> list[list[int]]:
    return [
        torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        for length in lengths
    ]


def new_model(name: str, device: str, dtype: torch.dtype) -> Any:
    """Random weights, attention in plain operators."""
    config = copy.deepcopy(CONFIGS[name])  # a model keeps its attention implementation there
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).to(device).eval()


@functools.cache
def reference_model(name: str, device: str) -> Any:
    torch.manual_seed(1)
    return new_model(name, device, torch.float32)


def served_model(name: str, device: str, dtype: torch.dtype, implementation: str) -> Any:
    """The same weights in `dtype`, with another attention implementation."""
    model = new_model(name, device, dtype)
    model.load_state_dict(reference_model(name, device).state_dict())
    model.set_attn_implementation(implementation)
    return model


@dataclass
class Served:
    """Tokens and log-probabilities of each request, and the query lengths of each step's requests."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    steps: list[list[int]] = field(default_factory=list)

    def excess(self, name: str, device: str) -> tuple[float, float]:
        """How far the chosen tokens lie below the best ones, and their log-probabilities from the exact ones, at most.

        Teacher forcing: the reference model reads the tokens that were chosen.
        """
        gap = error = 0.0
        for prompt, tokens, logprobs in zip(self.prompts, self.tokens, self.logprobs):
            exact = log_softmax_of(reference_model(name, device), prompt, tokens)
            chosen = exact.gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0]
            gap = max(gap, float((exact.max(-1).values - chosen).max()))
            error = max(error, float((torch.tensor(logprobs, device=device).double() - chosen).abs().max()))
        return gap, error

    def noise(self, name: str, device: str, dtype: torch.dtype) -> float:
        """The same error of the log-probabilities, at most, of the plain model in `dtype` on the same tokens."""
        model = served_model(name, device, dtype, "eager")
        worst = 0.0
        for prompt, tokens in zip(self.prompts, self.tokens):
            models = (reference_model(name, device), model)
            exact, rounded = (log_softmax_of(each, prompt, tokens) for each in models)
            index = torch.tensor(tokens, device=device)[:, None]
            worst = max(worst, float((exact - rounded).gather(1, index).abs().max()))
        return worst


def log_softmax_of(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities where each of `tokens` was chosen, float64 [tokens, vocabulary]."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens], device=model.device)).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1)


def generate(
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    lengths: Sequence[int] = PROMPT_LENGTHS,
    prompts: list[list[int]] | None = None,
    new_tokens: int = 24,
    num_return_sequences: int = 1,
    **config: Any,
) -> Served:
    """`model.generate_batch`, in blocks of 8 tokens and steps of at most 48; greedy, of one continuation each."""
    steps: list[list[int]] = []
    prepare = ContinuousBatchingIOs.prepare_batch_tensors

    def spy(self: Any, requests_in_batch: Any, *arguments: Any, **keywords: Any) -> None:
        steps.append([request.query_length for request in requests_in_batch])
        prepare(self, requests_in_batch, *arguments, **keywords)

    prompts = prompts_of(lengths) if prompts is None else prompts
    choice = dict(do_sample=False)
    if num_return_sequences > 1:
        choice = dict(do_sample=True, top_k=0, num_return_sequences=num_return_sequences)
    sizes = dict(block_size=8, num_blocks=200, max_batch_tokens=48, return_logprobs=True, use_async_batching=False)
    with monkeypatch.context() as patch:
        patch.setattr(ContinuousBatchingIOs, "prepare_batch_tensors", spy)
        results = model.generate_batch(
            prompts,
            generation_config=GenerationConfig(max_new_tokens=new_tokens, eos_token_id=-1, **choice),
            continuous_batching_config=ContinuousBatchingConfig(**{**sizes, **config}),
        )
    assert len(results) == len(prompts)  # of several continuations of a prompt the engine returns the first
    assert [result.error for result in results.values()] == [None] * len(results)
    assert all(len(result.generated_tokens) == new_tokens for result in results.values())
    return Served(
        [result.prompt_ids for result in results.values()],
        [result.generated_tokens for result in results.values()],
        [result.logprobs for result in results.values()],
        steps,
    )
