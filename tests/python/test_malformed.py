"""Page tables with absurd values on the device: no hang, no fault, and every other request is right."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import Case, Spec, make_case
from reference import assert_close, reference

MAX, MIN = 2**31 - 1, -(2**31)
BAD_REQUEST = 5
LENGTHS = [40, 0, 7, 100, 33, 64, 1, 300, 16, 90]


def last_len(value: int) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.last_page_len[BAD_REQUEST] = value

    return change


def page_ids(value: int) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        begin, end = case.page_indptr[BAD_REQUEST : BAD_REQUEST + 2].tolist()
        case.page_indices[begin:end] = value

    return change


def last_row(*bounds: int) -> Callable[[Case], None]:
    """Makes the bad request the last one, so that no other row shares the bounds that change."""

    def change(case: Case) -> None:
        case.page_indptr[-len(bounds) :] = torch.tensor(bounds, dtype=torch.int32)

    return change


CHANGES = {
    "last_page_len 0": (BAD_REQUEST, last_len(0)),
    "last_page_len -1": (BAD_REQUEST, last_len(-1)),
    "last_page_len smallest": (BAD_REQUEST, last_len(MIN)),
    "last_page_len past the page": (BAD_REQUEST, last_len(17)),
    "last_page_len largest": (BAD_REQUEST, last_len(MAX)),
    "page ids -1": (BAD_REQUEST, page_ids(-1)),
    "page ids smallest": (BAD_REQUEST, page_ids(MIN)),
    "page ids largest": (BAD_REQUEST, page_ids(MAX)),
    "page id one past the pool": (BAD_REQUEST, lambda case: page_ids(len(case.k_cache))(case)),
    "indptr past the indices": (len(LENGTHS) - 1, last_row(10**6)),
    "indptr largest": (len(LENGTHS) - 1, last_row(MAX)),
    "indptr decreasing": (len(LENGTHS) - 1, last_row(3)),
    "indptr negative": (len(LENGTHS) - 1, last_row(-7)),
    "indptr smallest": (len(LENGTHS) - 1, last_row(MIN)),
}


def check_others(case: Case, bad: set[int]) -> None:
    """Runs the case twice; all requests but `bad` must meet the tolerance, and the bits repeat."""
    out, again = case.run(), case.run()
    assert torch.equal(out.view(torch.int16), again.view(torch.int16))
    for request in bad:
        case.kv_lens[request] = 0
    expected = reference(case).out
    for request in bad:
        out[request] = expected[request]
    assert_close(out, expected)


@pytest.mark.parametrize("window_left", [-1, 30])
@pytest.mark.parametrize("rope", [0, 1])
@pytest.mark.parametrize("name", CHANGES)
def test_one_bad_request(device: str, name: str, rope: int, window_left: int) -> None:
    case = make_case(device, Spec(LENGTHS, 8, 2, 64, pos_encoding_mode=rope, window_left=window_left))
    request, change = CHANGES[name]
    change(case)
    check_others(case, {request})


@pytest.mark.parametrize("copies", [1, 5, 30], ids=["10", "50", "300"])
def test_bad_first_rows(device: str, copies: int) -> None:
    case = make_case(device, Spec(LENGTHS * copies, 8, 2, 128, first_entry=3))
    case.page_indptr[0] = -5
    case.last_page_len[2] = MAX
    case.last_page_len[-1] = MIN
    check_others(case, {0, 2, len(case.kv_lens) - 1})


@pytest.mark.parametrize("batch", [1, 32, 33, 256, 257, 4096])
@pytest.mark.parametrize("kind", ["random", "largest", "smallest", "alternating"])
def test_every_value_absurd(device: str, kind: str, batch: int) -> None:
    case = make_case(device, Spec([20] * batch, 8, 2, 64))
    generator = torch.Generator().manual_seed(batch)
    for tensor in (case.page_indptr, case.page_indices, case.last_page_len):
        values = torch.randint(MIN, MAX, tensor.shape, generator=generator, dtype=torch.int64)
        if kind == "largest":
            values[:] = MAX
        elif kind == "smallest":
            values[:] = MIN
        elif kind == "alternating":
            values[::2], values[1::2] = MIN, MAX
        tensor.copy_(values.int())
    out = case.run()
    assert out.shape == case.q.shape
    if device == "cuda":
        torch.cuda.synchronize()


def test_rows_that_overlap_and_one_that_decreases(device: str) -> None:
    case = make_case(device, Spec([64, 64, 64], 8, 2, 64))
    case.page_indptr.copy_(torch.tensor([0, 4, 2, 6], dtype=torch.int32))
    case.kv_lens = [64, 0, 64]
    assert_close(case.run(), reference(case).out)


def test_caches_without_pages(device: str) -> None:
    case = make_case(device, Spec([20, 0], 8, 2, 64))
    case.k_cache, case.v_cache = case.k_cache[:0], case.v_cache[:0]
    out = case.run()
    assert torch.equal(out[1], torch.zeros_like(out[1]))
