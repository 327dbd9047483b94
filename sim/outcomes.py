"""What the target decides: models of the outcome of a round, drawn as (accepted length k, rank of the bonus token).

The rank is 1-based among the candidates of position k, best first: without the sent token for k below the drafted length, with
all tokens where everything was accepted. An outcome is in the cache if its rank is at most F_k.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from scipy.optimize import isotonic_regression

from sim.draws import one_by_one
from theory import check
from theory.acceptance import accepted_length_law
from theory.check import FloatArray

# A rank that no cache holds: the bonus is none of the candidates that a curve tells of.
NEVER = 1 << 30
# Candidates of a position whose chances are told apart.
RANKS = 32

Outcome = tuple[int, int]
Draw = Callable[[int, bool], Outcome]


class Outcomes(Protocol):
    """A model of outcomes."""

    def start(self, rng: np.random.Generator) -> Draw:
        """A request's stream: a function of (drafted length, whether the draft was a hit) that returns the next (k, rank)."""
        ...

    def chances(self, drafted: int, hit: bool) -> FloatArray:
        """What is known of a round before its outcome: the chance of each (k, rank), [drafted+1, RANKS], falling with the rank."""
        ...


@dataclass(frozen=True, slots=True)
class Positional:
    """Acceptance and candidates that depend on the position.

    alphas: K acceptance rates, each given that all before were accepted; curves: K+1 cumulative curves indexed by F (theory.hits), the
    last one for full acceptance, whatever the drafted length. What a curve leaves to 1 at its end is drawn as the rank NEVER.
    """

    alphas: tuple[float, ...]
    curves: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        check.probability("alphas", self.alphas)
        if len(self.curves) != len(self.alphas) + 1:
            raise ValueError(f"{len(self.curves)} curves for {len(self.alphas)} alphas: pass one a position and one for full acceptance")
        for k, curve in enumerate(self.curves):
            check.curve(f"curves[{k}]", curve)

    def start(self, rng: np.random.Generator) -> Draw:
        """A stream of independent rounds; ValueError when asked for more drafted tokens than there are alphas."""
        random = one_by_one(rng.random).__next__

        def draw(drafted: int, hit: bool) -> Outcome:
            if drafted > len(self.alphas):
                raise ValueError(f"drafted={drafted} tokens but only {len(self.alphas)} alphas: give one for every position")
            accepted = 0
            while accepted < drafted and random() < self.alphas[accepted]:
                accepted += 1
            return accepted, _rank(self.curves[accepted if accepted < drafted else -1], random())

        return draw

    def chances(self, drafted: int, hit: bool) -> FloatArray:
        """The rates and the curves as they are."""
        curves = [*self.curves[:drafted], self.curves[-1]]
        return _chances(accepted_length_law(self.alphas[:drafted], drafted), [_gains(curve) for curve in curves])


@dataclass(frozen=True, slots=True)
class IID:
    """Every position is accepted with probability alpha; ranks follow a cumulative curve indexed by F (theory.hits).

    curve: after a rejection; curve_at_end: after full acceptance, where no token is excluded (default: the same). What a curve leaves
    to 1 at its end is drawn as the rank NEVER.
    """

    alpha: float
    curve: tuple[float, ...]
    curve_at_end: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check.probability("alpha", self.alpha)
        check.curve("curve", self.curve)
        if self.curve_at_end is not None:
            check.curve("curve_at_end", self.curve_at_end)

    def start(self, rng: np.random.Generator) -> Draw:
        """A stream of independent rounds."""
        random, alpha, rejected = one_by_one(rng.random).__next__, self.alpha, self.curve
        end = rejected if self.curve_at_end is None else self.curve_at_end

        def draw(drafted: int, hit: bool) -> Outcome:
            accepted = 0
            while accepted < drafted and random() < alpha:
                accepted += 1
            return accepted, _rank(rejected if accepted < drafted else end, random())

        return draw

    def chances(self, drafted: int, hit: bool) -> FloatArray:
        """The rate and the curves as they are."""
        end = self.curve if self.curve_at_end is None else self.curve_at_end
        return _chances(accepted_length_law(self.alpha, drafted), [_gains(self.curve)] * drafted + [_gains(end)])


