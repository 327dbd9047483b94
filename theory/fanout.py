"""How to spread a budget of B branches over the accepted lengths k = 0..K: the fan-outs F_k.

Candidates at k < K exclude the token that was sent; at K none is excluded.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

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
    budget, law = check.count("budget", budget, 0), check.distribution("length_law", length_law)
    if law.size != len(curves):
        raise ValueError(f"length_law has {law.size} entries and there are {len(curves)} curves: pass K+1 of each")
    best = np.zeros(budget + 1)
    choices: list[IntArray] = []
    for k, curve in enumerate(curves):
        best, choice = _add_position(best, law[k] * check.curve(f"curves[{k}]", curve)[: budget + 1])
        choices.append(choice)
    return _read_back(choices, budget)


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
