"""append_kv: every byte of the caches, turned keys and queries, and refusals, on every device."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pgqa
import pytest
import torch
from cases import Spec, bits, make_case
from reference import TOLERANCES, assert_close, reference, turn

DTYPES = (torch.float16, torch.bfloat16)
LENGTHS = [17, 0, 1, 16, 33, 0]


@dataclass
class Rows:
    """New rows for a case, whose table counts them."""

    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor  # int64, of the requests that have a token
    live: torch.Tensor  # their numbers


def problem(device: str, **spec: object) -> tuple[object, Rows]:
    case = make_case(device, Spec(LENGTHS, 8, 2, **{"head_dim": 64, **spec}))
    live = [request for request, length in enumerate(case.kv_lens) if length > 0]
    slots = torch.stack([case.live_slots(request)[-1] for request in live])
    shape = (len(case.kv_lens), *case.k_cache.shape[2:])
    generator = torch.Generator(device).manual_seed(7)

    def rows() -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.q.dtype)

    return case, Rows(rows(), rows(), slots, torch.tensor(live, device=device))


def written(cache: torch.Tensor, values: torch.Tensor, rows: Rows) -> torch.Tensor:
    """A copy of `cache` with the new rows of the live requests in their slots."""
    expected = cache.clone()
    expected[rows.slots // cache.shape[1], rows.slots % cache.shape[1]] = values[rows.live]
    return expected


@pytest.mark.parametrize("layout", ["nhd", "hnd", "rows", "mixed"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_new_slots_change_and_nothing_else(device: str, layout: str, page_size: int) -> None:
    for dtype in (*DTYPES, *([torch.float32] if device == "cpu" else [])):
        case, rows = problem(device, layout=layout, page_size=page_size, dtype=dtype, first_entry=3)
        expected = [written(case.k_cache, rows.k, rows), written(case.v_cache, rows.v, rows)]
        assert pgqa.append_kv(rows.k, rows.v, *case.tensors()[1:]) is None
        for cache, after in zip((case.k_cache, case.v_cache), expected):
            assert torch.equal(bits(cache), bits(after))


def test_appended_token_counts(device: str) -> None:
    """Decode after append equals decode of a cache that had the token all along."""
    case, rows = problem(device)
    page, offset = rows.slots // 16, rows.slots % 16
    rows.k[rows.live], rows.v[rows.live] = case.k_cache[page, offset], case.v_cache[page, offset]
    expected = reference(case).out
    case.k_cache[page, offset] = torch.nan
    case.v_cache[page, offset] = torch.nan
    pgqa.append_kv(rows.k, rows.v, *case.tensors()[1:])
    assert_close(case.run(), expected)


def test_rows_of_a_packed_projection(device: str) -> None:
    """q, k and v as views of one tensor, their rows at odd offsets; q is turned in place."""
    case, rows = problem(device)
    head_dim = 64
    packed = torch.randn(len(LENGTHS), 12 * head_dim + 3, device=device).to(case.q.dtype)
    heads = packed[:, 1:-2].unflatten(1, (12, head_dim))
    q, k, v = heads[:, :8], heads[:, 8:10], heads[:, 10:]
    before = packed.clone()
    expected = written(case.v_cache, v, rows)
    result = pgqa.append_kv(k, v, *case.tensors()[1:], q=q, q_out=q, pos_encoding_mode=1)
    assert result is q
    assert torch.equal(bits(case.v_cache), bits(expected))
    assert torch.equal(packed[:, 1 + 8 * head_dim :], before[:, 1 + 8 * head_dim :])
    assert torch.equal(packed[:, 0], before[:, 0]) and not torch.equal(packed, before)


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_turned_keys_and_queries(device: str, theta: float, scale: float) -> None:  # T39, D7
    for dtype in DTYPES:
        case, rows = problem(device, dtype=dtype)
        rope = {"pos_encoding_mode": 1, "rope_theta": theta, "rope_scale": scale}
        q_out = pgqa.append_kv(rows.k, rows.v, *case.tensors()[1:], q=case.q, **rope)
        assert q_out.shape == case.q.shape and q_out.dtype == dtype
        lengths = torch.tensor(case.kv_lens, device=device)[rows.live]
        keys = case.k_cache[rows.slots // 16, rows.slots % 16]
        for got, given in ((keys, rows.k), (q_out[rows.live], case.q)):
            exact = turn(given[rows.live].double(), lengths - 1, theta, scale)
            bound = TOLERANCES[dtype].element / 4  # one rounding
            assert (got.double() - exact).abs().max() <= bound * exact.abs().max()


@pytest.mark.parametrize("length", [131_072, 1_000_000])
def test_turned_far_out(device: str, length: int) -> None:  # T40
    """One page, named by every entry: angles are right at any position."""
    dim = 128
    k_cache, v_cache = torch.zeros(2, 1, 16, 1, dim, dtype=torch.float16, device=device)
    pages = -(-length // 16)
    indptr = torch.tensor([0, pages], dtype=torch.int32, device=device)
    indices = torch.zeros(pages, dtype=torch.int32, device=device)
    last = torch.tensor([length - 16 * (pages - 1)], dtype=torch.int32, device=device)
    k = torch.randn(1, 1, dim, device=device).half()
    pgqa.append_kv(k, k, k_cache, v_cache, indptr, indices, last, pos_encoding_mode=1)
    exact = turn(k.double(), torch.tensor([length - 1], device=device), 1e4, 1.0)
    got = k_cache[0, (length - 1) % 16].double()
    assert (got - exact[0]).abs().max() <= 2**-10 * exact.abs().max()


def test_turned_cache_equals_rope_on_cached_keys(device: str) -> None:
    """Appending one token after another, turned, then decode without RoPE: decode with RoPE on plain keys."""
    plain = make_case(device, Spec([5, 20], 8, 2, 64, pos_encoding_mode=1, dtype=torch.float16))
    expected = reference(plain).out
    k_cache, v_cache = torch.zeros_like(plain.k_cache), torch.zeros_like(plain.v_cache)
    q = plain.q
    for length in range(1, 21):
        lens = [min(length, 5), length]
        counts = [1, -(-lens[1] // 16)]
        indptr = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32, device=device)
        indices = plain.page_indices[[0, *range(1, 1 + counts[1])]].contiguous()
        last = torch.tensor([lens[0], lens[1] - 16 * (counts[1] - 1)], dtype=torch.int32, device=device)
        slots = [plain.live_slots(request)[lens[request] - 1] for request in range(2)]
        caches = (plain.k_cache, plain.v_cache)
        rows = [torch.stack([cache[slot // 16, slot % 16] for slot in slots]) for cache in caches]
        q = pgqa.append_kv(*rows, k_cache, v_cache, indptr, indices, last, q=plain.q, pos_encoding_mode=1)
    out = pgqa.decode(q, k_cache, v_cache, indptr, indices, last, None)
    assert_close(out, expected)


def test_malformed_tables_write_nothing_of_their_request(device: str) -> None:
    for entry in (-1, 2147480000, -2147483648):
        case, rows = problem(device)
        case.page_indices[int(case.page_indptr[5]) - 1] = entry  # the last page of request 4
        rows.live, rows.slots = rows.live[:-1], rows.slots[:-1]
        expected = written(case.k_cache, rows.k, rows)
        pgqa.append_kv(rows.k, rows.v, *case.tensors()[1:])
        assert torch.equal(bits(case.k_cache), bits(expected))


def test_no_requests(device: str) -> None:
    case = make_case(device, Spec([], 8, 2, 64))
    k = torch.empty(0, 2, 64, dtype=case.q.dtype, device=device)
    pgqa.append_kv(k, k, *case.tensors()[1:])


REFUSALS: dict[str, tuple[Callable[[dict], None], str]] = {
    "dtype of k": (lambda c: c.update(k=c["k"].double()), "^k: got dtype Double, expected float16"),
    "rank of k": (lambda c: c.update(k=c["k"][0]), "^k: got shape .*, expected rank 3"),
    "stride of k": (lambda c: c.update(k=c["k"].mT.contiguous().mT), "^k: got last-dimension stride 2, expected 1"),
    "shape of v": (lambda c: c.update(v=c["v"][1:]), "^v: got shape .*, expected that of k"),
    "dtype of a cache": (lambda c: c.update(k_cache=c["k_cache"].half()), "^k_cache: got dtype Half, exp"),
    "heads of a cache": (lambda c: c.update(k_cache=c["k_cache"][:, :, :1]), "^k_cache: got shape .*, expected kv_"),
    "one page over and over": (
        lambda c: c.update(k_cache=c["k_cache"][:1].expand(3, -1, -1, -1)), "^k_cache: got stride 0 in dimension 0",
    ),
    "cache as k": (lambda c: c.update(k=c["k_cache"][:6, 0]), "^k_cache: got memory that overlaps an input"),
    "shape of v_cache": (lambda c: c.update(v_cache=c["v_cache"][1:]), "^v_cache: got shape .*, expected that of"),
    "int64 table": (lambda c: c.update(page_indptr=c["page_indptr"].long()), "^page_indptr: got dtype Long"),
    "short table": (lambda c: c.update(last_page_len=c["last_page_len"][1:]), "^last_page_len: got 5"),
    "q without RoPE": (lambda c: c.update(q=c["q"], pos_encoding_mode=0), "^q: got a tensor with pos_encoding_mode 0"),
    "q_out without q": (lambda c: c.update(q=None, q_out=c["q"]), "^q_out: got a tensor without q"),
    "batch of q": (lambda c: c.update(q=c["q"][1:]), "^q: got shape .*, expected batch and head_dim of k"),
    "shifted q_out": (
        lambda c: c.update(q=c["packed"][:6], q_out=c["packed"][1:]), "^q_out: got memory that overlaps an input",
    ),
    "pos_encoding_mode": (lambda c: c.update(q=None, pos_encoding_mode=2), "^pos_encoding_mode: got 2, expected 0"),
    "rope_theta": (lambda c: c.update(rope_theta=0.0), "^rope_theta: got 0, expected a finite number above 0"),
    "grad": (lambda c: c["k"].requires_grad_(), "^k: got a tensor that requires grad"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(device: str, name: str) -> None:
    case, rows = problem(device)
    change, message = REFUSALS[name]
    packed = torch.zeros(7, 8, 64, dtype=case.q.dtype, device=device)
    names = ("k_cache", "v_cache", "page_indptr", "page_indices", "last_page_len")
    call = {"k": rows.k, "v": rows.v, **dict(zip(names, case.tensors()[1:])), "q": case.q, "pos_encoding_mode": 1}
    call["packed"] = packed
    before = [bits(cache).clone() for cache in (case.k_cache, case.v_cache)]
    change(call)
    del call["packed"]
    with pytest.raises(ValueError, match=message):
        pgqa.append_kv(**call)
    for cache, bytes_before in zip((case.k_cache, case.v_cache), before):
        assert torch.equal(bits(cache), bytes_before)


def test_wrong_types(device: str) -> None:
    case, rows = problem(device)
    with pytest.raises(TypeError, match="^v: got list, expected a torch.Tensor"):
        pgqa.append_kv(rows.k, [1], *case.tensors()[1:])
    with pytest.raises(TypeError, match="^rope_scale: got str, expected a number"):
        pgqa.append_kv(rows.k, rows.v, *case.tensors()[1:], rope_scale="1")


@pytest.mark.gpu
def test_float32_is_refused_on_the_gpu() -> None:
    case, rows = problem("cuda")
    tensors = [rows.k, rows.v, case.k_cache, case.v_cache]
    with pytest.raises(ValueError, match="^dtype: got float32, expected float16 or bfloat16 on a GPU"):
        pgqa.append_kv(*[tensor.float() for tensor in tensors], *case.tensors()[3:])


@pytest.mark.parametrize("apart", [0, 1, 3])
def test_caches_that_share_slots_are_refused(apart: int) -> None:
    pool = torch.zeros(8, 16, 2, 64)
    k_cache, v_cache = pool[: 8 - apart], pool[apart:]
    k = torch.ones(1, 2, 64)
    table = [torch.tensor(row, dtype=torch.int32) for row in ([0, 1], [2], [4])]
    with pytest.raises(ValueError, match="^v_cache: got memory that overlaps k_cache, expected memory of its own"):
        pgqa.append_kv(k, k, k_cache, v_cache, *table)
    assert (pool == 0).all()


def test_caches_interleaved_in_one_tensor_are_taken() -> None:
    pool = torch.zeros(8, 2, 16, 2, 64)
    k, v = torch.ones(1, 2, 64), torch.full((1, 2, 64), 2.0)
    table = [torch.tensor(row, dtype=torch.int32) for row in ([0, 1], [2], [4])]
    pgqa.append_kv(k, v, pool[:, 0], pool[:, 1], *table)
    assert (pool[2, 0, 3] == 1).all() and (pool[2, 1, 3] == 2).all() and pool.sum() == 3 * 128
