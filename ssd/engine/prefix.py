"""Prompts, fed in pieces; and those that begin alike: a row that was left keeps its text, and a new request takes over, or copies, what it
has in common with one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

from ssd.engine.forward import SlotModel
from ssd.engine.kv import Trunk

# Of prompts, so many tokens a forward; fewer beside requests that are being decoded: their rounds are not to take much longer. The same for
# target and draft, so that the draft has read a prompt about when the target has.
PREFILL_CHUNK = 256
SHARED_CHUNK = 64
# Fewer tokens than this are fed again sooner than they are copied.
WORTH_COPYING = 16


class Row(Protocol):
    """A text with its keys and values; `age` rises from each row's last use to the next."""

    tokens: list[int]
    trunk: Trunk
    active: bool
    age: int


R = TypeVar("R", bound=Row)


def place_for(prompt: Sequence[int], rows: Sequence[R | None], model: SlotModel) -> tuple[int, Trunk]:
    """Return an idle row for a prompt and its trunk: one whose text begins alike, cut to that, else one never used or left longest ago.

    At least the prompt's last token is left to feed.
    """
    idle = [index for index, row in enumerate(rows) if row is None or not row.active]

    def merit(index: int) -> tuple[int, int]:
        row = rows[index]
        if row is None:
            return 0, 0
        same = _shared(prompt, row)
        return (same, 0) if same >= WORTH_COPYING else (0, -1 - row.age)

    index = max(idle, key=merit)
    row = rows[index]
    if row is None:
        return index, Trunk(model.slots)
    row.trunk.cut(merit(index)[0])
    return index, row.trunk


def share_prefix(row: R, index: int, rows: Sequence[R | None], model: SlotModel) -> None:
    """Copy from whichever other row has fed more of how this row's text begins, if that is worth it."""
    others = [(_shared(row.tokens, other), place) for place, other in enumerate(rows) if other is not None and place != index]
    same, source = max(others, default=(0, 0))
    begin = row.trunk.length
    if same - begin < WORTH_COPYING:
        return
    other = rows[source]
    if other is not None:
        slots = row.trunk.slots.take(same - begin)
        model.cache.copy(source, other.trunk.places[begin:same], index, slots)
        row.trunk.add(slots)


def gains_by_waiting(row: R, others: Sequence[R]) -> bool:
    """Whether another row, which is being fed in this very forward, will soon hold more of how this row's text begins."""
    return any(min(common(row.tokens, other.tokens), len(row.tokens) - 1) - row.trunk.length >= WORTH_COPYING for other in others)


def _shared(text: Sequence[int], row: Row) -> int:
    return min(common(text, row.tokens), row.trunk.length, len(text) - 1)


def common(text: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts have in common at their beginnings."""
    size = min(len(text), len(other))
    differ = np.flatnonzero(np.asarray(text[:size]) != np.asarray(other[:size]))
    return int(differ[0]) if len(differ) else size
