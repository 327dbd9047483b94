"""What target and draft say to each other, and how long it takes to arrive."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import simpy

Steps = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Target to draft: a request begins."""

    request: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Target to draft: the outcome of a round (0 is the prefill): k accepted tokens, the rank of the bonus among its candidates."""

    round: int
    accepted: int
    rank: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft to target: so many draft tokens, and where they came from (as in sim.metrics.Round)."""

    drafted: int
    hit: bool | None
    backup: bool


class Link:
    """One direction: messages arrive in order, `delay` seconds after they were sent."""

    def __init__(self, env: simpy.Environment, delay: float) -> None:
        self._env, self._delay, self._arrived = env, delay, simpy.Store(env)

    def send(self, message: object) -> None:
        """Send without waiting."""
        self._env.process(self._deliver(message))

    def receive(self) -> simpy.Event:
        """An event that bears the next message; it may be awaited later."""
        return self._arrived.get()

    def _deliver(self, message: object) -> Steps:
        yield self._env.timeout(self._delay)
        yield self._arrived.put(message)
