"""The order of candidates."""

import numpy as np

from theory.check import FloatArray, IntArray


def best_first(scores: FloatArray, count: int) -> IntArray:
    """Indices of the best scores, best first, [..., min(count, vocabulary)]; equal scores in no particular order.

    A partition first: sorting a whole vocabulary is slow.
    """
    count = min(count, scores.shape[-1])
    if count == 0:
        return np.empty((*scores.shape[:-1], 0), dtype=np.intp)
    among = np.argpartition(-scores, count - 1, axis=-1)[..., :count]
    order = np.argsort(-np.take_along_axis(scores, among, -1), axis=-1, kind="stable")
    return np.take_along_axis(among, order, -1)


def cumulative(mass: FloatArray, best: IntArray, size: int) -> FloatArray:
    """Mass [..., vocabulary] of the F first of `best`, for F = 0..size-1, [..., size]; flat past the last of them."""
    sums = np.cumsum(np.take_along_axis(mass, best, -1), -1)
    padding = [(0, 0)] * (sums.ndim - 1)
    return np.pad(np.pad(sums, [*padding, (1, 0)]), [*padding, (0, size - 1 - sums.shape[-1])], mode="edge")
