"""A group of prompts decoded together by one configuration or rival, and sums over several such runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Protocol

from sim.metrics import Metrics, Round
from sim.timeline import Span, Timeline
from ssd.bench.setting import Who
from ssd.rivals.messages import Decoded
from ssd.specs import RequestOutput


@dataclass(frozen=True, slots=True)
class Run:
    """Prompts decoded together: their outputs, what both devices did meanwhile, seconds in all, and peak bytes of target and draft."""

    outputs: tuple[RequestOutput, ...]
    timeline: Timeline
    seconds: float
    peaks: tuple[int | None, ...] = ()

    @classmethod
    def of_rival(cls, prompts: Sequence[tuple[int, ...]], found: Decoded, peak: int | None) -> Run:
        """Return what another program did: its bursts stand for prefill and verifications."""
        times = [seconds for seconds, _ in found.bursts]
        names = ", ".join(map(str, range(len(prompts))))
        starts = zip([0.0, *times], times, strict=False)
        spans = [Span("target", "verify" if place else "prefill", *ends, place, names) for place, ends in enumerate(starts)]
        outputs = (_rivals_output(place, prompt, found) for place, prompt in enumerate(prompts))
        return cls(tuple(outputs), Timeline(spans), times[-1], (peak,))

    @property
    def metrics(self) -> Metrics:
        """Counts and seconds of all requests; seconds in all are wall clock."""
        return reduce(Metrics.plus, [output.metrics for output in self.outputs]).over(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second: of one request, decoding alone, the first token apart; of several, all over wall clock, prompts included."""
        if len(self.outputs) > 1:
            return self.metrics.num_output_tokens / self.seconds
        return 1.0 / (self.outputs[0].metrics.time_per_output_token or float("inf"))

    @property
    def decode_seconds(self) -> float:
        """Seconds after the first token, summed over requests."""
        return sum(output.metrics.total_seconds - (output.metrics.time_to_first_token or 0.0) for output in self.outputs)

    def gaps(self) -> list[float]:
        """Return the seconds between bursts of a request's tokens, which come at the ends of prefill and verifications."""
        return [gap for output in self.outputs for gap in self._gaps(output)]

    def _gaps(self, output: RequestOutput) -> list[float]:
        ends = sorted(
            span.end
            for span in self.timeline.spans
            if span.device == "target" and span.activity in ("prefill", "verify") and output.request_id in span.request.split(", ")
        )
        # The rounds before, if there are any, fed pieces of its prompt.
        return [after - before for before, after in pairwise(ends[-output.metrics.num_rounds - 1 :])]

    def rests(self) -> list[float]:
        """Return, for each round but a request's first, its seconds between the verification before it and its own wait or verification."""
        return [_rest(before, after) for output in self.outputs for before, after in pairwise(output.rounds)]


def _rest(before: Round, after: Round) -> float:
    return max(0.0, after.start - (before.start + before.wait_seconds + before.verify_seconds))


def _rivals_output(place: int, prompt: tuple[int, ...], found: Decoded) -> RequestOutput:
    (first, begun), (last, _), tokens = found.bursts[0], found.bursts[-1], found.tokens[place]
    metrics = Metrics.from_rounds((), num_output_tokens=len(tokens), total_seconds=last, time_to_first_token=first)
    # Tokens that came with the first, as a draft's do in assisted generation, took no time after it.
    later = len(tokens) - begun
    metrics = replace(metrics, num_rounds=len(found.bursts) - 1, time_per_output_token=(last - first) / later if later else None)
    return RequestOutput(
        request_id=str(place),
        prompt=None,
        prompt_token_ids=prompt,
        text="",
        token_ids=tokens,
        finish_reason="length",
        metrics=metrics,
    )


class HasMetrics(Protocol):
    """Whatever was counted."""

    @property
    def metrics(self) -> Metrics:
        """Its counts and seconds."""
        ...


# In the order of the groups of prompts.
Runs = dict[Who, list[Run]]


def median_speed(runs: Sequence[Run]) -> float:
    """Return the median tokens per second."""
    return statistics.median(run.tokens_per_second for run in runs)


def total(runs: Sequence[HasMetrics]) -> Metrics:
    """Return the counts, seconds and ratios of several runs together."""
    return reduce(Metrics.plus, [run.metrics for run in runs])
