"""What the target decides, as the planner sees it: the law of accepted lengths and the hit curves, recorded or assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from sim import outcomes as sim_outcomes
from ssd.specs import Profile, Texts, Verification
from theory.acceptance import accepted_length_law, expected_tokens_of
from theory.check import FloatArray, IntArray
from theory.hits import PowerLaw

# Curves are needed up to the largest budget.
LARGEST_BUDGET = 32
LONGEST_DRAFT = 8
# The rounds that a profile tells of: draft tokens, and candidates cached at each position.
TOLD_LOOKAHEAD, TOLD_FAN_OUT = 3, 1
# Fits of the published miss rates by temperature, after a hit and after a miss (Definition 11 with a free prefactor).
PUBLISHED_MISSES = {
    0.0: (PowerLaw(r=0.54, c=0.28), PowerLaw(r=0.47, c=0.57)),
    0.7: (PowerLaw(r=0.54, c=0.44), PowerLaw(r=0.50, c=0.78)),
    1.0: (PowerLaw(r=0.42, c=0.54), PowerLaw(r=0.37, c=0.85)),
}

Curves = tuple[FloatArray, ...]


class OutcomeModel(Protocol):
    """Outcomes of drafts of up to `longest` tokens."""

    @property
    def longest(self) -> int:
        """Most draft tokens it can tell of."""
        ...

    def law(self, K: int) -> FloatArray:
        """Chance P(k) that k of K draft tokens are accepted, [K+1]."""
        ...

    def curves(self, K: int, after_hit: bool) -> Curves:
        """K+1 cumulative hit curves, [LARGEST_BUDGET+1] each, of a round whose draft was a hit or was not."""
        ...

    def simulated(self) -> sim_outcomes.Outcomes:
        """The same for the simulator."""
        ...

    def at(self, alpha: float) -> OutcomeModel:
        """The same, had a draft token been accepted with this chance."""
        ...

    @property
    def alpha(self) -> float:
        """Chance that a draft token is accepted."""
        ...


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rounds of SSD after a hit and after a miss, in this order.

    hits: chance that the outcome is cached. laws: P(k) of the accepted length, [K+1] or as many as are drafted. drafted: mean tokens.
    """

    hits: tuple[float, float]
    laws: tuple[FloatArray, FloatArray]
    drafted: tuple[float, float]

    @property
    def tokens(self) -> tuple[float, float]:
        """Tokens that they commit on average, bonus included."""
        of_hit, of_miss = map(expected_tokens_of, self.laws)
        return float(of_hit), float(of_miss)

    def mean(self, share: float, values: tuple[float, float]) -> float:
        """Mean of what is one value after a hit and another after a miss, over rounds of which `share` come after a hit."""
        return share * values[0] + (1 - share) * values[1]


@dataclass(frozen=True)
class Traced:
    """Recorded texts: for each, the rank of every token among the draft's choices (sim.outcomes.Trace).

    ends: where other than `ranks`, those of tokens before which a whole draft was accepted (ssd.scoring).
    """

    ranks: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...] = ()

    @property
    def longest(self) -> int:
        """Most draft tokens that the longest text can answer."""
        return min(LONGEST_DRAFT, max(len(text) for text in self.ranks) - 1)

    def law(self, K: int) -> FloatArray:
        """Share of rounds with k of K draft tokens accepted, [K+1]."""
        accepted, _ = self._rounds(K)
        return np.asarray(np.bincount(accepted, minlength=K + 1) / accepted.size)

    def curves(self, K: int, after_hit: bool) -> Curves:
        """One curve for rejections at any position, one for full acceptance; the texts do not tell hits from misses."""
        accepted, ranks = self._rounds(K)
        return (*[_curve(ranks[accepted < K])] * K, _curve(ranks[accepted == K]))

    def simulated(self) -> sim_outcomes.Outcomes:
        """The texts, one after another in random order."""
        return sim_outcomes.Trace(self.ranks, self.ends)

    def some(self, texts: Sequence[int]) -> Traced:
        """Those with these indices, which may repeat."""
        return Traced(tuple(self.ranks[i] for i in texts), tuple(self.ends[i] for i in texts) if self.ends else ())

    def at(self, alpha: float) -> Traced:
        """The same texts with tokens struck out, or others taken as accepted, at random until so many are."""
        rng, known = np.random.default_rng(0), self.alpha
        more = (alpha - known) / (1 - known) if alpha > known else 0.0
        less = 1 - alpha / known if alpha < known else 0.0
        texts = []
        for text in self.ranks:
            ranks, chance = np.asarray(text), rng.random(len(text))
            struck = np.where((ranks == 1) & (chance < less), 2, ranks)
            texts.append(tuple(np.where((ranks > 1) & (chance < more), 1, struck).tolist()))
        return replace(self, ranks=tuple(texts))

    @property
    def alpha(self) -> float:
        """Share of tokens that are the draft's own."""
        ranks = np.concatenate([np.asarray(text) for text in self.ranks])
        return float((ranks == 1).mean())

    def ranks_after(self, K: int, F: int) -> tuple[list[int], list[int]]:
        """Ranks of the bonus in rounds after a hit and after a miss, with F cached candidates at each position."""
        after_hit, after_miss = list[int](), list[int]()
        for text, end in zip(self.ranks, self.ends or self.ranks, strict=True):
            for place in range(min(K + 1, len(text))):
                hit = False
                while place + K < len(text):
                    accepted, rank = sim_outcomes.outcome_at(text, place, K, end)
                    (after_hit if hit else after_miss).append(rank)
                    hit = rank <= F
                    place += accepted + 1
        return after_hit, after_miss

    def _rounds(self, K: int) -> tuple[IntArray, IntArray]:
        if K not in self._read:
            accepted, ranks = zip(*sim_outcomes.rounds_of(self.ranks, K, self.ends), strict=True)
            self._read[K] = np.asarray(accepted, dtype=np.intp), np.asarray(ranks, dtype=np.intp)
        return self._read[K]

    @cached_property
    def _read(self) -> dict[int, tuple[IntArray, IntArray]]:
        return {}


