"""Checks of arguments: each returns the value as a float64 array or raises a ValueError that says what to pass instead."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]

# Sums of float32 probabilities over a vocabulary of 150k tokens are off by some 1e-5.
SUM_TOLERANCE = 1e-4


def probability(name: str, value: ArrayLike) -> FloatArray:
    """Numbers in [0, 1], of any shape."""
    array = np.asarray(value, dtype=np.float64)
    if not np.all((array >= 0) & (array <= 1)):
        raise ValueError(f"{name}={value!r} must lie between 0 and 1: pass a probability, not a percentage or a logit")
    return array


def non_negative(name: str, value: ArrayLike) -> FloatArray:
    """Finite numbers >= 0, of any shape: seconds, token counts, ratios."""
    array = np.asarray(value, dtype=np.float64)
    if not np.all(np.isfinite(array) & (array >= 0)):
        raise ValueError(f"{name}={value!r} must be finite and not negative: check the measurement it comes from")
    return array


def positive(name: str, value: ArrayLike) -> FloatArray:
    """Finite numbers > 0, of any shape: durations and token counts that are divided by."""
    array = non_negative(name, value)
    if not np.all(array > 0):
        raise ValueError(f"{name}={value!r} must be greater than 0: check the measurement it comes from")
    return array


def distribution(name: str, value: ArrayLike) -> FloatArray:
    """Non-negative numbers that sum to 1 along the last axis."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim == 0 or not np.all(array >= 0) or not np.allclose(array.sum(-1), 1, atol=SUM_TOLERANCE):
        raise ValueError(f"{name}={value!r} must be probabilities that sum to 1 along the last axis: normalise it first")
    return array


def scores(name: str, value: ArrayLike) -> FloatArray:
    """Logits or other scores along the last axis: numbers or -inf, at least one of each row finite."""
    array = np.asarray(value, dtype=np.float64)
    if array.ndim == 0 or np.any(np.isnan(array) | (array == np.inf)) or not np.all(np.isfinite(array).any(-1)):
        raise ValueError(f"{name}={value!r} must be numbers or -inf along the last axis, one of them finite: pass logits")
    return array


def one_vocabulary(**arrays: FloatArray) -> tuple[FloatArray, ...]:
    """Arrays over one vocabulary along the last axis, broadcast to one shape."""
    if len({array.shape[-1] for array in arrays.values()}) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"{shapes} differ along the last axis: pass one entry for each token of one vocabulary")
    return np.broadcast_arrays(*arrays.values())


def count(name: str, value: int, least: int) -> int:
    """A whole number not below `least`."""
    if value != int(value) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    return int(value)


def table(name: str, value: ArrayLike) -> FloatArray:
    """Seconds of a draft step of n = 0, 1, ... branches: one axis, 0 first, never falling."""
    array = non_negative(name, value)
    if array.ndim != 1 or array.size < 2 or array[0] != 0 or not np.all(np.diff(array) >= 0):
        raise ValueError(f"{name}={value!r} must be seconds of a step of n = 0, 1, ... branches, 0 first, never falling: smooth it first")
    return array


def curve(name: str, value: ArrayLike) -> FloatArray:
    """A cumulative hit curve: one axis indexed by F, 0 at F=0, never falling, at most 1 (but for rounding, which is cut off)."""
    array = np.asarray(value, dtype=np.float64)
    cumulative = (
        array.ndim == 1 and array.size > 0 and array[0] == 0 and array[-1] <= 1 + SUM_TOLERANCE and bool(np.all(np.diff(array) >= 0))
    )
    if not cumulative:
        raise ValueError(
            f"{name}={value!r} must be a cumulative curve: entry F for the F best candidates, 0 first, never falling, at most 1"
        )
    return np.minimum(array, 1.0)
