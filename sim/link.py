"""What target and draft say to each other, and how long it takes to arrive."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import simpy

Steps = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a request's round (its prompt is one, too): k accepted tokens, the rank of the bonus among its candidates."""

    request: str
    accepted: int
    rank: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What the next forward feeds of a request's prompt: tokens, 0 where the prompt is fed whole, and whether it ends with them."""

    request: str
    tokens: int
    last: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """Target to draft, before forward `round`: the outcomes of the rows that go on, for which drafts are due, and a piece of a prompt."""

    round: int
    outcomes: tuple[Verdict, ...] = ()
    piece: Piece | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft to target, for one row: so many draft tokens, and where they came from (as in sim.metrics.Round)."""

    drafted: int = 0
    hit: bool | None = None
    backup: bool = False


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
