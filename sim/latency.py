"""How long a forward takes: a piecewise-linear line through measured points."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from theory import check


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of one forward as a function of its size (tokens or branches), linear between measured points.

    sizes: rising, at least one; seconds: one for each. Beyond the ends the line of the outer two points goes on, but never
    falls with size and never below 0; a single point is a constant. ValueError for unsorted or missing points.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise ValueError(f"sizes={self.sizes!r} and seconds={self.seconds!r} must be of one length, at least 1")
        if any(later <= earlier for earlier, later in zip(self.sizes, self.sizes[1:], strict=False)):
            raise ValueError(f"sizes={self.sizes!r} must rise: sort the points and keep one for each size")
        check.non_negative("seconds", self.seconds)

    @classmethod
    def of(cls, points: Mapping[int, float] | Mapping[float, float]) -> "Latency":
        """From size -> seconds, in any order."""
        sizes, seconds = zip(*sorted(points.items()), strict=True) if points else ((), ())
        return cls(sizes, seconds)

    @classmethod
    def constant(cls, seconds: float) -> "Latency":
        """The same seconds for every size."""
        return cls((1.0,), (seconds,))

    def __call__(self, size: float) -> float:
        """Seconds of a forward of this size."""
        if size < self.sizes[0]:
            return max(0.0, self.seconds[0] + (size - self.sizes[0]) * self._slope(0))
        if size > self.sizes[-1]:
            return self.seconds[-1] + (size - self.sizes[-1]) * self._slope(-2)
        return float(np.interp(size, self.sizes, self.seconds))

    def _slope(self, left: int) -> float:
        if len(self.sizes) == 1:
            return 0.0
        return max(0.0, (self.seconds[left + 1] - self.seconds[left]) / (self.sizes[left + 1] - self.sizes[left]))
