"""When the draft is away: at given times, or with random times between failures and until repair."""

import math
from collections.abc import Iterator

from numpy.random import Generator

from sim.scenario import Scenario

Outage = tuple[float, float]
NEVER: Outage = (math.inf, math.inf)


def outages(scenario: Scenario, rng: Generator) -> Iterator[Outage]:
    """Yield (death, return) in seconds from the start, each after the one before; without end, the last ones never."""
    yield from scenario.draft_outages
    back = 0.0
    while scenario.draft_mtbf is not None:
        death = back + rng.exponential(scenario.draft_mtbf)
        back = death + rng.exponential(scenario.draft_repair_seconds)
        yield float(death), float(back)
    while True:
        yield NEVER
