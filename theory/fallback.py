"""Which backup to draft with after a miss: a slow, good one (`jit`) for small batches, a fast, poor one for large (Theorem 17)."""

import numpy as np
from numpy.typing import ArrayLike

from theory import check
from theory.check import FloatArray


def critical_batch(
    h: ArrayLike, E_hit: ArrayLike, E_slow: ArrayLike, E_fast: ArrayLike, T_slow: ArrayLike, T_fast: ArrayLike, T_p: ArrayLike
) -> FloatArray:
    """Batch size b* below which the slow backup is faster and above which the fast one is, by Corollary 16 (Theorem 17). Broadcasts.

    E_slow >= E_fast: tokens a round after a miss; T_slow >= T_fast, T_p: in units of one verification. With M = max(1, T_p) and
    N_x = h E_hit + (1-h) E_x:
    h^{b*} = [N_f (1+T_s) - N_s (1+T_f)] / [N_s (M-1-T_f) - N_f (M-1-T_s)]; for T_f = 0, M = 1: b* = ln(1 - (N_s-N_f)/(N_f T_s)) / ln h.
    [derived] inf: the slow one always, as N_s/(1+T_s) >= N_f/(1+T_f) or h = 1. Below 1: never, the fast one is ahead even at b = 1.
    """
    p, slow, fast = check.probability("h", h), check.non_negative("T_slow", T_slow), check.non_negative("T_fast", T_fast)
    after_slow, after_fast = check.positive("E_slow", E_slow), check.positive("E_fast", E_fast)
    if np.any(slow < fast) or np.any(after_slow < after_fast):
        raise ValueError(
            f"T_slow={T_slow!r}, E_slow={E_slow!r} must be no less than T_fast={T_fast!r}, E_fast={E_fast!r}: swap the backups"
        )
    hit = p * check.positive("E_hit", E_hit)
    N_s, N_f = hit + (1 - p) * after_slow, hit + (1 - p) * after_fast
    waited = np.maximum(1, check.non_negative("T_p", T_p)) - 1
    lost = N_f * (1 + slow) - N_s * (1 + fast)
    with np.errstate(divide="ignore", invalid="ignore"):
        all_hit = lost / (N_s * (waited - fast) - N_f * (waited - slow))
        batch = np.log(all_hit) / np.log(p)
    # abs: a quotient of -0.0 where both commit alike.
    return np.where((lost <= 0) | (p == 1), np.inf, np.abs(batch))


def first_ahead(batch: ArrayLike, slow: ArrayLike, fast: ArrayLike) -> float:
    """The smallest batch size from which on the fast backup stays ahead, for any laws: per-row backups, times that grow with the batch.

    batch: [n] rising sizes; slow, fast: [n] seconds a token there (theory.batch, or measured). inf where the slow one is ahead at the
    last size, the first size where the fast one is at all. [derived]
    """
    sizes, ours, theirs = check.positive("batch", batch), check.positive("slow", slow), check.positive("fast", fast)
    if sizes.ndim != 1 or not sizes.shape == ours.shape == theirs.shape or sizes.size == 0 or np.any(np.diff(sizes) <= 0):
        raise ValueError(f"batch={batch!r} must rise, with one entry of slow and fast for each: {ours.shape} and {theirs.shape} given")
    slow_wins = np.flatnonzero(ours <= theirs)
    after = int(slow_wins[-1]) + 1 if slow_wins.size else 0
    return float(sizes[after]) if after < sizes.size else np.inf
