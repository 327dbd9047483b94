"""How many drafted tokens the target accepts: the rate at one position, and the law of the accepted length of a round."""

import numpy as np
from numpy.typing import ArrayLike

from theory import check
from theory.check import FloatArray


def acceptance_rate(p: ArrayLike, q: ArrayLike) -> FloatArray:
    """Probability alpha = sum_x min(p(x), q(x)) = 1 - TV(p, q) that a token drawn from q passes a verification by p.

    p, q: [..., vocabulary] probabilities of target and draft; returns [...]. ValueError if one is no distribution.
    """
    overlap = np.minimum(check.distribution("p", p), check.distribution("q", q)).sum(-1)
    # float32 rows may sum to a little more than 1.
    return np.asarray(np.minimum(overlap, 1.0))


def residual(p: ArrayLike, q: ArrayLike) -> FloatArray:
    """Law of the bonus token after a rejection: max(p - q, 0) normalised, [..., vocabulary].

    Where p = q nothing is ever rejected and the residual has no mass; p is returned there. ValueError if one is no distribution.
    """
    law = check.distribution("p", p)
    excess = np.maximum(law - check.distribution("q", q), 0)
    mass = excess.sum(-1, keepdims=True)
    return np.where(mass > 0, excess / np.where(mass > 0, mass, 1), law)


def accepted_length_law(alpha: ArrayLike, K: int) -> FloatArray:
    """Law P(k) of the number k = 0..K of accepted draft tokens, [K+1].

    alpha: one rate for all positions (P(k) = a^k (1-a), P(K) = a^K), or K rates, of position k given that all before it were
    accepted. ValueError for rates outside [0, 1] or of another length.
    """
    K = check.count("K", K, 0)
    rates = check.probability("alpha", alpha)
    if rates.ndim > 0 and rates.shape != (K,):
        raise ValueError(f"alpha has shape {rates.shape} with K={K}: pass one rate, or one for each of the K positions")
    survival = np.cumprod(np.concatenate([[1.0], np.broadcast_to(rates, (K,)), [0.0]]))
    return -np.diff(survival)


def expected_tokens(alpha: ArrayLike, K: ArrayLike) -> FloatArray:
    """Tokens that a round commits on average, bonus included: (1 - a^{K+1}) / (1 - a), and K+1 at a = 1. Broadcasts.

    alpha: acceptance rate of every position; K: draft tokens. ValueError for a rate outside [0, 1] or a negative K.
    """
    a, length = np.broadcast_arrays(check.probability("alpha", alpha), check.non_negative("K", K) + 1)
    # expm1 and log1p keep all digits where 1 - a is tiny and the plain quotient would cancel.
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = -np.expm1(length * np.log1p(a - 1)) / (1 - a)
    return np.where(a == 1, length, quotient)


def expected_tokens_of(length_law: ArrayLike) -> FloatArray:
    """Tokens that a round commits on average, bonus included, under any law P(k) of accepted lengths, [..., K+1] -> [...]."""
    law = check.distribution("length_law", length_law)
    return np.asarray(1 + law @ np.arange(law.shape[-1]))


def tokens_cut_off(length_law: ArrayLike) -> FloatArray:
    """Tokens of an output's last round that lie past its end, on average over long outputs of any length. [derived]

    (E[X^2] / E[X] - 1) / 2 for rounds of X = 1 + k tokens, the mean overshoot of a renewal process on whole numbers, [..., K+1] -> [...].
    An output of N tokens so takes (N + tokens cut off) / E[X] rounds, near enough from N of a few K on.
    """
    law = check.distribution("length_law", length_law)
    tokens = 1 + np.arange(law.shape[-1])
    return np.asarray((law @ tokens**2 / (law @ tokens) - 1) / 2)
