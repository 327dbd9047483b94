"""What all devices share: a clock of their own, a noisy stopwatch and the record of what they did."""

import math
from collections import defaultdict
from collections.abc import Sequence

from numpy.random import Generator

from sim.scenario import Scenario

# Device, activity, start, end, round, requests: what becomes a sim.timeline.Span.
Mark = tuple[str, str, float, float, int, tuple[str, ...]]


class Device:
    """A device of a simulated machine; what it does is in sim.target and sim.draft.

    now: its clock, seconds from the start. Between two messages nothing can come between, so a device reckons what it did until then
    without an event for each forward. What lies past `limit` is not noted: then it dies. marks: where to note the rest,
    none for nowhere. spent: seconds of each activity.
    """

    def __init__(self, name: str, scenario: Scenario, marks: list[Mark] | None, rng: Generator, residuals: Sequence[float]) -> None:
        self.name, self.scenario, self.marks, self.rng = name, scenario, marks, rng
        self.sigma, self.residuals = scenario.noise, tuple(residuals)
        self.noisy = bool(self.sigma or self.residuals)
        self.now, self.limit = 0.0, math.inf
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.names: tuple[str, ...] = ()

    def forward_seconds(self, seconds: float) -> float:
        """Seconds of one forward: its latency times a measured residual, or the scenario's noise."""
        if self.residuals:
            return seconds * self.residuals[int(self.rng.integers(len(self.residuals)))]
        if self.sigma:
            return seconds * float(self.rng.lognormal(-(self.sigma**2) / 2, self.sigma))
        return seconds

    def log(self, activity: str, start: float, number: int) -> None:
        """Note an activity of round `number` that ends now, if it took any time."""
        end = min(self.now, self.limit)
        if end > start:
            self.note((self.name, activity, start, end, number, self.names))

    def note(self, mark: Mark) -> None:
        """Note a span."""
        self.spent[mark[1]] += mark[3] - mark[2]
        if self.marks is not None:
            self.marks.append(mark)

    def rest(self, until: float, number: int, activity: str = "idle") -> None:
        """Do nothing until a later time."""
        start, self.now = self.now, max(self.now, until)
        self.log(activity, start, number)
