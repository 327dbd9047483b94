"""What both devices share: a clock, a noisy stopwatch and the record of what they did."""

import simpy
from numpy.random import Generator

from sim.scenario import Scenario
from sim.timeline import Span, Timeline


class Device:
    """A device of a simulated machine; its processes are in sim.target and sim.draft."""

    name = ""

    def __init__(self, env: simpy.Environment, scenario: Scenario, timeline: Timeline, rng: Generator) -> None:
        self.env, self.scenario, self.timeline, self.rng = env, scenario, timeline, rng
        self.request = ""

    def forward_seconds(self, seconds: float) -> float:
        """Seconds of one forward: its latency times the scenario's noise."""
        sigma = self.scenario.noise
        return seconds * float(self.rng.lognormal(-(sigma**2) / 2, sigma)) if sigma else seconds

    def log(self, activity: str, start: float, number: int) -> None:
        """Record an activity of round `number` that ends now, if it took any time."""
        if self.env.now > start:
            self.timeline.add(Span(self.name, activity, start, self.env.now, number, self.request))
