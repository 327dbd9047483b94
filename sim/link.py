"""What target and draft say to each other, and when it arrives."""

from collections.abc import Sequence
from typing import NamedTuple


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
    """Target to draft, before forward `round`: the outcomes of the rows that go on, for which drafts are due, and pieces of prompts.

    sent, arrived: seconds from the start. unknown: for each row that a draft which is back does not know, the tokens to feed first, 0
    where prompts are fed whole.
    """

    round: int
    sent: float
    arrived: float
    outcomes: Sequence[Verdict] = ()
    pieces: Sequence[Piece] = ()
    unknown: tuple[int, ...] = ()


class Proposal(NamedTuple):
    """Draft to target, for one row: so many draft tokens, and where they came from (as in sim.metrics.Round)."""

    drafted: int = 0
    hit: bool | None = None
    backup: bool = False


class Answer(NamedTuple):
    """Draft to target: a proposal for each outcome. sent, arrived: seconds from the start.

    back: instead of proposals, when the target notices that the draft has died: it is back at this time.
    """

    proposals: Sequence[Proposal]
    sent: float
    arrived: float
    back: float | None = None


class Link:
    """One direction: messages arrive in order, each `delay` seconds after its last byte has left; bandwidth in bytes a second."""

    def __init__(self, delay: float, bandwidth: float | None = None) -> None:
        self._delay, self.bandwidth = delay, bandwidth
        self._free = 0.0

    def arrival(self, sent: float, size: float) -> float:
        """Send so many bytes at a time; return when they arrive."""
        if self.bandwidth is None:
            return sent + self._delay
        self._free = max(self._free, sent) + size / self.bandwidth
        return self._free + self._delay
