"""How often the outcome of a round is in the cache.

A curve is an array indexed by the fan-out: curve[F] is the probability that the bonus token is among the F best candidates, curve[0] = 0.
Candidates at a position k < K are the draft's best tokens without the token that was sent, which cannot be the bonus there; at K, where all
was accepted, none is excluded. So the curve of position K is another one than those before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from theory import check
from theory.check import FloatArray
from theory.ranking import best_first, cumulative


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """Miss probability 1 - h(F) = floor + c F^-r, never above 1 (Definition 11 is c = 1, floor = 0; measured curves need a free c)."""

    r: float
    c: float = 1.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        check.positive("r", self.r)
        check.non_negative("c", self.c)
        check.probability("floor", self.floor)

    def hit(self, F: ArrayLike) -> FloatArray:
        """Probability h(F) that the bonus is among the F best candidates; 0 at F = 0; F may be fractional. Broadcasts."""
        fan_out = check.non_negative("F", F)
        with np.errstate(divide="ignore", invalid="ignore"):
            miss = self.floor + self.c * fan_out**-self.r
        return np.where(fan_out > 0, 1 - np.minimum(miss, 1.0), 0.0)

    def curve(self, largest: int) -> FloatArray:
        """The cumulative curve at F = 0..largest, [largest+1]."""
        return self.hit(np.arange(check.count("largest", largest, 0) + 1))


def hit_probability(length_law: ArrayLike, fan_out: Sequence[int], curves: Sequence[ArrayLike]) -> float:
    """Probability sum_k P(k) curves[k][F_k] that the outcome of a round is in the cache.

    length_law: P(k), [K+1]; fan_out: F_k, K+1 whole numbers; curves: K+1 cumulative curves (a curve is flat past its end). ValueError
    if the lengths differ.
    """
    law, checked = check.distribution("length_law", length_law), [check.curve(f"curves[{k}]", c) for k, c in enumerate(curves)]
    if not law.size == len(fan_out) == len(checked):
        raise ValueError(f"{law.size} lengths, {len(fan_out)} fan-outs and {len(checked)} curves: pass K+1 of each")
    sizes = [check.count(f"fan_out[{k}]", F, 0) for k, F in enumerate(fan_out)]
    return float(sum(P * curve[min(F, curve.size - 1)] for P, F, curve in zip(law, sizes, checked, strict=True)))


def stationary_hit_rate(h_after_hit: ArrayLike, h_after_miss: ArrayLike) -> FloatArray:
    """Share of hits in the long run when hits depend on whether the round before hit, m / (1 - h + m). Broadcasts. [derived]

    ValueError for h_after_hit = 1 with h_after_miss = 0, a chain that never leaves the state it began in.
    """
    h, m = check.probability("h_after_hit", h_after_hit), check.probability("h_after_miss", h_after_miss)
    if np.any((h == 1) & (m == 0)):
        raise ValueError(
            f"h_after_hit={h_after_hit!r} with h_after_miss={h_after_miss!r} has no single long-run rate: move one off its end"
        )
    return np.asarray(m / (1 - h + m))


class BonusCurves(NamedTuple):
    """Acceptance and cumulative hit curves of positions: what a candidate list is worth there, before anything is drawn."""

    acceptance: FloatArray
    rejected_hit: FloatArray
    accepted_hit: FloatArray


def bonus_curves(p: ArrayLike, q: ArrayLike, scores: ArrayLike, largest: int) -> BonusCurves:
    """Exact chances, for each position, that the bonus is among the F = 0..largest candidates of highest score. [derived]

    p, q: [..., vocabulary] probabilities of target and draft; scores: [..., vocabulary] finite or -inf, what ranks the candidates (the
    draft's logits, say); equal scores are ranked in no particular order. Returns, for leading shape [...]:
    - acceptance [...]: alpha = sum min(p, q).
    - rejected_hit [..., largest+1]: probability that the token sent, x ~ q, is rejected and the bonus is among the F best without x;
      divided by 1 - alpha, the hit curve given a rejection. With w = max(q - p, 0), r = max(p - q, 0), beta = 1 - alpha, and W_F, R_F
      their masses in the F best of all: w(x) = P(x sent and rejected), and r(x) = 0 then: [W_F R_{F+1} + (beta - W_F) R_F] / beta.
    - accepted_hit [..., largest+1]: mass of p in the F best, the hits if this is the position after full acceptance.
    ValueError if p or q is no distribution, or for scores of another vocabulary.
    """
    largest = check.count("largest", largest, 0)
    target, draft, ranked = check.one_vocabulary(
        p=check.distribution("p", p), q=check.distribution("q", q), scores=check.scores("scores", scores)
    )
    # What float32 rounds away must not reappear as a rejection.
    target, draft = (law / law.sum(-1, keepdims=True) for law in (target, draft))
    best = best_first(ranked, largest + 1)
    lost, gained = np.maximum(draft - target, 0), np.maximum(target - draft, 0)
    beta = lost.sum(-1, keepdims=True)
    W, R, accepted = (cumulative(mass, best, largest + 2) for mass in (lost, gained, target))
    joint = W[..., :-1] * R[..., 1:] + (beta - W[..., :-1]) * R[..., :-1]
    rejected = np.where(beta > 0, joint / np.where(beta > 0, beta, 1), 0.0)
    return BonusCurves(1 - beta[..., 0], rejected, np.minimum(accepted[..., :-1], 1.0))
