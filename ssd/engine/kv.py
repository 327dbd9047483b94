"""Key-value slots: preallocated buffers that a forward writes into at given places, read through an explicit mask.

Keys are stored with their rotary position, so rolling back and committing a branch move no data: a slot that no mask shows does not
exist, and a slot that is free may be written again. Slot 0 is waste: padding queries write there and see nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, Cache

ATTENTION = "ssd_slots"
Abort = Callable[[], bool]


class Aborted(Exception):  # noqa: N818 - an event, not an error
    """The forward was given up between two layers because its result no longer matters."""


class SlotCache(Cache):
    """Keys and values of `rows` sequences in buffers `[rows, kv_heads, slots, head_dim]`, one pair a layer."""

    def __init__(self, rows: int, slots: int) -> None:
        super().__init__(layers=[])
        self.rows, self.slots = rows, slots
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._places = torch.empty(0, dtype=torch.long)
        self._limit = slots
        self._abort: Abort | None = None

    def place(self, slots: torch.Tensor, limit: int, abort: Abort | None = None) -> None:
        """Let the next forward write query `[row, i]` into `slots[row, i]`, read the first `limit` slots and ask `abort` at each layer."""
        self._places, self._limit, self._abort = slots[:, None, :, None], limit, abort

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[rows, kv_heads, queries, head_dim]` into the placed slots and return the layer's buffers up to the limit."""
        if self._abort is not None and self._abort():
            raise Aborted
        if layer_idx == len(self._keys):
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys.scatter_(2, self._places.expand_as(key_states), key_states)
        values.scatter_(2, self._places.expand_as(value_states), value_states)
        return keys[:, :, : self._limit], values[:, :, : self._limit]

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        # Zeros, not garbage: a NaN in a masked slot would poison every query of its row.
        return states.new_zeros(self.rows, states.shape[1], self.slots, states.shape[3])

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

    def release_all(self) -> None:
        """Forget the row."""
        self._free[1:] = True


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with the query heads of a group folded into query rows, so that grouped keys and values are never repeated.

    `attention_mask` is additive and folded likewise, `[rows, 1, groups x queries, keys]`; queries `[rows, heads, queries, head_dim]`.
    """
    rows, heads, queries, width = query.shape
    kv_heads = key.shape[1]
    folded = query.reshape(rows, kv_heads, heads // kv_heads * queries, width)
    out = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, heads, queries, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, slot_attention)
