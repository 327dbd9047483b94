"""The outcomes (k, t) of one round, each with its probability, and the best B of them to cache: adaptive choice, and its oracle.

A law of outcomes is an array [..., K+1, vocabulary] that sums to 1 over both axes: entry (k, t) for k accepted draft tokens and then the
bonus t. What a set of cached outcomes hits is the sum of the true law over it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from theory import check
from theory.acceptance import residual
from theory.check import FloatArray, IntArray
from theory.ranking import best_first


class CachedOutcomes(NamedTuple):
    """Outcomes to draft for, the likeliest first, [..., B] each: accepted draft tokens, bonus token."""

    accepted: IntArray
    bonus: IntArray


def estimated_outcomes(acceptance: ArrayLike, q: ArrayLike, sent: ArrayLike) -> FloatArray:
    """What the draft can know: prod_{j<=k} a_j (1 - a_{k+1}) q_k(t), q_k without the token sent, [..., K+1, vocabulary]. [derived]

    acceptance: [..., K] estimates that the target accepts each token sent, calibrated: q_j(s_j) itself is far too unsure at temperature 1;
    q: [..., K+1, vocabulary] the draft's probabilities after 0..K tokens; sent: [..., K] the tokens sent. The adaptive choice is
    best_outcomes of this; under shared noise, scores of theory.noise take the place of q.
    """
    law, tokens = check.distribution("q", q), _tokens("sent", sent, q)
    bonus = law.copy()
    np.put_along_axis(bonus[..., :-1, :], tokens[..., None], 0.0, -1)
    mass = bonus.sum(-1, keepdims=True)
    return _chances(check.probability("acceptance", acceptance))[..., None] * np.where(mass > 0, bonus / np.where(mass > 0, mass, 1), 0.0)


def true_outcomes(p: ArrayLike, q: ArrayLike, sent: ArrayLike) -> FloatArray:
    """The law of outcomes given the draft: token s_j is accepted with min(1, p_j(s_j) / q_j(s_j)), [..., K+1, vocabulary].

    p: [..., K+1, vocabulary] the target's probabilities after 0..K tokens; q: [..., K, vocabulary] the draft's, which the tokens
    `sent` [..., K] were drawn from. The oracle, the most that any choice can hit without knowing the noise, is best_outcomes of this.
    """
    target, draft = check.distribution("p", p), check.distribution("q", q)
    tokens = _tokens("sent", sent, p)[..., None]
    if draft.shape[-2] != target.shape[-2] - 1:
        raise ValueError(f"q has {draft.shape[-2]} positions and p {target.shape[-2]}: pass K and K+1")
    of_target, of_draft = np.take_along_axis(target[..., :-1, :], tokens, -1)[..., 0], np.take_along_axis(draft, tokens, -1)[..., 0]
    if np.any(of_draft == 0):
        raise ValueError(f"sent={sent!r} holds a token that q gives no probability: pass the q that it was drawn from")
    bonus = np.concatenate([residual(target[..., :-1, :], draft), target[..., -1:, :]], -2)
    return np.asarray(_chances(np.minimum(of_target / of_draft, 1))[..., None] * bonus)


def best_outcomes(law: ArrayLike, budget: int) -> CachedOutcomes:
    """The B outcomes of greatest probability, equal ones in no particular order; all of them for a larger budget.

    law: [..., K+1, vocabulary], estimated or true, need not sum to 1. The best that B branches can do in this round if the law is true.
    """
    chances = check.non_negative("law", law)
    if chances.ndim < 2:
        raise ValueError(f"law has shape {chances.shape}: pass [K+1, vocabulary]")
    flat = chances.reshape(*chances.shape[:-2], -1)
    best = best_first(flat, check.count("budget", budget, 0))
    return CachedOutcomes(*np.divmod(best, chances.shape[-1]))


def hit_probability_of(law: ArrayLike, cached: CachedOutcomes) -> FloatArray:
    """Probability that the outcome is a cached one: the sum of the true law over the set, [..., K+1, vocabulary] -> [...]."""
    chances = check.non_negative("law", law)
    flat = chances.reshape(*chances.shape[:-2], -1)
    return np.asarray(np.take_along_axis(flat, cached.accepted * chances.shape[-1] + cached.bonus, -1).sum(-1))


def _chances(acceptance: FloatArray) -> FloatArray:
    """P(k), [..., K] -> [..., K+1]."""
    ones = np.ones_like(acceptance, shape=(*acceptance.shape[:-1], 1))
    return -np.diff(np.cumprod(np.concatenate([ones, acceptance, 0 * ones], -1), -1))


def _tokens(name: str, value: ArrayLike, law: ArrayLike) -> IntArray:
    tokens, shape = np.asarray(value, dtype=np.intp), np.shape(law)
    if tokens.shape != (*shape[:-2], shape[-2] - 1) or np.any((tokens < 0) | (tokens >= shape[-1])):
        raise ValueError(f"{name}={value!r} must be K tokens of the vocabulary of {shape[-1]}, with laws after 0..K of them")
    return tokens
