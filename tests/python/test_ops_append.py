"""torch.ops.pgqa.append_kv: a schema and fake that torch accepts, the bytes of pgqa.append_kv, compiled, captured."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pgqa
import pytest
import torch
from cases import Case, Spec, bits, make_case

OPS = torch.ops.pgqa
LENGTHS = [17, 0, 1, 16, 33, 0]
TURNED = {"pos_encoding_mode": 1, "rope_scale": 2.0, "rope_theta": 5e5}


def problem(device: str, layout: str = "nhd") -> tuple[Case, torch.Tensor, torch.Tensor]:
    """A case with finite caches, which checks that compare copies expect, and rows to append."""
    case = make_case(device, Spec(LENGTHS, 8, 2, 64, layout=layout))
    for cache in (case.k_cache, case.v_cache):
        cache.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    k, v = torch.randn(2, len(LENGTHS), 2, 64, generator=torch.Generator(device).manual_seed(3), device=device)
    return case, k.to(case.q.dtype), v.to(case.q.dtype)


def fresh_caches(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return case.k_cache.clone(), case.v_cache.clone()


def same(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second))


@pytest.mark.parametrize("layout", ["nhd", "hnd", "mixed"])
def test_the_same_bytes_as_the_python_function(device: str, layout: str) -> None:
    case, k, v = problem(device, layout)
    table = case.tensors()[3:]
    ours, theirs = fresh_caches(case), fresh_caches(case)
    assert OPS.append_kv(k, v, *ours, *table) is None
    pgqa.append_kv(k, v, *theirs, *table)
    assert same(ours, theirs) and not same(ours, (case.k_cache, case.v_cache))
    q, q_out = case.q.clone(), torch.zeros_like(case.q)
    OPS.append_kv(k, v, *ours, *table, case.q, q_out, *TURNED.values())
    expected = torch.zeros_like(case.q)
    assert pgqa.append_kv(k, v, *theirs, *table, q=case.q, q_out=expected, **TURNED) is expected
    assert same((*ours, q_out), (*theirs, expected)) and torch.equal(case.q, q)
    OPS.append_kv(k, v, *ours, *table, q=q, q_out=q, **TURNED)
    live = torch.tensor([length > 0 for length in LENGTHS], device=device)
    assert torch.equal(q[live], expected[live]) and torch.equal(q[~live], case.q[~live])


def test_arguments_are_those_of_the_python_function() -> None:
    parameters = inspect.signature(pgqa.append_kv).parameters
    arguments = OPS.append_kv.default._schema.arguments
    assert [argument.name for argument in arguments] == list(parameters)
    for argument in arguments:
        if argument.has_default_value():
            assert argument.default_value == parameters[argument.name].default, argument.name
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {"k_cache", "v_cache", "q_out"}
    assert not OPS.append_kv.default._schema.returns


@pytest.mark.parametrize("layout", ["nhd", "mixed"])
def test_opcheck(device: str, layout: str) -> None:
    case, k, v = problem(device, layout)
    inputs = (k, v, *case.tensors()[1:])
    torch.library.opcheck(OPS.append_kv.default, inputs)
    torch.library.opcheck(OPS.append_kv.default, inputs, {"q": case.q, "q_out": torch.zeros_like(case.q), **TURNED})


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *paged: torch.Tensor) -> torch.Tensor:
    """Append and decode twice, the second time with what the first gave."""
    OPS.append_kv(k * 2, v, *paged)
    first = OPS.decode(q, *paged, None)
    turned = torch.zeros_like(q)
    OPS.append_kv(k - 1, v + first[:, ::4], *paged, first + q, turned, 1)
    return OPS.decode(turned, *paged, None) + 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_compiled_whole(device: str, backend: str, layout: str) -> None:
    """Without graph breaks; the caches are written in place, where they lie."""
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    case, k, v = problem(device, layout)
    for _ in range(2):
        ours, theirs = fresh_caches(case), fresh_caches(case)
        addresses = [cache.data_ptr() for cache in theirs]
        expected = step(case.q, k, v, *ours, *case.tensors()[3:])
        got = compiled(case.q, k, v, *theirs, *case.tensors()[3:])
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)  # fused arithmetic rounds elsewhere
        for cache, other in zip(theirs, ours):
            torch.testing.assert_close(cache, other, rtol=2e-2, atol=2e-2)
        assert [cache.data_ptr() for cache in theirs] == addresses
        k, v = k + 1, v - 1


def in_place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *paged: torch.Tensor) -> torch.Tensor:
    OPS.append_kv(k, v, *paged, q, q, 1)
    return OPS.decode(q, *paged, None)


def test_compiled_with_queries_turned_in_place(device: str) -> None:
    """q is read and marked as written in one call: its rows that write nothing stay as they are."""
    torch.compiler.reset()
    case, k, v = problem(device)
    results = []
    for run in (in_place, torch.compile(in_place, fullgraph=True, backend="aot_eager")):
        q, caches = case.q.clone(), fresh_caches(case)
        results.append((run(q, k, v, *caches, *case.tensors()[3:]), q, *caches))
    assert same(*results) and not torch.equal(results[0][1], case.q)


@pytest.mark.gpu
def test_captured_in_a_graph() -> None:
    case, k, v = problem("cuda")
    table = case.tensors()[3:]
    ours, theirs = fresh_caches(case), fresh_caches(case)
    q_out = torch.zeros_like(case.q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        OPS.append_kv(k, v, *ours, *table, case.q, q_out, 1)
    for seed in range(3):
        for rows in (k, v, case.q):
            rows.copy_(torch.randn(rows.shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda"))
        graph.replay()
        expected = torch.zeros_like(case.q)
        pgqa.append_kv(k, v, *theirs, *table, q=case.q, q_out=expected, pos_encoding_mode=1)
        assert same((*ours, q_out), (*theirs, expected))


BAD: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "q without q_out": (lambda c: c.update(q_out=None), "^q_out: got none, expected a tensor for the turned q"),
    "q_out without q": (lambda c: c.update(q=None), "^q_out: got a tensor without q"),
    "shape of v": (lambda c: c.update(v=c["v"][1:]), "^v: got shape .*, expected that of k"),
    "heads of a cache": (lambda c: c.update(k_cache=c["k_cache"][:, :, :1]), "^k_cache: got shape .*, expected kv_"),
    "mode": (lambda c: c.update(q=None, q_out=None, pos_encoding_mode=2), "^pos_encoding_mode: got 2, expected 0"),
    "grad": (lambda c: c["k"].requires_grad_(), "^k: got a tensor that requires grad"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_by_name(device: str, name: str) -> None:
    case, k, v = problem(device)
    names = ("k_cache", "v_cache", "page_indptr", "page_indices", "last_page_len")
    call = {"k": k, "v": v, **dict(zip(names, case.tensors()[1:])), "q": case.q, "q_out": torch.zeros_like(case.q)}
    call["pos_encoding_mode"] = 1
    before = fresh_caches(case)
    change, message = BAD[name]
    change(call)
    with pytest.raises(ValueError, match=message):
        OPS.append_kv(**call)
    assert same(before, (case.k_cache, case.v_cache))
