"""The laws of draft tokens on their way to the target: the very numbers that they were drawn by, in whichever exact form is smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ssd.engine.encoding import Array

# How far from 1 rounding may bring the sum of a law.
LEEWAY = 1e-2


@dataclass(frozen=True, slots=True)
class Laws:
    """q after 0..K-1 draft tokens, in the logits' type: every probability, `values` [K * width], or those above zero with their `ids`.

    counts: [K] entries of each place, where ids are given.
    """

    width: int
    values: Array
    ids: Array | None = None
    counts: Array | None = None

    @classmethod
    def of(cls, log_q: Sequence[torch.Tensor]) -> Laws | None:
        """Pack log-probabilities, [1, width] a place; None for none."""
        if not log_q:
            return None
        q = torch.cat(list(log_q)).exp().cpu().numpy()
        support = q > 0
        if 2 * int(support.sum()) + len(q) < q.size:
            return cls(q.shape[1], q[support], np.nonzero(support)[1].astype(np.int32), support.sum(1).astype(np.int32))
        return cls(q.shape[1], q.reshape(-1))

    @property
    def places(self) -> int:
        """K."""
        return self.values.size // self.width if self.counts is None else len(self.counts)

    def check(self, tokens: Sequence[int], vocab_size: int) -> None:
        """Raise an error, of whatever kind, unless these are laws that `tokens` can have been drawn from."""
        if self.counts is not None and (self.counts < 0).any():
            raise ValueError("a place has fewer than no entries")
        q = self.dense(vocab_size)
        drawn = q.gather(1, torch.tensor(tokens)[:, None])
        if q.shape[0] != len(tokens) or not (q >= 0).all() or not (drawn > 0).all() or not ((q.sum(1) - 1).abs() < LEEWAY).all():
            raise ValueError(f"{q.shape[0]} laws of {self.width} tokens are not those of {len(tokens)} draft tokens")

    def dense(self, vocab_size: int) -> torch.Tensor:
        """Return the probabilities [K, vocab_size], zero past the draft's vocabulary."""
        values = torch.from_numpy(self.values)
        table = torch.zeros(self.places, vocab_size, dtype=values.dtype)
        if self.ids is None or self.counts is None:
            table[:, : self.width] = values.view(-1, self.width)
        else:
            rows = np.repeat(np.arange(self.places), self.counts)
            table[torch.from_numpy(rows), torch.from_numpy(self.ids.astype(np.int64))] = values
        return table
