"""How long a forward takes: a piecewise-linear line through measured points, one for each measured context length."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from theory import check


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of one forward as a function of its size (tokens or branches), linear between measured points.

    sizes: rising, at least one; seconds: one for each. Beyond the ends the line of the outer two points goes on, but never
    falls with size and never below 0; a single point is a constant. ValueError for unsorted or missing points.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    # A run asks for few sizes, but often.
    _known: dict[float, float] = field(default_factory=dict, init=False, repr=False, compare=False)

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

    def __call__(self, size: float, context: float = 0.0) -> float:
        """Seconds of a forward of this size, whatever the context."""
        known = self._known.get(size)
        if known is None:
            known = self._known[size] = self._between(size)
        return known

    def _between(self, size: float) -> float:
        sizes, seconds = self.sizes, self.seconds
        if size < sizes[0]:
            return max(0.0, seconds[0] + (size - sizes[0]) * max(0.0, self._slope(0)))
        left = bisect_right(sizes, size) - 1
        if size == sizes[left]:
            return seconds[left]
        if left == len(sizes) - 1:
            return seconds[-1] + (size - sizes[-1]) * max(0.0, self._slope(-2))
        return self._slope(left) * (size - sizes[left]) + seconds[left]

    def _slope(self, left: int) -> float:
        if len(self.sizes) == 1:
            return 0.0
        return (self.seconds[left + 1] - self.seconds[left]) / (self.sizes[left + 1] - self.sizes[left])


@dataclass(frozen=True, slots=True)
class LatencyByContext:
    """Seconds of one forward by its size and by its context: the tokens, over all its rows, whose keys and values it reads.

    contexts: rising, at least one; tables: one for each. Linear in the context between them and beyond the ends, where it does not fall
    and not below 0. ValueError for unsorted or missing contexts.
    """

    contexts: tuple[float, ...]
    tables: tuple[Latency, ...]

    def __post_init__(self) -> None:
        if len(self.contexts) != len(self.tables):
            raise ValueError(f"contexts={self.contexts!r} come with {len(self.tables)} tables: give one for each")
        # The same rules as for sizes.
        Latency(self.contexts, (0.0,) * len(self.contexts))

    @classmethod
    def of(cls, tables: Mapping[int, Mapping[int, float]]) -> "LatencyByContext":
        """From context -> size -> seconds, in any order."""
        contexts = sorted(tables)
        return cls(tuple(contexts), tuple(Latency.of(tables[context]) for context in contexts))

    def __call__(self, size: float, context: float = 0.0) -> float:
        """Seconds of a forward of this size that reads so many tokens."""
        contexts, last = self.contexts, len(self.contexts) - 1
        if not last:
            return self.tables[0](size)
        left = min(max(bisect_right(contexts, context) - 1, 0), last - 1)
        lower, upper = self.tables[left](size), self.tables[left + 1](size)
        slope = (upper - lower) / (contexts[left + 1] - contexts[left])
        if not contexts[0] <= context <= contexts[last]:
            slope = max(0.0, slope)
            nearest = 0 if context < contexts[0] else last
            return max(0.0, self.tables[nearest](size) + slope * (context - contexts[nearest]))
        return lower + slope * (context - contexts[left])


Seconds = Latency | LatencyByContext
