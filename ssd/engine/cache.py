"""The speculation cache: which outcomes to draft for, and the branches drafted for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ssd.engine.forward import Queries, SlotModel
from ssd.engine.kv import Abort
from ssd.engine.proposer import Proposer
from ssd.sampling import Before, extend
from theory.fanout import shortened


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

    positions `[B]` of the roots, slots `[B, steps]` for what is fed, visible `[B, slots]` before it. Once fed, `tokens[i]` is the token
    fed at step i and `prefixes[i]` the hash up to it, `[B]`; `scores[i]` and, unless greedy, `laws[i]` are what the draft says after it,
    `[B, vocabulary]`: processed logits and log q. after_hit: whether they are to be a draft after a hit.
    """

    def __init__(
        self,
        proposer: Proposer,
        roots: Roots,
        accepted: np.ndarray,
        positions: np.ndarray,
        slots: np.ndarray,
        visible: np.ndarray,
        after_hit: bool = True,
    ) -> None:
        self.proposer, self.ids, self.after_hit = proposer, roots.ids, after_hit
        self.accepted, self.positions, self.slots, self.visible = accepted, positions, slots, visible
        self.tokens: list[torch.Tensor] = [roots.tokens]
        self.prefixes: list[torch.Tensor] = [roots.prefixes]
        self.scores: list[torch.Tensor] = []
        self.laws: list[torch.Tensor | None] = []

    @property
    def fed(self) -> int:
        """Tokens of each column whose keys and values are in the slots."""
        return len(self.scores)

    def queries(self) -> Queries:
        """Return the next token of every column as one row's queries."""
        step = self.fed
        slots = self.slots[:, step]
        self.visible[np.arange(len(slots)), slots] = True
        return Queries(self.tokens[step], self.positions + step, slots, self.visible)

    def grow(self, logits: torch.Tensor) -> None:
        """Take what the model said `[B, vocabulary]` and draft the next token of every column."""
        step = self.fed
        before = Before(self.length(step), self.ids)
        scores, log_q, tokens = self.proposer.step(logits, before, self.prefixes[step], step, self.after_hit)
        self.scores.append(scores)
        self.laws.append(log_q)
        self.tokens.append(tokens)
        # Nothing is drawn for a greedy request, and its hashes are read by nobody.
        self.prefixes.append(self.prefixes[step] if self.proposer.greedy else extend(self.prefixes[step], tokens))
        if self.ids is not None:
            self.ids = torch.cat([self.ids, tokens[:, None]], 1)

    def length(self, step: int) -> torch.Tensor:
        """Return how many tokens each column has once step `step` is fed, [B]."""
        return torch.from_numpy(self.positions + step + 1).to(self.tokens[0].device, non_blocking=True)

    def find(self, accepted: int, bonus: int) -> int | None:
        """Return the column drafted for outcome (accepted, bonus)."""
        found = np.flatnonzero((self.accepted == accepted) & (self.tokens[0].cpu().numpy() == bonus))
        return int(found[0]) if len(found) else None

    def column(self, index: int) -> Branches:
        """Return one column alone, sharing what has been computed."""
        pick = slice(index, index + 1)
        roots = Roots(self.tokens[0][pick], self.prefixes[0][pick], None if self.ids is None else self.ids[pick])
        parts = self.accepted[pick], self.positions[pick], self.slots[pick], self.visible[pick].copy()
        alone = Branches(self.proposer, roots, *parts, self.after_hit)
        alone.tokens = [tokens[pick] for tokens in self.tokens]
        alone.prefixes = [hashes[pick] for hashes in self.prefixes]
        alone.scores = [scores[pick] for scores in self.scores]
        alone.laws = [None if law is None else law[pick] for law in self.laws]
        return alone


def advance(model: SlotModel, rows: Sequence[Branches | None], vocab_size: int, abort: Abort | None = None) -> None:
    """Feed the next token of every column of every row in one forward; Aborted leaves all of them as they were."""
    logits = model.forward([None if row is None else row.queries() for row in rows], abort=abort)
    for r, row in enumerate(rows):
        if row is not None:
            row.grow(logits[r, logits.shape[1] - len(row.accepted) :, :vocab_size])


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Outcomes to draft for: bonus tokens `[B]` on the device and how many draft tokens stand before each `[B]`."""

    bonus: torch.Tensor
    accepted: np.ndarray


def choose_outcomes(draft: Branches, drafted: int, fan_out: Sequence[int], end_ids: Sequence[int]) -> Outcomes:
    """Return the F_k best bonus tokens after each k = 0..drafted, as the request's proposer ranks them.

    Where k < drafted the token that was sent is left out: had it been right it would have been accepted. So are end tokens: nothing
    follows them. `draft` has one column, with scores after each of its drafted tokens. Only what is cached hangs on the ranking, so it may
    look at the noise that the target will draw with.
    """
    wanted, places = np.asarray(shortened(fan_out, drafted)), range(drafted + 1)
    length, prefixes = torch.cat([draft.length(k) for k in places]), torch.cat(draft.prefixes[: drafted + 1])
    order = draft.proposer.rank(torch.cat(draft.scores[: drafted + 1]), length, prefixes).clone()
    if drafted:
        order[:-1].scatter_(1, torch.stack(draft.tokens[1 : drafted + 1]), float("-inf"))
    order[:, list(end_ids)] = float("-inf")
    wanted = np.minimum(wanted, max(1, order.shape[1] - 1 - len(end_ids)))
    ranked = order.topk(int(wanted.max()), dim=-1).indices
    accepted = np.repeat(np.arange(drafted + 1), wanted)
    ranks = np.concatenate([np.arange(count) for count in wanted])
    return Outcomes(ranked[torch.from_numpy(accepted), torch.from_numpy(ranks)], accepted)
