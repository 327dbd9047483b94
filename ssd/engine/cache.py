"""The speculation cache: which outcomes to draft for, and the branches drafted for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ssd.engine.forward import Queries, SlotModel
from ssd.engine.kv import Abort
from theory.fanout import shortened


class Branches:
    """Continuations of one row that grow together, one token a step; the root of column b follows `accepted[b]` draft tokens.

    roots `[B]` (on the model's device), positions `[B]` of the roots, slots `[B, steps]` for what is fed, visible `[B, slots]` before it.
    Once fed, `tokens[i]` and `logits[i]` are `[B]` and `[B, vocabulary]`: the token fed at step i, and what the model says after it.
    """

    def __init__(self, roots: torch.Tensor, accepted: np.ndarray, positions: np.ndarray, slots: np.ndarray, visible: np.ndarray) -> None:
        self.accepted, self.positions, self.slots, self.visible = accepted, positions, slots, visible
        self.tokens: list[torch.Tensor] = [roots]
        self.logits: list[torch.Tensor] = []

    @property
    def fed(self) -> int:
        """Tokens of each column whose keys and values are in the slots."""
        return len(self.logits)

    def queries(self) -> Queries:
        """Return the next token of every column as one row's queries."""
        step = self.fed
        slots = self.slots[:, step]
        self.visible[np.arange(len(slots)), slots] = True
        return Queries(self.tokens[step], self.positions + step, slots, self.visible)

    def grow(self, logits: torch.Tensor) -> None:
        """Take what the model said `[B, vocabulary]` and draft the next token of every column."""
        self.logits.append(logits)
        self.tokens.append(logits.argmax(-1))

    def find(self, accepted: int, bonus: int) -> int | None:
        """Return the column drafted for outcome (accepted, bonus)."""
        found = np.flatnonzero((self.accepted == accepted) & (self.tokens[0].cpu().numpy() == bonus))
        return int(found[0]) if len(found) else None

    def column(self, index: int) -> Branches:
        """Return one column alone, sharing what has been computed."""
        pick = slice(index, index + 1)
        alone = Branches(self.tokens[0][pick], self.accepted[pick], self.positions[pick], self.slots[pick], self.visible[pick].copy())
        alone.tokens = [tokens[pick] for tokens in self.tokens]
        alone.logits = [logits[pick] for logits in self.logits]
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
    """Return the F_k likeliest bonus tokens after each k = 0..drafted, by the draft's own logits.

    Where k < drafted the token that was sent is left out: had it been right it would have been accepted. So are end tokens: nothing
    follows them. `draft` has one column, with logits after each of its drafted tokens.
    """
    wanted = np.asarray(shortened(fan_out, drafted))
    logits = torch.cat(draft.logits[: drafted + 1]).clone()
    if drafted:
        logits[:-1].scatter_(1, torch.stack(draft.tokens[1 : drafted + 1]), float("-inf"))
    logits[:, list(end_ids)] = float("-inf")
    wanted = np.minimum(wanted, max(1, logits.shape[1] - 1 - len(end_ids)))
    ranked = logits.topk(int(wanted.max()), dim=-1).indices
    accepted = np.repeat(np.arange(drafted + 1), wanted)
    places = np.concatenate([np.arange(count) for count in wanted])
    return Outcomes(ranked[torch.from_numpy(accepted), torch.from_numpy(places)], accepted)
