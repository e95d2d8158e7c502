"""The accuracy that bench/accuracy.py reports: pgqa keeps the bounds, and what rounds once too often does not."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable

import pgqa
import pytest
import torch
from cases import Case, Options
from reference import reference

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench"))  # behind the folder of the tests

import accuracy  # noqa: E402
import accuracy_problem  # noqa: E402
from accuracy import CASES, AccuracyCase, bound_of, errors_of, measure  # noqa: E402
from accuracy_problem import Problem, attention, make_problem, turned  # noqa: E402
from report import Json  # noqa: E402


def check(case: AccuracyCase, device: str) -> None:
    record = measure(case, device, pgqa.decode)
    assert record["fault"] is None, f"{case.name}: {record['fault']}"
    assert record["rows"] == case.batch * case.kv_heads * case.group and 0.5 < record["ratio"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("group", [1, 4, 8, 16, 32])
def test_bounds_on_the_cpu(dtype: str, group: int) -> None:
    for length, rope in ((17, True), (1000, False)):
        for peaked in (False, True):
            check(AccuracyCase(dtype, group, 64, length, rope, peaked), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 8, 16, 32])
def test_bounds_on_the_gpu(group: int, head_dim: int, rope: bool) -> None:
    for case in CASES:
        if (case.group, case.head_dim, case.rope) == (group, head_dim, rope) and case.length <= 8192:
            check(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("group", "head_dim"), [(4, 128), (8, 64), (16, 128), (8, 256)])
def test_bounds_at_131072_tokens(dtype: str, group: int, head_dim: int) -> None:
    for rope in (False, True):
        check(AccuracyCase(dtype, group, head_dim, 131072, rope, peaked=True), "cuda")


def weights_rounded(problem: Problem) -> torch.Tensor:
    """float32 throughout, but weights in 16 bits."""
    case, out = problem.case, []
    for request in range(case.batch):
        k, v = (problem.tokens(cache, request, 0, case.length).float() for cache in (problem.k_cache, problem.v_cache))
        q = problem.q[request].float().view(case.kv_heads, case.group, case.head_dim)
        scores = torch.einsum("hgd,nhd->hgn", q, k) * problem.scale
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        rounded = weights.to(problem.q.dtype).float()
        out.append((torch.einsum("hgn,nhd->hgd", rounded, v) / weights.sum(-1, keepdim=True)).flatten(0, 1))
    return torch.stack(out).to(problem.q.dtype)


def turned_keys_rounded(problem: Problem) -> torch.Tensor:
    return attention_with(problem, lambda x, first: turned(x, first).to(problem.q.dtype).to(x.dtype))


def angles_of_float32(problem: Problem) -> torch.Tensor:
    def turn(x: torch.Tensor, first: int) -> torch.Tensor:
        half = x.shape[-1] // 2
        frequencies = accuracy_problem.ROPE_THETA ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = (torch.arange(first, first + len(x), dtype=torch.float32)[:, None] * frequencies)[:, None]
        low, high = x[..., :half], x[..., half:]
        return torch.cat((low * angles.cos() - high * angles.sin(), low * angles.sin() + high * angles.cos()), dim=-1)

    return attention_with(problem, turn)


def attention_with(problem: Problem, turn: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy_problem, "turned", turn)
        return attention(problem, torch.float32).to(problem.q.dtype)


@pytest.mark.parametrize(
    ("case", "solve"),
    [
        (AccuracyCase("bfloat16", 4, 128, 1000, rope=False, peaked=False), weights_rounded),
        (AccuracyCase("float16", 8, 64, 1000, rope=False, peaked=False), weights_rounded),
        (AccuracyCase("bfloat16", 8, 128, 1000, rope=True, peaked=True), turned_keys_rounded),
        (AccuracyCase("float16", 16, 64, 1000, rope=True, peaked=True), turned_keys_rounded),
        (AccuracyCase("float16", 8, 64, 131072, rope=True, peaked=True), angles_of_float32),
    ],
)
def test_what_rounds_once_too_often_is_beyond_the_bound(
    case: AccuracyCase, solve: Callable[[Problem], torch.Tensor]
) -> None:
    record = measure(case, "cpu", lambda *arguments, **keywords: solve(make_problem(case, "cpu")))
    assert record["fault"] is not None and record["of_bound"] > 1.05


@pytest.mark.parametrize("rope", [False, True])
def test_float64_is_the_reference_whatever_the_chunks(rope: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = AccuracyCase("float16", 4, 64, 1000, rope, peaked=True)
    problem = make_problem(case, "cpu")
    whole = attention(problem, torch.float64)
    monkeypatch.setattr(accuracy_problem, "CHUNK_TOKENS", 300)
    torch.testing.assert_close(attention(problem, torch.float64), whole, rtol=1e-12, atol=1e-14)
    as_test_case = Case(
        problem.q, problem.k_cache, problem.v_cache, problem.page_indptr, problem.page_indices, problem.last_page_len,
        [case.length] * case.batch, Options(sm_scale=problem.scale, pos_encoding_mode=int(rope)),
    )  # fmt: skip
    torch.testing.assert_close(reference(as_test_case).out, whole, rtol=1e-9, atol=1e-11)


def test_statistic_is_over_all_rows() -> None:
    expected = torch.zeros(1, 3, 4, dtype=torch.float64)
    out, yardstick = expected.float(), expected.float()
    out[0, :, 0] = torch.tensor([2.0, 8.0, 0.0])  # row errors 1, 4, 0
    yardstick[0, :, 1] = torch.tensor([4.0, 2.0, 0.0])  # row errors 2, 1, 0
    errors = errors_of(out, expected, yardstick)
    assert errors.ratio() == pytest.approx((17 / 5) ** 0.5)
    assert errors.row_ratios().tolist() == [[0.5, 4.0, 1.0]]
    assert errors_of(expected.float() + 1, expected, expected.float()).ratio() == float("inf")


def test_bounds_by_group() -> None:
    assert [bound_of(group) for group in (1, 4, 8, 16, 32)] == [1.2, 1.2, 1.2, 1.5, 1.5]


def test_table_and_records(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    """One case that keeps its bound, one whose output is no number, one that raises."""
    case = AccuracyCase("float16", 1, 64, 17, rope=False, peaked=False)

    def nan(q: torch.Tensor, *arguments: object, **keywords: object) -> torch.Tensor:
        return torch.full_like(q, torch.nan)

    def failing(*arguments: object, **keywords: object) -> torch.Tensor:
        raise RuntimeError("no kernel")

    log = Json(str(tmp_path / "records"))
    for decode in (pgqa.decode, nan, failing):
        accuracy.run([case], "cpu", decode, log)
    table = capsys.readouterr().out
    assert log.num_bad == 2 and table.count("| BEYOND") + table.count(" BEYOND |") == 1 and "no kernel |" in table
    good, wrong, failed = (json.loads(line) for line in (tmp_path / "records").read_text().splitlines())
    assert (
        good["fault"] is None
        and good["rows"] == 64
        and good["of_bound"] == pytest.approx(good["ratio"] / 1.2, rel=1e-3)
    )
    assert wrong["fault"].startswith("ratio nan") and failed["failed"] == "RuntimeError: no kernel"
    for name in ("case", "dtype", "group", "head_dim", "rope", "length", "peaked", "median_row", "worst_row"):
        assert name in good
