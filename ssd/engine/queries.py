"""What a forward feeds: the queries of some rows, packed into one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch


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


@dataclass(frozen=True, slots=True)
class FedRow:
    """One row's share of a forward: its number, its first query and how many there are, what each sees, `[count, slots]`, and the slots
    that are read."""

    index: int
    begin: int
    count: int
    visible: np.ndarray
    limit: int


@dataclass(frozen=True, slots=True)
class Fed:
    """The queries of all rows, row by row: tokens, positions, and the row and slot of each, `[n]`; and after which of them logits are
    wanted, `[wanted]`."""

    tokens: torch.Tensor
    positions: np.ndarray
    owners: np.ndarray
    slots: np.ndarray
    wanted: np.ndarray
    rows: tuple[FedRow, ...]

    @classmethod
    def of(cls, rows: Mapping[int, Queries]) -> Fed:
        """Pack the queries of each row."""
        fed, wanted, begin = [], [], 0
        for index in sorted(rows):
            queries = rows[index]
            count = len(queries.slots)
            limit = int(np.flatnonzero(queries.visible.any(axis=0))[-1]) + 1
            fed.append(FedRow(index, begin, count, np.ascontiguousarray(queries.visible), limit))
            begin += count
            wanted.append(np.arange(begin - queries.logits, begin))
        every = [rows[row.index] for row in fed]
        if len(fed) == 1:
            (only,) = every
            return cls(only.tokens, only.positions, np.full(begin, fed[0].index), only.slots, wanted[0], tuple(fed))
        return cls(
            torch.cat([queries.tokens for queries in every]),
            np.concatenate([queries.positions for queries in every]),
            np.repeat([row.index for row in fed], [row.count for row in fed]),
            np.concatenate([queries.slots for queries in every]),
            np.concatenate(wanted),
            tuple(fed),
        )