@dataclass(frozen=True, slots=True)
class TwoState:
    """One model for rounds whose draft was a hit and one for all others."""

    after_hit: Outcomes
    after_miss: Outcomes

    def start(self, rng: np.random.Generator) -> Draw:
        """A stream that asks the model of the state it is in."""
        hit_draw, miss_draw = self.after_hit.start(rng), self.after_miss.start(rng)
        return lambda drafted, hit: hit_draw(drafted, hit) if hit else miss_draw(drafted, hit)

    def chances(self, drafted: int, hit: bool) -> FloatArray:
        """Those of the state."""
        return (self.after_hit if hit else self.after_miss).chances(drafted, hit)


@dataclass(frozen=True, slots=True)
class Trace:
    """Greedy texts as the draft would have ranked them: exact rounds for any lookahead, from real text.

    ranks: for each text, the rank of every token among the draft's choices after what precedes it, 1 being the token that the draft
    would have sent. Under greedy decoding the rounds of any draft length follow: tokens are accepted while the rank is 1, the next is
    the bonus, and the sent token, being first, is no candidate where it was rejected. ends: of sampled texts the ranks of tokens before
    which a whole draft was accepted, where they are others. ValueError for a text without tokens, and for ends of other lengths.
    """

    ranks: tuple[tuple[int, ...], ...] = field(repr=False)
    ends: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.ranks or any(not text or min(text) < 1 for text in self.ranks):
            raise ValueError(f"ranks={self.ranks!r} needs at least one text, each of at least one rank, counted from 1")
        if self.ends and list(map(len, self.ends)) != list(map(len, self.ranks)):
            raise ValueError(f"ends={self.ends!r} and ranks={self.ranks!r} differ in length: give one rank of each for every token")

    def start(self, rng: np.random.Generator) -> Draw:
        """A stream that reads a random text from its beginning, and others behind it."""
        texts = tuple(zip(self.ranks, self.ends or self.ranks, strict=True))
        (text, end), place = texts[int(rng.integers(len(texts)))], 0

        def draw(drafted: int, hit: bool) -> Outcome:
            nonlocal text, end, place
            while place + drafted >= len(text):
                more, more_end = texts[int(rng.integers(len(texts)))]
                text, end, place = text[place:] + more, end[place:] + more_end, 0
            outcome = outcome_at(text, place, drafted, end)
            place += outcome[0] + 1
            return outcome

        return draw

    def chances(self, drafted: int, hit: bool) -> FloatArray:
        """How often they came in all texts: the ranks do not say how sure the draft was of each."""
        return _counted(rounds_of(self.ranks, drafted, self.ends), drafted)


def outcome_at(ranks: tuple[int, ...], place: int, drafted: int, ends: tuple[int, ...] | None = None) -> Outcome:
    """The outcome of a round whose first drafted token stands at `place` of a text; past its end all is accepted. ends: see Trace."""
    accepted = next((k for k in range(drafted) if place + k < len(ranks) and ranks[place + k] > 1), drafted)
    read = ranks if ends is None or accepted < drafted else ends
    rank = read[place + accepted] if place + accepted < len(read) else 1
    return accepted, rank - (accepted < drafted)


def rounds_of(ranks: Sequence[tuple[int, ...]], lookahead: int, ends: Sequence[tuple[int, ...]] = ()) -> list[Outcome]:
    """The rounds in which decoding with `lookahead` draft tokens reads each text, begun at each of its first lookahead+1 places."""
    rounds = []
    for text, end in zip(ranks, ends or ranks, strict=True):
        for place in range(min(lookahead + 1, len(text))):
            while place + lookahead < len(text):
                rounds.append(outcome_at(text, place, lookahead, end))
                place += rounds[-1][0] + 1
    return rounds


