"""A transformers decoder over key-value slots: any supported architecture, on any device."""

from __future__ import annotations

import numpy as np
import torch

from ssd.engine.kv import Abort, SlotCache, Spread
from ssd.engine.queries import Fed
from ssd.models import LoadedModel

# Attention reads whole blocks of slots: few distinct shapes, little read in vain.
SLOT_BLOCK = 64


class SlotTransformer:
    """A model whose keys and values of `rows` sequences lie in `slots` slots each."""

    def __init__(self, model: LoadedModel, rows: int, slots: int) -> None:
        self.model, self.device, self.dtype, self.groups = model.module, model.device, model.dtype, model.query_groups
        self.slots, self.cache = slots, SlotCache(rows, slots)

    def copy(self, source: int, from_slots: np.ndarray, row: int, to_slots: np.ndarray) -> None:
        """Copy keys and values from some slots of one row into some of another."""
        self.cache.copy(source, from_slots, row, to_slots)

    def forward(self, fed: Fed, abort: Abort | None = None) -> torch.Tensor:
        """Feed the queries and return the fp32 logits that are wanted, `[wanted, vocabulary]`. Raises Aborted when `abort` says so."""
        limit = min(self.slots, -(-max(row.limit for row in fed.rows) // SLOT_BLOCK) * SLOT_BLOCK)
        # Buffers are read from the first to the last row that is fed, without a copy; an idle row between them is read in vain.
        first, end = fed.rows[0].index, fed.rows[-1].index + 1
        self.cache.place(self._upload(fed.owners), self._upload(fed.slots), (slice(first, end), slice(0, limit)), abort)
        # One place at least: a head is not made for none.
        kept = fed.wanted if len(fed.wanted) else np.array([len(fed.slots) - 1])
        output = self.model(
            input_ids=fed.tokens[None],
            position_ids=self._upload(fed.positions)[None],
            attention_mask=self._additive(fed, first, end - first, limit),
            cache=self.cache,
            use_cache=True,
            logits_to_keep=0 if len(kept) == len(fed.slots) else self._upload(kept),
            spread=None if end - first == 1 else self._spread(fed, first, end - first),
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits[: len(fed.wanted)]

    def _spread(self, fed: Fed, first: int, rows: int) -> Spread:
        width = max(row.count for row in fed.rows)
        packed = np.zeros((rows, width), dtype=np.int64)
        for row in fed.rows:
            packed[row.index - first, : row.count] = np.arange(row.begin, row.begin + row.count)
        places = np.concatenate([(row.index - first) * width + np.arange(row.count) for row in fed.rows])
        return Spread(self._upload(packed), self._upload(places))

    def _additive(self, fed: Fed, first: int, rows: int, limit: int) -> torch.Tensor:
        width = max(row.count for row in fed.rows)
        visible = np.zeros((rows, width, limit), dtype=bool)
        visible[:, :, 0] = True
        for row in fed.rows:
            visible[row.index - first, : row.count] = row.visible[:, :limit]
        seen = self._upload(visible)[:, None]
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen, torch.finfo(self.dtype).min).repeat(1, 1, self.groups, 1)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
