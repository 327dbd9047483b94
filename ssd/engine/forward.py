"""One forward of a model over key-value slots, for ragged rows packed into one rectangle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ssd.engine.kv import Abort, SlotCache
from ssd.models import LoadedModel

# Attention reads whole blocks of slots: few distinct shapes, little read in vain.
SLOT_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Queries:
    """What one row feeds: tokens `[n]` (on the model's device), their positions and slots `[n]`, and the slots each sees `[n, slots]`."""

    tokens: torch.Tensor
    positions: np.ndarray
    slots: np.ndarray
    visible: np.ndarray


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
    def forward(self, rows: Sequence[Queries | None], *, last_only: bool = False, abort: Abort | None = None) -> torch.Tensor:
        """Feed each row's queries (None: an idle row) and return fp32 logits `[rows, widest row, vocabulary]`, or of the last query only.

        A narrower row is padded at the front, so that the last query of every row stands last. Raises Aborted when `abort` says so.
        """
        width = max(len(q.slots) for q in rows if q is not None)
        shape = (len(rows), width)
        positions = np.zeros(shape, dtype=np.int64)
        slots = np.zeros(shape, dtype=np.int64)
        visible = np.zeros((*shape, self.slots), dtype=bool)
        tokens = torch.zeros(shape, dtype=torch.long, device=self.device)
        for r, q in enumerate(rows):
            pad = width - len(q.slots) if q is not None else width
            visible[r, :pad, 0] = True
            if q is not None:
                positions[r, pad:], slots[r, pad:], visible[r, pad:] = q.positions, q.slots, q.visible
                tokens[r, pad:] = q.tokens
        limit = self._limit(visible)
        self.cache.place(self._upload(slots), limit, abort)
        output = self.model(
            input_ids=tokens,
            position_ids=self._upload(positions),
            attention_mask=self._additive(visible[:, :, :limit]),
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
        )
        logits: torch.Tensor = output.logits
        return logits.float()

    def _limit(self, visible: np.ndarray) -> int:
        highest = int(np.flatnonzero(visible.any(axis=(0, 1)))[-1]) + 1
        return min(self.slots, -(-highest // SLOT_BLOCK) * SLOT_BLOCK)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _additive(self, visible: np.ndarray) -> torch.Tensor:
        seen = self._upload(np.ascontiguousarray(visible))[:, None]
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen, torch.finfo(self.dtype).min).repeat(1, 1, self.groups, 1)
