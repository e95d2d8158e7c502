"""Each gate of the evaluation catches the cheat that it is there for, and a right submission passes all of them."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Callable

import pytest

ROOT = Path(__file__).resolve().parents[2]
Judged = Callable[..., list[str]]


def test_right_submission_has_no_faults(judged: Judged) -> None:
    assert judged("return HONEST", window_left=6, logits_soft_cap=5.0, pos_encoding_mode=1) == []


def test_cached_output(judged: Judged) -> None:
    body = "key = q.data_ptr()\nif key not in cache:\n    cache[key] = HONEST\nreturn cache[key].clone()"
    (fault,) = judged(body, "cache = {}")
    assert fault.startswith("fresh values, accuracy:")


def test_output_cached_only_while_timed(judged: Judged) -> None:
    body = "state.append(0)\nif len(state) < 80 or not kept:\n    kept[:] = [HONEST]\nreturn kept[0].clone()"
    faults = judged(body, "state, kept = [], []")
    assert faults[0].startswith("timed call, fresh values: the same output")


def test_wrong_only_while_timed(judged: Judged) -> None:
    faults = judged("state.append(0)\nout = HONEST\nreturn out if len(state) < 5 else out * 1.01", "state = []")
    assert faults[0].startswith("timed call, accuracy:")


def test_mutated_input(judged: Judged) -> None:
    faults = judged("out = HONEST\nq.mul_(0.5)\nreturn out")
    assert faults == ["input immutability: q was changed"]


def test_input_mutated_only_while_timed(judged: Judged) -> None:
    faults = judged(
        "state.append(0)\nout = HONEST\nif len(state) > 60:\n    q.mul_(1.0001)\nreturn out",
        "state = []",
    )
    assert faults[0] == "timed call, input immutability: q was changed"


def test_mutated_page_table(judged: Judged) -> None:
    faults = judged("out = HONEST\nlast_page_len.add_(1)\nreturn out")
    assert faults == ["input immutability: last_page_len was changed"]


def test_returned_alias_of_an_input(judged: Judged) -> None:
    """One token alone is its own output, so a view of v_cache has the right values."""
    body = "return v_cache[page_indices[0].item()].view(q.shape)"
    (fault,) = judged(body, kv_lens=[1], query_heads=1, kv_heads=1, page_size=1)
    assert fault == "alias: the output shares memory with v_cache"


def test_returned_buffer_of_an_earlier_call(judged: Judged) -> None:
    body = "out = HONEST\nif not kept:\n    kept.append(out)\nreturn kept[0].copy_(out)"
    faults = judged(body, "kept = []")
    assert "fresh values, alias: the output shares memory with an earlier output" in faults


def test_returned_buffer_out_of_a_few(judged: Judged) -> None:
    body = "out = HONEST\nkept.append(out if len(kept) < 8 else kept[-8].copy_(out))\nreturn kept[-1]"
    assert judged(body, "kept = []") == ["alias: the output shares memory with an earlier output"]


def test_stale_page_table(judged: Judged) -> None:
    head = "table = []"
    body = (
        "if not table:\n    table.extend(t.clone() for t in (page_indptr, page_indices, last_page_len))\n"
        "page_indptr, page_indices, last_page_len = table\nreturn HONEST"
    )
    (fault,) = judged(body, head)
    assert fault.startswith("fresh page table, ")


def test_stale_last_page_len(judged: Judged) -> None:
    body = "kept.append(last_page_len.clone())\nlast_page_len = kept[0]\nreturn HONEST"
    (fault,) = judged(body, "kept = []", kv_lens=[18, 17])
    assert fault.startswith("fresh page table, ")


@pytest.mark.parametrize(
    "patch",
    [
        "class Fake(torch.cuda.Event):\n    pass\ntorch.cuda.Event = Fake",
        "torch.cuda.Event.elapsed_time = lambda self, other: 0.001",
        "torch.cuda.synchronize = lambda device=None: None",
        "torch.Tensor.clone = lambda self: self",
    ],
)
def test_patched_timer(judged: Judged, patch: str) -> None:
    faults = judged("return HONEST", patch)
    assert faults[0].startswith("timing integrity: torch.") and faults[0].endswith("was replaced")


def test_torch_functions_redefined_by_a_mode(judged: Judged) -> None:
    faults = judged("return HONEST", "torch.set_default_device('cpu')")
    assert faults[0] == "timing integrity: a mode that redefines torch functions was left active"


def test_time_hidden_from_the_timer(judged: Judged) -> None:
    """Work that only happens when the values are not new is seen by the clock of the evaluating process."""
    head = "state = []"
    body = (
        "if state[-1:] == [q._version]:\n    for _ in range(20):\n        HONEST\n"
        "state.append(q._version)\nreturn HONEST"
    )
    faults = judged(body, head)
    assert any(fault.startswith("timing integrity:") and "evaluator's clock" in fault for fault in faults)


def test_scattered_latency(judged: Judged) -> None:
    body = "state.append(0)\nfor _ in range(60 * (len(state) % 2)):\n    HONEST\nreturn HONEST"
    faults = judged(body, "state = []")
    assert any(fault.startswith("dispersion: idle") for fault in faults)


def test_reads_past_last_page_len(judged: Judged) -> None:
    (fault,) = judged("last_page_len = torch.full_like(last_page_len, k_cache.shape[1])\nreturn HONEST")
    assert fault.startswith("finite:")


def test_dead_slots_recognized_by_their_poison(judged: Judged) -> None:
    """Takes the finite slots of a last page for its length: right until dead slots look like live ones."""
    body = (
        "lens = last_page_len.clone()\n"
        "for r in range(len(lens)):\n"
        "    if page_indptr[r + 1] > page_indptr[r]:\n"
        "        lens[r] = k_cache[page_indices[page_indptr[r + 1] - 1], :, 0, 0].isfinite().sum()\n"
        "last_page_len = lens\n"
        "return HONEST"
    )
    (fault,) = judged(body)
    assert fault.startswith("dead slots, accuracy:")


def test_one_token_too_many_in_the_window(judged: Judged) -> None:
    (fault,) = judged("window_left = window_left + 1\nreturn HONEST", window_left=6, kv_lens=[40, 18])
    assert fault.startswith("finite:")


@pytest.mark.parametrize("ignored", ["logits_soft_cap = 0.0", "pos_encoding_mode = 0", "rope_scale = 1.0"])
def test_ignored_option(judged: Judged, ignored: str) -> None:
    fields = {"logits_soft_cap": 3.0, "pos_encoding_mode": 1, "rope_scale": 4.0}
    (fault,) = judged(f"{ignored}\nreturn HONEST", kv_lens=[40, 33], **fields)
    assert fault.startswith("accuracy:")


@pytest.mark.parametrize(
    "returned, what",
    [
        ("HONEST.double()", "dtype"),
        ("HONEST[:, :1]", "shape"),
        ("(HONEST, None)", "returned tuple"),
        ("HONEST.transpose(0, 1).contiguous().transpose(0, 1)", "is_contiguous"),
    ],
)
def test_wrong_structure(judged: Judged, returned: str, what: str) -> None:
    (fault,) = judged(f"return {returned}")
    assert fault.startswith("structure: " + what)


def test_exception_in_the_call(judged: Judged) -> None:
    assert judged("raise RuntimeError('no such shape')") == ["error: RuntimeError: no such shape"]


def test_process_that_ends(judged: Judged) -> None:
    (fault,) = judged("raise SystemExit(0)")
    assert fault.startswith("error: the process ended")


def test_endless_call(judged: Judged) -> None:
    (fault,) = judged("while True:\n    pass", timeout_s=12.0)
    assert fault.startswith("timeout:")


def test_file_outside_the_submission(judged: Judged) -> None:
    spec = ROOT / "problems" / "visible_spec.json"
    head = f"try:\n    torch.load({str(spec)!r})\nexcept Exception:\n    pass"
    faults = judged("return HONEST", head)
    assert faults == [f"import: opens {spec}"]
