"""Streams, threads and devices: work lands on the current stream, waits for nothing, and shares nothing."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pgqa
import pytest
import torch
from cases import Case, Spec, make_case
from fresh import run_fresh
from reference import assert_close, reference

pytestmark = pytest.mark.gpu

SPIN_CYCLES = 1_000_000_000  # half a second or more
SPECS = (
    Spec([3000, 0, 9000, 17], 32, 8, 128),
    Spec([500 + 131 * i for i in range(24)], 40, 8, 64, pos_encoding_mode=1, window_left=1000),
    Spec([20000], 16, 2, 256, page_size=1),
    Spec([90 + i for i in range(300)], 8, 2, 80, logits_soft_cap=10.0),
)


def solved(specs: tuple[Spec, ...]) -> list[tuple[Case, torch.Tensor]]:
    """Cases with their outputs, which have been checked."""
    pairs = []
    for spec in specs:
        case = make_case("cuda", spec)
        out = case.run()
        assert_close(out, reference(case).out)
        pairs.append((case, out))
    torch.cuda.synchronize()
    return pairs


def spin() -> None:
    """Keeps the current stream busy for half a second or more."""
    torch.cuda._sleep(SPIN_CYCLES)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Fails when torch synchronises, or when the block takes as long as a spin that was queued before it."""
    torch.cuda.set_sync_debug_mode("error")
    start = time.monotonic()
    try:
        yield
        assert time.monotonic() - start < 0.2, "the host waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_current_stream_is_used() -> None:  # T51
    case, expected = solved(SPECS[:1])[0]
    side = torch.cuda.Stream()
    done, behind = torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(side):
        case.run()  # The workspace of the stream exists from here on.
    torch.cuda.synchronize()
    spin()
    behind.record()
    with torch.cuda.stream(side):
        out = case.run()
        done.record()
    done.synchronize()
    assert not behind.query(), "the call waited for the default stream"
    assert torch.equal(out, expected)


def test_calls_wait_for_nothing() -> None:  # T50
    pairs = solved(SPECS)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for case, _ in pairs:
                case.run()  # Workspaces of this stream exist from here on.
            torch.cuda.synchronize()
            spin()
            with no_synchronisation():
                outs = [case.run() for case, _ in pairs]
        torch.cuda.synchronize()
        for out, (_, expected) in zip(outs, pairs):
            assert torch.equal(out, expected)


def test_calls_without_synchronisation_in_between() -> None:  # T20, 41
    """A blocked stream; then table A, call, table B, call, with the tables in the same memory."""
    tables = [make_case("cuda", Spec(lengths, 8, 2, 64)) for lengths in ([2000, 5, 300], [40, 3000, 0], [1, 1, 5000])]
    expected = [reference(case).out for case in tables]
    largest = max(len(case.page_indices) for case in tables)
    indices = torch.zeros(largest, dtype=torch.int32, device="cuda")
    indptr, last = torch.zeros_like(tables[0].page_indptr), torch.zeros_like(tables[0].last_page_len)
    tables[0].run()
    spin()
    outs = []
    for case in tables:
        indices[: len(case.page_indices)].copy_(case.page_indices)
        indptr.copy_(case.page_indptr)
        last.copy_(case.last_page_len)
        moved = Case(case.q, case.k_cache, case.v_cache, indptr, indices, last, case.kv_lens, case.options)
        outs.append(moved.run())
    for out, exact in zip(outs, expected):
        assert_close(out, exact)


def test_two_streams_at_once() -> None:  # T27, 43
    pairs = solved(SPECS)
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i in range(100):
        for lane, stream in enumerate(streams):
            case, expected = pairs[(i + lane) % len(pairs)]
            with torch.cuda.stream(stream):
                outs.append((case.run(), expected))
    torch.cuda.synchronize()
    for out, expected in outs:
        assert torch.equal(out, expected)


def test_windows_interleaved_on_one_stream() -> None:  # T27
    case = make_case("cuda", Spec([3000, 200, 9000], 8, 2, 128))
    variants = [case.with_options(window_left=window) for window in (-1, 127)]
    expected = [variant.run() for variant in variants]
    outs = [[variant.run() for variant in variants] for _ in range(50)]
    for pair in outs:
        assert torch.equal(pair[0], expected[0]) and torch.equal(pair[1], expected[1])


@pytest.mark.parametrize("shared_stream", [False, True], ids=["a stream each", "one stream"])
def test_four_threads(shared_stream: bool) -> None:  # 45
    pairs = solved(SPECS)
    shared = torch.cuda.Stream()
    start = threading.Barrier(len(pairs))

    def work(lane: int) -> int:
        start.wait()
        wrong = 0
        with torch.cuda.stream(shared if shared_stream else torch.cuda.Stream()):
            for i in range(100):
                case, expected = pairs[(i + lane) % len(pairs)]
                out = case.run()
                if i % 10 == 0:
                    wrong += not torch.equal(out, expected)
            torch.cuda.current_stream().synchronize()
        return wrong

    with ThreadPoolExecutor(len(pairs)) as pool:
        assert list(pool.map(work, range(len(pairs)))) == [0] * len(pairs)


