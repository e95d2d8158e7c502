"""Which test restates each reported failure of another library, and why a few are not tested here.

The reports are known by short ids; a test that restates one carries the id in a comment on its first line.
"""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pathlib
import re

import pytest
from fresh import run_fresh

BENCH = "a time, not a result: measured by bench/"
LATER = "belongs to a feature that pgqa does not have yet: "

NOT_HERE = {
    "T48": BENCH,
    "4": BENCH,
    "9": BENCH,
    "14": "every device address of a 64-bit process lies beyond 32 bits: all tests cover it",
    "33": LATER + "attention sinks; unknown arguments are refused",
}

# Their results are tested, their times are not.
ALSO_TIMES = ("T23", "T25", "T45", "T50", "1", "5", "6", "7", "8")

# Restated by tests over many values at once, or by programs in C++.
ELSEWHERE = {
    "T10": ("test_bad_inputs", "int64"),
    "T11": ("test_bad_inputs", "one request more"),
    "T12": ("test_strides", "test_offsets_beyond_32_bits"),
    "T14": ("test_decode", "test_groups"),
    "T15": ("test_decode", "test_head_dims"),
    "T16": ("test_decode", "test_page_sizes_around_page_ends"),
    "T17": ("test_decode", "test_page_sizes_around_page_ends"),
    "T29": ("test_windows", "test_tokens_left_of_the_window_weigh_exactly_zero"),
    "T30": ("test_windows", "test_exactly_w_plus_one_tokens_have_weight"),
    "T33": ("test_batch_invariant", "test_alone_and_in_any_batch"),
    "T35": ("test_ops", "test_compiled_whole"),
    "T37": ("test_bad_inputs", "another dtype"),
    "T39": ("test_rope", "test_thetas_and_scales"),
    "T40": ("test_rope", "test_error_at_131072_is_that_without_rope"),
    "T42": ("test_bad_inputs", "test_unknown_arguments_are_not_ignored"),
    "T47": ("test_bad_inputs", "one dimension less"),
    "T49": ("test_field_cases", "test_import_and_first_call_take_less_than_a_second"),
    "T52": ("test_bad_inputs", "two tokens a request"),
    "10": ("test_strides", "wide stride"),
    "11": ("test_strides", "page 16"),
    "12": ("test_strides", "test_offsets_beyond_32_bits"),
    "13": ("test_strides", "test_page_ids_beyond_16_bits"),
    "15": ("test_malformed", "indptr past the indices"),
    "18": ("test_decode", "test_page_sizes_with_window_and_rope"),
    "19": ("test_strides", "test_index_arrays_without_an_entry_to_spare"),
    "20": ("test_windows", "test_ragged_windows"),
    "23": ("test_windows", "test_nan_in_the_tile_of_a_live_token"),
    "29": ("test_capture", "test_captured_with_every_length_zero"),
    "34": ("test_batch_invariant", "test_alone_and_in_any_batch"),
    "35": ("test_batch_invariant", "test_alone_and_in_any_batch"),
    "36": ("test_batch_invariant_gpu", "test_graphs_of_any_capacity"),
    "38": ("test_capture", "test_caller_workspace_filled_between_replays"),
    "46": ("test_repeatability", "test_what_ran_before_does_not_matter"),
    "48": ("test_decode", "BATCHES"),
    "49": ("test_decode", "test_groups"),
    "50": ("test_decode", "test_groups"),
    "51": ("test_bad_inputs", "one request less"),
    "53": ("test_streams", "test_calls_wait_for_nothing"),
}

T_IDS = [1, 2, 4, 5, 6, *range(8, 18), *range(19, 26), *range(27, 31), 32, 33, 34, 35, 37, 39, *range(40, 44),
         *range(45, 53), 55]  # fmt: skip
PLAIN_IDS = [1, *range(4, 17), *range(18, 25), 26, *range(28, 37), *range(38, 54)]
ALL_IDS = [f"T{i}" for i in T_IDS] + [str(i) for i in PLAIN_IDS]

FOLDER = pathlib.Path(__file__).resolve().parent


def ids_in_comments() -> set[str]:
    """Ids that tests carry: "def test_...: # T1, 21"."""
    found: set[str] = set()
    for path in FOLDER.glob("test_*.py"):
        for comment in re.findall(r"^(?:def test_.*|    \"[^\"]*\": Spec.*)  # ([T0-9, ]+)$", path.read_text(), re.M):
            found.update(comment.split(", "))
    return found


@pytest.mark.parametrize("case_id", ALL_IDS)
def test_every_report_has_a_test(case_id: str) -> None:
    if case_id in NOT_HERE:
        pytest.skip(NOT_HERE[case_id])
    if case_id in ELSEWHERE:
        module, text = ELSEWHERE[case_id]
        assert text in (FOLDER / f"{module}.py").read_text()
    else:
        assert case_id in ids_in_comments()


@pytest.mark.parametrize("case_id", ALSO_TIMES)
def test_times_of_reports(case_id: str) -> None:
    assert case_id in ALL_IDS
    pytest.skip(BENCH)


@pytest.mark.gpu
def test_import_and_first_call_take_less_than_a_second() -> None:
    """Nothing is compiled at run time; torch and its CUDA context are not counted."""
    code = """
import time
import torch
lengths = torch.tensor([0, 3], dtype=torch.int32, device="cuda")
q = torch.randn(1, 8, 128, device="cuda").half()
cache = torch.randn(3, 16, 2, 128, device="cuda").half()
ids = torch.tensor([2, 0, 1], dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
start = time.monotonic()
import pgqa
pgqa.decode(q, cache, cache, lengths, ids, lengths[1:], 0.1)
torch.cuda.synchronize()
print(time.monotonic() - start)
"""
    assert float(run_fresh(code)) < 1.0
