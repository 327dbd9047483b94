"""Coupled verification: target and draft sample by Gumbel-max with the same noise; a draft token is accepted iff both chose it.

The target's token is then its own sample, whatever the draft. Sources: Daliri, Musco, Suresh, Coupling without communication and
drafter-invariant speculative decoding, arXiv 2408.07978; not in the SSD paper.
"""

import numpy as np
from numpy.typing import ArrayLike

from theory import check
from theory.check import FloatArray


def coupled_agreement(p: ArrayLike, q: ArrayLike) -> FloatArray:
    """Probability that target and draft both choose the token, for each token, [..., vocabulary] -> [..., vocabulary].

    argmax(log p + g) = argmax(log q + g) = x with probability 1 / sum_y max(p_y/p_x, q_y/q_x), g the shared Gumbel noise. What the
    target chooses where they differ, the bonus after a rejection, has the law p minus this, normalised.
    """
    target, draft = check.one_vocabulary(p=check.distribution("p", p), q=check.distribution("q", q))
    # max(p_y/p_x, q_y/q_x) is the first where y's ratio p/q is above x's, else the second: sort by it, and sums do the rest.
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.nan_to_num(target / draft, nan=0.0)
        order = np.argsort(ratio, axis=-1)
        P, Q = (np.take_along_axis(law, order, -1) for law in (target, draft))
        above, below = P[..., ::-1].cumsum(-1)[..., ::-1], Q.cumsum(-1) - Q
        agree = 1 / (above / P + below / Q)
    joint = np.empty_like(agree)
    np.put_along_axis(joint, order, np.where(P > 0, agree, 0.0), -1)
    return joint


def coupled_acceptance_rate(p: ArrayLike, q: ArrayLike) -> FloatArray:
    """Probability that a coupled draft token is accepted, [..., vocabulary] -> [...].

    Between coupled_acceptance_bound(alpha) and the acceptance alpha = 1 - TV(p, q) of rejection.
    """
    return np.asarray(np.minimum(coupled_agreement(p, q).sum(-1), 1.0))


def coupled_acceptance_bound(alpha: ArrayLike) -> FloatArray:
    """Least coupled acceptance, (1 - TV) / (1 + TV) = alpha / (2 - alpha), of a pair whose acceptance by rejection is alpha. Broadcasts."""
    rate = check.probability("alpha", alpha)
    return np.asarray(rate / (2 - rate))
