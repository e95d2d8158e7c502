"""The serving simulator from end to end: right outputs over reused, shared and poisoned pages, faults that it finds."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import importlib.util
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pgqa
import pytest
import torch
from serve_sim import cli
from serve_sim.engine import EagerEngine, Engine, EngineConfig
from serve_sim.ledger import ROW_TOLERANCE, Ledger, WrongOutput
from serve_sim.page_pool import PagePool
from serve_sim.report import percentile
from serve_sim.simulation import Result, Simulation, SimulationConfig
from serve_sim.workload import Request, Trace, WorkloadConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads, much slower beside other programs."""
    chosen = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(chosen)


def config_of(device: str, dtype: torch.dtype, pad_by_rows: bool, steps: int) -> SimulationConfig:
    """Eight requests in a pool that they soon fill."""
    engine = EngineConfig(8, 2, 64, 16, dtype, 8, num_pages=60, max_entries=500, pad_by_rows=pad_by_rows)
    workload = WorkloadConfig(
        Trace(100, 20), sigma=0.8, rate=0.4, backlog=8, max_tokens=900, shared_fraction=0.6, num_system_prompts=2,
        system_prompt_tokens=40,
    )  # fmt: skip
    return SimulationConfig(engine, workload, device, steps, check_every=1)


def check_result(result: Result, dtype: torch.dtype) -> None:
    rows = sum(record.batch for record in result.records)
    assert result.num_checked == 8 * rows
    assert 0 < result.worst_error <= ROW_TOLERANCE[dtype]
    assert result.counters.finished > 10 and result.counters.preemptions > 0 and result.counters.shared_pages > 5
    assert max(record.shared_pages for record in result.records) > 0
    assert all(record.step_ms > 0 for record in result.records)


@pytest.mark.parametrize(("dtype", "pad_by_rows"), [(torch.float32, False), (torch.bfloat16, True)])
def test_every_step_is_right_on_the_cpu(dtype: torch.dtype, pad_by_rows: bool) -> None:
    result = Simulation(config_of("cpu", dtype, pad_by_rows, steps=100)).run()
    check_result(result, dtype)
    assert result.torch_growth is None and not result.memory_grew


@pytest.mark.gpu
@pytest.mark.parametrize("pad_by_rows", [False, True])
def test_every_replay_is_right_and_memory_stays(pad_by_rows: bool) -> None:
    result = Simulation(config_of("cuda", torch.float16, pad_by_rows, steps=300)).run()
    check_result(result, torch.float16)
    assert result.torch_growth is not None and not result.memory_grew


def no_append(*arguments: object, **keywords: object) -> None:
    """In place of pgqa.append_kv."""


def first_page_only(self: PagePool) -> int:
    """In place of PagePool.allocate: always page 0."""
    self._references[0] += 1
    return 0


def unwritten(self: Engine, pages: list[int], first: int, kv: torch.Tensor) -> None:
    """In place of Engine.write: the last token is left out."""
    write(self, pages, first, kv[:, :-1])


write = Engine.write


@pytest.mark.parametrize(
    ("owner", "name", "faulty"),
    [(pgqa, "append_kv", no_append), (PagePool, "allocate", first_page_only), (Engine, "write", unwritten)],
)
def test_faults_are_found(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, faulty: object) -> None:
    monkeypatch.setattr(owner, name, faulty)
    with pytest.raises(WrongOutput, match="query head"):
        Simulation(config_of("cpu", torch.float32, pad_by_rows=False, steps=50)).run()


def test_ledger_sees_one_token_less_and_rows_that_are_not_zero() -> None:
    config = config_of("cpu", torch.float16, pad_by_rows=False, steps=1).engine
    ledger, engine = Ledger(config, 900, "cpu"), EagerEngine(config)
    request = Request(0, 500, 9, length=500, pages=list(range(32)))
    kv = torch.randn(2, 500, 2, 64).half()
    ledger.begin(request, kv)
    engine.write(request.pages, 0, kv)
    for rows, values in ((engine.k, kv[0, -1]), (engine.v, kv[1, -1])):
        rows[0] = values
    engine.q[0].normal_()
    engine.step([request])
    ledger.check([request], engine.q, engine.out)
    engine.out[3, 0, 0] = 1e-3
    with pytest.raises(WrongOutput, match="row 1 or one past it is not 0"):
        ledger.check([request], engine.q, engine.out)
    engine.step([replace(request, length=499)])
    with pytest.raises(WrongOutput, match="request 0 of 500 tokens"):
        ledger.check([request], engine.q, engine.out)


def test_freed_pages_are_poison() -> None:
    simulation = Simulation(replace(config_of("cpu", torch.float32, pad_by_rows=False, steps=60), check_every=0))
    simulation.run()
    simulation.engine.poison(simulation.pool.take_freed())
    for page in range(simulation.pool.num_pages):
        held = simulation.pool.references(page) > 0
        for cache in (simulation.engine.k_cache, simulation.engine.v_cache):
            assert held or cache[page].isnan().all()


def test_program_on_the_cpu(tmp_path: pathlib.Path) -> None:
    picture = tmp_path / "steps.png"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "serve_sim.py"), "--device", "cpu", "--steps", "40", "--check", "3",
         "--max-batch", "4", "--trace", "coding", "--max-tokens", "500", "--plot", str(picture)],
        env={"PYTHONPATH": str(ROOT / "python"), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in ("step time       median", "tokens/s", "preemptions", "shared pages", "memory growth   not measured"):
        assert words in done.stdout
    assert int(re.search(r"checked +(\d+) rows", done.stdout)[1]) > 0
    if importlib.util.find_spec("matplotlib") is None:
        assert "skipped: matplotlib is not installed" in done.stdout and not picture.exists()
    else:
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_growing_memory_fails_the_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    arguments = ["--device", "cpu", "--plot", "", "--steps", "2", "--check", "none"]
    assert cli.main("", arguments) == 0
    run = Simulation.run

    def growing(self: Simulation) -> Result:
        return replace(run(self), torch_growth=512, workspace_growth=0)

    monkeypatch.setattr(Simulation, "run", growing)
    assert cli.main("", arguments) == 1
    assert "512 bytes of tensors, 0 of workspaces" in capsys.readouterr().out


def test_wrong_output_fails_the_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(pgqa, "append_kv", no_append)
    assert cli.main("", ["--device", "cpu", "--plot", "", "--steps", "2"]) == 1
    assert capsys.readouterr().err.startswith("wrong output: request ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--check", "0"], "--check: got 0, expected a number from 1"),
        (["--check", "often"], "--check: got often"),
        (["--steps", "-1"], "--steps: got -1"),
        (["--shared", "1.5"], "--shared: got 1.5, expected a number from 0 to 1"),
        (["--sigma", "nan"], "--sigma: got nan"),
        (["--pages", "7"], "--pages: got 7, expected 256 or more for --max-tokens"),
        (["--query-heads", "7"], "query_heads"),
        (["--trace", "none"], "--trace"),
        (["--plot", "/no/such/folder/a.png"], "--plot: got /no/such/folder/a.png"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as refusal:
        cli.main("", ["--device", "cpu", "--plot", "", *arguments])
    assert refusal.value.code == 2
    assert words in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main("What it is.", ["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert "What it is." in text and "--check every|N|none" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_said(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cli.main("", ["--device", "cuda"])
    assert "--device: got cuda, but torch finds no GPU" in capsys.readouterr().err


def test_percentile() -> None:
    assert percentile([5.0], 99) == 5.0
    assert percentile([float(value) for value in range(101)], 99) == pytest.approx(99.0)
