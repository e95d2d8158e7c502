"""Spec files: the cases to evaluate, read and checked field by field."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Iterable

INT32_MAX = 2**31 - 1
DTYPES = ("float16", "bfloat16", "float32")
SPEC_VERSION = 1


class SpecError(ValueError):
    """A spec file that can not be evaluated; the message names the case and the field."""


@dataclass(frozen=True)
class PageTable:
    """CSR page table: the pages of request r are page_indices[page_indptr[r]:page_indptr[r + 1]]."""

    page_indptr: tuple[int, ...]  # [batch + 1], never decreasing
    page_indices: tuple[int, ...]  # [>= page_indptr[batch]]
    last_page_len: tuple[int, ...]  # [batch], in [1, page_size] where the request has pages

    def kv_lens(self, page_size: int) -> tuple[int, ...]:
        """Tokens of each request; a request without pages has none."""
        spans = zip(self.page_indptr, self.page_indptr[1:], self.last_page_len)
        return tuple((end - begin - 1) * page_size + last if end > begin else 0 for begin, end, last in spans)


@dataclass(frozen=True)
class Case:
    """One shape to evaluate: lengths or a page table, heads, dtype and attention options."""

    name: str
    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    kv_lens: tuple[int, ...]  # tokens of each request; derived where page_table is given
    page_table: PageTable | None = None
    sm_scale: float | None = None  # None: head_dim ** -0.5
    window_left: int = -1
    logits_soft_cap: float = 0.0
    pos_encoding_mode: int = 0
    rope_scale: float = 1.0
    rope_theta: float = 10000.0

    @property
    def batch(self) -> int:
        return len(self.kv_lens)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale

    @property
    def live_kv_bytes(self) -> int:
        """Bytes of K and V that the result depends on: every request's tokens inside its window."""
        limit = self.window_left + 1 if self.window_left >= 0 else INT32_MAX
        tokens = sum(min(length, limit) for length in self.kv_lens)
        return tokens * 2 * self.kv_heads * self.head_dim * (4 if self.dtype == "float32" else 2)

    def to_json(self) -> dict[str, Any]:
        """The case as a spec file states it."""
        fields = asdict(self)
        del fields["kv_lens" if self.page_table else "page_table"]
        return json.loads(json.dumps(fields))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _int_in(low: int, high: int = INT32_MAX) -> tuple[Callable[[Any], bool], str]:
    return (lambda v: _is_int(v) and low <= v <= high), f"an integer in [{low}, {high}]"


def _int_list_in(low: int) -> tuple[Callable[[Any], bool], str]:
    return (
        lambda v: isinstance(v, list) and all(_is_int(x) and low <= x <= INT32_MAX for x in v),
        f"a list of integers in [{low}, {INT32_MAX}]",
    )


_POSITIVE = (lambda v: _is_number(v) and v > 0), "a finite number above 0"
_REQUIRED = {
    "name": ((lambda v: isinstance(v, str) and v.strip() != ""), "a non-empty string"),
    "query_heads": _int_in(1),
    "kv_heads": _int_in(1),
    "head_dim": _int_in(1),
    "page_size": _int_in(1),
    "dtype": ((lambda v: v in DTYPES), "one of " + ", ".join(DTYPES)),
}
_OPTIONAL = {
    "sm_scale": ((lambda v: v is None or _is_number(v)), "a finite number or null"),
    "window_left": _int_in(-1),
    "logits_soft_cap": ((lambda v: _is_number(v) and v >= 0), "a finite number, 0 or above"),
    "pos_encoding_mode": _int_in(0, 1),
    "rope_scale": _POSITIVE,
    "rope_theta": _POSITIVE,
}
_TABLE_FIELDS = {
    "page_indptr": _int_list_in(0),
    "page_indices": _int_list_in(0),
    "last_page_len": _int_list_in(0),
}


def _check(where: str, field: str, value: Any, rule: tuple[Callable[[Any], bool], str]) -> None:
    accepts, expected = rule
    if not accepts(value):
        shown = repr(value)
        raise SpecError(
            f"{where}, {field}: got {shown if len(shown) <= 80 else shown[:77] + '...'}, expected {expected}"
        )


def _check_names(where: str, fields: dict[str, Any], required: Iterable[str], allowed: Iterable[str]) -> None:
    for field in required:
        if field not in fields:
            raise SpecError(f"{where}, {field}: missing")
    for field in fields:
        if field not in allowed:
            raise SpecError(f"{where}, {field}: unknown field, expected one of {', '.join(sorted(allowed))}")


