"""A transformers decoder over key-value slots: any supported architecture, on any device."""

from __future__ import annotations

import numpy as np
import torch

from ssd.devices import ready_for, upload
from ssd.engine.graphs import Graphs, Shape, bucket
from ssd.engine.kv import Abort, Aborted, SlotCache, Spread
from ssd.engine.queries import Fed
from ssd.models import LoadedModel

# Attention reads whole blocks of slots: few distinct shapes, little read in vain.
SLOT_BLOCK = 64


class SlotTransformer:
    """A model whose keys and values of `rows` sequences lie in `slots` slots each, whole blocks of them.

    graphs: plays forwards in fixed shapes; without, each is played in its own.
    """

    def __init__(self, model: LoadedModel, rows: int, slots: int, graphs: Graphs | None = None) -> None:
        self.model, self.device, self.dtype, self.groups = model.module, model.device, model.dtype, model.query_groups
        self.rows, self.slots = rows, -(-slots // SLOT_BLOCK) * SLOT_BLOCK
        self.cache = SlotCache(rows, self.slots)
        self.graphs = graphs if graphs is not None else Graphs.on(model.device)

    def copy(self, source: int, from_slots: np.ndarray, row: int, to_slots: np.ndarray) -> None:
        """Copy keys and values from some slots of one row into some of another."""
        self.cache.copy(source, from_slots, row, to_slots)

    def forward(self, fed: Fed, abort: Abort | None = None) -> torch.Tensor:
        """Feed the queries and return the fp32 logits that are wanted, `[wanted, vocabulary]`. Raises Aborted when `abort` says so."""
        bucketed = None if self.graphs is None else bucket(fed, self.rows, self.slots)
        shape = bucketed or self._exact(fed)
        tokens = torch.nn.functional.pad(fed.tokens, (0, shape.queries - len(fed.tokens))) if bucketed else fed.tokens
        return self.feed(shape, bucketed is not None, tokens, *_laid_out(fed, shape), abort)[: len(fed.wanted)]

    def feed(
        self, shape: Shape, fixed: bool, tokens: torch.Tensor, numbers: np.ndarray, visible: np.ndarray, abort: Abort | None = None
    ) -> torch.Tensor:
        """Feed tokens `[queries]` of the device, the rest as `_laid_out` has it; return fp32 logits `[wanted, vocabulary]`.

        fixed: whether it is a shape that a graph is kept for.
        """
        if self.graphs is None or not fixed:
            return self._play(shape, tokens, upload(numbers, self.device), upload(visible, self.device), abort)
        # A graph is not left in its midst, and is short.
        if abort is not None and abort():
            raise Aborted
        given = tokens, ready_for(self.device, numbers), ready_for(self.device, visible)
        # The next forward of this shape writes over it.
        return self.graphs.play(self._play, shape, *given).clone()

    def _exact(self, fed: Fed) -> Shape:
        limit = min(self.slots, -(-max(row.limit for row in fed.rows) // SLOT_BLOCK) * SLOT_BLOCK)
        # Buffers are read from the first to the last row that is fed, without a copy; an idle row between them is read in vain.
        first, end = fed.rows[0].index, fed.rows[-1].index + 1
        width = max(row.count for row in fed.rows)
        # One place at least: a head is not made for none.
        return Shape(first, end - first, len(fed.slots), width, max(1, len(fed.wanted)), limit)

    def _play(
        self, shape: Shape, tokens: torch.Tensor, numbers: torch.Tensor, visible: torch.Tensor, abort: Abort | None = None
    ) -> torch.Tensor:
        """Feed tokens `[queries]`; numbers and visible are as `_laid_out` has them. Return fp32 logits `[wanted, vocabulary]`."""
        sizes = [shape.queries] * 4 + [shape.wanted, shape.rows * shape.width]
        positions, owners, slots, places, wanted, packed = numbers.split(sizes)  # type: ignore[no-untyped-call]
        read = slice(shape.first, shape.first + shape.rows), slice(0, shape.slots)
        self.cache.place(owners, slots, read, abort)
        hidden = torch.zeros((), dtype=self.dtype, device=self.device)
        mask = torch.where(visible, hidden, torch.finfo(self.dtype).min)[:, None]
        output = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=mask.repeat(1, 1, self.groups, 1),
            cache=self.cache,
            use_cache=True,
            logits_to_keep=wanted,
            spread=None if shape.rows == 1 else Spread(packed.view(shape.rows, shape.width), places),
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits


def _laid_out(fed: Fed, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Return what a forward needs beside its tokens, in the sizes of `shape`.

    The numbers stand in one array, for one transfer: position, row, slot and place of each query, which of them logits are wanted after,
    and which query stands at each place. What fills up has position, row, slot and place 0. visible: the slots that each place sees,
    `[rows, width, slots]`; where no query stands, the waste.
    """
    queries, width = shape.queries, shape.width
    numbers = np.zeros(4 * queries + shape.wanted + shape.rows * width, dtype=np.int64)
    positions, owners, slots, places = numbers[: 4 * queries].reshape(4, queries)
    count = len(fed.slots)
    positions[:count], owners[:count], slots[:count] = fed.positions, fed.owners, fed.slots
    wanted = numbers[4 * queries : 4 * queries + shape.wanted]
    wanted[: len(fed.wanted)] = fed.wanted
    packed = numbers[4 * queries + shape.wanted :].reshape(shape.rows, width)
    visible = np.zeros((shape.rows, width, shape.slots), dtype=bool)
    visible[:, :, 0] = True
    for row in fed.rows:
        place, among = row.index - shape.first, np.arange(row.count)
        places[row.begin : row.begin + row.count] = place * width + among
        packed[place, : row.count] = row.begin + among
        visible[place, : row.count] = row.visible[:, : shape.slots]
    return numbers, visible
