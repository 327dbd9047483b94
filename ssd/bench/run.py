"""One prompt decoded by one configuration, and sums over several."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

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


Runs = dict[Configuration, list[Run]]


def median_speed(runs: Sequence[Run]) -> float:
    """Return the median tokens per second of decoding."""
    return statistics.median(run.tokens_per_second for run in runs)


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts and seconds of several requests, and the ratios of the sums, none where nothing was counted."""

    hits: int
    misses: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    verify_seconds: float
    wait_seconds: float
    decode_seconds: float
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Totals:
        """Sum up."""
        parts = [run.metrics for run in runs]
        return cls(
            hits=sum(m.num_cache_hits for m in parts),
            misses=sum(m.num_cache_misses for m in parts),
            drafts=sum(m.num_drafts for m in parts),
            draft_tokens=sum(m.num_draft_tokens for m in parts),
            accepted_tokens=sum(m.num_accepted_tokens for m in parts),
            verify_seconds=sum(m.verify_seconds for m in parts),
            wait_seconds=sum(m.wait_seconds for m in parts),
            decode_seconds=sum(run.decode_seconds for run in runs),
            histogram=tuple(sum(counts) for counts in zip_longest(*(m.acceptance_histogram for m in parts), fillvalue=0)),
        )

    @property
    def hit_rate(self) -> float | None:
        """Hits over hits and misses."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens a draft, bonus included."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None

    def acceptance_per_position(self) -> tuple[float, ...]:
        """Return, for each place in a draft, the share of drafts whose token there was accepted."""
        return tuple(sum(self.histogram[k + 1 :]) / self.drafts for k in range(len(self.histogram) - 1))
