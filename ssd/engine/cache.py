"""The speculation cache: which outcomes to draft for, and the branches drafted for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ssd.devices import upload
from ssd.engine.forward import SlotModel
from ssd.engine.kv import Abort
from ssd.engine.proposer import Proposer, Step
from ssd.engine.queries import Queries
from ssd.sampling import Before, extend
from theory.fanout import shortened

LEAST = 1e-12
# Outcomes of one place that are looked at.
CANDIDATES = 32


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the columns of some branches begin: the tokens fed first and the hashes of all up to and including them, [B] each.

    ids: the tokens up to and including them, [B, length], -1 in front, where the request's law reads them.
    """

    tokens: torch.Tensor
    prefixes: torch.Tensor
    ids: torch.Tensor | None = None


class Branches:
    """Continuations of one row that grow together, one token a step; the root of column b follows `accepted[b]` draft tokens.

    positions `[B]` of the roots, slots `[B, steps]` for what is fed, visible `[B, slots]` before it, bonus `[B]` the roots' tokens on the
    host. Once fed, `tokens[i]` is the token fed at step i and `prefixes[i]` the hash up to it, `[B]`; `scores[i]` and, unless greedy,
    `laws[i]` are what the draft says after it, `[B, vocabulary]`: processed logits and log q. after_hit: whether they are to be a draft
    after a hit.
    """

    def __init__(
        self,
        proposer: Proposer,
        roots: Roots,
        accepted: np.ndarray,
        bonus: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        visible: np.ndarray,
        after_hit: bool = True,
    ) -> None:
        self.proposer, self.ids, self.after_hit = proposer, roots.ids, after_hit
        self.accepted, self.bonus, self.positions, self.slots, self.visible = accepted, bonus, positions, slots, visible
        self.tokens: list[torch.Tensor] = [roots.tokens]
        self.prefixes: list[torch.Tensor] = [roots.prefixes]
        self.scores: list[torch.Tensor] = []
        self.laws: list[torch.Tensor | None] = []

    @property
    def fed(self) -> int:
        """Tokens of each column whose keys and values are in the slots."""
        return len(self.scores)

    @property
    def drafted(self) -> int:
        """Draft tokens of each column so far."""
        return len(self.tokens) - 1

    def queries(self) -> Queries:
        """Return the next token of every column as one row's queries."""
        step = self.fed
        slots = self.slots[:, step]
        self.visible[np.arange(len(slots)), slots] = True
        return Queries(self.tokens[step], self.positions + step, slots, self.visible)

    def grow(self, logits: torch.Tensor, given: int | None = None, *, lawless: bool = True) -> None:
        """Take what the model said `[B, vocabulary]` and draft the next token of every column, or take the one that is given.

        lawless: whether a given token was drawn from no law of this model.
        """
        step = self.fed
        scores, log_q, tokens = self._step(logits, step)
        if given is not None:
            log_q, tokens = None if lawless else log_q, torch.full_like(tokens, given)
        self.scores.append(scores)
        self.laws.append(log_q)
        self.tokens.append(tokens)
        # Nothing is drawn for a greedy request, and its hashes are read by nobody.
        self.prefixes.append(self.prefixes[step] if self.proposer.greedy else extend(self.prefixes[step], tokens))
        if self.ids is not None:
            self.ids = torch.cat([self.ids, tokens[:, None]], 1)

    def _step(self, logits: torch.Tensor, step: int) -> Step:
        if self.proposer.plain:
            return Step(logits, None, logits.argmax(-1))
        return self.proposer.step(logits, Before(self.length(step), self.ids), self.prefixes[step], step, self.after_hit)

    def length(self, step: int) -> torch.Tensor:
        """Return how many tokens each column has once step `step` is fed, [B]."""
        return upload(self.positions + step + 1, self.tokens[0].device)

    def find(self, accepted: int, bonus: int) -> int | None:
        """Return the column drafted for outcome (accepted, bonus)."""
        found = np.flatnonzero((self.accepted == accepted) & (self.bonus == bonus))
        return int(found[0]) if len(found) else None

    def column(self, index: int) -> Branches:
        """Return one column alone, sharing what has been computed."""
        pick = slice(index, index + 1)
        roots = Roots(self.tokens[0][pick], self.prefixes[0][pick], None if self.ids is None else self.ids[pick])
        parts = self.accepted[pick], self.bonus[pick], self.positions[pick], self.slots[pick], self.visible[pick].copy()
        alone = Branches(self.proposer, roots, *parts, self.after_hit)
        alone.tokens = [tokens[pick] for tokens in self.tokens]
        alone.prefixes = [hashes[pick] for hashes in self.prefixes]
        alone.scores = [scores[pick] for scores in self.scores]
        alone.laws = [None if law is None else law[pick] for law in self.laws]
        return alone


