"""Which outcomes to draft for, where that is not written in lists: those that are likeliest."""

from collections.abc import Sequence

import numpy as np

from sim.outcomes import RANKS
from theory.check import FloatArray

# An outcome of one of several rows: the row, accepted draft tokens, the rank of the bonus.
Place = tuple[int, int, int]
# Each with its chance, the likeliest first.
Ranked = tuple[tuple[float, Place], ...]


def ranked(tables: Sequence[FloatArray]) -> Ranked:
    """All outcomes that can be at all of several rows, whose chances are [drafted+1, RANKS] each."""
    chances = np.concatenate([table.ravel() for table in tables]) if tables else np.zeros(0)
    rows = [(row, k) for row, table in enumerate(tables) for k in range(len(table))]
    order = np.argsort(-chances, kind="stable")[: np.count_nonzero(chances > 0)]
    return tuple((float(chances[at]), (*rows[at // RANKS], int(at % RANKS) + 1)) for at in order)


def as_lists(chosen: Ranked, drafted: Sequence[int]) -> list[tuple[int, ...]]:
    """The fan-outs F_0..F_drafted of each row that hold the chosen outcomes: of every position the best candidates."""
    lists = [[0] * (length + 1) for length in drafted]
    for _, (row, k, _) in chosen:
        lists[row][k] += 1
    return [tuple(fan_out) for fan_out in lists]
