"""Judged code may import torch, triton, typing, math, __future__ and its siblings; every other way in is refused."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Callable

import pytest

from harness.sandbox import SubmissionError, copy_submission, scan_sources

ALLOWED = """
from __future__ import annotations
import math
import typing
from typing import Optional
import torch
import torch.nn.functional as F
from torch import Tensor
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
import extra
from package.part import thing
import _native

class Plan:
    def __init__(self, input: Tensor) -> None:
        self.steps = torch.compile(F.softmax)
        self.name = type(self).__name__
"""


@pytest.fixture
def scanned(tmp_path: Path) -> Callable[[str], list[str]]:
    def scan(source: str) -> list[str]:
        (tmp_path / "solver.py").write_text(source)
        return scan_sources(tmp_path)

    return scan


def test_allowed_source_has_no_faults(tmp_path: Path, scanned: Callable[[str], list[str]]) -> None:
    (tmp_path / "extra.py").write_text("import math\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "part.py").write_text("thing = 1\n")
    (tmp_path / "_native.abi3.so").write_bytes(b"")
    assert scanned(ALLOWED) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os",
        "import numpy as np",
        "import torch, sys",
        "from importlib import import_module",
        "import flash_attn",
        "def f():\n    import time",
        "import protocol",
        "import harness.timing",
        "from torch import os",
        "import torch\ntorch.sys.modules",
        "import typing\ntyping.sys",
        "import math\nmath.__loader__",
        "f = __import__",
        "eval('1')",
        "exec('import os')",
        "open('/etc/passwd')",
        "vars(f)['x']",
        "__builtins__",
        "(lambda: 0).__globals__",
        "(lambda: 0).__code__",
        "().__class__.__bases__[0].__subclasses__()",
        "match torch:\n    case object(sys=found):\n        pass",
        "import torch\ntorch.library.Library('aten', 'IMPL')",
        "from torch.overrides import TorchFunctionMode",
        "class Lazy:\n    def __torch_function__(self):\n        pass",
        "import typing\ntyping.get_type_hints(f, {})",
        "def broken(:",
    ],
)
def test_forbidden_source(scanned: Callable[[str], list[str]], source: str) -> None:
    faults = scanned(source)
    assert faults and all(fault.startswith("solver.py") for fault in faults)


def test_forbidden_import_in_a_sibling(tmp_path: Path, scanned: Callable[[str], list[str]]) -> None:
    (tmp_path / "extra.py").write_text("import ctypes\n")
    assert scanned("import extra\n") == ["extra.py:1: imports ctypes, which is neither allowed nor beside it"]


@pytest.mark.parametrize("name", ["json", "torch", "statistics", "protocol"])
def test_sibling_that_poses_as_another_module(tmp_path: Path, scanned: Callable[[str], list[str]], name: str) -> None:
    (tmp_path / f"{name}.py").write_text("")
    assert any(fault.startswith(f"{name}: a sibling") for fault in scanned("import torch\n"))


def test_only_sources_and_libraries_are_copied(tmp_path: Path) -> None:
    source, target, outside = tmp_path / "source", tmp_path / "target", tmp_path / "library.so"
    source.mkdir()
    target.mkdir()
    outside.write_bytes(b"library")
    for name in ("solver.py", "notes.json", "_native.abi3.so", "libother.so.3.0"):
        (source / name).write_text(name)
    (source / "liblinked.so.1").symlink_to(outside)
    copy_submission(source, target)
    names = {"solver.py", "_native.abi3.so", "libother.so.3.0", "liblinked.so.1"}
    assert {path.name for path in target.iterdir()} == names
    assert (target / "liblinked.so.1").read_bytes() == b"library"


def test_linked_source_outside_the_submission_is_refused(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (tmp_path / "other.py").write_text("")
    (source / "solver.py").write_text("")
    (source / "other.py").symlink_to(tmp_path / "other.py")
    with pytest.raises(SubmissionError, match="other.py"):
        copy_submission(source, target)


def test_folder_without_solver_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SubmissionError, match="no solver.py"):
        copy_submission(tmp_path, tmp_path / "target")


def test_forbidden_import_is_a_fault_of_every_case(judged: Callable[..., list[str]]) -> None:
    (fault,) = judged("return HONEST", "import os")
    assert fault.startswith("import: solver.py:3: imports os,")


@pytest.mark.parametrize(
    "head, fault",
    [
        (
            "name = 'o' + 's'\ntry:\n    getattr(torch, name)\nexcept AttributeError:\n    pass",
            "import: reaches for os",
        ),
        ("setattr(torch, 'equal', lambda a, b: True)", "import: replaces equal of torch"),
    ],
)
def test_way_in_at_run_time(judged: Callable[..., list[str]], head: str, fault: str) -> None:
    assert judged("return HONEST", head) == [fault]


def test_failing_import_tells_why(judged: Callable[..., list[str]]) -> None:
    (fault,) = judged("return HONEST", "raise ValueError('not built for this machine')")
    assert fault == "import: ValueError: not built for this machine"


def test_missing_entry_function(judged: Callable[..., list[str]]) -> None:
    (fault,) = judged(full="import torch\n")
    assert "no function paged_gqa_decode" in fault