@dataclass(frozen=True)
class Assumed:
    """The same acceptance at every position, and the published hit curves."""

    alpha: float
    longest: int = LONGEST_DRAFT
    temperature: float = 0.0

    def law(self, K: int) -> FloatArray:
        """Law of accepted lengths for independent positions, [K+1]."""
        return accepted_length_law(self.alpha, K)

    def curves(self, K: int, after_hit: bool) -> Curves:
        """The power law of the state, at every position."""
        return (published_misses(after_hit, self.temperature).curve(LARGEST_BUDGET),) * (K + 1)

    def simulated(self) -> sim_outcomes.Outcomes:
        """Independent rounds with the two states' curves."""
        hit, miss = (sim_outcomes.IID(self.alpha, tuple(self.curves(0, state)[0].tolist())) for state in (True, False))
        return sim_outcomes.TwoState(hit, miss)

    def at(self, alpha: float) -> Assumed:
        """The same at another acceptance."""
        return replace(self, alpha=alpha)


def outcome_model(profile: Profile, verification: Verification = "rejection") -> OutcomeModel:
    """Return the recorded texts of a profile of one load, or where they have no two tokens the published hit curves at its acceptance rate.

    verification: how drafts are verified; of sampled texts coupling reads the ranks under the noise that both sides share.
    """
    its = profile.texts[0]
    return _traced(its, verification) or Assumed(its.draft_acceptance_rate, temperature=its.temperature)


def acceptance_by_position(its: Texts) -> tuple[float, ...]:
    """Chance that each of a draft's tokens is accepted given those before it were, as far as any was; none of texts too short to tell."""
    model = _traced(its)
    if model is None:
        return ()
    reached = np.cumsum(model.law(model.longest)[::-1])[::-1]
    return tuple((reached[1:][reached[:-1] > 0] / reached[:-1][reached[:-1] > 0]).tolist())


def bonus_curves(its: Texts) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Chance that the bonus is among the best F = 0..LARGEST_BUDGET candidates of its position, in rounds after hits and after misses.

    Places that are hard for the draft come together, so that they differ. Rounds of TOLD_LOOKAHEAD draft tokens, with TOLD_FAN_OUT cached
    candidates at each position; the first round of a text comes after a miss.
    """
    model = _traced(its)
    after = model.ranks_after(TOLD_LOOKAHEAD, TOLD_FAN_OUT) if model is not None else ((), ())
    of_hit, of_miss = (tuple(_curve(np.asarray(ranks)).tolist()) if ranks else () for ranks in after)
    return of_hit, of_miss


def _traced(its: Texts, verification: Verification = "rejection") -> Traced | None:
    texts = tuple(text for text in its.traces if text)
    ends = tuple(text for text in its.end_traces if text)
    if max(map(len, texts), default=0) < 2:
        return None
    return Traced(texts, ends) if verification == "rejection" else Traced(ends or texts)


def published_misses(after_hit: bool, temperature: float) -> PowerLaw:
    """Return the published law of misses at a temperature, between and beyond the published ones the nearest two joined by a line."""
    known, state = sorted(PUBLISHED_MISSES), 0 if after_hit else 1
    r, c = (float(np.interp(temperature, known, [getattr(PUBLISHED_MISSES[T][state], name) for T in known])) for name in ("r", "c"))
    return PowerLaw(r=r, c=c)


def _curve(ranks: IntArray) -> FloatArray:
    if ranks.size == 0:
        return np.zeros(LARGEST_BUDGET + 1)
    return np.asarray((ranks[None, :] <= np.arange(LARGEST_BUDGET + 1)[:, None]).mean(axis=1))
