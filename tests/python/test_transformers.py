"""transformers' continuous batching over pgqa: exact logits, and every decode row served by pgqa."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pathlib
import runpy

import engine  # skips where transformers is missing
import pytest
import torch
import transformers
from engine import CONFIGS, NUM_LAYERS, WINDOW, generate, prompts_of, served_model
from transformers.generation.continuous_batching import initialization, model_runner
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from pgqa.integrations import _hf_step
from pgqa.integrations import transformers as integration
from pgqa.integrations.transformers import counters

LLAMA, SEVEN = "llama", "llama, 7 query heads a KV head"
MISTRAL, GEMMA = "mistral, windows", "gemma 2, windows and soft caps"
EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "transformers_continuous_batching.py"
FLOAT32_NOISE = 2e-4  # of a log-probability


def check_counts(served: engine.Served, layers: int = NUM_LAYERS) -> None:
    """Every request with one query token in a step that reads the cache was served by pgqa, all others were not."""
    reads, cached = [], 0
    for step in served.steps:
        reads.append(cached > 0)
        cached += sum(step)
    decode = sum(lengths.count(1) for lengths, read in zip(served.steps, reads) if read)
    assert counters.steps == len(served.steps)
    assert counters.layer_calls == layers * len(served.steps)
    assert counters.decode_steps == sum(set(lengths) == {1} for lengths, read in zip(served.steps, reads) if read)
    assert counters.decode_rows == layers * decode
    assert counters.prefill_rows == layers * (sum(map(sum, served.steps)) - decode)


@pytest.mark.parametrize("prefill", ["paged|sdpa", "paged|eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_exact_and_counted(name: str, prefill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = served_model(name, "cpu", torch.float32, integration.register(prefill=prefill))
    counters.reset()
    served = generate(model, monkeypatch)
    gap, error = served.excess(name, "cpu")
    assert gap < FLOAT32_NOISE and error < FLOAT32_NOISE
    check_counts(served)
    assert any(1 in lengths and max(lengths) > 1 for lengths in served.steps), "no mixed step"
    assert any(set(lengths) == {1} for lengths in served.steps), "no decode step"


@pytest.mark.parametrize("name", [LLAMA, SEVEN])
def test_the_tokens_of_the_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = generate(served_model(name, "cpu", torch.float32, "paged|sdpa"), monkeypatch)
    ours = generate(served_model(name, "cpu", torch.float32, integration.register()), monkeypatch)
    assert ours.tokens == theirs.tokens and ours.steps == theirs.steps


def test_the_reference_notices_a_lost_soft_cap_and_a_lost_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own function ignores soft caps; a wider window is not the model's."""
    served = generate(served_model(GEMMA, "cpu", torch.float32, "paged|sdpa"), monkeypatch)
    assert served.excess(GEMMA, "cpu")[1] > 10 * FLOAT32_NOISE
    model = served_model(MISTRAL, "cpu", torch.float32, "paged|sdpa")
    model.config.sliding_window = WINDOW + 1
    assert generate(model, monkeypatch).excess(MISTRAL, "cpu")[1] > 10 * FLOAT32_NOISE


@pytest.mark.parametrize("name", [LLAMA, GEMMA])
def test_decode_rows_after_prefill_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = served_model(name, "cpu", torch.float32, integration.register())
    counters.reset()
    served = generate(model, monkeypatch, scheduler_type="prefill_first", max_batch_tokens=20)
    assert served.excess(name, "cpu")[1] < FLOAT32_NOISE
    check_counts(served)


@pytest.mark.parametrize("name", [LLAMA, GEMMA])
def test_requests_put_off_for_lack_of_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = served_model(name, "cpu", torch.float32, integration.register())
    served = generate(model, monkeypatch, num_blocks=40 if name == LLAMA else 70, safety_margin=0.0)
    assert served.excess(name, "cpu")[1] < FLOAT32_NOISE
    enough = sum(len(prompt) + len(tokens) - 1 for prompt, tokens in zip(served.prompts, served.tokens))
    assert sum(map(sum, served.steps)) > enough, "no request was put off and computed again"


