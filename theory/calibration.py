"""What a draft's confidence is worth: how often what it says with this confidence comes, counted in bins and made monotone. [derived]

A confidence is any chance that the draft can name before the outcome is known: q(s) that its token s is accepted, or a score's that a
candidate is the bonus. Bins lie on the logit axis, where chances near 0 and near 1 are told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import isotonic_regression
from scipy.special import expit, logit

from theory import check
from theory.check import FloatArray, IntArray

# Where the bins meet: candidates for the bonus lie below .5 down to 1e-4, tokens sent near 1. The outer bins hold what is beyond.
_CHANCES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97, 0.99, 0.997, 0.999)
EDGES: FloatArray = np.asarray(logit(_CHANCES), dtype=np.float64)
# The middle of each bin, [bins], as a logit and as a chance; the outer bins are given their neighbours' widths.
_ENDS = np.concatenate([2 * EDGES[:1] - EDGES[1:2], EDGES, 2 * EDGES[-1:] - EDGES[-2:-1]])
_LOGITS = (_ENDS[:-1] + _ENDS[1:]) / 2
CENTRES: FloatArray = np.asarray(expit(_LOGITS), dtype=np.float64)
BINS = CENTRES.size
# Outcomes that the confidence itself counts for, in each bin. The least error has chance (1 - chance) / d^2 where it is off by d, say .2.
PRIOR = 4.0
# No outcome is certain: a calibrated chance of 0 or 1 would bar all that it is multiplied with.
LEAST = 1e-6


def bins_of(chance: ArrayLike) -> IntArray:
    """The bin of each chance, 0..bins-1, in its shape; a chance on an edge belongs above it."""
    return np.asarray(np.searchsorted(EDGES, logit(check.probability("chance", chance)), side="right"), dtype=np.intp)


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """How often each bin's event was tried and how often it came, [bins] each; counts may be fractions.

    ValueError unless 0 <= successes <= trials. The arrays are copies that cannot be written to.
    """

    trials: FloatArray
    successes: FloatArray

    def __post_init__(self) -> None:
        trials, successes = (np.array(check.non_negative(name, getattr(self, name))) for name in ("trials", "successes"))
        for name, counts in (("trials", trials), ("successes", successes)):
            if counts.shape != (BINS,):
                raise ValueError(f"{name} has shape {counts.shape}: pass one count for each of the {BINS} bins")
            counts.flags.writeable = False
            object.__setattr__(self, name, counts)
        if np.any(successes > trials):
            raise ValueError(f"successes={successes!r} exceed trials={trials!r}: count each outcome as tried, too")

    @classmethod
    def empty(cls) -> Calibration:
        """Nothing tried: the calibrated chance is the confidence."""
        return cls(np.zeros(BINS), np.zeros(BINS))

    @classmethod
    def from_lists(cls, trials: Sequence[float], successes: Sequence[float]) -> Calibration:
        """The counts that `to_lists` gave, [bins] each."""
        return cls(np.asarray(trials, dtype=np.float64), np.asarray(successes, dtype=np.float64))

    def to_lists(self) -> tuple[list[float], list[float]]:
        """Trials and successes as plain numbers, [bins] each."""
        return self.trials.tolist(), self.successes.tolist()

    def updated(self, chances: ArrayLike, came: ArrayLike, *, memory: float = 1.0) -> Calibration:
        """These counts times `memory`, and one trial for each of `chances`, of any shape.

        came: in the same shape, whether the event came (0 or 1), or the chance in [0, 1] that it had once all was known: of a token sent,
        min(1, p/q) tells more than the draw. memory: in [0, 1]; below 1 old outcomes fade with each call, and the curve follows a change.
        """
        confidences, outcomes = check.probability("chances", chances), check.probability("came", came)
        kept = float(check.probability("memory", memory))
        if confidences.shape != outcomes.shape:
            raise ValueError(f"chances {confidences.shape} and came {outcomes.shape} differ in shape: pass one outcome for each chance")
        bins = bins_of(confidences).ravel()
        tried, seen = (np.bincount(bins, weights, BINS) for weights in (np.ones(bins.size), outcomes.ravel()))
        return Calibration(kept * self.trials + tried, kept * self.successes + seen)

    def merged(self, other: Calibration) -> Calibration:
        """The counts of both."""
        return Calibration(self.trials + other.trials, self.successes + other.successes)

    def curve(self, prior: float = PRIOR) -> FloatArray:
        """The calibrated chance at CENTRES, [bins]: the monotone one nearest to (successes + prior CENTRES) / (trials + prior).

        Nearest in squares weighted by trials + prior (isotonic regression). Without data it is CENTRES.
        """
        weights = self.trials + check.positive("prior", prior)
        fitted = isotonic_regression((self.successes + prior * CENTRES) / weights, weights=weights).x
        return np.asarray(np.clip(fitted, 0, 1), dtype=np.float64)

    def calibrated(self, chances: ArrayLike, prior: float = PRIOR) -> FloatArray:
        """The calibrated chance of each confidence, in its shape, in [LEAST, 1 - LEAST]: the curve, logits interpolated between CENTRES.

        Monotone and continuous; without data it is the confidence between the outer centres. Flat beyond them, where a bin tells only its
        mean: a caller that ranks what lies there breaks the tie by the confidence.
        """
        known = _fitted(self, prior)
        return np.asarray(expit(np.interp(logit(check.probability("chances", chances)), _LOGITS, known)), dtype=np.float64)

    def bias(self, predicted: ArrayLike = CENTRES) -> float:
        """Mean over these trials of prediction minus outcome: negative where the prediction is under-confident.

        predicted: [bins], what was said in each bin; by default the confidence itself, to within a bin's width. To judge a fit, pass
        the curve of other trials than these.
        """
        return float(self._excess(predicted).sum() / self.trials.sum())

    def expected_calibration_error(self, predicted: ArrayLike = CENTRES) -> float:
        """Mean over these trials of |predicted - observed| of the bin they are in; predicted as in `bias`. ValueError without trials."""
        return float(np.abs(self._excess(predicted)).sum() / self.trials.sum())

    def _excess(self, predicted: ArrayLike) -> FloatArray:
        """Successes predicted beyond those seen, [bins]."""
        chances = check.probability("predicted", predicted)
        if chances.shape != (BINS,):
            raise ValueError(f"predicted has shape {chances.shape}: pass one chance for each of the {BINS} bins")
        if not self.trials.any():
            raise ValueError("trials are all 0: nothing was tried, so there is no error yet; update the counts first")
        return np.asarray(chances * self.trials - self.successes)


@lru_cache(maxsize=16)
def _fitted(calibration: Calibration, prior: float) -> FloatArray:
    """The logits of the curve, kept: counts do not change, and a curve is asked for many times."""
    return np.asarray(logit(np.clip(calibration.curve(prior), LEAST, 1 - LEAST)))