@dataclass(frozen=True, slots=True)
class Replay:
    """Recorded rounds, played back in blocks of successive rounds from random places, so that runs of easy or hard text stay together.

    rounds: (k, rank) of rounds with `lookahead` drafted tokens each; block: rounds played before the next jump. A shorter draft is
    answered from the same record: what was accepted beyond its end is a bonus token of rank 1 (the draft's own choice), and a rejection at
    its end is one rank later (there the sent token is a candidate too). ValueError when asked for longer drafts.
    """

    rounds: tuple[Outcome, ...] = field(repr=False)
    lookahead: int
    block: int = 16

    def __post_init__(self) -> None:
        check.count("lookahead", self.lookahead, 0)
        check.count("block", self.block, 1)
        if not self.rounds:
            raise ValueError("rounds=() holds nothing to replay: record at least one round")
        for k, rank in self.rounds:
            if not (0 <= k <= self.lookahead and rank >= 1):
                raise ValueError(f"rounds has ({k}, {rank}): k must lie in 0..lookahead={self.lookahead} and rank start at 1")

    def start(self, rng: np.random.Generator) -> Draw:
        """A stream of resampled blocks; a block that reaches the end of the record goes on at its beginning."""
        position, left = 0, 0

        def draw(drafted: int, hit: bool) -> Outcome:
            nonlocal position, left
            if left == 0:
                position, left = int(rng.integers(len(self.rounds))), self.block
            outcome = self.rounds[position]
            position, left = (position + 1) % len(self.rounds), left - 1
            return _shortened(outcome, self.lookahead, drafted)

        return draw

    def chances(self, drafted: int, hit: bool) -> FloatArray:
        """How often they came in the record."""
        return _counted([_shortened(outcome, self.lookahead, drafted) for outcome in self.rounds], drafted)


def _rank(curve: Sequence[float], chance: float) -> int:
    rank = bisect_right(curve, chance)
    return rank if rank < len(curve) else NEVER


def _gains(curve: Sequence[float]) -> FloatArray:
    """What each further candidate adds to a curve, [RANKS]."""
    gains = np.diff(np.asarray(curve, dtype=np.float64))[:RANKS]
    return np.pad(gains, (0, RANKS - gains.size))


def _counted(rounds: Sequence[Outcome], drafted: int) -> FloatArray:
    """Chances by counts: of the accepted length, and of the rank after a rejection and after full acceptance."""
    if not rounds:
        return np.zeros((drafted + 1, RANKS))
    accepted, ranks = np.array(rounds).T
    law = np.bincount(accepted, minlength=drafted + 1) / len(rounds)
    of_rejected, of_full = (_shares(ranks[which]) for which in (accepted < drafted, accepted == drafted))
    return _chances(law, [of_rejected] * drafted + [of_full])


def _shares(ranks: np.ndarray) -> FloatArray:
    """How often each rank came, [RANKS]."""
    return np.asarray(np.bincount(ranks[ranks <= RANKS], minlength=RANKS + 1)[1:] / max(1, ranks.size))


def _chances(law: FloatArray, ranks: Sequence[FloatArray]) -> FloatArray:
    """A worse candidate is never the likelier one: the nearest falling chances, as theory.calibration makes confidences monotone."""
    return np.asarray(law[:, None] * np.array([isotonic_regression(of_one, increasing=False).x for of_one in ranks]), dtype=np.float64)


def _shortened(outcome: Outcome, lookahead: int, drafted: int) -> Outcome:
    if drafted > lookahead:
        raise ValueError(f"drafted={drafted} exceeds lookahead={lookahead} of the record: record longer drafts")
    accepted, rank = outcome
    if accepted < drafted or drafted == lookahead:
        return outcome
    return (drafted, 1) if accepted > drafted else (drafted, rank + 1)
