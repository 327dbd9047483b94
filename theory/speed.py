"""Speed of AR, SD and SSD, as ratios in units of one verification and as seconds a token.

Symbols: E tokens committed by a round (bonus included), h probability that the outcome of a round is in the cache, T_v
seconds of one verification, T_p of building the cache, T_b of the backup. AR spends one forward of one token, T_ar, on each token;
the speedup over AR in seconds is T_ar over the seconds a token of the other.
"""

import numpy as np
from numpy.typing import ArrayLike

from theory import check
from theory.check import FloatArray
from theory.hits import stationary_hit_rate


def sd_speedup(E: ArrayLike, T_sd: ArrayLike) -> FloatArray:
    """Speedup of SD over AR, E / (1 + T_sd), with the drafting time T_sd in units of one verification. Broadcasts."""
    return check.non_negative("E", E) / (1 + check.non_negative("T_sd", T_sd))


def ssd_speedup(h: ArrayLike, E_hit: ArrayLike, E_miss: ArrayLike, T_p: ArrayLike, T_b: ArrayLike) -> FloatArray:
    """Speedup of SSD over AR (Theorem 7), times in units of one verification. Broadcasts.

    [h E_hit + (1-h) E_miss] / [h max(1, T_p) + (1-h)(1 + T_b)]. A miss is charged as if the draft were free when the outcome
    comes, which is optimistic for T_p > 1.
    """
    return 1 / ssd_seconds_per_token(1.0, T_p, T_b, h, E_hit, E_miss)


def sd_seconds_per_token(T_v: ArrayLike, T_sd: ArrayLike, E: ArrayLike) -> FloatArray:
    """Seconds that SD takes for one token: (T_v + T_sd) / E, all times in seconds. Broadcasts."""
    return (check.positive("T_v", T_v) + check.non_negative("T_sd", T_sd)) / check.positive("E", E)


def ssd_seconds_per_token(
    T_v: ArrayLike, T_p: ArrayLike, T_b: ArrayLike, h: ArrayLike, E_hit: ArrayLike, E_miss: ArrayLike, step: ArrayLike = 0.0
) -> FloatArray:
    """Seconds that SSD takes for one token (Theorem 7 in seconds). Broadcasts.

    step: seconds of one draft step. A draft that is still building (T_p > T_v) notices a miss when the step under way ends, on average half
    a step later; 0 leaves this out, as the theorem does.
    """
    p = check.probability("h", h)
    hit, miss = round_seconds(T_v, T_p, T_b, step)
    tokens = p * check.positive("E_hit", E_hit) + (1 - p) * check.positive("E_miss", E_miss)
    return np.asarray((p * hit + (1 - p) * miss) / tokens)


def round_seconds(T_v: ArrayLike, T_p: ArrayLike, T_b: ArrayLike, step: ArrayLike = 0.0) -> tuple[FloatArray, FloatArray]:
    """Seconds of a round whose outcome hits, max(T_v, T_p), and of one that misses, T_v + T_b + step/2 if T_p > T_v. Broadcasts."""
    verify, build = check.positive("T_v", T_v), check.non_negative("T_p", T_p)
    residual = np.where(build > verify, check.non_negative("step", step) / 2, 0.0)
    return np.maximum(verify, build), np.asarray(verify + residual + check.non_negative("T_b", T_b))


def blocking_round_seconds(T_v: ArrayLike, T_p: ArrayLike, T_b: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Seconds of a round whose outcome hits, max(T_v, T_p), and of one that misses, max(T_v, T_p) + T_b. Broadcasts. [derived]

    For a draft that completes its build before it looks for the outcome, as the paper's own code does. Exact where Theorem 7 is not: for
    T_p > T_v. theory.interruption has the exact times of a draft that looks after each step.
    """
    hit = np.maximum(check.positive("T_v", T_v), check.non_negative("T_p", T_p))
    return hit, np.asarray(hit + check.non_negative("T_b", T_b))


def two_state_seconds_per_token(
    h_after_hit: ArrayLike,
    h_after_miss: ArrayLike,
    seconds_after_hit: tuple[ArrayLike, ArrayLike],
    seconds_after_miss: tuple[ArrayLike, ArrayLike],
    E_hit: ArrayLike,
    E_miss: ArrayLike,
) -> FloatArray:
    """Seconds a token where rounds after a hit and after a miss differ in length too, as with the empty draft of backup `none`. Broadcasts.

    seconds_after_*: (seconds if the outcome hits, if it misses) of a round that verifies a cached draft and of one that verifies the
    backup's. [derived: the mean over the stationary law of the two-state chain; Theorem 7 is the case of equal rows.]
    """
    pi = stationary_hit_rate(h_after_hit, h_after_miss)
    seconds = pi * _mean(h_after_hit, seconds_after_hit) + (1 - pi) * _mean(h_after_miss, seconds_after_miss)
    return np.asarray(seconds / (pi * check.positive("E_hit", E_hit) + (1 - pi) * check.positive("E_miss", E_miss)))


def _mean(h: ArrayLike, seconds: tuple[ArrayLike, ArrayLike]) -> FloatArray:
    hit, miss = seconds
    p = check.probability("h", h)
    return np.asarray(p * check.non_negative("seconds", hit) + (1 - p) * check.non_negative("seconds", miss))


def ssd_over_own_sd(h: ArrayLike, T_p: ArrayLike, T_sd: ArrayLike) -> FloatArray:
    """Speedup of SSD over SD when SD's draft is both primary and backup (Corollary 8), times in units of one verification. Broadcasts.

    At least 1 as long as T_p <= 1 + T_sd, and above 1 if also h > 0 and max(1, T_p) < 1 + T_sd.
    """
    return ssd_speedup(h, 1.0, 1.0, T_p, T_sd) / sd_speedup(1.0, T_sd)


def ssd_over_sd_bounds(h: ArrayLike, E_hit: ArrayLike, E_sd: ArrayLike, T_sd: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Lower and upper bound of the speedup of SSD over SD (Corollary 9), T_sd in units of one verification. Broadcasts.

    Upper (1 + T_sd) E_hit / E_sd, for E_miss <= E_hit; lower h times that, for T_p <= 1 and T_b = 0.
    """
    upper = (1 + check.non_negative("T_sd", T_sd)) * check.positive("E_hit", E_hit) / check.positive("E_sd", E_sd)
    return np.asarray(check.probability("h", h) * upper), upper
