"""Checks of numbers that Python code of the package shares."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any


def check_int(name: str, value: Any) -> None:
    """TypeError for what is no int; bool is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int")


def check_at_least(name: str, value: Any, least: int) -> None:
    """The same, and ValueError below `least`."""
    check_int(name, value)
    if value < least:
        raise ValueError(f"{name}: got {value}, expected at least {least}")