@pytest.mark.slow
def test_first_calls_race_in_a_fresh_process() -> None:
    """Plans and workspaces are made by several threads at once."""
    code = """
import threading
from concurrent.futures import ThreadPoolExecutor
import torch
from cases import Spec, make_case
from reference import fault, reference
case = make_case("cuda", Spec([3000, 0, 900], 8, 2, 128))
expected = reference(case).out
barrier = threading.Barrier(4)
def work(lane):
    barrier.wait()
    with torch.cuda.stream(torch.cuda.Stream()):
        return fault(case.run(), expected)
torch.cuda.synchronize()
with ThreadPoolExecutor(4) as pool:
    print([found for found in pool.map(work, range(4)) if found])
"""
    assert run_fresh(code) == "[]"


def test_inputs_written_just_before() -> None:  # T43
    """Producers of q, table and caches run right before each of 1000 calls, with nothing in between."""
    cases = [make_case("cuda", Spec(lengths, 8, 2, 64, seed=i)) for i, lengths in enumerate(([400, 3], [17, 900]))]
    expected = [case.run() for case in cases]
    pages = max(len(case.k_cache) for case in cases)
    entries = max(len(case.page_indices) for case in cases)
    now = make_case("cuda", Spec([16 * (pages // 2), 16 * (pages // 2)], 8, 2, 64))
    now.page_indices = torch.zeros(entries, dtype=torch.int32, device="cuda")
    names = ("q", "k_cache", "v_cache", "page_indptr", "page_indices", "last_page_len")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        source = cases[i % 2]
        order = names[i % 6 :] + names[: i % 6]
        for name in order:
            tensor = getattr(source, name)
            getattr(now, name)[: len(tensor)].copy_(tensor)
        wrong += (now.run() != expected[i % 2]).sum()
    assert wrong.item() == 0


def test_output_read_right_after() -> None:
    """A consumer queued behind the call sees the finished output, though the kernel may be launched early."""
    case, expected = solved((SPECS[1],))[0]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    out = torch.empty_like(expected)
    for _ in range(300):
        out.fill_(torch.nan)
        case.run(out=out)
        wrong += (out != expected).sum()
    assert wrong.item() == 0


def test_tensors_dropped_right_after_the_call() -> None:  # T55
    case, expected = solved(SPECS[:1])[0]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        outs = []
        for _ in range(20):
            copy = make_copy(case)
            outs.append(copy.run())
            del copy
            junk = [torch.full_like(case.k_cache, torch.nan) for _ in range(2)]
            del junk
        side.synchronize()
    for out in outs:
        assert torch.equal(out, expected)


def make_copy(case: Case) -> Case:
    return Case(*(tensor.clone() for tensor in case.tensors()), case.kv_lens, case.options)


@contextmanager
def raw_streams(count: int) -> Iterator[list[torch.cuda.Stream]]:
    """Streams of the CUDA runtime; torch's own are 32 that it hands out again and again."""
    handles = [ctypes.c_void_p() for _ in range(count)]
    for handle in handles:
        assert int(torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle))) == 0
    try:
        yield [torch.cuda.ExternalStream(handle.value) for handle in handles]
    finally:
        for handle in handles:
            assert int(torch.cuda.cudart().cudaStreamDestroy(handle.value)) == 0


def test_many_streams() -> None:
    """More streams than workspaces are kept for."""
    case, expected = solved(SPECS[:1])[0]
    outs = []
    with raw_streams(100) as streams:
        for stream in streams * 2:
            with torch.cuda.stream(stream):
                outs.append(case.run())
        torch.cuda.synchronize()
    for out in outs:
        assert torch.equal(out, expected)
    assert pgqa.workspace_usage()["workspaces"] <= 64


def test_streams_that_come_and_go() -> None:
    """A stream's address may be used again by another; its workspace is not mistaken for that one's."""
    case, expected = solved(SPECS[:1])[0]
    for _ in range(40):
        with raw_streams(2) as streams:
            outs = []
            for stream in streams:
                with torch.cuda.stream(stream):
                    outs.append(case.run())
            torch.cuda.synchronize()
            for out in outs:
                assert torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one() -> None:  # T13, 44
    case = make_case("cuda:1", Spec([300, 5], 8, 2, 64))
    assert torch.cuda.current_device() == 0
    out = case.run()
    assert torch.cuda.current_device() == 0 and out.device == case.q.device
    assert_close(out, reference(case).out)
    mixed = make_case("cuda:0", Spec([300, 5], 8, 2, 64))
    mixed.page_indptr = mixed.page_indptr.to("cuda:1")
    with pytest.raises(ValueError, match="^page_indptr: got"):
        mixed.run()


def test_current_device_stays() -> None:
    case = make_case("cuda", Spec([300, 5], 8, 2, 64))
    case.run()
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
