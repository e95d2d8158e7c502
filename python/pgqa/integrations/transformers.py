"""Attention for continuous batching of Hugging Face transformers 5.17: `model.generate_batch` over pgqa.

    name = pgqa.integrations.transformers.register()
    model.set_attn_implementation(name)
    config = ContinuousBatchingConfig(num_blocks=1000, max_batch_tokens=512)
    model.generate_batch(prompts, continuous_batching_config=config)

Requests with one new token are served by pgqa from the engine's paged cache, in steps of any kind; prompts go to the
engine's own function. Grouped heads, sliding windows and soft caps are those of the model, for prompts too. Always
give num_blocks and max_batch_tokens: the engine sizes its cache by masks that are not made here.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
import transformers
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import pgqa
from pgqa.integrations._hf_attention import Counters, PagedAttention
from pgqa.integrations.block_table import flash_attn_with_kvcache

__all__ = ["FAST_PATH_NAME", "NAME", "Counters", "counters", "register"]

NAME = "paged|pgqa"
FAST_PATH_NAME = "paged|flash_pgqa_2"  # the engine looks for "flash" and a 2 or 3 after it
SUPPORTED = "5.17"
PREFILL = ("paged|sdpa", "paged|eager")

counters = Counters()


def register(*, fast_path: bool = False, prefill: str = "paged|sdpa") -> str:
    """Registers the attention implementation and returns its name, for `model.set_attn_implementation`.

    prefill: the engine's function for rows that do not decode, "paged|sdpa" or "paged|eager".
    fast_path: also the engine's decode fast path, in which steps that only decode use block tables and may be
    captured; name "paged|flash_pgqa_2". It needs a GPU and rests on private functions of transformers: where these do
    not match, a RuntimeWarning says so and "paged|pgqa" is returned. Use it with use_cuda_graph=(False, True): in a
    graph of the other path every row goes to the engine's function, under a mask over the whole cache.

    May be called again; the last call's `prefill` holds. RuntimeError for another transformers than 5.17, ValueError
    for an unknown `prefill`.
    """
    if transformers.__version__.split(".")[:2] != SUPPORTED.split("."):
        raise RuntimeError(f"transformers: got version {transformers.__version__}, expected {SUPPORTED}.*")
    if prefill not in PREFILL:
        raise ValueError(f"prefill: got {prefill!r}, expected {' or '.join(map(repr, PREFILL))}")
    attention = PagedAttention(prefill, counters)
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    if not fast_path:
        return NAME
    if (reason := why_no_fast_path()) is not None:
        warnings.warn(f"no decode fast path: {reason}; using {NAME}", RuntimeWarning, stacklevel=2)
        return NAME
    ALL_ATTENTION_FUNCTIONS.register(FAST_PATH_NAME, attention)
    offer_fast_path()
    return FAST_PATH_NAME


def why_no_fast_path() -> str | None:
    """What is missing for the decode fast path, or None."""
    if not torch.cuda.is_available():
        return "it needs a CUDA device"
    if not pgqa.build_info()["cuda"]:
        return "this pgqa was built without CUDA"
    return why_not_offered()


def why_not_offered() -> str | None:
    """Whether transformers has changed where it looks for flash attention functions, or None."""
    importer = getattr(flash_utils, "_lazy_imports", None)
    if importer is None:
        return "modeling_flash_attention_utils has no _lazy_imports"
    found = list(inspect.signature(importer).parameters)
    expected = ["implementation", "attention_wrapper", "allow_all_kernels"]
    return None if found == expected else f"_lazy_imports: got parameters {found}, expected {expected}"


def offer_fast_path() -> None:
    """Makes transformers find our functions under our name, in place of a package or a kernel of the hub."""
    importer = flash_utils._lazy_imports
    if getattr(importer, "offers_pgqa", False):
        return

    def lazy_imports(
        implementation: str | None, attention_wrapper: Any = None, allow_all_kernels: bool = False
    ) -> tuple[Any, ...]:
        if implementation != FAST_PATH_NAME:
            return importer(implementation, attention_wrapper, allow_all_kernels=allow_all_kernels)
        return None, None, flash_attn_with_kvcache, flash_utils._pad_input, flash_utils._unpad_input

    lazy_imports.offers_pgqa = True  # type: ignore[attr-defined]
    flash_utils._lazy_imports = lazy_imports
