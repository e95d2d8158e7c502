"""pgqa.warmup: shapes run without pages, what the first real call then finds, and refusals that name the field."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any

import pgqa
import pytest
import torch
from cases import Spec, make_case
from fresh import run_fresh
from reference import assert_close, reference

SHAPE: dict[str, Any] = {"num_query_heads": 8, "num_kv_heads": 2, "head_dim": 64}


class Calls:
    """Stands in for the module and keeps the tensors of its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded: list[tuple[Any, ...]] = []
        self.outs: list[torch.Tensor] = []
        self.appended: list[tuple[Any, ...]] = []
        native = pgqa._pgqa

        class Module:
            build_info, supports_shape = staticmethod(native.build_info), staticmethod(native.supports_shape)

            @staticmethod
            def decode(*arguments: Any, **keywords: Any) -> torch.Tensor:
                self.decoded.append((*arguments, keywords))
                self.outs.append(native.decode(*arguments, **keywords))
                return self.outs[-1]

            @staticmethod
            def append_kv(*arguments: Any, **keywords: Any) -> None:
                self.appended.append((*arguments, keywords))
                native.append_kv(*arguments, **keywords)

        monkeypatch.setattr(pgqa._warmup, "_pgqa", Module)


def test_each_shape_is_run_without_pages(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    second = {"batch": 5, "page_size": 1, "dtype": torch.float16, "pos_encoding_mode": 1, "max_pages": 40}
    pgqa.warmup([SHAPE, pgqa.WarmupShape(**SHAPE, **second)], device=device)
    assert len(calls.decoded) == 2 and len(calls.appended) == 4
    for (q, k_cache, v_cache, indptr, indices, last, _, keywords), out in zip(calls.decoded, calls.outs):
        assert q.device.type == k_cache.device.type == device
        assert k_cache.shape == v_cache.shape and (indptr == 0).all() and len(last) == len(q)
        assert (out == 0).all()
    q, k_cache, _, indptr, indices, _, _, keywords = calls.decoded[1]
    assert q.shape == (5, 8, 64) and q.dtype == torch.float16 and indptr.shape == (6,)
    assert k_cache.shape[1:] == (1, 2, 64) and indices.shape == (40,) and keywords == {"pos_encoding_mode": 1}
    assert calls.decoded[0][0].dtype == torch.bfloat16 and calls.decoded[0][-1] == {"pos_encoding_mode": 0}


def test_no_shapes_and_no_requests(device: str) -> None:
    pgqa.warmup([], device=device)
    pgqa.warmup(iter([{**SHAPE, "batch": 0}]), device=device)


def test_device_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    pgqa.warmup([SHAPE])
    gpu = torch.cuda.is_available() and pgqa.build_info()["cuda"]
    assert calls.decoded[0][0].device.type == ("cuda" if gpu else "cpu")


REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no heads": ({"num_kv_heads": 0}, ValueError, r"num_kv_heads: got 0, expected at least 1"),
    "ragged group": ({"num_query_heads": 7}, ValueError, r"num_query_heads: got 7, expected a multiple"),
    "head_dim": ({"head_dim": 0}, ValueError, r"head_dim: got 0, expected"),
    "batch": ({"batch": -1}, ValueError, r"batch: got -1, expected 0 to"),
    "batch of 2^40": ({"batch": 2**40}, ValueError, r"batch: got 1099511627776, expected 0 to"),
    "heads of 2^40": ({"num_query_heads": 2**40}, ValueError, r"num_query_heads: got .*, expected a 32-bit"),
    "page_size": ({"page_size": 0}, ValueError, r"page_size: got 0, expected at least 1"),
    "dtype": ({"dtype": "int8"}, ValueError, r"dtype: got int8, expected float16, bfloat16, float32"),
    "mode": ({"pos_encoding_mode": 2}, ValueError, r"pos_encoding_mode: got 2, expected 0"),
    "max_pages": ({"max_pages": -1}, ValueError, r"max_pages: got -1, expected 0 to"),
    "unknown field": ({"heads": 8}, ValueError, r"heads: got a field of this name, expected num_query_heads, "),
    "float": ({"head_dim": 64.0}, TypeError, r"head_dim: got float, expected an int"),
    "bool": ({"batch": True}, TypeError, r"batch: got bool, expected an int"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_by_field(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything runs, the shapes before included."""
    calls = Calls(monkeypatch)
    change, error, message = REFUSALS[name]
    with pytest.raises(error, match=rf"^shapes\[1\]\.{message}"):
        pgqa.warmup([SHAPE, {**SHAPE, **change}], device=device)
    assert not calls.decoded


def test_refused_arguments() -> None:
    with pytest.raises(ValueError, match=r"^shapes\[0\]\.head_dim: got none, expected a number"):
        pgqa.warmup([{"num_query_heads": 8, "num_kv_heads": 2}], device="cpu")
    with pytest.raises(TypeError, match=r"^shapes\[0\]: got tuple, expected a dict"):
        pgqa.warmup([(8, 2, 64)], device="cpu")
    with pytest.raises(TypeError, match=r"^shapes: got dict, expected a sequence"):
        pgqa.warmup(SHAPE, device="cpu")
    for device in ("meta", "no device"):
        with pytest.raises(ValueError, match=f"^device: got {device}, expected "):
            pgqa.warmup([SHAPE], device=device)


@pytest.mark.skipif(pgqa.build_info()["cuda"], reason="built with CUDA")
def test_without_cuda_it_says_so() -> None:
    with pytest.raises(ValueError, match="^device: got cuda, expected cpu: built without CUDA"):
        pgqa.warmup([SHAPE], device="cuda")


FIRST_CALLS = """
import time
import pgqa
import torch
from cases import Spec, make_case

def seconds(case):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    case.run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin

warmed = make_case("cuda", Spec([40, 7], 8, 2, 64))
cold = make_case("cuda", Spec([40, 7], 8, 2, 128))
pgqa.warmup([{"num_query_heads": 8, "num_kv_heads": 2, "head_dim": 64, "batch": 2}])
usage = pgqa.workspace_usage()
first = seconds(warmed)
assert pgqa.workspace_usage() == usage and usage["workspaces"] == 1
print(first < seconds(cold) / 2)
"""


@pytest.mark.gpu
def test_the_first_call_finds_kernel_and_workspace() -> None:
    """A tenth of a millisecond or so, against a shape whose kernel has to be loaded."""
    assert run_fresh(FIRST_CALLS) == "True"


@pytest.mark.gpu
def test_results_are_right_afterwards_on_each_stream() -> None:
    case = make_case("cuda", Spec([300, 0, 5], 8, 2, 64))
    expected = reference(case).out
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        pgqa.warmup([{**SHAPE, "batch": 3}])
        usage = pgqa.workspace_usage()
        out = case.run()
        assert pgqa.workspace_usage() == usage
    stream.synchronize()
    assert_close(out, expected)


@pytest.mark.gpu
def test_refused_while_capturing() -> None:
    case = make_case("cuda", Spec([40], 8, 2, 64))
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="^stream: got one that is being captured"):
            pgqa.warmup([SHAPE])
        out = case.run()
    graph.replay()
    assert_close(out, reference(case).out)


@pytest.mark.gpu
def test_a_batch_beyond_the_gpu_is_refused_by_field() -> None:
    large = {"num_query_heads": 1, "num_kv_heads": 1, "head_dim": 8, "batch": 1_000_000}
    with pytest.raises(ValueError, match=r"^shapes\[1\]\.batch: got 1000000, expected 0 to "):
        pgqa.warmup([SHAPE, large], device="cuda")
