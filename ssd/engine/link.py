"""Small messages with a deadline between the target's process and the draft's, on one machine or two.

A closed or silent peer, or a message that is not one of ours, raises LinkError: the caller decides what to do without the peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from sim.timeline import Span
from ssd.engine.encoding import Encoding
from ssd.engine.packed import Laws
from ssd.engine.transport import LinkError as LinkError
from ssd.engine.transport import Transport
from ssd.specs import Placement, SamplingParams

T = TypeVar("T")

# A process that sleeps wakes up some 60 us after its message has come; longer waits are too rare to be worth a core.
AWAKE_SECONDS = 1e-3

# A kind of confidence with its trials and successes in each bin (theory.calibration).
Counts = tuple[str, tuple[float, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Boot:
    """Target to draft, first of all: what to load, where, and for how much."""

    draft: str
    dtype: str
    placement: Placement
    rows: int
    max_model_len: int
    vocab_size: int
    int8: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """Draft to target: the model is loaded."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Draft to target: it cannot go on, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Setup:
    """Target to draft: how to draft from the next request on."""

    num_speculative_tokens: int
    fan_out_hit: tuple[int, ...]
    fan_out_miss: tuple[int, ...]
    backup: str
    placement: Placement
    ranking: str = "shared_noise"
    saguaro: tuple[float, ...] = ()
    budget: int = 0
    building: str = "fixed"
    calibration: tuple[Counts, ...] = ()
    # As the paper's code does it, for comparison: one row that misses has the whole batch drafted anew, hits included.
    redraft_all: bool = False
    # Which of how many workers this is: of the outcomes that one alone would cache, it caches its share.
    worker: int = 0
    workers: int = 1


@dataclass(frozen=True, slots=True)
class Start:
    """Target to draft: a request with its prompt; `end_ids` are tokens after which nothing follows. `params` are settled: the seed is
    given, and the verification is rejection or coupled. output: what it has already emitted, where it is taken up on its way."""

    request: str
    prompt: tuple[int, ...]
    end_ids: tuple[int, ...]
    params: SamplingParams
    output: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one request: `accepted` draft tokens stand and `bonus` follows them."""

    request: str
    accepted: int
    bonus: int


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Target to draft: what round `round` came to, for every request in it that goes on."""

    round: int
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """Of one request: the tokens to verify next; `hit` is None where no cache is kept, `backup` whether a backup drafted them.

    laws: what the tokens were drawn from, where the verification reads it; without them the tokens are point masses.
    """

    request: str
    tokens: tuple[int, ...] = ()
    hit: bool | None = None
    backup: bool = False
    laws: Laws | None = None


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft to target: a draft for each outcome of round `round`; now and then, what its confidence has been worth, to be told again
    should it have to be restarted."""

    round: int
    drafts: tuple[Draft, ...]
    calibration: tuple[Counts, ...] = ()


@dataclass(frozen=True, slots=True)
class BackUp:
    """Target to one of several drafts: draft by the backup for these requests, whose outcomes none of them holds; answered by Drafts."""

    round: int
    requests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """Target to each of several drafts: what the target verifies now, whoever drafted it, without laws; the next cache is for this."""

    round: int
    drafts: tuple[Draft, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Target to draft: the request has ended."""

    request: str


@dataclass(frozen=True, slots=True)
class Rehearse:
    """Target to draft: time `repeats` forwards of `tokens` queries over `context` tokens and report; 0 repeats: until the next message."""

    tokens: int
    context: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Draft to target: seconds of each forward."""

    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """Target to draft: rank each of `tokens` from place `start` on among the draft's choices after what precedes it."""

    tokens: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Scored:
    """Draft to target: the ranks, 1 for the draft's own choice, and what its confidence was worth."""

    ranks: tuple[int, ...]
    calibration: tuple[Counts, ...] = ()


@dataclass(frozen=True, slots=True)
class Ping:
    """Target to draft: return it at once, with the draft's clock (seconds from some time of its own)."""

    clock: float = 0.0


@dataclass(frozen=True, slots=True)
class TakeSpans:
    """Target to draft: hand over and forget what you were busy with."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Draft to target: what it was busy with, on the clock that both share."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Target to draft: leave."""


MESSAGES = Encoding(
    *(Boot, Ready, Failed, Setup, Start, Outcomes, Drafts, Stop, Shutdown),
    *(Rehearse, Rehearsed, Score, Scored, Ping, TakeSpans, Spans),
    *(BackUp, Sent),
)


@dataclass(slots=True)
class Traffic:
    """Messages and their size, bytes, both ways together."""

    messages: int = 0
    size: int = 0

    def count(self, data: bytes) -> None:
        """Add a message."""
        self.messages += 1
        self.size += len(data)


class Link:
    """One end of the connection."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._next: object | None = None
        self._awake = 0.0
        self.traffic = Traffic()

    def give_up_after(self, seconds: float) -> None:
        """Let a peer that stops reading, or stops in the middle of a message, be a LinkError after `seconds`."""
        self._transport.give_up_after(seconds)

    def stay_awake(self, placement: Placement) -> None:
        """Wait with open eyes at first where target and draft have no device in common: waking up takes longer than a message."""
        self._awake = 0.0 if set(placement.target) & set(placement.draft) else AWAKE_SECONDS

    def send(self, message: object) -> None:
        """Send `message`; LinkError if the peer is gone."""
        data = MESSAGES.encode(message)
        self._transport.send(data)
        self.traffic.count(data)

    def peek(self) -> object | None:
        """Return the message that `receive` would, if it is already here; asking costs microseconds."""
        if self._next is None and self._transport.ready():
            self._next = self.receive()
        return self._next

    def receive(self, deadline: float | None = None) -> object:
        """Return the next message; LinkError if none comes within `deadline` seconds (None: wait for ever)."""
        if self._next is not None:
            message, self._next = self._next, None
            return message
        if self._awake:
            self._transport.watch(self._awake if deadline is None else min(deadline, self._awake))
        data = self._transport.receive(deadline)
        self.traffic.count(data)
        try:
            return MESSAGES.decode(data)
        except Exception as error:
            # Whatever the bytes are, it is the peer's fault.
            raise LinkError(f"a malformed message ({type(error).__name__}: {error})") from error

    def expect(self, *kinds: type[T], deadline: float | None = None) -> T:
        """Return the next message, which must be of one of `kinds`; LinkError otherwise, with the reason where the peer gave one."""
        message = self.receive(deadline)
        if isinstance(message, kinds):
            return message
        if isinstance(message, Failed):
            raise LinkError(message.reason)
        raise LinkError(f"{type(message).__name__} came where {' or '.join(kind.__name__ for kind in kinds)} was due")

    def close(self) -> None:
        """Close this end; the peer finds out."""
        self._transport.close()
