"""What all devices share: a clock of their own, a noisy stopwatch and the record of what they did."""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.random import Generator

from sim.draws import one_by_one
from sim.scenario import Scenario

# Device, activity, start, end, round, requests: what becomes a sim.timeline.Span.
Mark = tuple[str, str, float, float, int, tuple[str, ...]]


class Device:
    """A device of a simulated machine; what it does is in sim.target and sim.draft.

    now: its clock, seconds from the start. Between two messages nothing can come between, so a device reckons what it did until then.
    What lies past `limit` is not noted: then it dies. marks: where to note the rest, none for nowhere. spent: seconds of each activity.
    heard: until when the run is known to go on; what ends later is noted once it is known to lie within the run.
    """

    heard = math.inf

    def __init__(self, name: str, scenario: Scenario, marks: list[Mark] | None, rng: Generator, residuals: Sequence[float]) -> None:
        self.name, self.scenario, self.marks = name, scenario, marks
        self.noisy = bool(scenario.noise or residuals)
        self._factors = _factors(scenario.noise, residuals, rng)
        self.now, self.limit = 0.0, math.inf
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.names: tuple[str, ...] = ()
        self.ahead: deque[Mark] = deque()

    def forward_seconds(self, seconds: float) -> float:
        """Seconds of one forward: its latency times a measured residual, or the scenario's noise."""
        return seconds * next(self._factors) if self.noisy else seconds

    def log(self, activity: str, start: float, number: int) -> None:
        """Note an activity of round `number` that ends now, if it took any time."""
        end = self.now if self.now < self.limit else self.limit
        if end <= start:
            return
        if end > self.heard:
            self.ahead.append((self.name, activity, start, end, number, self.names))
            return
        self.spent[activity] += end - start
        if self.marks is not None:
            self.marks.append((self.name, activity, start, end, number, self.names))

    def settle(self, until: float) -> None:
        """Hear that the run goes on until then."""
        self.heard = until
        while self.ahead and self.ahead[0][3] <= until:
            self._note(self.ahead.popleft())

    def finish(self, end: float) -> None:
        """Note what lies within a run that ends then."""
        for mark in self.ahead:
            if mark[2] < end:
                self._note((*mark[:3], min(mark[3], end), *mark[4:]))

    def _note(self, mark: Mark) -> None:
        self.spent[mark[1]] += mark[3] - mark[2]
        if self.marks is not None:
            self.marks.append(mark)

    def rest(self, until: float, number: int, activity: str = "idle") -> None:
        """Do nothing until a later time."""
        if until > self.now:
            start, self.now = self.now, until
            self.log(activity, start, number)


def _factors(sigma: float, residuals: Sequence[float], rng: Generator) -> Iterator[float]:
    """What the latency of each forward is multiplied with."""
    if residuals:
        return one_by_one(lambda count: np.asarray(residuals)[rng.integers(len(residuals), size=count)])
    return one_by_one(lambda count: rng.lognormal(-(sigma**2) / 2, sigma, count))
