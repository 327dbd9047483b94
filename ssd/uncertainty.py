"""How sure a prediction is, and what would change the choice: theory's answer with other inputs, over its answer with those there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ssd.outcomes import Traced
from ssd.pace import Pace
from ssd.prediction import Played
from ssd.search import Search
from ssd.specs import Mode, Profile, Sensitivity

# Where two are this near in what is optimised, the simpler one is chosen.
TIE = 0.005
SIMPLEST: tuple[Mode, ...] = ("ar", "sd", "ssd")
# Of nine in ten errors, in standard deviations.
NINE_IN_TEN = 1.645
# Standard deviations: of computed latencies over published ones (benchmarks/roofline.py), of an acceptance taken from a publication,
# of one taken from another pair, and of the simulator's 2,000 tokens.
ROOFLINE_ERROR, PUBLISHED_ERROR, LENT_ERROR, PLAYED_ERROR = 0.05, 0.03, 0.08, 0.01
# An interquartile range in standard deviations.
QUARTILES = 1.349
RESAMPLED, SEED = 8, 0
# How far and how finely a threshold is sought.
FARTHEST, HALVINGS = 32, 8
# A draft step or a message is looked at up to so many seconds even where it takes none.
UNNOTICED = 1e-4


@dataclass(frozen=True)
class Doubt:
    """What is not known of a profile: how long forwards take and what is accepted."""

    profile: Profile
    search: Search

    def interval(self, played: Played) -> tuple[float, float]:
        """Tokens a second between which the speed lies 9 times in 10, if inputs are off as far as they may be, independently."""
        errors = [PLAYED_ERROR if played.method == "simulation" else 2 * PLAYED_ERROR, self._latency(played.pace)]
        if played.configuration.mode != "ar":
            errors.append(self._outcomes(played))
        spread = np.exp(NINE_IN_TEN * np.sqrt(np.sum(np.square(errors))))
        return float(played.tokens_per_second / spread), float(played.tokens_per_second * spread)

    def _latency(self, pace: Pace) -> float:
        tables = [t for t in self.profile.forwards if t.model == "target" and t.devices == pace.placement.target]
        if any(table.source != "measured" for table in tables):
            return ROOFLINE_ERROR
        spreads = [spread for table in tables for spread in table.spread]
        return float(np.median(spreads)) / QUARTILES if spreads else 0.0

    def _outcomes(self, played: Played) -> float:
        """Standard deviation of the logarithm of the speed as acceptance varies: over texts, or by what a published one may be off."""
        seconds = np.asarray([other.seconds_per_token(played.configuration, played.pace) for other in self._others])
        return float(np.std(np.log(seconds[np.isfinite(seconds)])))

    @cached_property
    def _others(self) -> list[Search]:
        """The search as it would be on other texts, or at an acceptance on either side."""
        outcomes = self.search.outcomes
        if isinstance(outcomes, Traced):
            rng, count = np.random.default_rng(SEED), len(outcomes.ranks)
            draws = rng.integers(count, size=(RESAMPLED, count))
            return [self.search.of(outcomes.some(draw.tolist())) for draw in draws]
        lent = any("another pair" in note for note in self.profile.notes)
        error = LENT_ERROR if lent else PUBLISHED_ERROR
        return [self.search.of(outcomes.at(min(max(outcomes.alpha + by, 0.01), 0.99))) for by in (-error, error)]


def sensitivity(best: Played, rivals: Sequence[Played], search: Search, value: Callable[[Played, float], float]) -> tuple[Sensitivity, ...]:
    """How far acceptance, the draft's step and the link must move until another mode is ahead, among the best and its rivals; by theory."""
    if len({p.configuration.mode for p in rivals}) < 2:
        return ()
    rivals = [best, *rivals]
    own = {id(p): search.seconds_per_token(p.configuration, p.pace) for p in rivals}

    def ahead(other: Search, change: Callable[[Pace], Pace]) -> Mode:
        """The mode ahead, each speed scaled by what theory makes of the change."""

        def changed(p: Played) -> float:
            seconds = other.seconds_per_token(p.configuration, change(p.pace))
            return value(p, p.tokens_per_second * own[id(p)] / seconds)

        values = [(changed(p), p.configuration.mode) for p in rivals]
        return min((mode for found, mode in values if found >= max(values)[0] * (1 - TIE)), key=SIMPLEST.index)

    drafting = next(p for p in rivals if p.configuration.mode != "ar")
    alpha, link, step = search.outcomes.alpha, drafting.pace.link_seconds, drafting.pace.alone(1)
    reach = FARTHEST * max(step, UNNOTICED)
    inputs: list[tuple[str, str, float, tuple[float, float], Callable[[float], Mode]]] = [
        ("acceptance", "", alpha, (0.01, 0.99), lambda x: ahead(search.of(search.outcomes.at(x)), lambda pace: pace)),
        ("a draft step", "s", step, (0.0, reach), lambda x: ahead(search, lambda pace: _drafting(pace, x - step))),
        ("link, one way", "s", link, (0.0, FARTHEST * max(link, UNNOTICED)), lambda x: ahead(search, lambda pace: _linked(pace, x - link))),
    ]
    return tuple(_thresholds(*each, best.configuration.mode) for each in inputs)


def _drafting(pace: Pace, more: float) -> Pace:
    """The pace with draft forwards that take so many seconds more, or less if it is negative, down to none."""
    step, alone = (replace(table, seconds=tuple(max(0.0, s + more) for s in table.seconds)) for table in (pace.step, pace.alone))
    return replace(pace, step=step, alone=alone)


def _linked(pace: Pace, more: float) -> Pace:
    """The pace with messages that take so many seconds more, or less if it is negative, down to none; AR sends none."""
    return replace(pace, link_seconds=max(0.0, pace.link_seconds + more)) if pace.placement.draft else pace


def _thresholds(name: str, unit: str, value: float, ends: tuple[float, float], ahead: Callable[[float], Mode], own: Mode) -> Sensitivity:
    """Where, on either side of the value, another mode takes the lead, if one does at the end; and which it then is."""
    found: list[tuple[float | None, Mode | None]] = []
    for end in ends:
        near, far = value, end
        if ahead(end) == own:
            found.append((None, None))
            continue
        for _ in range(HALVINGS):
            middle = (near + far) / 2
            near, far = (middle, far) if ahead(middle) == own else (near, middle)
        found.append((far, ahead(far)))
    (below, to_below), (above, to_above) = found
    return Sensitivity(name=name, unit=unit, value=value, below=below, becomes_below=to_below, above=above, becomes_above=to_above)
