"""Random numbers one by one, drawn many at a time."""

from collections.abc import Callable, Iterator

import numpy as np

# A call for each number would take ten times as long.
BLOCK = 1024


def one_by_one(draw: Callable[[int], np.ndarray]) -> Iterator[float]:
    """Yield, without end, the numbers that `draw` gives by the block."""
    while True:
        yield from draw(BLOCK).tolist()
