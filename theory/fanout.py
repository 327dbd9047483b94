"""How to spread a budget of B branches over the accepted lengths k = 0..K: the fan-outs F_k.

Candidates at k < K exclude the token that was sent; at K none is excluded.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from theory import check
from theory.acceptance import accepted_length_law
from theory.check import FloatArray, IntArray


def uniform(budget: int, K: int) -> tuple[int, ...]:
    """Equal fan-outs, K+1 whole numbers that sum to the budget.

    What cannot be divided goes to the last positions: full acceptance is the likeliest single outcome as soon as a^K > 1 - a, and its
    candidates are not thinned by the token that was sent.
    """
    least, rest = divmod(check.count("budget", budget, 0), check.count("K", K, 0) + 1)
    return tuple(least + (k > K - rest) for k in range(K + 1))


def geometric(budget: float, K: int, alpha: float, r: float) -> FloatArray:
    """Real-valued fan-outs F_k proportional to P(k)^{1/(1+r)} that sum to the budget, [K+1] (Theorem 12).

    That is F_k = F_0 a^{k/(1+r)} for k < K and F_K = F_0 a^{K/(1+r)} (1-a)^{-1/(1+r)}: optimal for i.i.d. acceptance a and the
    power law with exponent r > 0, whatever its prefactor, while no F_k falls below 1.
    """
    weights = accepted_length_law(alpha, K) ** (1 / (1 + check.positive("r", r)))
    return np.asarray(check.non_negative("budget", budget) * weights / weights.sum())


class Allocation(NamedTuple):
    """Real-valued fan-outs, [K+1], and the multiplier: what one more branch would add to the hit probability."""

    fan_out: FloatArray
    multiplier: float


def lagrange(budget: float, length_law: ArrayLike, r: ArrayLike, c: ArrayLike = 1.0, least: ArrayLike = 1.0) -> Allocation:
    """Real-valued fan-outs that maximise sum_k P(k) (1 - c_k F_k^-r_k) with sum F_k = B and F_k >= least_k. [derived]

    length_law: P(k), [K+1]; r > 0, c > 0: exponent and prefactor of all positions, or K+1 of each; a floor changes nothing. Conditions of
    Karush, Kuhn and Tucker: P(k) c_k r_k F_k^-(1+r_k) = lambda where F_k > least_k, and <= lambda where F_k = least_k. With one r, one c
    and no bound reached this is Theorem 12, and lambda = r c (sum P^{1/(1+r)} / B)^{1+r}. Below F = c^{1/r} the power law is no
    probability: keep `least` at or above that. ValueError for a budget that does not cover the least fan-outs.
    """
    law = check.distribution("length_law", length_law)
    exponent, factor, bound = (
        np.broadcast_to(check.positive(name, value), law.shape) for name, value in (("r", r), ("c", c), ("least", least))
    )
    total = float(check.positive("budget", budget))
    if bound.sum() > total:
        raise ValueError(f"budget={budget!r} is less than the sum of the least fan-outs, {bound.sum():g}: raise it or lower `least`")

    def fan_out(log_multiplier: float) -> FloatArray:
        with np.errstate(divide="ignore"):
            free = (np.log(law * factor * exponent) - log_multiplier) / (1 + exponent)
        return np.asarray(np.maximum(bound, np.exp(free)))

    # At `high` every position is at its bound, at `low` one alone takes the whole budget; a little apart, so that rounding decides nothing.
    gain = law * factor * exponent
    high, low = (float(np.log((gain * F ** -(1 + exponent)).max())) for F in (bound, np.full(law.shape, total)))
    multiplier = float(brentq(lambda x: fan_out(x).sum() - total, low - 1e-6, high + 1e-6, xtol=1e-14))
    return Allocation(fan_out(multiplier), float(np.exp(multiplier)))


def rounded(fan_out: ArrayLike) -> tuple[int, ...]:
    """Whole fan-outs with the same sum (itself rounded to a whole number), K+1 of them.

    All are rounded down, then those with the largest fractions get one more, early positions first among equals.
    """
    real = check.non_negative("fan_out", fan_out)
    whole = np.floor(real).astype(int)
    missing = round(float(real.sum())) - int(whole.sum())
    whole[np.argsort(whole - real, kind="stable")[:missing]] += 1
    return tuple(whole.tolist())


def optimal(budget: int, length_law: ArrayLike, curves: Sequence[ArrayLike]) -> tuple[int, ...]:
    """The whole fan-outs, K+1 of them with a sum of at most the budget, that maximise the hit probability sum_k P(k) curves[k][F_k].

    length_law: P(k), [K+1]; curves: K+1 cumulative curves; F_k stays within its curve, and a branch that gains nothing is left out.
    Exact for any curves: measured ones, and the power law with c = 1 (where one candidate never hits), are not concave, and greedy
    allocation would be wrong for them. O(K B^2). ValueError for a curve that is not cumulative.
    """
    return _read_back(_best(budget, length_law, curves)[1], budget)


def greedy(budget: int, length_law: ArrayLike, curves: Sequence[ArrayLike]) -> tuple[int, ...]:
    """The same optimum for concave curves, whose gains never rise with F: the budget goes to the largest gains. O(K B log(K B)). [derived]

    ValueError for a curve that is not concave: use `optimal`.
    """
    budget, gains = check.count("budget", budget, 0), [np.diff(curve[: budget + 1]) for curve in _weighted(length_law, curves)]
    for k, gain in enumerate(gains):
        if np.any(np.diff(gain) > 1e-12):
            raise ValueError(f"curves[{k}]={curves[k]!r} is not concave: use `optimal`, which needs no concave curve")
    position = np.repeat(np.arange(len(gains)), [gain.size for gain in gains])
    # Rounding must not put a candidate before a better one of its own position: stable, on gains that never rise.
    ranked = np.concatenate([np.minimum.accumulate(gain) for gain in gains])
    taken = np.argsort(-ranked, kind="stable")[:budget]
    return tuple(np.bincount(position[taken[ranked[taken] > 0]], minlength=len(gains)).tolist())


def best_hit_rates(budget: int, length_law: ArrayLike, curves: Sequence[ArrayLike]) -> FloatArray:
    """Hit probability of the optimal fan-outs for every budget 0..B, [B+1]; np.diff of it is the value of one more branch. [derived]

    Arguments as for `optimal`. With d draft devices, each good for B branches, entry d B tells what they are worth together.
    """
    return _best(budget, length_law, curves)[0]


class TwoLists(NamedTuple):
    """Fan-outs after a hit and after a miss, and the long-run hit rate."""

    after_hit: tuple[int, ...]
    after_miss: tuple[int, ...]
    hit_rate: float


def optimal_two_lists(
    budget: int,
    law_after_hit: ArrayLike,
    curves_after_hit: Sequence[ArrayLike],
    law_after_miss: ArrayLike,
    curves_after_miss: Sequence[ArrayLike],
) -> TwoLists:
    """The lists after a hit and after a miss, together of at most B branches, of the best stationary hit rate m / (1 - h + m). [derived]

    A ratio, but one that rises with both h and m: so each list is optimal for its share, and the best of the B + 1 shares is exact, for
    any curves. The laws may be of different lengths, as after an empty draft. Where the budget bounds each round instead, each list
    gets all of it: call `optimal` twice.
    """
    h, choices_after_hit = _best(budget, law_after_hit, curves_after_hit)
    m, choices_after_miss = _best(budget, law_after_miss, curves_after_miss)
    leaving = 1 - h + m[::-1]
    rates = np.where(leaving > 0, m[::-1] / np.where(leaving > 0, leaving, 1), 0.0)
    share = int(np.argmax(rates))
    return TwoLists(_read_back(choices_after_hit, share), _read_back(choices_after_miss, budget - share), float(rates[share]))


def _weighted(length_law: ArrayLike, curves: Sequence[ArrayLike]) -> list[FloatArray]:
    """P(k) times the curve, for each position."""
    law = check.distribution("length_law", length_law)
    if law.shape != (len(curves),):
        raise ValueError(f"length_law has {law.size} entries and there are {len(curves)} curves: pass K+1 of each")
    return [P * check.curve(f"curves[{k}]", curve) for k, (P, curve) in enumerate(zip(law, curves, strict=True))]


def _best(budget: int, length_law: ArrayLike, curves: Sequence[ArrayLike]) -> tuple[FloatArray, list[IntArray]]:
    """The best hit probability for each budget 0..B, and each position's share of it."""
    best = np.zeros(check.count("budget", budget, 0) + 1)
    choices: list[IntArray] = []
    for gain in _weighted(length_law, curves):
        best, choice = _add_position(best, gain[: best.size])
        choices.append(choice)
    return best, choices


