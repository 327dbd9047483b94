"""What a draft does with its laws: draw tokens, press some down (Saguaro), rank the outcomes worth drafting for."""

from __future__ import annotations

import math

import torch

from ssd.sampling.noise import gumbel

# Puts what the draft's law leaves out below what it allows, at ordinary temperatures; not so far down that fp32 forgets the order there.
OUTSIDE = 1e3


def draw(log_law: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
    """Draw a token from each law by Gumbel-max, [n, vocabulary] and keys [n] -> [n]; without keys the likeliest, the first among equals."""
    return (log_law if keys is None else log_law + gumbel(keys, log_law.shape[-1])).argmax(-1)


def press(log_q: torch.Tensor, factor: float, count: int) -> torch.Tensor:
    """Return Saguaro's law (Definition 14): the `count` likeliest tokens of each log_q [n, vocabulary] times `factor`, normalised.

    Factor 1 changes nothing, and nothing changes where these tokens hold all the mass, the limit of a factor of 0 included.
    """
    best = log_q.topk(min(count, log_q.shape[-1]), -1)
    pressed = log_q.scatter(-1, best.indices, best.values + (math.log(factor) if factor else -math.inf))
    mass = pressed.logsumexp(-1, keepdim=True)
    return torch.where(mass > -torch.inf, pressed - mass, log_q)


def outcome_scores(scores: torch.Tensor, log_q: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
    """Return what bonus tokens are ranked by, [n, vocabulary]: log q + g, g the noise `keys` [n] that the target will draw the bonus with.

    Without keys, log q. scores: the draft's processed logits, which rank the tokens that its law leaves out, after all that it allows; the
    target's law may allow them.
    """
    beyond = torch.log_softmax(scores, -1)
    order = torch.where(log_q > -torch.inf, log_q, beyond - OUTSIDE)
    return order if keys is None else order + gumbel(keys, order.shape[-1])
