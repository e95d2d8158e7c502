"""`python -m pgqa replay`: recorded calls fail alike or work, on memory laid out as it was; other files are refused."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import pgqa
import pytest
import torch
from cases import Case, Spec, make_case
from pgqa import _replay

SPEC = Spec([40, 0, 7, 100], 8, 2, 64, layout="mixed")


def fail(case: Case) -> None:
    with pytest.raises(ValueError, match="^window_left: got -2"):
        case.with_options(window_left=-2).run()


class Halved:
    """A number that is none of Python's."""

    def __float__(self) -> float:
        return 0.5


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "window": ({"window_left": -2}, "ValueError: window_left: got -2"),
    "a number": ({"sm_scale": Halved(), "logits_soft_cap": -1.0}, "ValueError: logits_soft_cap: got -1"),
    "no tensor": ({"page_indices": [1, 2]}, "TypeError: page_indices: got list, expected a torch.Tensor"),
    "sparse": ({"q": torch.zeros(4, 8, 64).to_sparse()}, "ValueError: q: got a sparse tensor"),
    "int64 table": ({"page_indptr": torch.zeros(5, dtype=torch.int64)}, "ValueError: page_indptr: got dtype Long"),
    "one entry again": ({"last_page_len": torch.ones(1).int().expand(4)}, "ValueError: last_page_len: got stride 0"),
    "grad": ({"q": torch.zeros(4, 8, 64, dtype=torch.bfloat16, requires_grad=True)}, "ValueError: q: got a tensor tha"),
}


@pytest.mark.parametrize("name", CALLS)
def test_replayed_it_fails_alike(name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, text = CALLS[name]
    names = ("q", "k_cache", "v_cache", "page_indptr", "page_indices", "last_page_len")
    call = {**dict(zip(names, make_case("cpu", SPEC).tensors())), "sm_scale": None, **change}
    with pgqa.record(tmp_path) as recorder, pytest.raises((ValueError, TypeError)):
        pgqa.decode(**call)
    assert _replay.replay(str(recorder.paths[0])) == _replay.FAILS
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"recorded: {text}") for line in lines), lines
    assert any(line.startswith(f"now: {text}") for line in lines) and lines[-1] == "matches: yes"


def test_with_values_it_gives_the_same_bits(
    device: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = make_case(device, SPEC)
    with pgqa.record(tmp_path, every_call=True, values=True) as recorder:
        case.run(return_lse=True)
    assert _replay.replay(str(recorder.paths[0])) == _replay.WORKS
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "matches: yes, every bit" and "page table: valid" in lines
    assert "now: bfloat16 [4, 8, 64], finite; float32 [4, 8], not finite" in lines  # -inf: a request without pages


def test_memory_that_was_shared_is_shared_again(device: str, tmp_path: pathlib.Path) -> None:
    case = make_case(device, SPEC)
    with pgqa.record(tmp_path) as recorder, pytest.raises(ValueError, match="^out: got memory that overlaps an inp"):
        case.run(out=case.q)
    arguments = _replay.Rebuilt(_replay.load(recorder.paths[0]), None, 0).arguments
    assert arguments["out"].data_ptr() == arguments["q"].data_ptr()
    assert arguments["k_cache"].data_ptr() != arguments["v_cache"].data_ptr()
    for name, tensor in zip(("k_cache", "v_cache"), case.tensors()[1:]):
        assert arguments[name].stride() == tensor.stride()
        assert arguments[name].storage_offset() == tensor.storage_offset()
    assert _replay.replay(str(recorder.paths[0])) == _replay.FAILS


def test_made_up_values_are_those_of_the_seed(tmp_path: pathlib.Path) -> None:
    case = make_case("cpu", SPEC)
    with pgqa.record(tmp_path) as recorder:
        fail(case)
    entry = _replay.load(recorder.paths[0])
    first, again, other = (_replay.Rebuilt(entry, None, seed).arguments["q"] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other) and first.float().std() > 0.5


def test_the_table_is_judged(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = make_case("cpu", SPEC)
    case.page_indices[0] = -1
    with pgqa.record(tmp_path, every_call=True) as recorder:
        case.run()
    assert _replay.replay(str(recorder.paths[0])) == _replay.WORKS
    output = capsys.readouterr().out
    assert "page table: page_indices of request 0" in output and "now: bfloat16 [4, 8, 64]" in output
    assert output.endswith("matches: yes, in shape\n")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    package = pathlib.Path(pgqa.__file__).parents[1]
    line = [sys.executable, "-m", "pgqa", "replay", *arguments]
    return subprocess.run(line, cwd=package, capture_output=True, text=True, timeout=110)


def test_exit_status(tmp_path: pathlib.Path) -> None:
    """1 while the call fails; 0 where it works now, here because the file was changed."""
    with pgqa.record(tmp_path) as recorder:
        fail(make_case("cpu", SPEC))
    (path,) = recorder.paths
    done = command(str(path))
    assert done.returncode == 1 and "now: ValueError: window_left: got -2" in done.stdout and not done.stderr
    entry = _replay.load(path)
    entry["arguments"]["window_left"]["value"] = 3
    torch.save(entry, path)
    done = command(str(path), "--device", "cpu", "--seed", "3")
    assert done.returncode == 0 and ", finite\nmatches: no" in done.stdout


@pytest.mark.parametrize("content", [b"", b"no archive", {"format": 7}, {"format": 1}, [1]])
def test_other_files_are_refused(content: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert _replay.replay(str(path)) == _replay.UNREADABLE
    assert _replay.replay(str(tmp_path / "none")) == _replay.UNREADABLE
    captured = capsys.readouterr()
    assert captured.err.startswith("cannot be replayed: ") and not captured.out


@pytest.mark.gpu
def test_recorded_on_the_gpu_replayed_on_either(tmp_path: pathlib.Path) -> None:
    case = make_case("cuda", Spec([17, 5, 300], 8, 2, 64))
    with pgqa.record(tmp_path, every_call=True, values=True) as recorder:
        case.run()
    path = recorder.paths[0]
    rebuilt = _replay.Rebuilt(_replay.load(path), None, 0)
    assert rebuilt.arguments["q"].is_cuda
    results, error = _replay.run(_replay.load(path), rebuilt.arguments)
    assert _replay.matches(_replay.load(path), results, error) == "yes, every bit"
    assert _replay.replay(str(path), device="cpu") == _replay.WORKS
