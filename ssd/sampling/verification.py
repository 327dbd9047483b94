"""Verification: how many draft tokens stand, and the token after them, so that what is emitted has the target's law.

`rejection`: token x, drawn from q, stands with probability min(1, p(x)/q(x)); where it falls the next is drawn from the residual
max(p - q, 0), normalised (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). A token with no q is a point mass: it stands
with probability p(x), and the residual is p without x. `coupled`: the target draws its own token at every place by Gumbel-max, with the
noise that the draft used; a draft token stands if it is that token (Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ssd.sampling.drafting import draw
from ssd.sampling.noise import uniform


class Verified(NamedTuple):
    """How many draft tokens stand and the token after them, int64 [n] each."""

    accepted: torch.Tensor
    bonus: torch.Tensor


class Proposed(NamedTuple):
    """Drafts of n rows: tokens [n, K], of which the first `drafted` [n] are meant; q [n, K, vocabulary], read where `has_q` [n] says so.

    A row without q proposes point masses. q is None where no row has one.
    """

    tokens: torch.Tensor
    drafted: torch.Tensor
    q: torch.Tensor | None = None
    has_q: torch.Tensor | None = None


def rejection(log_p: torch.Tensor, drafts: Proposed, accept: torch.Tensor | None, target: torch.Tensor | None) -> Verified:
    """Verify by rejection. log_p: [n, K+1, vocabulary]; keys accept: [n, K], target: [n, K+1]; without keys the laws are point masses."""
    tokens, of_p = drafts.tokens, log_p[:, :-1].exp()
    # Law and probabilities keep the dtype of log_p; the comparison is made in fp64, the uniform's own precision.
    chance = _at(of_p, tokens).double()
    if drafts.q is not None and drafts.has_q is not None:
        proposal = torch.where(drafts.has_q[:, None], _at(drafts.q, tokens).double(), 1.0)
    else:
        proposal = torch.ones_like(chance)
    # A uniform number of 0 must not let a token pass that p forbids: hence `<`.
    stands = (uniform(accept) if accept is not None else torch.full_like(chance, 0.5)) * proposal < chance
    accepted = _leading(stands & _meant(drafts))
    rejected = accepted < drafts.drafted
    law = _row(log_p, accepted).exp()
    if tokens.shape[1]:
        at = accepted.clamp(max=tokens.shape[1] - 1)
        left = law.scatter(1, _row(tokens, at)[:, None], 0.0)
        if drafts.q is not None and drafts.has_q is not None:
            left = torch.where(drafts.has_q[:, None], (law - _row(drafts.q, at)).clamp_(min=0), left)
        # Rounding may leave no residual where p and q are all but equal; p is then as right as anything.
        law = torch.where((rejected & (left > 0).any(-1))[:, None], left, law)
    return Verified(accepted, draw(law.log(), None if target is None else _row(target, accepted)))


def coupled(log_p: torch.Tensor, drafts: Proposed, target: torch.Tensor | None) -> Verified:
    """Verify by coupling, or greedily where there are no keys. log_p: [n, K+1, vocabulary]; keys target: [n, K+1]; q is not read."""
    own = draw(log_p.flatten(0, 1), None if target is None else target.flatten()).view(log_p.shape[:2])
    accepted = _leading((own[:, :-1] == drafts.tokens) & _meant(drafts))
    return Verified(accepted, _row(own, accepted))


def verify(
    log_p: torch.Tensor, drafts: Proposed, couples: torch.Tensor | bool, accept: torch.Tensor | None, target: torch.Tensor | None
) -> Verified:
    """Verify each row by its own scheme: coupled where `couples` ([n] or one for all), else rejection. Arguments as for the two."""
    if isinstance(couples, bool):
        return coupled(log_p, drafts, target) if couples else rejection(log_p, drafts, accept, target)
    one, other = coupled(log_p, drafts, target), rejection(log_p, drafts, accept, target)
    return Verified(*(torch.where(couples, a, b) for a, b in zip(one, other, strict=True)))


def _meant(drafts: Proposed) -> torch.Tensor:
    return torch.arange(drafts.tokens.shape[1], device=drafts.tokens.device) < drafts.drafted[:, None]


def _leading(stands: torch.Tensor) -> torch.Tensor:
    """Return how many places from the first on are true, [n, K] -> [n]."""
    return stands.long().cumprod(-1).sum(-1)


def _at(law: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the entries of `tokens`, [n, K, vocabulary] and [n, K] -> [n, K]."""
    return law.gather(-1, tokens[..., None])[..., 0]


def _row(table: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return for each row what stands at its own place, [n, places, ...] and [n] -> [n, ...]."""
    return table[torch.arange(len(table), device=table.device), place]
