"""The same inputs give the same bits, however often and beside whatever else, where most workers leave partials."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pytest
import torch
from cases import Case, Spec, bits, make_case, rewrite
from reference import assert_close, reference

RUNS = 100

SPECS = {
    "one long": Spec([9000], 32, 8, 128),
    "three long": Spec([4000, 9000, 2500], 32, 8, 128, dtype=torch.float16),
    "ragged": Spec([500 + 131 * i for i in range(24)], 32, 8, 128),
    "ragged rope window": Spec(
        [500 + 131 * i for i in range(24)], 40, 8, 80, window_left=1500, pos_encoding_mode=1, logits_soft_cap=20.0
    ),
    "one KV head": Spec([3000, 20000, 0, 5000], 71, 1, 64, page_size=1),
    "head dim 256": Spec([3000, 9000, 1], 16, 2, 256, page_size=7, pos_encoding_mode=1),
    "group 33": Spec([3000, 6000, 700], 66, 2, 128),
    "33 requests": Spec([700 + 37 * i for i in range(33)], 8, 2, 128),
    "300 requests": Spec([90 + i for i in range(300)], 8, 2, 64),
}


def result(case: Case) -> torch.Tensor:
    """The bytes of output and LSE."""
    out, lse = case.run(return_lse=True)
    return torch.cat((bits(out).flatten(), bits(lse).flatten()))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SPECS)
def test_a_hundred_runs(name: str) -> None:  # T34
    case = make_case("cuda", SPECS[name])
    schedule = case.schedule()
    assert 2 * schedule.num_workers_with_partials >= schedule.num_workers, str(schedule)
    first = result(case)
    assert_close(case.run(), reference(case).out)
    noise = torch.randn(2048, 2048, device="cuda")
    other = torch.cuda.Stream()
    for run in range(RUNS):
        if run % 3 == 1:  # Other work changes who arrives last.
            with torch.cuda.stream(other):
                torch.mm(noise, noise)
        if run % 5 == 2:
            noise.sum()
        assert torch.equal(result(case), first), f"run {run}"


@pytest.mark.parametrize("name", ["one long", "ragged rope window", "300 requests"])
def test_runs_on_the_cpu(name: str) -> None:
    case = make_case("cpu", SPECS[name])
    first = result(case)
    for run in range(4):
        assert torch.equal(result(case), first), f"run {run}"


@pytest.mark.gpu
def test_what_ran_before_does_not_matter() -> None:
    """Partials and counters that other shapes left behind change nothing."""
    cases = {name: make_case("cuda", spec) for name, spec in SPECS.items()}
    first = {name: result(case) for name, case in cases.items()}
    for step in range(1, len(SPECS)):
        for i in range(len(SPECS)):
            name = list(SPECS)[i * step % len(SPECS)]
            assert torch.equal(result(cases[name]), first[name]), f"{name}, step {step}"


@pytest.mark.gpu
def test_where_tensors_lie_does_not_matter() -> None:
    """Other pages, other addresses, other entries of the index array: the same bits."""
    spec = SPECS["ragged"]
    first = make_case("cuda", spec)
    expected = result(first)
    other = make_case("cuda", spec)
    rewrite(other, spec.kv_lens, seed=77)
    other.q.copy_(first.q)
    for request in range(len(spec.kv_lens)):
        source, target = first.live_slots(request), other.live_slots(request)
        for cache, filled in ((other.k_cache, first.k_cache), (other.v_cache, first.v_cache)):
            cache[target // 16, target % 16] = filled[source // 16, source % 16]
    assert not torch.equal(first.page_indices, other.page_indices)
    assert torch.equal(result(other), expected)
