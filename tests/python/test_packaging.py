"""The built files: paths baked into them, what they bring along, what the module needs to load."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
import torch  # noqa: F401  Loaded before the module, as its users do.

from pgqa import _pgqa

MODULE = pathlib.Path(_pgqa.__file__)
SOLVER_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "methods" / "main"
MAX_MODULE_BYTES = 12 << 20


def dynamic_entries(path: pathlib.Path, tag: str) -> list[str]:
    """Values of one kind of entry in the dynamic section of an ELF file."""
    listing = subprocess.run(
        ["readelf", "--dynamic", "--wide", str(path)], check=True, capture_output=True, text=True
    ).stdout
    return re.findall(rf"\({tag}\).*\[(.*)\]", listing)


def bundled_libraries() -> list[pathlib.Path]:
    return sorted(MODULE.parent.glob("libabsl_*.so*"))


def test_module_searches_its_own_folder_and_no_other() -> None:
    assert dynamic_entries(MODULE, "RPATH") == ["$ORIGIN"]
    assert dynamic_entries(MODULE, "RUNPATH") == []


def test_bundled_libraries_have_no_paths_and_are_complete() -> None:
    present = {path.name for path in bundled_libraries()}
    for path in [MODULE, *bundled_libraries()]:
        needed = {name for name in dynamic_entries(path, "NEEDED") if name.startswith("libabsl_")}
        assert needed <= present, path.name
        if path != MODULE:
            assert dynamic_entries(path, "RPATH") + dynamic_entries(path, "RUNPATH") == []


def test_module_needs_no_driver() -> None:
    assert not [name for name in dynamic_entries(MODULE, "NEEDED") if name.startswith("libcuda.")]


def test_module_is_stripped_and_small() -> None:
    sections = subprocess.run(
        ["readelf", "--sections", "--wide", str(MODULE)], check=True, capture_output=True, text=True
    ).stdout
    assert ".symtab" not in sections
    assert MODULE.stat().st_size < MAX_MODULE_BYTES


def run_python(code: str, folder: pathlib.Path) -> str:
    """Standard output of `code` in a fresh interpreter that sees `folder` and the environment."""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("folder", "name"), [(MODULE.parents[1], "pgqa._pgqa"), (SOLVER_FOLDER, "_pgqa")]
)
def test_abseil_and_cudart_come_from_the_right_place(folder: pathlib.Path, name: str) -> None:
    code = f"""
import torch
import {name} as module
for line in open("/proc/self/maps"):
    path = line.split()[-1]
    if "libabsl_" in path or "libcudart" in path:
        print(path)
"""
    loaded = {pathlib.Path(line) for line in run_python(code, folder).splitlines()}
    abseil = {path for path in loaded if path.name.startswith("libabsl_")}
    assert abseil
    assert {path.parent.name for path in abseil} == {"pgqa" if "." in name else "main"}
    assert len(loaded - abseil) <= 1, "two CUDA runtimes in one process"


def test_package_and_solver_module_live_in_one_process() -> None:
    code = f"""
import sys
import torch, pgqa
sys.path.insert(0, {str(SOLVER_FOLDER)!r})
import _pgqa
assert _pgqa.__file__ != pgqa._pgqa.__file__
print(_pgqa.build_info() == pgqa.build_info())
"""
    assert run_python(code, MODULE.parents[1]).strip() == "True"


def test_info_command_prints_version_and_build() -> None:
    command = [sys.executable, "-m", "pgqa", "info"]
    output = subprocess.run(command, cwd=MODULE.parents[1], capture_output=True, text=True)
    assert output.returncode == 0, output.stderr
    assert _pgqa.build_info()["version"] in output.stdout
    assert "GPU" in output.stdout
