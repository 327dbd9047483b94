"""All that noise can be, in finitely many cells: within a cell every comparison that matters comes out the same way.

Gumbel noise is g = -log T with independent exponential T, and argmax(log r + g) compares T_x / r_x with T_y / r_y. Scaled to sum 1, T is
uniform on the simplex, which the planes T_x r_y = T_y r_x cut into simplices; the probability of each is its volume, a determinant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise

import numpy as np

EPS = 1e-13
Cell = tuple[np.ndarray, float]


def gumbel_cells(laws: Sequence[Sequence[float]], ranked: Sequence[Sequence[float]], size: int) -> list[Cell]:
    """Noise vectors `[size]` and their probabilities: one for each set of winners under `laws` and orders under `ranked` laws."""
    simplices = [np.eye(size)]
    for normal in _planes([*laws, *ranked], size):
        simplices = [part for simplex in simplices for part in _split(simplex, normal)]
    groups: dict[tuple[int, ...], list[Cell]] = defaultdict(list)
    with np.errstate(divide="ignore"):
        scores = [np.log(law) for law in laws]
        orders = [np.log(law) for law in ranked]
    for simplex in simplices:
        noise, weight = -np.log(simplex.mean(0)), abs(np.linalg.det(simplex))
        decided = [int((row + noise).argmax()) for row in scores] + [int(x) for row in orders for x in (row + noise).argsort()]
        groups[tuple(decided)].append((noise, weight))
    return [(max(group, key=lambda cell: cell[1])[0], sum(weight for _, weight in group)) for group in groups.values()]


def _planes(laws: Iterable[Sequence[float]], size: int) -> list[np.ndarray]:
    found: dict[tuple[float, ...], np.ndarray] = {}
    for law in laws:
        for x, y in combinations(range(size), 2):
            if law[x] > 0 and law[y] > 0:
                normal = np.zeros(size)
                normal[x], normal[y] = law[y], -law[x]
                normal /= np.abs(normal).sum()
                found.setdefault(tuple(normal.round(14)), normal)
    return list(found.values())


def _split(simplex: np.ndarray, normal: np.ndarray) -> list[np.ndarray]:
    """Cut along edges that cross the plane until no simplex does."""
    value = simplex @ normal
    above, below = int(value.argmax()), int(value.argmin())
    if value[above] <= EPS or value[below] >= -EPS:
        return [simplex]
    middle = (value[above] * simplex[below] - value[below] * simplex[above]) / (value[above] - value[below])
    parts = []
    for corner in (above, below):
        part = simplex.copy()
        part[corner] = middle
        parts += _split(part, normal)
    return parts


def uniform_cells(thresholds: Iterable[float]) -> list[Cell]:
    """Numbers from [0, 1) and the probabilities of the intervals that they stand for; the first is 0 itself."""
    ends = [0.0, *sorted({t for t in thresholds if 0 < t < 1}), 1.0]
    return [(np.array(left if left == 0 else (left + right) / 2), right - left) for left, right in pairwise(ends)]
