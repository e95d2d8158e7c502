"""Wrong arguments are refused before anything runs, by an error that names the argument, and do no harm."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pgqa
import pytest
import torch
from cases import Case, Spec, make_case
from reference import assert_close, reference

INF, NAN = float("inf"), float("nan")
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Bad:
    """A call with `changes(arguments)` put in; the error is of `kind` and begins with "<argument>: got"."""

    name: str
    argument: str
    changes: Callable[[Arguments], Arguments]
    kind: type[Exception] = ValueError
    gpu_only: bool = False


def odd_stride(t: torch.Tensor) -> torch.Tensor:
    """The same shape with rows that begin at odd multiples of two bytes."""
    wide = torch.zeros(*t.shape[:-1], t.shape[-1] + 1, dtype=t.dtype, device=t.device)
    return wide[..., :-1]


def shifted(t: torch.Tensor) -> torch.Tensor:
    """The same shape, contiguous, beginning two bytes off alignment."""
    return torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape)


def every_other(t: torch.Tensor) -> torch.Tensor:
    """The same shape with a last-dimension stride of two."""
    return torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype, device=t.device)[..., ::2]


def other(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.bfloat16 else torch.bfloat16


def each(names: str, make: Callable[[str], Bad]) -> list[Bad]:
    return [make(name) for name in names.split()]


TENSORS = "q k_cache v_cache page_indptr page_indices last_page_len"
TABLES = "page_indptr page_indices last_page_len"

BAD = [
    *each(TENSORS, lambda n: Bad("not a tensor", n, lambda a: {n: a[n].tolist()}, TypeError)),
    *each(TENSORS, lambda n: Bad("None", n, lambda a: {n: None}, TypeError)),
    *each(TENSORS + " out", lambda n: Bad("one dimension more", n, lambda a: {n: a[n][None]})),
    *each("q k_cache v_cache", lambda n: Bad("one dimension less", n, lambda a: {n: a[n][0]})),
    *each("k_cache v_cache out", lambda n: Bad("another dtype", n, lambda a: {n: a[n].to(other(a[n].dtype))})),
    Bad("integers", "q", lambda a: {n: a[n].int() for n in ("q", "k_cache", "v_cache")}),
    Bad("float64", "q", lambda a: {n: a[n].double() for n in ("q", "k_cache", "v_cache")}),
    Bad("float32 on a GPU", "dtype|q", lambda a: {n: a[n].float() for n in ("q", "k_cache", "v_cache")}, gpu_only=True),
    *each(TABLES, lambda n: Bad("int64", n, lambda a: {n: a[n].long()})),
    *each(TABLES, lambda n: Bad("float", n, lambda a: {n: a[n].float()})),
    *each(TABLES, lambda n: Bad("strided", n, lambda a: {n: a[n].repeat_interleave(2)[::2]})),
    *each("k_cache v_cache " + TABLES, lambda n: Bad("on another device", n, lambda a: {n: a[n].to("meta")})),
    Bad("on a device without kernels", "q", lambda a: {n: t.to("meta") for n, t in a.items() if torch.is_tensor(t)}),
    Bad("sparse", "k_cache", lambda a: {"k_cache": a["k_cache"].nan_to_num().to_sparse()}),
    Bad("one request more", "page_indptr|last_page_len", lambda a: {"q": torch.cat([a["q"], a["q"][:1]])}),
    Bad("one request less", "page_indptr|last_page_len", lambda a: {"q": a["q"][:-1]}),
    Bad("two tokens a request", "q", lambda a: {"q": a["q"][:, None].repeat(1, 2, 1, 1)}),
    Bad("one entry less", "page_indptr", lambda a: {"page_indptr": a["page_indptr"][:-1].clone()}),
    Bad("one entry more", "last_page_len", lambda a: {"last_page_len": a["last_page_len"].repeat(2)}),
    Bad("no entries", "page_indptr", lambda a: {"page_indptr": a["page_indptr"][:0]}),
    Bad("another head_dim", "k_cache", lambda a: {"k_cache": a["k_cache"][..., :32].contiguous()}),
    Bad("another head_dim", "v_cache", lambda a: {"v_cache": a["v_cache"][..., :32].contiguous()}),
    Bad("fewer pages", "v_cache", lambda a: {"v_cache": a["v_cache"][:-1]}),
    Bad("smaller pages", "v_cache", lambda a: {"v_cache": a["v_cache"][:, :-1]}),
    Bad("fewer heads", "v_cache", lambda a: {"v_cache": a["v_cache"][:, :, :1]}),
    Bad("heads that do not divide", "num_query_heads", lambda a: {"q": a["q"][:, :3]}),
    Bad("fewer query than KV heads", "num_query_heads", lambda a: {"q": a["q"][:, :1]}),
    Bad("no query heads", "num_query_heads", lambda a: {"q": a["q"][:, :0]}),
    Bad("no KV heads", "num_kv_heads", lambda a: {n: a[n][:, :, :0] for n in ("k_cache", "v_cache")}),
    Bad("empty pages", "page_size", lambda a: {n: a[n][:, :0] for n in ("k_cache", "v_cache")}),
    Bad("head_dim 0", "head_dim", lambda a: {n: a[n][..., :0] for n in ("q", "k_cache", "v_cache")}),
    Bad("head_dim 60", "head_dim|q", lambda a: {n: a[n][..., :60] for n in ("q", "k_cache", "v_cache")}, gpu_only=True),
    Bad("head_dim 264", "head_dim",
        lambda a: {n: a[n].repeat_interleave(5, -1)[..., :264] for n in ("q", "k_cache", "v_cache")}, gpu_only=True),
    Bad("group 129", "num_query_heads",
        lambda a: {"q": a["q"].repeat(1, 65, 1)[:, :258]}, gpu_only=True),
    *each("q k_cache v_cache", lambda n: Bad("last dimension strided", n, lambda a: {n: every_other(a[n])})),
    *each("q k_cache v_cache", lambda n: Bad("rows not aligned", n, lambda a: {n: odd_stride(a[n])}, gpu_only=True)),
    *each("q k_cache v_cache out", lambda n: Bad("start not aligned", n, lambda a: {n: shifted(a[n])}, gpu_only=True)),
    *each("q k_cache v_cache", lambda n: Bad("requires grad", n, lambda a: {n: a[n].clone().requires_grad_()})),
    *each("sm_scale logits_soft_cap rope_scale rope_theta", lambda n: Bad("text", n, lambda a: {n: "1"}, TypeError)),
    *each("sm_scale logits_soft_cap rope_scale rope_theta", lambda n: Bad("NaN", n, lambda a: {n: NAN})),
    *each("sm_scale logits_soft_cap rope_scale rope_theta", lambda n: Bad("infinite", n, lambda a: {n: INF})),
    *each("logits_soft_cap rope_scale rope_theta", lambda n: Bad("negative", n, lambda a: {n: -1.0})),
    *each("rope_scale rope_theta", lambda n: Bad("zero", n, lambda a: {n: 0.0})),
    *each("sm_scale window_left rope_theta",
          lambda n: Bad("tensor", n, lambda a: {n: torch.tensor(1, device=a["q"].device)}, TypeError)),
    Bad("beyond float32", "sm_scale", lambda a: {"sm_scale": 1e39}),
    Bad("below -1", "window_left", lambda a: {"window_left": -2}),
    Bad("beyond 32 bits", "window_left", lambda a: {"window_left": 2**31}),
    Bad("beyond 64 bits", "window_left", lambda a: {"window_left": 2**70}),
    Bad("a float", "window_left", lambda a: {"window_left": 3.0}, TypeError),
    Bad("a bool", "window_left", lambda a: {"window_left": True}, TypeError),
    Bad("unknown", "pos_encoding_mode", lambda a: {"pos_encoding_mode": 2}),
    Bad("negative", "pos_encoding_mode", lambda a: {"pos_encoding_mode": -1}),
    Bad("text", "pos_encoding_mode", lambda a: {"pos_encoding_mode": "ROPE_LLAMA"}, TypeError),
    Bad("an int", "return_lse", lambda a: {"return_lse": 1}, TypeError),
    Bad("not a tensor", "out", lambda a: {"out": [0.0]}, TypeError),
    Bad("smaller", "out", lambda a: {"out": a["out"][:-1]}),
    Bad("strided", "out", lambda a: {"out": a["out"].transpose(0, 1).contiguous().transpose(0, 1)}),
    Bad("q itself", "out", lambda a: {"out": a["q"]}),
    Bad("inside k_cache", "out", lambda a: {"out": a["k_cache"].flatten()[: a["q"].numel()].view(a["q"].shape)}),
    Bad("not a tensor", "workspace", lambda a: {"workspace": 0}, TypeError),
    Bad("too small", "workspace",
        lambda a: {"workspace": torch.zeros(64, dtype=torch.uint8, device="cuda")}, gpu_only=True),
    Bad("on the CPU", "workspace", lambda a: {"workspace": torch.zeros(1 << 24, dtype=torch.uint8)}, gpu_only=True),
    Bad("strided", "workspace",
        lambda a: {"workspace": torch.zeros(1 << 25, dtype=torch.uint8, device="cuda")[::2]}, gpu_only=True),
    *each("q k_cache v_cache page_indices", lambda n: Bad("lazily negated", n, lambda a: {n: torch._neg_view(a[n])})),
    Bad("sparse", "workspace", lambda a: {"workspace": torch.zeros(4, 4, device=a["q"].device).to_sparse()}),
    Bad("overlaps the keys", "workspace", lambda a: {"workspace": a["k_cache"].view(torch.uint8).view(-1)}),
    Bad("start not aligned", "workspace",
        lambda a: {"workspace": torch.zeros(1 << 24, dtype=torch.uint8, device="cuda")[1:]}, gpu_only=True),
]  # fmt: skip


def good_case(device: str) -> Case:
    return make_case(device, Spec([40, 0, 7, 100], 4, 2, 64))


def arguments_of(case: Case) -> Arguments:
    """Every argument by its name; the call that they make is right."""
    names = (*TENSORS.split(), "sm_scale")
    arguments = dict(zip(names, (*case.tensors(), case.options.sm_scale)))
    return {**arguments, **case.options.keywords(), "out": torch.empty_like(case.q), "return_lse": False}


def test_there_are_forty_of_them() -> None:
    assert len(BAD) >= 40


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad.argument}: {bad.name}")
def test_refused_by_name_and_harmless(device: str, bad: Bad) -> None:
    if bad.gpu_only and device == "cpu":
        pytest.skip("a limit of the GPU only")
    case = good_case(device)
    arguments = arguments_of(case)
    before = {name: t.clone() for name, t in arguments.items() if torch.is_tensor(t)}
    with pytest.raises(bad.kind, match=f"^({bad.argument}): got .*expected ") as caught:
        pgqa.decode(**{**arguments, **bad.changes(arguments)})
    assert type(caught.value) is bad.kind
    for name, copy in before.items():
        assert torch.equal(copy.nan_to_num(), arguments[name].nan_to_num()), name
    assert_close(case.run(), reference(case).out)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad.argument}: {bad.name}")
def test_supports_lists_what_decode_refuses(device: str, bad: Bad) -> None:
    of_decode_alone = bad.argument in ("out", "workspace", "return_lse")
    no_number = bad.kind is TypeError or bad.name == "beyond 64 bits"  # supports raises too
    if of_decode_alone or no_number or (bad.gpu_only and device == "cpu"):
        pytest.skip("not an argument that supports judges, or a limit of the GPU only")
    arguments = arguments_of(good_case(device))
    del arguments["out"], arguments["return_lse"]
    assert pgqa.supports(**arguments) == []
    arguments.update(bad.changes(arguments))
    with pytest.raises(ValueError) as caught:
        pgqa.decode(**arguments)
    assert pgqa.supports(**arguments)[0] == str(caught.value)


@pytest.mark.parametrize("name", ["sinks", "q_len", "alibi_slopes", "block_table"])
def test_unknown_arguments_are_not_ignored(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        pgqa.decode(**arguments_of(good_case("cpu")), **{name: None})


def test_grad_is_refused_only_while_grad_mode_is_on(device: str) -> None:
    case = good_case(device)
    expected = case.run()
    case.q.requires_grad_()
    with pytest.raises(ValueError, match="^q: got"):
        case.run()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = case.run()
        assert torch.equal(out, expected) and not out.requires_grad


Rows = tuple[list[int], list[int], list[int]]


@pytest.mark.parametrize(
    ("rows", "begins"),
    [
        (([-1, 2, 3], [0, 1, 2], [1, 1]), "page_indptr of request 0"),
        (([0, 2, 1], [0, 1, 2], [1, 1]), "page_indptr of request 1"),
        (([0, 2, 4], [0, 1, 2], [1, 1]), "page_indices of request 1"),
        (([0, 2, 3], [0, 1, 9], [1, 1]), "page_indices of request 1"),
        (([0, 2, 3], [0, -1, 2], [1, 1]), "page_indices of request 0"),
        (([0, 2, 3], [0, 1, 2], [0, 1]), "last_page_len of request 0"),
        (([0, 2, 3], [0, 1, 2], [1, -1]), "last_page_len of request 1"),
        (([0, 2, 3], [0, 1, 2], [1, 5]), "last_page_len of request 1"),
        (([0, 2, 3, 3], [0, 1, 2], [1, 1]), "page_indptr"),
    ],
)
def test_validation_names_the_request(rows: Rows, begins: str) -> None:
    tensors = [torch.tensor(row, dtype=torch.int32) for row in rows]
    with pytest.raises(ValueError, match=f"^{begins}: got .*expected "):
        pgqa.validate_page_table(*tensors, num_pages=9, page_size=4)


def test_validation_passes_what_is_right(device: str) -> None:
    case = make_case(device, Spec([40, 0, 7, 100], 4, 2, 64, first_entry=2))
    pgqa.validate_page_table(
        case.page_indptr, case.page_indices, case.last_page_len, num_pages=len(case.k_cache), page_size=16
    )


@pytest.mark.parametrize(
    "name, value", [("sm_scale", 1e300), ("logits_soft_cap", 1e-300), ("logits_soft_cap", 1e300)]
)
def test_scalars_beyond_float32_are_refused_as_given(name: str, value: float) -> None:
    case = make_case("cpu", Spec([5], query_heads=4, kv_heads=2, head_dim=16))
    scalars = {"sm_scale": case.options.sm_scale, name: value}
    message = re.escape(f"{name}: got {value:g}, expected a number of float32's range")
    with pytest.raises(ValueError, match=f"^{message}"):
        pgqa.decode(*case.tensors(), **scalars)
