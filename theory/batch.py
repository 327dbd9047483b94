"""Rounds of a batch: all sequences are verified together, each hits or misses on its own.

Symbols: h probability that a sequence's outcome is in the cache, T_v, T_p, T_b seconds of verifying the batch, of building its cache and of
the backup, E tokens that a sequence's round commits. Sequences are taken as independent and alike.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binom

from theory import check
from theory.check import FloatArray


def batched_seconds_per_token(
    batch: ArrayLike, T_v: ArrayLike, T_p: ArrayLike, T_b: ArrayLike, h: ArrayLike, E_hit: ArrayLike, E_miss: ArrayLike
) -> FloatArray:
    """Seconds between the tokens of one sequence where one miss makes the whole batch wait for the backup (Corollary 16). Broadcasts.

    [h^b max(T_v, T_p) + (1-h^b)(T_v + T_b)] / [h E_hit + (1-h) E_miss]. batch: sequences, > 0, may be fractional. Tends to
    (T_v + T_b) / N for large batches. Like Theorem 7, optimistic for T_p > T_v.
    """
    p = check.probability("h", h)
    all_hit = p ** check.positive("batch", batch)
    verify = check.positive("T_v", T_v)
    hit, miss = np.maximum(verify, check.non_negative("T_p", T_p)), verify + check.non_negative("T_b", T_b)
    return np.asarray((all_hit * hit + (1 - all_hit) * miss) / _tokens(p, E_hit, E_miss))


def batched_ssd_speedup(batch: ArrayLike, h: ArrayLike, E_hit: ArrayLike, E_miss: ArrayLike, T_p: ArrayLike, T_b: ArrayLike) -> FloatArray:
    """Speedup over AR at the same batch size (Corollary 16), times in units of one verification. Broadcasts."""
    return np.asarray(1 / batched_seconds_per_token(batch, 1.0, T_p, T_b, h, E_hit, E_miss))


def per_row_seconds_per_token(
    batch: int, T_v: ArrayLike, T_p: ArrayLike, T_b: ArrayLike, h: ArrayLike, E_hit: ArrayLike, E_miss: ArrayLike
) -> FloatArray:
    """Seconds between the tokens of one sequence where the backup drafts only the rows that missed, and the batch waits for it. [derived]

    T_b: [batch+1] seconds of the backup for m = 0..batch missing rows, T_b[0] = 0; all zeros for an `ngram` or `none` backup. Rows that hit
    need the complete build, so a round lasts max(T_v, T_p) + T_b[m], and T_v + T_b[batch] if no row hits. Exact for independent rows;
    the other arguments broadcast. For T_p <= T_v and one T_b for all m > 0 this is Corollary 16.
    """
    size, backup = check.count("batch", batch, 1), check.non_negative("T_b", T_b)
    if backup.shape != (size + 1,) or backup[0] != 0:
        raise ValueError(f"T_b={T_b!r} with batch={batch}: pass {size + 1} numbers, for 0 to {size} missing rows, the first of them 0")
    p, verify = check.probability("h", h), check.positive("T_v", T_v)
    waiting = binom.pmf(np.arange(size + 1), size, 1 - p[..., None]) @ backup
    some_hit = 1 - (1 - p) ** size
    seconds = some_hit * np.maximum(verify, check.non_negative("T_p", T_p)) + (1 - some_hit) * verify + waiting
    return np.asarray(seconds / _tokens(p, E_hit, E_miss))


def sitting_out_seconds_per_token(T_round: ArrayLike, T_b: ArrayLike, h: ArrayLike, E_hit: ArrayLike, E_miss: ArrayLike) -> FloatArray:
    """Seconds between the tokens of one sequence where a row that missed sits out until its backup is drafted. Broadcasts. [derived]

    T_round: seconds from one verification to the next, max(T_v, T_p), which go on with the other rows; a miss costs ceil(T_b / T_round) of
    them. The batch size enters by T_round alone; it must be large enough that some row is always there to verify.
    """
    p, rounds = check.probability("h", h), check.positive("T_round", T_round)
    missed = np.ceil(check.non_negative("T_b", T_b) / rounds)
    return np.asarray(rounds * (1 + (1 - p) * missed) / _tokens(p, E_hit, E_miss))


def _tokens(h: FloatArray, E_hit: ArrayLike, E_miss: ArrayLike) -> FloatArray:
    return np.asarray(h * check.positive("E_hit", E_hit) + (1 - h) * check.positive("E_miss", E_miss))
