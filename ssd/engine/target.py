"""The target's side of a round: feed a prompt, verify a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ssd.engine.forward import Queries, SlotModel
from ssd.engine.kv import Slots
from ssd.models import LoadedModel

PREFILL_CHUNK = 256


@dataclass
class TargetRow:
    """One request as the target knows it: the slots of its fed tokens, their number, and the last committed token, not yet fed."""

    trunk: np.ndarray
    slots: Slots
    length: int = 0
    last: int = field(default=-1)


def slots_needed(max_model_len: int, num_speculative_tokens: int) -> int:
    """Return the slots of a row: the waste slot, the context and one draft."""
    return 1 + max_model_len + num_speculative_tokens + 1


class Target:
    """The target model and the key-value slots of every row."""

    def __init__(self, loaded: LoadedModel, rows: int, slots: int) -> None:
        self.model = SlotModel(loaded, rows, slots)
        self.rows: list[TargetRow | None] = [None] * rows

    def start(self, prompt: Sequence[int]) -> int:
        """Take a request in, feed its prompt and return its row; the row's last token is then the first of the output."""
        index = self.rows.index(None)
        row = TargetRow(np.zeros(self.model.slots, dtype=bool), Slots(self.model.slots))
        for begin in range(0, len(prompt), PREFILL_CHUNK):
            queries, slots = self._chain(row, prompt[begin : begin + PREFILL_CHUNK])
            logits = self.model.forward([queries if r == index else None for r in range(len(self.rows))], last_only=True)
            row.trunk[slots] = True
            row.length += len(slots)
        row.last = int(logits[index, -1].argmax())
        self.rows[index] = row
        return index

    def last(self, index: int) -> int:
        """Return the last committed token of a row."""
        row = self.rows[index]
        if row is None:
            raise RuntimeError(f"row {index} is idle")
        return row.last

    def stop(self, index: int) -> None:
        """Forget a request."""
        self.rows[index] = None

    def verify(self, drafts: Sequence[Sequence[int] | None]) -> list[tuple[int, int] | None]:
        """Verify each row's draft (None: an idle row) greedily in one forward; return (accepted, bonus) a row and roll the rest back."""
        fed = [
            None if row is None or draft is None else self._chain(row, [row.last, *draft])
            for row, draft in zip(self.rows, drafts, strict=True)
        ]
        logits = self.model.forward([None if pair is None else pair[0] for pair in fed])
        outcomes = accept_greedy(logits, [[] if draft is None else draft for draft in drafts])
        found: list[tuple[int, int] | None] = [None] * len(drafts)
        for index, (row, pair) in enumerate(zip(self.rows, fed, strict=True)):
            if row is not None and pair is not None:
                accepted, bonus = found[index] = outcomes[index]
                row.trunk[pair[1][: accepted + 1]] = True
                row.slots.release(pair[1][accepted + 1 :])
                row.length += accepted + 1
                row.last = bonus
        return found

    def _chain(self, row: TargetRow, tokens: Sequence[int]) -> tuple[Queries, np.ndarray]:
        count = len(tokens)
        slots = row.slots.take(count)
        visible = np.repeat(row.trunk[None], count, axis=0)
        visible[:, slots] = np.tri(count, dtype=bool)
        fed = torch.tensor(tokens, device=self.model.device)
        return Queries(fed, np.arange(row.length, row.length + count), slots, visible), slots


def accept_greedy(logits: torch.Tensor, drafts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return (accepted, bonus) for each row: the draft's longest prefix of the target's own choices, and its choice after that.

    logits `[rows, 1 + longest draft, vocabulary]`, aligned at the end. One transfer to the host, the only one of a verification.
    """
    rows, width = logits.shape[:2]
    choices = logits.argmax(-1)
    given = torch.full((rows, width - 1), -1)
    padding = torch.tensor([width - 1 - len(draft) for draft in drafts])
    for r, draft in enumerate(drafts):
        given[r, width - 1 - len(draft) :] = torch.tensor(draft, dtype=torch.long)
    given, padding = given.to(logits.device), padding.to(logits.device)
    right = (choices[:, :-1] == given) | (torch.arange(width - 1, device=logits.device) < padding[:, None])
    stands = right.long().cumprod(-1).sum(-1)
    bonus = choices.gather(1, stands[:, None])[:, 0]
    return [(accepted, token) for accepted, token in torch.stack([stands - padding, bonus], -1).tolist()]
