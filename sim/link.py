"""What target and draft say to each other, and when it arrives."""

from collections import deque
from collections.abc import Generator
from typing import Any, NamedTuple

import simpy

Steps = Generator[simpy.Event, Any, None]


class Verdict(NamedTuple):
    """The outcome of a request's round (its prompt is one, too): k accepted tokens, the rank of the bonus among its candidates.

    context: tokens of its prompt and output so far.
    """

    request: str
    accepted: int
    rank: int
    context: int = 0


class Piece(NamedTuple):
    """What the next forward feeds of a request's prompt: tokens, 0 where the prompt is fed whole, and whether it ends with them.

    context: tokens of the prompt up to and with these.
    """

    request: str
    tokens: int
    last: bool
    context: int = 0


class Turn(NamedTuple):
    """Target to draft, before forward `round`: the outcomes of the rows that go on, for which drafts are due, and a piece of a prompt.

    unknown: for each row that a draft which is back does not know, the tokens to feed first, 0 where prompts are fed whole.
    """

    round: int
    outcomes: tuple[Verdict, ...] = ()
    piece: Piece | None = None
    unknown: tuple[int, ...] = ()


class Proposal(NamedTuple):
    """Draft to target, for one row: so many draft tokens, and where they came from (as in sim.metrics.Round)."""

    drafted: int = 0
    hit: bool | None = None
    backup: bool = False


class Lost(NamedTuple):
    """Instead of proposals, when the target notices it: the draft has died, and is back at this time."""

    back: float


class Message(NamedTuple):
    """What was said, when it was sent and when it arrived, seconds from the start."""

    content: Any
    sent: float
    arrived: float


class _Arrival(simpy.Event):
    """An event that comes with a message, at its time."""

    def bring(self, message: Message) -> None:
        self._ok, self._value = True, message
        self.env.schedule(self, delay=max(0.0, message.arrived - self.env.now))


class Link:
    """One direction: messages arrive in order, each `delay` seconds after its last byte has left; bandwidth in bytes a second.

    A message costs one event. Sender and receiver keep time by what messages say, which no event rounds.
    """

    def __init__(self, env: simpy.Environment, delay: float, bandwidth: float | None = None) -> None:
        self._env, self._delay, self._bandwidth = env, delay, bandwidth
        self._free = 0.0
        self._sent: deque[_Arrival] = deque()
        self._awaited: _Arrival | None = None

    def send(self, content: object, sent: float, size: float = 0.0) -> float:
        """Send so many bytes at time `sent`, now or later, without waiting; return when they arrive."""
        left = sent
        if self._bandwidth is not None:
            self._free = left = max(self._free, sent) + size / self._bandwidth
        self._bring(Message(content, sent, left + self._delay))
        return left + self._delay

    def tell(self, content: object, at: float) -> None:
        """Let the receiver know of something at time `at`, which nobody sends: that the other end is gone."""
        self._bring(Message(content, at, at))

    def receive(self) -> simpy.Event:
        """An event that bears the next Message. One may be awaited at a time."""
        if self._sent:
            return self._sent.popleft()
        self._awaited = _Arrival(self._env)
        return self._awaited

    def _bring(self, message: Message) -> None:
        arrival = self._awaited
        if arrival is None:
            arrival = _Arrival(self._env)
            self._sent.append(arrival)
        self._awaited = None
        arrival.bring(message)