def advance(model: SlotModel, rows: Mapping[int, Branches], vocab_size: int, abort: Abort | None = None) -> None:
    """Feed the next token of every column of every row in one forward; Aborted leaves all of them as they were."""
    logits = model.forward({index: branches.queries() for index, branches in rows.items()}, abort)
    for index, branches in rows.items():
        branches.grow(logits[index][:, :vocab_size])


@dataclass(frozen=True, slots=True)
class Candidates:
    """The R best bonus tokens of one row after each of the `drafted` tokens of a draft and before the first, best first.

    bonus: [drafted+1, R] token ids, on the host, tokens the same on the device; chances: [drafted+1, R] the draft's own chance of each
    among them, 0 for what can be no bonus; confidences: [drafted] its chance of each token that was sent.
    """

    bonus: np.ndarray
    tokens: torch.Tensor
    chances: np.ndarray
    confidences: np.ndarray

    def listed(self, fan_out: Sequence[int]) -> np.ndarray:
        """Return whether each belongs to the F_k best after k tokens, [drafted+1, R]; positions not drafted give theirs to the last."""
        wanted = np.asarray(shortened(fan_out, len(self.confidences)))
        return np.asarray((np.arange(self.bonus.shape[1]) < wanted[:, None]) & (self.chances > 0))


def candidates(draft: Branches, drafted: int, end_ids: Sequence[int], most: int, *, weigh: bool = True) -> Candidates:
    """Return the bonus tokens worth drafting for, `most` after each k = 0..drafted, as the request's proposer ranks them.

    weigh: whether chances and confidences are wanted; else both only say what can be at all, as 1 or 0.

    Where k < drafted the token that was sent is left out: had it been right it would have been accepted. So are end tokens: nothing
    follows them. `draft` has one column, with scores after each of its drafted tokens. Only what is cached hangs on the ranking, so it may
    look at the noise that the target will draw with. One transfer to the host.
    """
    scores = torch.cat(draft.scores[: drafted + 1])
    order = scores.clone() if draft.proposer.greedy else _ranked(draft, scores, drafted)
    confidences = order.new_ones(drafted)
    if drafted:
        sent = torch.stack(draft.tokens[1 : drafted + 1])
        if weigh:
            laws = [law for law in draft.laws[:drafted] if law is not None]
            own = torch.cat(laws) if len(laws) == drafted else torch.log_softmax(scores[:-1].float(), -1)
            confidences = own.gather(1, sent)[:, 0].exp()
        order[:-1].scatter_(1, sent, float("-inf"))
    order.index_fill_(1, upload(np.array(end_ids, dtype=np.int64), order.device), float("-inf"))
    best = order.topk(min(most, order.shape[1]), dim=-1)
    if not weigh:
        # No token's id stands where there is no candidate.
        bonus = best.indices.masked_fill(best.values == float("-inf"), -1).cpu().numpy()
        return Candidates(bonus, best.indices, (bonus >= 0).astype(float), np.ones(drafted))
    # Ranked among the allowed, a token has some chance, however small; what can be no bonus has none.
    chances = torch.softmax(best.values.float(), -1).clamp_(min=LEAST).masked_fill_(best.values == float("-inf"), 0.0)
    host = torch.cat([best.indices.double().flatten(), chances.double().flatten(), confidences.double()]).cpu().numpy()
    size = best.indices.numel()
    shape = best.indices.shape
    return Candidates(
        host[:size].astype(np.int64).reshape(shape), best.indices, host[size : 2 * size].reshape(shape), host[2 * size :].copy()
    )


def _ranked(draft: Branches, scores: torch.Tensor, drafted: int) -> torch.Tensor:
    """Return what drawn bonus tokens are ranked by after each k = 0..drafted, [drafted+1, vocabulary]."""
    length, prefixes = torch.cat([draft.length(k) for k in range(drafted + 1)]), torch.cat(draft.prefixes[: drafted + 1])
    return draft.proposer.rank(scores, length, prefixes)
