"""pgqa.record: what a file holds, calls that are left alone, nothing in the way of others."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pathlib
import threading
from typing import Any

import pgqa
import pytest
import torch
from cases import Case, Spec, make_case
from pgqa import _recording

SPEC = Spec([40, 0, 7, 100], 8, 2, 64, layout="mixed")


def fail(case: Case, message: str = "^window_left: got -2") -> None:
    with pytest.raises(ValueError, match=message):
        case.with_options(window_left=-2).run()


def load(path: pathlib.Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def test_a_call_that_raises_leaves_a_file(device: str, tmp_path: pathlib.Path) -> None:
    case = make_case(device, SPEC)
    with pgqa.record(tmp_path / "calls") as recorder:
        case.run()
        fail(case)
    fail(case)
    (path,) = recorder.paths
    assert list((tmp_path / "calls").iterdir()) == [path] and recorder.left_out == 0
    entry = load(path)
    assert entry["function"] == "decode" and entry["result"] is None
    assert entry["error"]["type"] == "ValueError" and entry["error"]["text"].startswith("window_left: got -2")
    arguments = entry["arguments"]
    names = ("q", "k_cache", "v_cache", "page_indptr", "page_indices", "last_page_len")
    for name, tensor in zip(names, case.tensors()):
        one = arguments[name]
        assert one["shape"] == list(tensor.shape) and one["strides"] == list(tensor.stride())
        assert one["storage_offset"] == tensor.storage_offset() and one["dtype"] == str(tensor.dtype)
        assert one["device"] == str(tensor.device)
        if name in _recording.TABLE:
            assert torch.equal(one["values"], tensor.cpu())
        else:
            assert one["values"] is None
    assert arguments["window_left"]["value"] == -2 and arguments["out"]["value"] is None
    assert path.stat().st_size < 20_000, "values of the caches are in it"


def test_every_call_with_values_from_before_it(device: str, tmp_path: pathlib.Path) -> None:
    case = make_case(device, Spec([17, 5], 8, 2, 64))
    k = torch.ones(2, 2, 64, dtype=case.q.dtype, device=device)
    before = case.k_cache.clone().cpu()
    with pgqa.record(tmp_path, every_call=True, values=True) as recorder:
        assert pgqa.append_kv(k, k, *case.tensors()[1:]) is None
        out, lse = case.run(return_lse=True)
    append, decode = [load(path) for path in recorder.paths]
    assert append["function"] == "append_kv" and append["result"] == [] and append["error"] is None
    assert torch.equal(append["arguments"]["k_cache"]["values"].view(torch.uint8), before.view(torch.uint8))
    assert torch.equal(append["arguments"]["k"]["values"], k.cpu())
    for one, tensor in zip(decode["result"], (out, lse), strict=True):
        assert torch.equal(one["values"], tensor.cpu())


def test_nothing_is_in_the_way_otherwise(tmp_path: pathlib.Path) -> None:
    assert _recording.decode is pgqa._pgqa.decode and _recording.append_kv is pgqa._pgqa.append_kv
    with pytest.raises(KeyError), pgqa.record(tmp_path):
        assert _recording.decode is not pgqa._pgqa.decode
        with pytest.raises(RuntimeError, match="^record: got a second recording"), pgqa.record(tmp_path):
            pass
        raise KeyError
    assert _recording.decode is pgqa._pgqa.decode and _recording.append_kv is pgqa._pgqa.append_kv


def test_other_threads_and_a_bound(tmp_path: pathlib.Path) -> None:
    case = make_case("cpu", SPEC)
    with pgqa.record(tmp_path, max_calls=3) as recorder:
        threads = [threading.Thread(target=fail, args=(case,)) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(recorder.paths) == len(list(tmp_path.iterdir())) == 3 and recorder.left_out == 2
    with pgqa.record(tmp_path) as second:  # the same folder: nothing is overwritten
        fail(case)
    assert len(list(tmp_path.iterdir())) == 4 and not set(second.paths) & set(recorder.paths)


def test_refused_arguments(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="^max_calls: got 0, expected at least 1"), pgqa.record(tmp_path, max_calls=0):
        pass
    wrong: Any = 1.0
    with pytest.raises(TypeError, match="^max_calls: got float, expected an int"), pgqa.record(tmp_path, max_calls=wrong):
        pass
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OSError), pgqa.record(file):
        pass
    assert _recording.decode is pgqa._pgqa.decode


def test_a_call_survives_a_recording_that_fails(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full)
    case = make_case("cpu", SPEC)
    with pgqa.record(tmp_path, every_call=True):
        with pytest.warns(RuntimeWarning, match="not recorded as asked: no space left"):
            assert case.run().shape == case.q.shape
        with pytest.warns(RuntimeWarning, match="not recorded as asked: no space left"):
            fail(case)


@pytest.mark.gpu
def test_nothing_is_read_while_capturing(tmp_path: pathlib.Path) -> None:
    case = make_case("cuda", SPEC)
    expected = case.run()
    graph = torch.cuda.CUDAGraph()
    with pgqa.record(tmp_path, every_call=True, values=True) as recorder:
        with torch.cuda.graph(graph):
            out = case.run()
            fail(case)
        assert not recorder.paths
        graph.replay()
        assert torch.equal(out, expected)
        case.run()
    assert len(recorder.paths) == 1