def _parse_table(where: str, raw: Any, page_size: int) -> PageTable:
    if not isinstance(raw, dict):
        raise SpecError(f"{where}, page_table: got {type(raw).__name__}, expected an object")
    where = f"{where}, page_table"
    _check_names(where, raw, _TABLE_FIELDS, _TABLE_FIELDS)
    for field, rule in _TABLE_FIELDS.items():
        _check(where, field, raw[field], rule)
    indptr, indices, last = (raw[field] for field in _TABLE_FIELDS)
    if len(indptr) != len(last) + 1:
        raise SpecError(f"{where}, page_indptr: got {len(indptr)} entries, expected {len(last) + 1} (batch + 1)")
    for r, (begin, end) in enumerate(zip(indptr, indptr[1:])):
        if end < begin:
            raise SpecError(f"{where}, page_indptr: decreases from {begin} to {end} at request {r}")
        if end > begin and not 1 <= last[r] <= page_size:
            raise SpecError(f"{where}, last_page_len: got {last[r]} at request {r}, expected 1 to {page_size}")
    if len(indices) < indptr[-1]:
        raise SpecError(f"{where}, page_indices: got {len(indices)} entries, expected at least {indptr[-1]}")
    return PageTable(tuple(indptr), tuple(indices), tuple(last))


def parse_case(raw: Any, index: int) -> Case:
    """Turns one JSON object into a Case; raises SpecError naming the case and the field."""
    if not isinstance(raw, dict):
        raise SpecError(f"case {index}: got {type(raw).__name__}, expected an object")
    name = raw.get("name")
    where = f"case {index}" + (f" ({name})" if isinstance(name, str) else "")
    _check_names(where, raw, _REQUIRED, {*_REQUIRED, *_OPTIONAL, "kv_lens", "page_table"})
    for field, rule in {**_REQUIRED, **_OPTIONAL}.items():
        if field in raw:
            _check(where, field, raw[field], rule)
    if raw["query_heads"] % raw["kv_heads"]:
        raise SpecError(
            f"{where}, query_heads: got {raw['query_heads']}, expected a multiple of kv_heads {raw['kv_heads']}"
        )
    if raw.get("pos_encoding_mode", 0) == 1 and raw["head_dim"] % 2:
        raise SpecError(f"{where}, head_dim: got {raw['head_dim']}, expected an even number with pos_encoding_mode 1")
    if ("kv_lens" in raw) == ("page_table" in raw):
        raise SpecError(f"{where}, kv_lens: expected exactly one of kv_lens and page_table")
    fields = dict(raw)
    if "kv_lens" in raw:
        _check(where, "kv_lens", raw["kv_lens"], _int_list_in(0))
        fields["kv_lens"] = tuple(raw["kv_lens"])
    else:
        table = _parse_table(where, raw["page_table"], raw["page_size"])
        fields["page_table"] = table
        fields["kv_lens"] = table.kv_lens(raw["page_size"])
    return Case(**fields)


def parse_spec(raw: Any) -> list[Case]:
    """Checks a whole decoded spec; raises SpecError."""
    if not isinstance(raw, dict):
        raise SpecError(f"spec: got {type(raw).__name__}, expected an object with version and cases")
    _check_names("spec", raw, ("version", "cases"), ("version", "cases"))
    if raw["version"] != SPEC_VERSION or not _is_int(raw["version"]):
        raise SpecError(f"spec, version: got {raw['version']!r}, expected {SPEC_VERSION}")
    if not isinstance(raw["cases"], list) or not raw["cases"]:
        raise SpecError("spec, cases: expected a non-empty list")
    cases = [parse_case(case, index) for index, case in enumerate(raw["cases"])]
    seen: set[str] = set()
    for index, case in enumerate(cases):
        if case.name in seen:
            raise SpecError(f"case {index} ({case.name}), name: used twice")
        seen.add(case.name)
    return cases


def load_spec(path: str | Path) -> list[Case]:
    """Reads and checks a spec file; raises SpecError for anything that is not one."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"spec {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise SpecError(f"spec {path}: not JSON: {error}") from error
    return parse_spec(raw)


def format_spec(spec: dict[str, Any]) -> str:
    """The text of a decoded spec, with the lists of integers on one line each."""
    lines = [f'{{"version": {spec["version"]}, "cases": [']
    for index, case in enumerate(spec["cases"]):
        table = case.get("page_table")
        plain = {key: value for key, value in case.items() if key not in ("kv_lens", "page_table")}
        text = json.dumps(plain)[:-1]
        if table is None:
            text += ',\n  "kv_lens": ' + json.dumps(case["kv_lens"])
        else:
            arrays = ",\n    ".join(f'"{key}": {json.dumps(values)}' for key, values in table.items())
            text += ',\n  "page_table": {\n    ' + arrays + "}"
        lines.append(" " + text + ("}," if index + 1 < len(spec["cases"]) else "}"))
    return "\n".join([*lines, "]}"]) + "\n"
