"""What transformers' continuous batching calls as attention: decode rows to pgqa, others to the engine's function."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as soft_capped_attention

import pgqa
from pgqa.integrations._hf_cache import HfCacheView
from pgqa.integrations._hf_step import Part, Step, take


@dataclass
class Counters:
    """What has been served since the start or `reset()`. Replays of CUDA graphs run no Python, so they do not count.

    Rows are counted in every layer. Of steps on the decode fast path, rows that only fill the batch count too.
    """

    steps: int = 0  # forward passes
    decode_steps: int = 0  # those in which pgqa served every row
    layer_calls: int = 0
    decode_rows: int = 0  # served by pgqa
    prefill_rows: int = 0  # handed to the engine's function

    def reset(self) -> None:
        for entry in fields(self):
            setattr(self, entry.name, 0)


@dataclass(frozen=True)
class LayerCall:
    """One layer's arguments. q, k, v [1, heads, tokens, head_dim], of the new tokens."""

    module: Any  # an attention layer
    cache: Any
    view: HfCacheView
    step: Step
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scaling: float | None
    softcap: float

    @property
    def layer(self) -> int:
        return self.module.layer_idx

    def rows(self, tensor: torch.Tensor, part: Part) -> torch.Tensor:
        """The tokens of a part, [tokens, heads, head_dim]."""
        rows = take(tensor[0].transpose(0, 1), part.tokens)
        return rows if rows.stride(-1) == 1 else rows.contiguous()


def decode_rows(call: LayerCall, part: Part) -> torch.Tensor:
    """Stores each request's new token and attends over all of them; [tokens, query_heads, head_dim]."""
    view, step, layer = call.view, call.step, call.layer
    group, window = view.group(layer), view.window(layer)
    pages = view.pages(layer, view.block_size if window is None else 1)
    q, *new = (call.rows(rows, part) for rows in (call.q, call.k, call.v))
    out: Any
    if step.is_fast_path:
        table = step.block_table(group)
        pgqa.append_kv_block_table(*new, *pages, *table, new_tokens=1)
        out = pgqa.decode_block_table(q, *pages, *table, call.scaling, new_tokens=1, logits_soft_cap=call.softcap)
    else:
        view.write(layer, step.writes(part, group), *new)
        csr = step.table(group, view.layer_type(layer), window)
        out = pgqa.decode(q, *pages, *csr, call.scaling, logits_soft_cap=call.softcap)
    return out


def prefill_rows(call: LayerCall, index: int, function: Callable[..., Any]) -> torch.Tensor:
    """The rows of prefill part `index` by the engine's function, which stores them; [tokens, query_heads, head_dim].

    None of the engine's functions has a soft cap: with one, the function of the model that introduced it attends.
    """
    view, step, layer = call.view, call.step, call.layer
    part, group, kind = step.prefill[index], view.group(layer), view.layer_type(layer)
    q, k, v = (take(tensor, part.tokens, dim=2) for tensor in (call.q, call.k, call.v))
    mask = step.mask(index, group, kind, view.window(layer), q.dtype)
    # The cache looks up its layer's group in lists over all groups.
    reads, writes = [step.reads(part, group, kind)] * (group + 1), [step.writes(part, group)] * (group + 1)
    if call.softcap > 0:
        k, v = call.cache.update(key_states=k, value_states=v, layer_idx=layer, read_index=reads, write_index=writes)
        k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        out, _ = soft_capped_attention(call.module, q, k, v, mask, scaling=call.scaling, softcap=call.softcap)
    else:
        out, _ = function(
            call.module, q, k, v, mask, dropout=0.0, scaling=call.scaling, cache=call.cache, read_index=reads,
            write_index=writes,
        )  # fmt: skip
    return out[0]


def refuse(module: torch.nn.Module, attention_mask: Any, dropout: float, arguments: dict[str, Any]) -> None:
    """Raises ValueError for what would otherwise be ignored."""
    if arguments.get("cache") is None:
        raise ValueError(
            "cache: got None, expected a PagedAttentionCache: paged|pgqa serves model.generate_batch, not forward"
        )
    if attention_mask is not None:
        raise ValueError("attention_mask: got a mask, expected None: only causal attention and windows are supported")
    if dropout:
        raise ValueError(f"dropout: got {dropout}, expected 0")
    if arguments.get("s_aux") is not None or hasattr(module, "sinks"):
        raise ValueError("s_aux: got attention sinks, expected none: use paged|eager for this model")


class PagedAttention:
    """An attention function of transformers, on the current stream; Step says when it waits for the device."""

    def __init__(self, prefill: str, counters: Counters) -> None:
        self.prefill = prefill
        self._counters = counters
        self._steps: weakref.WeakKeyDictionary[Any, tuple[torch.Tensor, bool, Step]] = weakref.WeakKeyDictionary()

    @torch.compiler.disable
    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        softcap: float | None = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, query_heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim], RoPE applied.

        Returns [1, tokens, query_heads, head_dim]. ValueError names what can not be honoured.
        """
        refuse(module, attention_mask, dropout, arguments)
        cache = arguments["cache"]
        view = HfCacheView(cache)
        step = self._step(cache, view, arguments, query)
        call = LayerCall(module, cache, view, step, query, key, value, scaling, softcap or 0.0)
        self._count(step)
        parts: list[tuple[Part, torch.Tensor]] = []
        if step.decode is not None:
            parts.append((step.decode, decode_rows(call, step.decode)))
        for index, part in enumerate(step.prefill):
            parts.append((part, prefill_rows(call, index, ALL_ATTENTION_FUNCTIONS[self.prefill])))
        return joined(parts, step.num_tokens, query)[None], None

    def _step(self, cache: Any, view: HfCacheView, arguments: dict[str, Any], query: torch.Tensor) -> Step:
        """The step that this call belongs to. The engine gives all layers of a pass the same tensor objects, and a
        pass that is captured those of the pass that warmed it up: what that one computed is not in the graph."""
        in_graph = query.is_cuda and torch.cuda.is_current_stream_capturing()
        offsets = arguments["cu_seq_lens_q"]
        known = self._steps.get(cache)
        if known is not None and known[0] is offsets and known[1] == in_graph:
            return known[2]
        step = Step(view.block_size, arguments, query.shape[2], in_graph)
        self._steps[cache] = offsets, in_graph, step
        self._counters.steps += 1
        self._counters.decode_steps += not step.prefill
        return step

    def _count(self, step: Step) -> None:
        self._counters.layer_calls += 1
        self._counters.decode_rows += step.decode.num_tokens if step.decode is not None else 0
        self._counters.prefill_rows += sum(part.num_tokens for part in step.prefill)


def joined(parts: list[tuple[Part, torch.Tensor]], num_tokens: int, query: torch.Tensor) -> torch.Tensor:
    """The rows of all parts in the order of the packed tokens; 0 for tokens that only fill the batch."""
    if len(parts) == 1 and parts[0][0].num_tokens == num_tokens:
        return parts[0][1]
    out = query.new_zeros(num_tokens, query.shape[1], query.shape[3])
    for part, rows in parts:
        done = 0
        for run in part.tokens:
            out[run] = rows[done : done + run.stop - run.start]
            done += run.stop - run.start
    return out
