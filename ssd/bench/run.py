"""One prompt decoded by one configuration, and sums over several."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Protocol

from sim.metrics import Metrics
from sim.timeline import Timeline
from ssd.specs import Configuration, RequestOutput


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt decoded by one configuration: its output and what both devices did meanwhile."""

    output: RequestOutput
    timeline: Timeline

    @property
    def metrics(self) -> Metrics:
        """Counts and seconds of the request."""
        return self.output.metrics

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding, the first token apart."""
        return 1.0 / (self.metrics.time_per_output_token or float("inf"))

    @property
    def decode_seconds(self) -> float:
        """Seconds after the first token."""
        return self.metrics.total_seconds - (self.metrics.time_to_first_token or 0.0)

    def gaps(self) -> list[float]:
        """Return the seconds between bursts of tokens, which come at the ends of prefill and verifications."""
        ends = sorted(span.end for span in self.timeline.spans if span.device == "target" and span.activity in ("prefill", "verify"))
        return [after - before for before, after in pairwise(ends)]


class HasMetrics(Protocol):
    """Whatever was counted."""

    @property
    def metrics(self) -> Metrics:
        """Its counts and seconds."""
        ...


Runs = dict[Configuration, list[Run]]


def median_speed(runs: Sequence[Run]) -> float:
    """Return the median tokens per second of decoding."""
    return statistics.median(run.tokens_per_second for run in runs)


def total(runs: Sequence[HasMetrics]) -> Metrics:
    """Return the counts, seconds and ratios of several runs together."""
    return reduce(Metrics.plus, [run.metrics for run in runs])
