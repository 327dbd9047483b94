"""Key-value slots: preallocated buffers that a forward writes into at given places, read through an explicit mask.

Keys are stored with their rotary position, so rolling back and committing a branch move no data: a slot that no mask shows does not
exist, and a slot that is free may be written again. Slot 0 is waste: padding reads it and sees nothing else.

The queries of all rows are packed into one sequence, so that the linear layers, which are most of a forward, compute nothing for the
padding of narrower rows; attention alone spreads them over their rows (`Spread`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, Cache

from ssd.devices import upload

ATTENTION = "ssd_slots"
Abort = Callable[[], bool]


class Aborted(Exception):  # noqa: N818 - an event, not an error
    """The forward was given up between two layers because its result no longer matters."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Where packed queries stand among their rows: `packed` [rows, width] is the query at each place (any for padding), `places` [total]
    the place, row by row, of each query."""

    packed: torch.Tensor
    places: torch.Tensor


class SlotCache(Cache):
    """Keys and values of `rows` sequences in buffers `[rows, kv_heads, slots, head_dim]`, one pair a layer."""

    def __init__(self, rows: int, slots: int) -> None:
        super().__init__(layers=[])
        self.rows, self.slots = rows, slots
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._places = (torch.empty(0, dtype=torch.long),) * 2
        self._read = (slice(0, rows), slice(0, slots))
        self._abort: Abort | None = None

    def place(self, rows: torch.Tensor, slots: torch.Tensor, read: tuple[slice, slice], abort: Abort | None = None) -> None:
        """Let the next forward write query i into `slots[i]` of `rows[i]`, read these rows and slots and ask `abort` at each layer."""
        self._places, self._read, self._abort = (rows, slots), read, abort

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[1, kv_heads, queries, head_dim]` into the placed slots and return the rows and slots that are read."""
        if self._abort is not None and self._abort():
            raise Aborted
        if layer_idx == len(self._keys):
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        rows, slots = self._places
        read, limit = self._read
        found = []
        for buffer, states in ((self._keys[layer_idx], key_states), (self._values[layer_idx], value_states)):
            buffer[rows, :, slots] = states[0].transpose(0, 1)
            found.append(buffer[read, :, limit])
        return found[0], found[1]

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        # Zeros, not garbage: a NaN in a masked slot would poison every query of its row.
        return states.new_zeros(self.rows, states.shape[1], self.slots, states.shape[3])

    @torch.inference_mode()
    def copy(self, source: int, from_slots: np.ndarray, row: int, to_slots: np.ndarray) -> None:
        """Copy keys and values from some slots of one row into some of another."""
        if not self._keys:
            return
        before, after = upload(np.stack([from_slots, to_slots]), self._keys[0].device)
        for buffer in (*self._keys, *self._values):
            buffer[row, :, after] = buffer[source, :, before]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: the length is in the masks, not here."""
        return 0


class Slots:
    """The free list of one row; slot 0, the waste, is never given out."""

    def __init__(self, count: int) -> None:
        self._free = np.ones(count, dtype=bool)
        self._free[0] = False

    def take(self, count: int) -> np.ndarray:
        """Return the `count` lowest free slots, so that a forward needs to read little more than what is in use."""
        found = np.flatnonzero(self._free)[:count]
        if len(found) < count:
            raise RuntimeError(f"{count} key-value slots wanted, {len(found)} free")
        self._free[found] = False
        return found

    def release(self, slots: np.ndarray) -> None:
        """Give `slots` back."""
        self._free[slots] = True


class Trunk:
    """The text of one row that has been fed: the slot of each of its tokens in order, the mask that shows them, and what is free."""

    def __init__(self, slots: int) -> None:
        self.slots, self.mask = Slots(slots), np.zeros(slots, dtype=bool)
        self._places = np.zeros(slots, dtype=np.int64)
        self.length = 0

    @property
    def places(self) -> np.ndarray:
        """The slot of each token, [length]."""
        return self._places[: self.length]

    def add(self, slots: np.ndarray) -> None:
        """Go on by the tokens that were fed into `slots`."""
        self._places[self.length : self.length + len(slots)] = slots
        self.length += len(slots)
        self.mask[slots] = True

    def cut(self, length: int) -> None:
        """Forget what stands past the first `length` tokens; only that is kept, whatever else was taken."""
        self.length = length
        self.mask[:] = False
        self.mask[self.places] = True
        self.release_all_but()

    def release_all_but(self, *kept: np.ndarray) -> None:
        """Give back every slot that neither the text nor any of `kept` holds."""
        unused = ~self.mask
        unused[0] = False
        for slots in kept:
            unused[slots] = False
        self.slots.release(np.flatnonzero(unused))

    def chain(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Take slots for `count` tokens that follow the text, and return them with what each of the tokens sees, [count, slots]."""
        slots = self.slots.take(count)
        visible = np.repeat(self.mask[None], count, axis=0)
        visible[:, slots] = np.tri(count, dtype=bool)
        return slots, visible


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    spread: Spread | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with the query heads of a group folded into query rows, so that grouped keys and values are never repeated.

    query: `[1, heads, total, head_dim]`, packed; keys and values `[rows, kv_heads, slots, head_dim]`; `attention_mask` is additive and
    folded likewise, `[rows, 1, groups x width, slots]`. spread: where the queries of more than one row stand.
    """
    if spread is not None:
        query = query[0][:, spread.packed].transpose(0, 1)
    rows, heads, width, size = query.shape
    kv_heads = key.shape[1]
    folded = query.reshape(rows, kv_heads, heads // kv_heads * width, size)
    out = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    out = out.reshape(rows, heads, width, value.shape[-1]).transpose(1, 2)
    if spread is None:
        return out.contiguous(), None
    return out.reshape(rows * width, heads, value.shape[-1])[spread.places][None], None


AttentionInterface.register(ATTENTION, slot_attention)
