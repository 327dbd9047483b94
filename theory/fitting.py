"""Fits of the power law 1 - h(F) = floor + c F^-r to what was measured."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import chi2

from theory import check
from theory.check import FloatArray
from theory.hits import PowerLaw

# Exponents that are told apart: below, the curve is flat over any vocabulary; above, a second candidate is as good as all.
LOG_R = (np.log(1e-3), np.log(20.0))
GRID = 60

Interval = tuple[float, float]


def fit_power_law(F: ArrayLike, miss: ArrayLike) -> PowerLaw:
    """The law c F^-r, without a floor, that is nearest to measured miss rates in the least squares of their logarithms.

    F, miss: [n] fan-outs >= 1 and miss rates in (0, 1], n >= 2. ValueError where no falling law exists.
    """
    sizes, rates = check.positive("F", F), check.positive("miss", check.probability("miss", miss))
    if sizes.ndim != 1 or sizes.shape != rates.shape or np.unique(sizes).size < 2:
        raise ValueError(f"F={F!r} and miss={miss!r} must be lists of one length with at least two different fan-outs")
    slope, intercept = np.polyfit(np.log(sizes), np.log(rates), 1)
    if slope >= 0:
        raise ValueError(f"miss={miss!r} does not fall as F={F!r} grows: measure more rounds or use the curve itself")
    return PowerLaw(r=float(-slope), c=float(np.exp(intercept)))


@dataclass(frozen=True, slots=True)
class PowerLawFit:
    """The likeliest power law and, for each of its constants, an interval that holds the true one with the confidence asked for."""

    law: PowerLaw
    r: Interval
    c: Interval
    floor: Interval


def fit_rank_counts(counts: ArrayLike, beyond: int, floor: bool = True, confidence: float = 0.95) -> PowerLawFit:
    """The power law of the greatest likelihood for counted ranks of the bonus, with intervals by profile likelihood. [derived]

    counts: [L] bonuses that were the 1st, 2nd, ... Lth best candidate; beyond: bonuses of a higher rank, of which no more is known. The
    chance of rank 1 is 1 - floor - c, of rank F > 1 it is c ((F-1)^-r - F^-r), of more than L it is floor + c L^-r; floor + c <= 1.
    floor=False holds the floor at 0. An interval is what a likelihood-ratio test at this level does not reject. ValueError where the counts
    cannot tell the exponent: no bonus of ranks 2..L, or L < 3 (L < 2 without a floor).
    """
    ranks = check.non_negative("counts", counts)
    censored, level = check.count("beyond", beyond, 0), float(check.probability("confidence", confidence))
    least = 3 if floor else 2
    if ranks.ndim != 1 or ranks.size < least or ranks[1:].sum() == 0:
        raise ValueError(
            f"counts={counts!r} must count the ranks 1, 2, ..., at least {least} of them, with a rank above 1 seen: measure more rounds"
        )
    likelihood = _Likelihood(ranks, float(censored), floor)
    return likelihood.fit(chi2.ppf(level, 1) / 2)


@dataclass(frozen=True)
class _Likelihood:
    """Log-likelihood of counted ranks; for a given r, and for a given r and c or floor, its greatest value has a closed form."""

    counts: FloatArray
    beyond: float
    free_floor: bool

    def fit(self, drop: float) -> PowerLawFit:
        log_r = _maximise(self.of_r)
        r, best = float(np.exp(log_r)), self.of_r(log_r)
        c, floor = self.best_c_and_floor(r)

        def interval(profile: Callable[[float], float], at: float, bounds: Interval) -> Interval:
            return _crossing(profile, at, bounds[0], best - drop), _crossing(profile, at, bounds[1], best - drop)

        low, high = np.exp(interval(self.of_r, log_r, LOG_R))
        return PowerLawFit(
            PowerLaw(r, c, floor),
            (0.0 if low <= np.exp(LOG_R[0]) else float(low), np.inf if high >= np.exp(LOG_R[1]) else float(high)),
            interval(lambda value: _greatest(lambda x: self.of_r(x, c=value)), c, (0.0, 1.0)),
            interval(lambda value: _greatest(lambda x: self.of_r(x, floor=value)), floor, (0.0, 1.0)) if self.free_floor else (0.0, 0.0),
        )

    def of_r(self, log_r: float, c: float | None = None, floor: float | None = None) -> float:
        """Greatest log-likelihood for this r, and c or floor where given."""
        r = float(np.exp(log_r))
        if c is not None:
            return self.value(r, c, self.best_floor(r, c))
        if floor is not None:
            return self.value(r, self.best_c(r, floor), floor)
        return self.value(r, *self.best_c_and_floor(r))

    def value(self, r: float, c: float, floor: float) -> float:
        F = np.arange(1, self.counts.size + 1)
        chances = np.concatenate([[1 - c - floor], -c * np.diff(F**-r), [floor + c * F[-1] ** -r]])
        seen = np.concatenate([self.counts, [self.beyond]])
        with np.errstate(divide="ignore"):
            return float(seen[seen > 0] @ np.log(np.maximum(chances[seen > 0], 0)))

    def best_c_and_floor(self, r: float) -> tuple[float, float]:
        """The shares of rank 1, of ranks 2..L and of the rest are free, unless the rest is less than a floor of 0 leaves it."""
        total, later = self.counts.sum() + self.beyond, self.counts[1:].sum()
        end = self.counts.size**-r
        c = later / total / (1 - end)
        floor = self.beyond / total - c * end
        if floor < 0 or not self.free_floor:
            return float((later + self.beyond) / total), 0.0
        return float(c), float(floor)

    def best_floor(self, r: float, c: float) -> float:
        if not self.free_floor:
            return 0.0
        first, end = self.counts[0], self.counts.size**-r
        seen = first + self.beyond
        floor = (self.beyond * (1 - c) - first * c * end) / seen if seen else 0.0
        return float(np.clip(floor, 0, 1 - c))

    def best_c(self, r: float, floor: float) -> float:
        """The root in (0, 1 - floor) of first/(1-c-floor) = later/c + beyond end/(floor + c end), a quadratic."""
        first, later, end = self.counts[0], self.counts[1:].sum(), self.counts.size**-r
        room = 1 - floor
        a = -end * (first + later + self.beyond)
        b = later * (room * end - floor) + self.beyond * end * room - first * floor
        return float(np.clip((-b - np.sqrt(b * b - 4 * a * later * floor * room)) / (2 * a), 0, room))


def _maximise(f: Callable[[float], float]) -> float:
    """The log r where f is greatest: the best of a grid, refined between its neighbours."""
    grid = np.linspace(*LOG_R, GRID)
    place = int(np.argmax([f(x) for x in grid]))
    return _refine(f, grid[max(place - 1, 0)], grid[min(place + 1, GRID - 1)])


def _refine(f: Callable[[float], float], low: float, high: float) -> float:
    return float(minimize_scalar(lambda x: -f(x), bounds=(low, high), method="bounded", options={"xatol": 1e-7}).x)


def _greatest(f: Callable[[float], float]) -> float:
    return f(_refine(f, *LOG_R))


def _crossing(profile: Callable[[float], float], inside: float, end: float, level: float) -> float:
    """Where the profile falls to the level on the way to the end of its range; the end where it does not."""
    if inside == end or profile(end) >= level:
        return end
    return float(brentq(lambda x: max(profile(x), level - 10) - level, inside, end, xtol=1e-6))
