"""One forward of a model over key-value slots, for ragged rows packed into one sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from ssd.devices import upload
from ssd.engine.decoder import SlotDecoder
from ssd.engine.kv import Abort, Trunk
from ssd.engine.queries import Fed, Queries
from ssd.engine.shares import SharedTransformer
from ssd.engine.transformer import SlotTransformer
from ssd.models import LoadedModel


class SlotModel:
    """A decoder whose keys and values lie in slots; `rows` sequences, at least `slots` places each."""

    def __init__(self, model: LoadedModel, rows: int, slots: int) -> None:
        self.device, self.vocab_size = model.device, model.vocab_size
        self.cache: SlotDecoder | SlotTransformer
        if model.team is not None:
            self.cache = SharedTransformer(model, rows, slots, model.team)
        else:
            self.cache = SlotTransformer(model, rows, slots) if model.decoder is None else SlotDecoder(model.decoder, rows, slots)

    @property
    def slots(self) -> int:
        """Places in a row, the waste slot included."""
        return self.cache.slots

    @torch.inference_mode()
    def forward(self, rows: Mapping[int, Queries], abort: Abort | None = None) -> dict[int, torch.Tensor]:
        """Feed the queries of each row and return the fp32 logits that it wants, `[wanted, vocabulary]`; rows that are left out are idle.

        Raises Aborted when `abort` says so; ValueError for a mask that is not of the queries and slots there are.
        """
        self._check(rows)
        fed = Fed.of(rows)
        logits = self.cache.forward(fed, abort)
        bounds = pairwise([0, *accumulate(rows[row.index].logits for row in fed.rows)])
        return {row.index: logits[begin:end] for row, (begin, end) in zip(fed.rows, bounds, strict=True)}

    def _check(self, rows: Mapping[int, Queries]) -> None:
        # Kernels are given addresses: of a mask that is too small they would read what lies behind it.
        for index, queries in rows.items():
            right = len(queries.slots), self.slots
            if queries.visible.shape != right:
                raise ValueError(
                    f"visible of row {index} has shape {queries.visible.shape}: give {right}, its queries by the model's slots"
                )


def chain(trunk: Trunk, tokens: Sequence[int], wanted: int, device: torch.device) -> Queries:
    """Return queries that feed `tokens` after the text; logits are wanted after the last so many."""
    slots, visible = trunk.chain(len(tokens))
    positions = np.arange(trunk.length, trunk.length + len(tokens))
    return Queries(upload(np.array(tokens, dtype=np.int64), device), positions, slots, visible, wanted)
