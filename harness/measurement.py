"""Latencies of a series of calls, summarized; needs no torch."""

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Measurement:
    """Latencies of one series of calls in microseconds."""

    calls: int
    median_us: float
    wall_us: float  # median by the host's clock from before the call until the device was done
    p25_us: float
    p75_us: float
    min_us: float

    @property
    def dispersion(self) -> float:
        """Interquartile range over the middle of the quartiles: two mixed latencies show whichever is the median."""
        return 2 * (self.p75_us - self.p25_us) / (self.p75_us + self.p25_us)


def summarize(elapsed_us: list[float], wall_us: list[float]) -> Measurement:
    """Median and quartiles of at least two calls."""
    p25, median, p75 = statistics.quantiles(elapsed_us, n=4, method="inclusive")
    return Measurement(len(elapsed_us), median, statistics.median(wall_us), p25, p75, min(elapsed_us))
