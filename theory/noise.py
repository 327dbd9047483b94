"""Bonus candidates under shared noise: the draft knows the Gumbel noise that the target will draw the bonus with. [derived, all of it]

The bonus is argmax(log r + g), r the law of the bonus (the residual after a rejection, p after full acceptance). The draft ranks
candidates by log q + g instead of by q, q without the token sent. Exact and free: only what is cached depends on g. It pays where q is
near r; where r is much surer than q, the noise misleads, and the rank by q is the better one.
"""

import numpy as np
from numpy.typing import ArrayLike

from theory import check
from theory.check import FloatArray
from theory.ranking import best_first, cumulative

# The trapezoidal rule in log s converges exponentially: these steps leave an error below 1e-9.
LOG_S = np.arange(np.log(1e-11), np.log(60), 0.2)


def ranked_curve(bonus: ArrayLike, scores: ArrayLike, largest: int) -> FloatArray:
    """Probability that the bonus is among the F = 0..largest best by score, the noise unknown, [..., vocabulary] -> [..., largest+1].

    bonus: its law r; scores: the draft's probabilities or logits, -inf (or 0 as a probability) for a token that is no candidate.
    """
    law, order = check.one_vocabulary(bonus=check.distribution("bonus", bonus), scores=check.scores("scores", scores))
    size = check.count("largest", largest, 0)
    return np.minimum(cumulative(law, best_first(order, size), size + 1), 1.0)


def shared_noise_curve(bonus: ArrayLike, q: ArrayLike, largest: int) -> FloatArray:
    """Probability that the bonus is among the F = 0..largest best by log q + g, g known to both sides, [vocabulary] -> [largest+1].

    bonus, q: [vocabulary] laws r and q. With T = e^-g, exponential times, the bonus is the x of least T_x / r_x = s, which has the law e^-s
    and leaves the others at T_y = r_y s + Exp(1). So y comes before x with probability 1 - e^{-s d_y}, d_y = max(q_y r_x / q_x - r_y, 0),
    independently: the rank is 1 + a sum of Bernoullis, averaged over s. At F = 1 it is coupled_agreement(r, q) summed over x.
    O(vocabulary^2 largest): for some hundreds of tokens; over a whole vocabulary, draw the noise.
    """
    law, draft = check.one_vocabulary(bonus=check.distribution("bonus", bonus), q=check.distribution("q", q))
    size = check.count("largest", largest, 0)
    if law.ndim != 1:
        raise ValueError(f"bonus and q have shape {law.shape}: pass one law each, [vocabulary]")
    curve = np.zeros(size + 1)
    for x in np.flatnonzero((law > 0) & (draft > 0)):
        lead = np.maximum(draft * (law[x] / draft[x]) - law, 0)
        curve[1:] += law[x] * _at_most(lead[lead > 0], size)
    return np.minimum(curve, 1.0)


def _at_most(lead: FloatArray, size: int) -> FloatArray:
    """Probability that fewer than F = 1..size of the others come first, averaged over s."""
    s = np.exp(LOG_S)
    before = np.zeros((size, s.size))
    if size:
        before[0] = 1.0
    for d in lead:
        late = np.exp(-s * d)
        before[1:] = before[1:] * late + before[:-1] * (1 - late)
        before[:1] *= late
    weights = s * np.exp(-s)
    return np.asarray(np.cumsum(before, 0) @ weights / weights.sum())