def _add_position(best: FloatArray, gain: FloatArray) -> tuple[FloatArray, IntArray]:
    # total[F, b]: F of b branches go to this position. argmax takes the first, so the smallest F among equals.
    total = np.full((gain.size, best.size), -np.inf)
    for F, value in enumerate(gain):
        total[F, F:] = best[: best.size - F] + value
    # A gain that is only the rounding of a sum is none.
    choice = np.argmax(total > total.max(0) - 1e-15, axis=0)
    return total[choice, np.arange(best.size)], choice


def _read_back(choices: list[IntArray], budget: int) -> tuple[int, ...]:
    fan_out = []
    for choice in reversed(choices):
        fan_out.append(int(choice[budget]))
        budget -= fan_out[-1]
    return tuple(reversed(fan_out))


def shortened(fan_out: Sequence[int], drafted: int) -> tuple[int, ...]:
    """Fan-outs for a round with fewer draft tokens, drafted+1 of them: positions not drafted give their branches to the last one.

    ValueError for more draft tokens than the list has positions.
    """
    drafted = check.count("drafted", drafted, 0)
    if drafted >= len(fan_out):
        raise ValueError(f"drafted={drafted} needs {drafted + 1} fan-outs, fan_out={tuple(fan_out)} has {len(fan_out)}")
    return (*fan_out[:drafted], sum(fan_out[drafted:]))
