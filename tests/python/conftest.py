"""Devices that the tests run on, markers, and a watchdog for launches that never end."""
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest
import torch

WATCHDOG_SECONDS = 120
HAS_GPU = torch.cuda.is_available()

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped where there is none")
    config.addinivalue_line("markers", "slow: left out of the quick run")
    config.addinivalue_line("markers", "large: allocates 20 GB of device memory")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(needs_gpu)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every device that the library computes on."""
    return request.param


@pytest.fixture(autouse=True)
def _settle(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the process when a test hangs; reports a device fault in the test that caused it."""
    faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)
    yield
    if HAS_GPU and request.node.get_closest_marker("gpu"):
        torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()
