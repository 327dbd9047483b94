"""Saguaro sampling (Definition 14): the draft presses down the F tokens that it will cache, so that the residual falls on them.

The paper has one C for all positions. Here also one C_k per position, by the same objective: a changed token changes the whole chain after
it, so each C_k is weighed by the round. Times are in units of one verification; M = max(1, T_p).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from theory import check
from theory.check import FloatArray, IntArray
from theory.hits import bonus_curves
from theory.ranking import best_first


def saguaro_law(q: ArrayLike, C: ArrayLike, F: int) -> FloatArray:
    """The law that a draft token is drawn from: C q(t) for t in the F best of q, else q(t), normalised (Definition 14), [..., vocabulary].

    q: [..., vocabulary]; C: numbers in [0, 1], which broadcast with the leading shape of q. C = 1 leaves q as it is; so does any C where
    the F best hold all the mass, C = 0 as a limit.
    """
    law, factor = check.distribution("q", q), check.probability("C", C)[..., None]
    pressed = np.zeros(law.shape)
    np.put_along_axis(pressed, best_first(law, check.count("F", F, 0)), 1.0, -1)
    weights = np.where(pressed > 0, factor * law, law)
    mass = weights.sum(-1, keepdims=True)
    return np.where(mass > 0, weights / np.where(mass > 0, mass, 1), law)


class SaguaroCurves(NamedTuple):
    """Means over the pairs, [n, m] for n factors and m fan-outs; accepted_hit, which no factor changes, [m]."""

    acceptance: FloatArray
    rejected_hit: FloatArray
    accepted_hit: FloatArray


def saguaro_curves(p: ArrayLike, q: ArrayLike, C: ArrayLike, fan_out: Sequence[int]) -> SaguaroCurves:
    """Acceptance and hits of measured pairs (p, q) for every factor and fan-out: what the C that maximises speed is chosen by.

    p, q: [pairs, vocabulary]; C: [n]; fan_out: [m] values of F, both how many tokens are pressed and how many candidates are cached.
    rejected_hit: the sent token is rejected and the bonus is cached, as in theory.hits.bonus_curves, for the exact mean over the tokens
    sent; accepted_hit: the bonus after full acceptance is cached.
    """
    target, draft = check.one_vocabulary(p=check.distribution("p", p), q=check.distribution("q", q))
    factors, sizes = np.atleast_1d(check.probability("C", C)), [check.count("fan_out", F, 0) for F in fan_out]
    (acceptance, rejected), accepted = np.empty((2, factors.size, len(sizes))), np.empty(len(sizes))
    for j, F in enumerate(sizes):
        for i, factor in enumerate(factors):
            curves = bonus_curves(target, saguaro_law(draft, factor, F), draft, F)
            acceptance[i, j], rejected[i, j], accepted[j] = (
                curve.mean() for curve in (curves.acceptance, curves.rejected_hit[..., F], curves.accepted_hit[..., F])
            )
    return SaguaroCurves(acceptance, rejected, accepted)


class SaguaroRound(NamedTuple):
    """What a choice of factors, [K] indices, makes of the round: tokens, hit probability, speedup over AR."""

    choice: IntArray
    E: float
    h: float
    speedup: float


def saguaro_round(
    choice: ArrayLike, acceptance: ArrayLike, rejected_hit: ArrayLike, accepted_hit: float, T_p: float, T_b: float
) -> SaguaroRound:
    """The round of given factors by Theorem 7, positions taken as independent, the backup drafting by the same law. [derived]

    choice: [K] index of the factor of each position; acceptance, rejected_hit: [n, K] of each factor at each position; accepted_hit: at
    position K. E = 1 + sum_k prod_{j<=k} a_j, h = sum_k prod_{j<k} a_j R_k + prod a_j H_K, speedup E / [h M + (1-h)(1+T_b)].
    """
    a, hit, H, M, miss = _round_arguments(acceptance, rejected_hit, accepted_hit, T_p, T_b)
    chosen = np.asarray(choice, dtype=np.intp)
    at = np.arange(a.shape[1])
    survival = np.cumprod(np.concatenate([[1.0], a[chosen, at]]))
    E, h = float(survival.sum()), float(survival[:-1] @ hit[chosen, at] + survival[-1] * H)
    return SaguaroRound(chosen, E, h, E / (h * M + (1 - h) * miss))


def best_single_factor(acceptance: ArrayLike, rejected_hit: ArrayLike, accepted_hit: float, T_p: float, T_b: float) -> SaguaroRound:
    """The one factor for all positions, of those on the table, that maximises the speed; arguments as for saguaro_round. [derived]"""
    n, K = np.shape(acceptance)
    rounds = [saguaro_round([i] * K, acceptance, rejected_hit, accepted_hit, T_p, T_b) for i in range(n)]
    return max(rounds, key=lambda each: each.speedup)


def best_factors(acceptance: ArrayLike, rejected_hit: ArrayLike, accepted_hit: float, T_p: float, T_b: float) -> SaguaroRound:
    """The factor C_k of each position that together maximise the speed; arguments as for saguaro_round. Exact on the table. [derived]

    Speed is a ratio E / T; for a price v of time, E - v T is a sum along the chain, maximised from its end, V_K = v g H_K and
    V_k = max_C [v g R_k(C) + a_k(C) (1 + V_{k+1})] with g = 1 + T_b - M; v is raised to the speed reached until it stays (Dinkelbach).
    """
    a, hit, H, M, miss = _round_arguments(acceptance, rejected_hit, accepted_hit, T_p, T_b)
    best = best_single_factor(a, hit, H, T_p, T_b)
    while True:
        price, choice = best.speedup * (miss - M), np.empty(a.shape[1], dtype=np.intp)
        value = price * H
        for k in reversed(range(a.shape[1])):
            values = price * hit[:, k] + a[:, k] * (1 + value)
            choice[k] = np.argmax(values)
            value = values[choice[k]]
        found = saguaro_round(choice, a, hit, H, T_p, T_b)
        if found.speedup <= best.speedup * (1 + 1e-12):
            return best
        best = found


def _round_arguments(
    acceptance: ArrayLike, rejected_hit: ArrayLike, accepted_hit: float, T_p: float, T_b: float
) -> tuple[FloatArray, FloatArray, float, float, float]:
    a, hit = check.probability("acceptance", acceptance), check.probability("rejected_hit", rejected_hit)
    if a.ndim != 2 or a.shape != hit.shape:
        raise ValueError(f"acceptance {a.shape} and rejected_hit {hit.shape} must both be [factors, positions]")
    M = max(1.0, float(check.non_negative("T_p", T_p)))
    return a, hit, float(check.probability("accepted_hit", accepted_hit)), M, 1 + float(check.non_negative("T_b", T_b))