def test_shared_prefixes_and_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served_model(LLAMA, "cpu", torch.float32, integration.register())
    (prefix,) = prompts_of([40])
    prompts = [prefix + tail for tail in prompts_of([3, 4, 9, 14])] + [prefix]
    served = generate(model, monkeypatch, prompts=prompts, num_return_sequences=2, max_batch_tokens=64)
    assert served.excess(LLAMA, "cpu")[1] < FLOAT32_NOISE


def test_prefilling_requests_in_several_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on masks changes no result, and keeps all but single requests below it."""
    sizes: list[int] = []
    mask = _hf_step.causal_mask

    def spy(*arguments: object) -> torch.Tensor:
        allowed = mask(*arguments)
        sizes.append(allowed.numel())
        return allowed

    monkeypatch.setattr(_hf_step, "causal_mask", spy)
    monkeypatch.setattr(_hf_step, "MASK_ELEMENTS", 300)
    model = served_model(GEMMA, "cpu", torch.float32, integration.register())
    counters.reset()
    served = generate(model, monkeypatch, lengths=[6, 9, 7, 12, 6, 16, 9, 10, 8, 7], max_batch_tokens=40)
    assert served.excess(GEMMA, "cpu")[1] < FLOAT32_NOISE
    check_counts(served)
    with_decode_rows = sizes[8:]  # the first step reads no cache and is handed over whole
    assert with_decode_rows and max(with_decode_rows) <= 300


def pad_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the engine fill up its batches, as it does for graphs."""
    start = model_runner.ModelRunner.__init__

    def padded(self: model_runner.ModelRunner, *arguments: object, **keywords: object) -> None:
        start(self, *arguments, **keywords)
        self.pad_inputs = True

    monkeypatch.setattr(model_runner.ModelRunner, "__init__", padded)


PADDING = dict(q_padding_interval_size=16, kv_padding_interval_size=64)


@pytest.mark.parametrize("name", [LLAMA, MISTRAL, GEMMA])
def test_filled_up_batches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pad_inputs(monkeypatch)
    model = served_model(name, "cpu", torch.float32, integration.register())
    counters.reset()
    served = generate(model, monkeypatch, **PADDING)
    assert served.excess(name, "cpu")[1] < FLOAT32_NOISE
    assert counters.decode_rows >= NUM_LAYERS * sum(lengths.count(1) for lengths in served.steps[1:])


@pytest.mark.parametrize("name", [LLAMA, MISTRAL, GEMMA])
def test_without_reading_the_offsets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a captured step: filled up, and all rows under one mask."""
    start = _hf_step.Step.__init__

    def captured(self: _hf_step.Step, *arguments: object) -> None:
        start(self, *arguments[:-1], True)

    pad_inputs(monkeypatch)
    monkeypatch.setattr(_hf_step.Step, "__init__", captured)
    model = served_model(name, "cpu", torch.float32, integration.register())
    counters.reset()
    served = generate(model, monkeypatch, **PADDING)
    assert served.excess(name, "cpu")[1] < FLOAT32_NOISE
    assert counters.decode_rows == 0 and counters.prefill_rows > 0


@pytest.fixture
def forced_fast_path(monkeypatch: pytest.MonkeyPatch) -> str:
    """The decode fast path where there is no GPU: all of it but the graphs."""
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    monkeypatch.setattr(integration, "why_no_fast_path", lambda: None)
    monkeypatch.setattr(integration.flash_utils, "_lazy_imports", integration.flash_utils._lazy_imports)
    return integration.register(fast_path=True)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [LLAMA, "gemma 2, soft caps"])
def test_fast_path(name: str, padded: bool, forced_fast_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block tables, -1 where they are filled up; blocks that nobody holds stay as they are."""
    if padded:
        pad_inputs(monkeypatch)
    tables: list[torch.Tensor] = []
    fill = PagedAttentionCache.fill_block_table

    def spy(self: PagedAttentionCache, *arguments: object) -> None:
        fill(self, *arguments)
        tables.append(arguments[-1])

    monkeypatch.setattr(PagedAttentionCache, "fill_block_table", spy)
    assert forced_fast_path == integration.FAST_PATH_NAME
    model = served_model(name, "cpu", torch.float32, forced_fast_path)
    counters.reset()
    served = generate(model, monkeypatch, max_blocks_per_request=16, **(PADDING if padded else {}))
    assert served.excess(name, "cpu")[1] < FLOAT32_NOISE
    assert tables, "the engine did not take its fast path"
    assert counters.decode_steps >= sum(set(lengths) == {1} for lengths in served.steps)


