"""One forward of a model over key-value slots, for ragged rows packed into one sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from ssd.engine.kv import Abort, SlotCache, Spread, Trunk
from ssd.models import LoadedModel

# Attention reads whole blocks of slots: few distinct shapes, little read in vain.
SLOT_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Queries:
    """What one row feeds: tokens `[n]` (on the model's device), their positions and slots `[n]`, the slots each sees `[n, slots]`, and
    after how many of the last of them logits are wanted (none: after all)."""

    tokens: torch.Tensor
    positions: np.ndarray
    slots: np.ndarray
    visible: np.ndarray
    wanted: int | None = None

    @property
    def logits(self) -> int:
        """Places whose logits are computed."""
        return len(self.slots) if self.wanted is None else self.wanted


class SlotModel:
    """A transformers decoder whose keys and values lie in slots; `rows` sequences, `slots` places each."""

    def __init__(self, model: LoadedModel, rows: int, slots: int) -> None:
        self.model, self.device, self.dtype, self.vocab_size = model.module, model.device, model.dtype, model.vocab_size
        self.cache = SlotCache(rows, slots)
        self.groups = model.query_groups

    @property
    def slots(self) -> int:
        """Places in a row, the waste slot included."""
        return self.cache.slots

    @torch.inference_mode()
    def forward(self, rows: Mapping[int, Queries], abort: Abort | None = None) -> dict[int, torch.Tensor]:
        """Feed the queries of each row and return the fp32 logits that it wants, `[wanted, vocabulary]`; rows that are left out are idle.

        Raises Aborted when `abort` says so.
        """
        indices = sorted(rows)
        fed = [rows[index] for index in indices]
        counts = [len(queries.slots) for queries in fed]
        ends = list(accumulate(counts))
        slots = self._upload(np.concatenate([queries.slots for queries in fed]))
        owners = self._upload(np.repeat(np.array(indices), counts))
        limit = self._limit(fed)
        # Buffers are read from the first to the last row that is fed, without a copy; an idle row between them is read in vain.
        read = range(indices[0], indices[-1] + 1)
        self.cache.place(owners, slots, (slice(read.start, read.stop), slice(0, limit)), abort)
        width = max(counts)
        wanted = [np.arange(end - queries.logits, end) for queries, end in zip(fed, ends, strict=True)]
        # One place at least: a head is not made for none.
        kept = np.concatenate(wanted) if any(len(one) for one in wanted) else np.array([ends[-1] - 1])
        output = self.model(
            input_ids=torch.cat([queries.tokens for queries in fed])[None],
            position_ids=self._upload(np.concatenate([queries.positions for queries in fed]))[None],
            attention_mask=self._additive({index - read.start: queries for index, queries in rows.items()}, len(read), width, limit),
            cache=self.cache,
            use_cache=True,
            logits_to_keep=0 if len(kept) == ends[-1] else self._upload(kept),
            spread=None if len(read) == 1 else self._spread([index - read.start for index in indices], counts, ends, len(read), width),
        )
        logits: torch.Tensor = output.logits[0].float()
        bounds = list(pairwise([0, *accumulate(map(len, wanted))]))
        return {index: logits[begin:end] for index, (begin, end) in zip(indices, bounds, strict=True)}

    def _limit(self, fed: list[Queries]) -> int:
        highest = max(int(np.flatnonzero(queries.visible.any(axis=0))[-1]) for queries in fed) + 1
        return min(self.slots, -(-highest // SLOT_BLOCK) * SLOT_BLOCK)

    def _spread(self, rows: list[int], counts: list[int], ends: list[int], read: int, width: int) -> Spread:
        packed = np.zeros((read, width), dtype=np.int64)
        for row, count, end in zip(rows, counts, ends, strict=True):
            packed[row, :count] = np.arange(end - count, end)
        places = np.concatenate([row * width + np.arange(count) for row, count in zip(rows, counts, strict=True)])
        return Spread(self._upload(packed), self._upload(places))

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _additive(self, rows: Mapping[int, Queries], read: int, width: int, limit: int) -> torch.Tensor:
        visible = np.zeros((read, width, limit), dtype=bool)
        visible[:, :, 0] = True
        for row, queries in rows.items():
            visible[row, : len(queries.slots)] = queries.visible[:, :limit]
        seen = self._upload(visible)[:, None]
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen, torch.finfo(self.dtype).min).repeat(1, 1, self.groups, 1)


def chain(trunk: Trunk, tokens: Sequence[int], wanted: int, device: torch.device) -> Queries:
    """Return queries that feed `tokens` after the text; logits are wanted after the last so many."""
    slots, visible = trunk.chain(len(tokens))
    positions = np.arange(trunk.length, trunk.length + len(tokens))
    return Queries(torch.tensor(tokens, device=device), positions, slots, visible, wanted)
