"""torch.ops.pgqa: schemas and fakes that torch accepts, the results of pgqa.decode, compilation without breaks."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pgqa
import pytest
import torch
from cases import Case, Spec, make_case
from fresh import run_fresh
from reference import assert_close, reference

OPS = torch.ops.pgqa
SPECS = {
    "plain": Spec([40, 0, 7, 100], 8, 2, 64),
    "every option": Spec(
        [300, 1, 0, 90], 8, 2, 64, window_left=50, logits_soft_cap=20.0, pos_encoding_mode=1, rope_scale=2.0,
        rope_theta=5e5, sm_scale=0.3, dtype=torch.float16,
    ),  # fmt: skip
    "strided caches": Spec([40, 0, 7, 100], 8, 2, 64, layout="mixed"),
    "no requests": Spec([], 8, 2, 64),
}


def inputs_of(case: Case) -> tuple[Any, ...]:
    """What every operator begins with."""
    return (*case.tensors(), case.options.sm_scale)


def with_clean_caches(case: Case) -> Case:
    """NaN is unequal to itself, which checks that compare copies of the inputs do not expect."""
    for cache in (case.k_cache, case.v_cache):
        cache.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return case


def buffers_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """An output and an LSE to write, full of NaN."""
    lse = torch.full(case.q.shape[:2], torch.nan, device=case.q.device)
    return torch.full_like(case.q, torch.nan), lse


@pytest.mark.parametrize("name", SPECS)
def test_the_same_bits_as_the_python_function(device: str, name: str) -> None:
    case = make_case(device, SPECS[name])
    expected, expected_lse = case.run(return_lse=True)
    keywords = case.options.keywords()
    assert torch.equal(OPS.decode(*inputs_of(case), **keywords), expected)
    out, lse = OPS.decode_with_lse(*inputs_of(case), **keywords)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    out, lse = buffers_of(case)
    assert OPS.decode_out(*inputs_of(case), out, **keywords) is None
    assert torch.equal(out, expected) and torch.isnan(lse).all()
    out.fill_(torch.nan)
    OPS.decode_out(*inputs_of(case), out, lse, *keywords.values())
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_defaults_are_those_of_the_python_function() -> None:
    parameters = inspect.signature(pgqa.decode).parameters
    for op in (OPS.decode.default, OPS.decode_with_lse.default, OPS.decode_out.default):
        for argument in op._schema.arguments:
            if argument.has_default_value() and argument.name != "lse":
                assert argument.default_value == parameters[argument.name].default, argument.name


@pytest.mark.parametrize("name", SPECS)
def test_opcheck(device: str, name: str) -> None:
    case = with_clean_caches(make_case(device, SPECS[name]))
    keywords = case.options.keywords()
    out, lse = buffers_of(case)
    torch.library.opcheck(OPS.decode.default, inputs_of(case), keywords)
    torch.library.opcheck(OPS.decode_with_lse.default, inputs_of(case), keywords)
    torch.library.opcheck(OPS.decode_out.default, (*inputs_of(case), out.zero_()), keywords)
    torch.library.opcheck(OPS.decode_out.default, (*inputs_of(case), out, lse.zero_()), keywords)


def test_only_outputs_are_marked_as_written() -> None:
    written = {
        argument.name: argument.alias_info.is_write
        for argument in OPS.decode_out.default._schema.arguments
        if argument.alias_info is not None
    }
    assert written == {"out": True, "lse": True}
    for op in (OPS.decode.default, OPS.decode_with_lse.default):
        assert not op._schema.is_mutable


def layer(decode: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A step with arithmetic before and after a call, and the caches rewritten in between."""

    def step(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *table: torch.Tensor) -> torch.Tensor:
        first = decode(q * 2, k_cache, v_cache, *table)
        k_cache.mul_(0.5)
        return decode(first + q, k_cache, v_cache, *table) - 1

    return step


def by_value(*inputs: Any) -> torch.Tensor:
    return OPS.decode(*inputs, None, window_left=60)


def into_a_buffer(q: torch.Tensor, *inputs: Any) -> torch.Tensor:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    OPS.decode_out(q, *inputs, None, out, lse, window_left=60)
    return out + lse[..., None].nan_to_num(neginf=0.0).to(q.dtype)