def test_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # in float32, so that the tokens are the same
    monkeypatch.setattr("sys.argv", ["example", "--requests", "4", "--new-tokens", "5"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "same tokens for 4 of 4 requests" in capsys.readouterr().out


def test_no_fast_path_without_a_gpu_or_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration.torch.cuda, "is_available", lambda: False)
    with pytest.warns(RuntimeWarning, match="needs a CUDA device; using paged.pgqa"):
        assert integration.register(fast_path=True) == "paged|pgqa"
    monkeypatch.setattr(integration.flash_utils, "_lazy_imports", lambda implementation: None)
    assert "expected ['implementation'" in str(integration.why_not_offered())
    monkeypatch.delattr(integration.flash_utils, "_lazy_imports")
    assert "has no _lazy_imports" in str(integration.why_not_offered())


def test_the_installed_transformers_is_as_expected() -> None:
    assert integration.why_not_offered() is None


def test_other_versions_and_functions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="^prefill: got 'paged.flash_attention_2', expected"):
        integration.register(prefill="paged|flash_attention_2")
    for version in ("5.18.0", "5.16.3", "4.17.0", "5.170.0"):
        monkeypatch.setattr(transformers, "__version__", version)
        with pytest.raises(RuntimeError, match=f"^transformers: got version {version}, expected 5.17"):
            integration.register()


def test_what_can_not_be_honoured_is_refused() -> None:
    model = served_model(LLAMA, "cpu", torch.float32, integration.register())
    with pytest.raises(ValueError, match="^cache: got None, expected a PagedAttentionCache"):
        model(torch.tensor([[1, 2, 3]]))
    attention = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["paged|pgqa"]
    module, x = torch.nn.Module(), torch.zeros(1, 2, 1, 8)
    for name, keywords in (
        ("attention_mask", {"attention_mask": torch.zeros(1, 1, 1, 1)}),
        ("dropout", {"dropout": 0.1}),
        ("s_aux", {"s_aux": torch.zeros(2)}),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got .*expected "):
            attention(module, x, x, x, cache=object(), **keywords)
    module.sinks = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="^s_aux: got attention sinks"):
        attention(module, x, x, x, cache=object())


GPU_ROUTES = {
    "A": dict(use_cuda_graph=(False, False)),
    "A, graphs": dict(use_cuda_graph=(True, True)),
    "B": dict(use_cuda_graph=(False, False)),
    "B, graphs": dict(use_cuda_graph=(False, True)),
    "B, graphs everywhere": dict(use_cuda_graph=(True, True)),
    "B, graphs, async": dict(use_cuda_graph=(False, True), use_async_batching=True),
    "B, async": dict(use_cuda_graph=(False, False), use_async_batching=True),
}


QUICK = [(LLAMA, "A"), (LLAMA, "B, graphs")]
SLOW = [
    *((LLAMA, route) for route in GPU_ROUTES if (LLAMA, route) not in QUICK), (SEVEN, "B, graphs, async"),
    (MISTRAL, "A"), (GEMMA, "A"), (GEMMA, "A, graphs"), (GEMMA, "B, graphs, async"),
    ("gemma 2, soft caps", "B, graphs"),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "route"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)])
def test_on_the_gpu(name: str, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16, 40 tokens of 8 requests: as near to the exact log-probabilities as the plain model in bfloat16."""
    implementation = integration.register(fast_path=route.startswith("B"))
    assert implementation == (integration.FAST_PATH_NAME if route.startswith("B") else integration.NAME)
    model = served_model(name, "cuda", torch.bfloat16, implementation)
    counters.reset()
    served = generate(model, monkeypatch, new_tokens=40, **GPU_ROUTES[route])
    assert served.excess(name, "cuda")[1] <= 2 * served.noise(name, "cuda", torch.bfloat16) + 0.02
    prefill_in_graphs, decode_in_graphs = GPU_ROUTES[route]["use_cuda_graph"]
    if not prefill_in_graphs and not decode_in_graphs:
        check_counts(served)
    elif prefill_in_graphs or "windows" not in name:  # with windows the engine has no fast path
        assert 0 < counters.steps < len(served.steps), "no step was replayed"
