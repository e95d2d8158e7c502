"""Output and workspace that the caller brings, and memory that stays flat over calls and graphs."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import gc

import pgqa
import pytest
import torch
from cases import Case, Spec, make_case
from reference import assert_close, reference

GUARD_BYTES = 4096
GUARD = 0xA5


SPECS = {
    "one long": Spec([9000], 32, 8, 128),
    "ragged": Spec([500 + 131 * i for i in range(24)], 40, 8, 64, pos_encoding_mode=1),
    "one KV head": Spec([3000, 20000, 0], 71, 1, 128),
    "many rows": Spec([4000, 300], 128, 1, 256),
    "512 requests": Spec([100 + i for i in range(512)], 32, 2, 256),  # T19
    "1000 requests": Spec([60 + i % 50 for i in range(1000)], 8, 2, 64),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_exact_workspace_with_guards(name: str) -> None:  # T19, T41, 47
    case = make_case("cuda", SPECS[name])
    expected = reference(case).out
    size = case.workspace_bytes()
    buffer = torch.full((GUARD_BYTES + size + GUARD_BYTES,), GUARD, dtype=torch.uint8, device="cuda")
    workspace = buffer[GUARD_BYTES : GUARD_BYTES + size]
    outs = []
    for fill in (0xFF, 0xFF, 0x7F, 0x00):
        workspace.fill_(fill)
        outs.append(case.run(workspace=workspace))
    assert_close(outs[0], expected)
    assert torch.equal(outs[0], case.run())
    for out in outs[1:]:
        assert torch.equal(out, outs[0])
    assert (buffer[:GUARD_BYTES] == GUARD).all() and (buffer[-GUARD_BYTES:] == GUARD).all()


@pytest.mark.gpu
def test_smaller_workspace_is_refused() -> None:
    case = make_case("cuda", SPECS["one long"])
    size = case.workspace_bytes()
    workspace = torch.full((size,), GUARD, dtype=torch.uint8, device="cuda")
    out = torch.full_like(case.q, 7.0)
    for smaller in (0, 16, size - 16, size - 1):
        with pytest.raises(ValueError, match=f"^workspace: got {smaller} bytes, expected at least {size}"):
            case.run(workspace=workspace[:smaller], out=out)
    assert (workspace == GUARD).all() and (out == 7.0).all()
    assert_close(case.run(workspace=workspace, out=out), reference(case).out)


@pytest.mark.gpu
def test_workspace_of_any_dtype_and_larger() -> None:
    case = make_case("cuda", SPECS["ragged"])
    expected = case.run()
    count = case.workspace_bytes() // 4 + 1000
    assert torch.equal(case.run(workspace=torch.full((count,), torch.nan, device="cuda")), expected)


def test_workspace_size_ignores_the_batch() -> None:
    """A pure function of the shape: asked again it is the same, and it needs no GPU."""
    sizes = [make_case("cpu", Spec([1] * batch, 32, 8, 128)).workspace_bytes() for batch in (1, 7, 500)]
    assert len(set(sizes)) == 1 and sizes[0] > 0


def test_output_of_the_caller(device: str) -> None:
    case = make_case(device, Spec([0, 300, 5], 8, 2, 64))
    buffer = torch.full((5, *case.q.shape[1:]), torch.nan, dtype=case.q.dtype, device=device)
    target = buffer[1:4]
    result = case.run(out=target)
    assert result is target
    assert_close(target, reference(case).out)
    assert torch.isnan(buffer[0]).all() and torch.isnan(buffer[4]).all()
    both = case.run(out=target, return_lse=True)
    assert both[0] is target and both[1].shape == (3, 8)


def used_bytes() -> int:
    """Device memory in use by anyone, torch's cache given back."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def shapes_of_a_day() -> list[Case]:
    """Calls of many shapes."""
    cases = []
    for i in range(30):
        kv_heads = (1, 2, 8)[i % 3]
        spec = Spec(
            [(i * 97 + 31 * j) % 800 for j in range(1 + i)], kv_heads * (1, 4, 7, 16)[i % 4], kv_heads,
            (64, 80, 128, 256)[i % 4], pos_encoding_mode=i % 2, dtype=(torch.float16, torch.bfloat16)[i // 2 % 2],
        )  # fmt: skip
        cases.append(make_case("cuda", spec))
    return cases


@pytest.mark.gpu
def test_memory_is_flat_over_ten_thousand_calls() -> None:
    cases = shapes_of_a_day()
    streams = [torch.cuda.Stream() for _ in range(3)]

    def run(calls: int) -> None:
        for i in range(calls):
            with torch.cuda.stream(streams[i % 7 % 3]):
                cases[i * 11 % len(cases)].run(return_lse=i % 2 == 0)

    run(1000)
    before, usage = used_bytes(), pgqa.workspace_usage()
    run(10_000)
    assert used_bytes() <= before + (4 << 20)
    assert pgqa.workspace_usage() == usage


@pytest.mark.gpu
def test_memory_is_flat_over_two_hundred_graphs() -> None:
    cases = shapes_of_a_day()[:10]

    def capture(count: int) -> None:
        for i in range(count):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = cases[i % len(cases)].run()
            if i % 10 == 0:
                graph.replay()
                torch.cuda.synchronize()
            del out, graph

    capture(30)
    before, usage = used_bytes(), pgqa.workspace_usage()
    capture(200)
    assert used_bytes() <= before + (4 << 20)
    assert pgqa.workspace_usage() == usage


@pytest.mark.gpu
def test_growing_workspace_while_calls_are_queued() -> None:
    """A larger shape replaces the stream's workspace while earlier calls still use the old one."""
    side = torch.cuda.Stream()
    cases = [make_case("cuda", Spec([6000, 40], heads * 4, heads, dim)) for heads, dim in ((1, 64), (2, 128), (8, 256))]
    expected = [reference(case).out for case in cases]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        outs = [case.run() for case in cases]
    side.synchronize()
    for out, exact in zip(outs, expected):
        assert_close(out, exact)
