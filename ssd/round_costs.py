"""What the engine's rounds take beyond the forwards in them, read off the timelines of a few: sampling, host work, caches gone cold.

Means throughout: what a machine does now and then, throughput pays for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from sim.metrics import Round
from sim.timeline import Span, Timeline
from ssd.pace import Pace
from ssd.specs import Configuration, Mode, Placement, RoundCost, Verification
from theory.fanout import uniform

# Lookaheads that are watched: a line through the two tells what a draft token and what a message takes.
SHORT, LONG = 1, 4


@dataclass(frozen=True, slots=True)
class Watched:
    """A configuration and what was seen of it in one run or several, each with a batch of so many rows."""

    configuration: Configuration
    timelines: tuple[Timeline, ...]
    rows: int

    @property
    def rounds(self) -> list[list[Round]]:
        """The records of each round that all rows took part in."""
        together: defaultdict[float, list[Round]] = defaultdict(list)
        for one in chain.from_iterable(timeline.rounds for timeline in self.timelines):
            together[one.start].append(one)
        return [rows for rows in together.values() if len(rows) == self.rows]

    def waits(self, lost: int | None = None) -> list[tuple[float, int]]:
        """Seconds that the target waited before each round, and how many rows had missed; only rounds with at least so many misses."""
        found = [(rows[0].wait_seconds, sum(row.hit is False for row in rows)) for rows in self.rounds]
        return [each for each in found if lost is None or each[1] >= lost]


def watched_configurations(mode: Mode, place: Placement, verification: Verification) -> tuple[Configuration, ...]:
    """What is watched of a mode: AR once, the others with a short and a long draft, SSD with the smallest caches."""
    if mode == "ar":
        return (Configuration(mode="ar", placement=place),)
    if mode == "sd":
        return tuple(Configuration(mode="sd", num_speculative_tokens=K, placement=place, verification=verification) for K in (SHORT, LONG))
    return tuple(
        Configuration(
            mode="ssd",
            num_speculative_tokens=K,
            fan_out_hit=uniform(K + 1, K),
            fan_out_miss=uniform(K + 1, K),
            backup="none" if K == SHORT else "jit",
            placement=place,
            verification=verification,
        )
        for K in (SHORT, LONG)
    )


def round_cost(raw: Pace, watched: Sequence[Watched], temperature: float = 0.0) -> RoundCost | None:
    """Return what the rounds of one mode at one place took beyond `raw`, the pace of the forwards alone; None if there were too few.

    watched: of each of `watched_configurations`, in requests of this temperature.
    """
    points = sorted(point for one in watched for point in _verifications(raw, one))
    if not points:
        return None
    first = watched[0].configuration
    answer = step = build_step = 0.0
    if first.mode == "sd":
        answer, step = _line(raw, watched)
    elif first.mode == "ssd":
        answer, step, build_step = _cached(raw, *watched)
    return RoundCost(
        mode=first.mode,
        placement=first.placement,
        verification=first.verification,
        temperature=temperature,
        tokens=tuple(tokens for tokens, _ in points),
        verify=tuple(seconds for _, seconds in points),
        answer=answer - 2 * raw.link_seconds if first.mode != "ar" else 0.0,
        step=step,
        build_step=build_step,
    )


def _verifications(raw: Pace, one: Watched) -> Iterator[tuple[float, float]]:
    """Mean tokens of verifications, and the seconds by which they were longer than forwards."""
    sizes = [sum(1 + row.drafted for row in rows) for rows in one.rounds]
    if sizes:
        yield fmean(sizes), fmean(rows[0].verify_seconds - raw.verify(size) for size, rows in zip(sizes, one.rounds, strict=True))


def _line(raw: Pace, watched: Sequence[Watched]) -> tuple[float, float]:
    """Of SD: what a wait takes whatever the draft's length, and a step beyond its forward."""
    beyond = {}
    for one in watched:
        K, waits = one.configuration.num_speculative_tokens, one.waits()
        if waits:
            beyond[K] = fmean(wait for wait, _ in waits) - raw.backup_seconds(K, one.rows)
    if len(beyond) < 2:
        return max(0.0, *beyond.values(), 0.0), 0.0
    (short, of_short), (long, of_long) = sorted(beyond.items())
    step = (of_long - of_short) / (long - short)
    return of_short - short * step, step


def _cached(raw: Pace, short: Watched, long: Watched) -> tuple[float, float, float]:
    """Of SSD: the wait for what lies ready, a step of the backup and one of the build, each of these two beyond its forward."""
    ready = short.waits()
    answer = fmean(wait for wait, _ in ready) if ready else 2 * raw.link_seconds
    K, missed = long.configuration.num_speculative_tokens, long.waits(1)
    steps = [(wait - answer - raw.backup_seconds(K, rows)) / K for wait, rows in missed]
    builds = [step for timeline in long.timelines for step in _build_steps(raw, long, timeline)]
    return answer, fmean(steps) if steps else 0.0, fmean(builds) if builds else 0.0


def _build_steps(raw: Pace, one: Watched, timeline: Timeline) -> Iterator[float]:
    """For each round the mean seconds of its build's steps, what lies between them included, beyond a forward of all branches."""
    forward = raw.step(one.rows * sum(one.configuration.fan_out_hit))
    spans: defaultdict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.device == "draft":
            spans[span.round].append(span)
    for its in spans.values():
        # The last one may have been given up.
        steps = [span for span in its if span.activity == "build"][:-1]
        answered = [span.end for span in its if span.activity == "answer"]
        if len(steps) > 1 and answered:
            yield (steps[-1].end - answered[-1]) / len(steps) - forward
