"""Prompt lookup as a backup: what its proposals are worth at every place of recorded texts, and the rounds of SSD that follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sim.outcomes import outcome_at
from ssd.outcomes import Rounds
from ssd.specs import Profile

# At places where nothing is proposed.
NOTHING = -1


class Lookup(Protocol):
    """The text of one request, in which what follows is looked up."""

    def add(self, tokens: Iterable[int]) -> None:
        """Append to the text."""
        ...

    def propose(self, count: int) -> tuple[int, ...]:
        """Return the `count` tokens that may follow, or none."""
        ...


def accepted_lengths(prompt: Sequence[int], output: Sequence[int], longest: int, lookup: Lookup) -> tuple[int, ...]:
    """Tell, before each token of a greedy output, how many of `longest` proposed tokens are accepted; NOTHING where none are proposed.

    The proposals come from `lookup`, still empty; towards the end of the output no more can be accepted than is left of it.
    """
    found = []
    lookup.add(prompt)
    for place in range(len(output)):
        proposal = lookup.propose(longest)
        found.append(_agreeing(proposal, output[place:]) if proposal else NOTHING)
        lookup.add(output[place : place + 1])
    return tuple(found)


def _agreeing(proposal: Sequence[int], text: Sequence[int]) -> int:
    known = min(len(proposal), len(text))
    return next((k for k in range(known) if proposal[k] != text[k]), known)


@dataclass(frozen=True)
class Recorded:
    """Recorded texts: for each token its rank among the draft's choices and what prompt lookup proposed before it was worth."""

    ranks: tuple[tuple[int, ...], ...]
    accepted: tuple[tuple[int, ...], ...]

    def rounds(self, K: int, after_hit: Sequence[int], after_miss: Sequence[int]) -> Rounds:
        """Read every text in rounds, the draft model's after a hit and prompt lookup's after a miss, and count them.

        Places that are easy for both are passed in few rounds, and a miss leads to hard ones: no law of single places tells of this.
        After a proposal was rejected the draft model's candidates are taken as they are; without the rejected token they may be better.
        NaN for what never comes up. ValueError for texts that are all too short for K.
        """
        hits, drafted, lengths = np.zeros(2), np.zeros(2), np.zeros((2, K + 1))
        for ranks, accepted in zip(self.ranks, self.accepted, strict=True):
            for place in range(0, min(K + 1, len(ranks)), 3):
                hit = False
                while place + K < len(ranks):
                    state = 0 if hit else 1
                    k, hit, asked = (
                        _of_draft(ranks, place, K, after_hit) if hit else _looked_up(ranks, accepted[place], place, K, after_miss)
                    )
                    hits[state] += hit
                    drafted[state] += asked
                    lengths[state, k] += 1
                    place += k + 1
        if not lengths.any():
            raise ValueError(f"K={K} is more than the recorded texts can answer: the longest has {max(map(len, self.ranks))} tokens")
        with np.errstate(invalid="ignore"):
            counts = lengths.sum(1)
            chances, means, (of_hit, of_miss) = hits / counts, drafted / counts, lengths / counts[:, None]
        return Rounds((float(chances[0]), float(chances[1])), (of_hit, of_miss), (float(means[0]), float(means[1])))


def _of_draft(ranks: tuple[int, ...], place: int, K: int, fan_out: Sequence[int]) -> tuple[int, bool, int]:
    """Accepted length, whether the outcome is cached, and tokens drafted."""
    k, rank = outcome_at(ranks, place, K)
    return k, rank <= fan_out[k], K


def _looked_up(ranks: tuple[int, ...], accepted: int, place: int, K: int, fan_out: Sequence[int]) -> tuple[int, bool, int]:
    """The same of prompt lookup; an empty draft has all candidates at its end."""
    if accepted == NOTHING:
        return 0, ranks[place] <= sum(fan_out), 0
    k = min(accepted, K)
    return k, ranks[place + k] <= fan_out[k], K


def recorded(profile: Profile) -> Recorded | None:
    """Return the texts of a profile of one load with what prompt lookup was worth, none if it was not measured on any of two tokens."""
    its = profile.texts[0]
    texts = [(ranks, accepted) for ranks, accepted in zip(its.traces, its.ngram_accepted, strict=False) if ranks]
    if max((len(ranks) for ranks, _ in texts), default=0) < 2:
        return None
    return Recorded(tuple(ranks for ranks, _ in texts), tuple(accepted for _, accepted in texts))