@pytest.mark.parametrize("decode", [by_value, into_a_buffer])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_compiled_whole(device: str, decode: Callable[..., torch.Tensor], backend: str, layout: str) -> None:
    """Without graph breaks, for changing batches, on caches that keep their strides."""
    torch.compiler.reset()
    compiled = torch.compile(layer(decode), fullgraph=True, dynamic=True, backend=backend)
    for lens in ([40, 0, 7, 100], [5, 200], [30] * 9):
        case = with_clean_caches(make_case(device, Spec(lens, 8, 2, 64, dtype=torch.float16, layout=layout)))
        ours, theirs = case.k_cache.clone(), case.k_cache.clone()
        tensors = case.tensors()
        expected = layer(decode)(tensors[0], ours, *tensors[2:])
        got = compiled(tensors[0], theirs, *tensors[2:])
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=2e-2)  # fused arithmetic rounds elsewhere
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_compiled_into_graphs() -> None:
    """torch's own graphs around a compiled step: right after everything has changed in place."""
    torch.compiler.reset()
    compiled = torch.compile(layer(by_value), fullgraph=True, mode="reduce-overhead")
    case = with_clean_caches(make_case("cuda", Spec([40, 0, 7, 100], 8, 2, 64)))
    q, k_cache, *rest = case.tensors()
    for seed in range(6):
        q.copy_(torch.randn(q.shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda"))
        ours = k_cache.clone()
        expected = layer(by_value)(q, ours, *rest)
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(q, k_cache, *rest), expected, rtol=1e-2, atol=5e-2)
        k_cache.copy_(ours)


@pytest.mark.gpu
def test_captured_in_a_graph() -> None:
    case = make_case("cuda", SPECS["every option"])
    out, lse = buffers_of(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        OPS.decode_out(*inputs_of(case), out, lse, *case.options.keywords().values())
        fresh = OPS.decode(*inputs_of(case), **case.options.keywords())
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, fresh)
    assert_close(out, reference(case).out)


def lse_within(t: torch.Tensor) -> torch.Tensor:
    """An LSE of the right shape in the memory of `t`."""
    return t.view(torch.float32).flatten()[:32].view(4, 8)


BAD: list[tuple[str, str, Callable[[Case, torch.Tensor, torch.Tensor], tuple[Any, ...]]]] = [
    ("q", "rank", lambda c, out, lse: (c.q[0], *c.tensors()[1:], None, out, lse)),
    ("window_left", "value", lambda c, out, lse: (*c.tensors(), None, out, lse, -2)),
    ("out", "shape", lambda c, out, lse: (*c.tensors(), None, out[1:], lse)),
    ("out", "an input", lambda c, out, lse: (*c.tensors(), None, c.q, lse)),
    ("lse", "shape", lambda c, out, lse: (*c.tensors(), None, out, lse[1:])),
    ("lse", "rank", lambda c, out, lse: (*c.tensors(), None, out, lse.flatten())),
    ("lse", "dtype", lambda c, out, lse: (*c.tensors(), None, out, lse.double())),
    ("lse", "strides", lambda c, out, lse: (*c.tensors(), None, out, lse.t().contiguous().t())),
    ("lse", "an input", lambda c, out, lse: (*c.tensors(), None, out, lse_within(c.q))),
    ("lse", "part of out", lambda c, out, lse: (*c.tensors(), None, out, lse_within(out))),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "what", "change"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_refused_by_name(device: str, argument: str, what: str, change: Callable[..., tuple[Any, ...]]) -> None:
    case = make_case(device, SPECS["plain"])
    out, lse = buffers_of(case)
    with pytest.raises(ValueError, match=f"^{argument}: got .*expected "):
        OPS.decode_out(*change(case, out, lse))
    assert torch.isnan(out).all() and torch.isnan(lse).all()


def test_gradients_are_refused() -> None:
    case = make_case("cpu", SPECS["plain"])
    case.q.requires_grad_()
    with pytest.raises(ValueError, match="^q: got a tensor that requires grad"):
        OPS.decode(*inputs_of(case))
    with torch.no_grad():
        assert not OPS.decode(*inputs_of(case)).requires_grad


def test_defined_by_importing_the_package_and_no_sooner() -> None:
    code = """
import torch
print(hasattr(torch.ops.pgqa, "decode"))
import pgqa
pgqa._pgqa.register_ops()  # again: does nothing
print(hasattr(torch.ops.pgqa, "decode"))
"""
    assert run_fresh(code).split() == ["False", "True"]
