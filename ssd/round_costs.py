"""What the engine's rounds take beyond the forwards in them, read off the timelines of a few: sampling, host work, caches gone cold.

Means throughout: what a machine does now and then, throughput pays for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import fmean

from sim.metrics import Round
from sim.timeline import Span, Timeline
from ssd.pace import Pace
from ssd.specs import Configuration, Mode, Placement, RoundCost, Verification
from theory.fanout import uniform

# Lookaheads that are watched: a line through the two tells what a draft token and what a message takes.
SHORT, LONG = 1, 4
# Of a cache whose outcomes are weighed, how many tokens are drafted for how many.
WEIGHED_LOOKAHEAD, WEIGHED_BUDGET = 2, 8


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
    """What is watched of a mode: AR once, the others with a short and a long draft, SSD with the smallest caches and with one whose
    outcomes are weighed."""
    if mode == "ar":
        return (Configuration(mode="ar", placement=place),)
    if mode == "sd":
        return tuple(Configuration(mode="sd", num_speculative_tokens=K, placement=place, verification=verification) for K in (SHORT, LONG))
    listed = tuple(
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
    weighed = Configuration(
        mode="ssd", num_speculative_tokens=WEIGHED_LOOKAHEAD, budget=WEIGHED_BUDGET, placement=place, verification=verification
    )
    return *listed, weighed


def round_cost(raw: Pace, watched: Sequence[Watched], temperature: float = 0.0) -> RoundCost | None:
    """Return what the rounds of one mode at one place took beyond `raw`, the pace of the forwards alone; None if there were too few.

    watched: of each of `watched_configurations`, in requests of this temperature.
    """
    points = sorted(point for one in watched for point in _verifications(raw, one))
    if not points:
        return None
    first = watched[0].configuration
    answer = step = build_step = plan = weigh = 0.0
    if first.mode == "sd":
        answer, step = _line(raw, watched)
    elif first.mode == "ssd":
        short, long, weighed = watched
        answer, step = _cached(raw, short, long)
        (plan, build_step), (weigh, _) = (_built(raw, one) for one in (long, weighed))
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
        plan=plan,
        weigh=weigh,
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


def _cached(raw: Pace, short: Watched, long: Watched) -> tuple[float, float]:
    """Of SSD: the wait for what lies ready, and a step of the backup beyond its forward."""
    ready = short.waits()
    answer = fmean(wait for wait, _ in ready) if ready else 2 * raw.link_seconds
    K, missed = long.configuration.num_speculative_tokens, long.waits(1)
    steps = [(wait - answer - raw.backup_seconds(K, rows)) / K for wait, rows in missed]
    return answer, fmean(steps) if steps else 0.0


def _built(raw: Pace, one: Watched) -> tuple[float, float]:
    """Of a build: what lies between its forwards, and a step of all branches beyond its forward."""
    branches = one.configuration.budget or sum(one.configuration.fan_out_hit)
    forward, between, steps = raw.step(one.rows * branches), [], []
    for spans in chain.from_iterable(map(_builds, one.timelines)):
        between.append(sum(after.start - before.end for before, after in pairwise(spans)))
        # The first one may feed what was sent last.
        steps += [span.end - span.start - forward for span in spans[2:] if span.activity == "build"]
    return fmean(between) if between else 0.0, fmean(steps) if steps else 0.0


def _builds(timeline: Timeline) -> Iterator[list[Span]]:
    """The draft's spans of each round from its answer on, but for the last, which may have been given up; of those with a build."""
    rounds: defaultdict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.device == "draft":
            rounds[span.round].append(span)
    for spans in rounds.values():
        answers = [place for place, span in enumerate(spans) if span.activity == "answer"]
        if answers and len(spans) - answers[-1] > 3:
            yield spans[answers[-1] : -1]
