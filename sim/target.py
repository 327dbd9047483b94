"""The target's process: rounds of waiting for the drafts, verifying them with a piece of a prompt beside, and telling the outcomes."""

import math
from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy
from numpy.random import Generator as Random

from sim.device import Device, Mark
from sim.link import Link, Lost, Message, Piece, Proposal, Steps, Turn, Verdict
from sim.load import Request, Served
from sim.metrics import Kind
from sim.outcomes import Draw
from sim.scenario import Scenario

# On the link: of a row's outcome, and of a prompt's token.
OUTCOME_BYTES, TOKEN_BYTES = 8, 4
NOTHING = Proposal()


@dataclass(frozen=True, slots=True)
class Stream:
    """Where the outcomes of one row of the batch come from, whoever is in it: of the draft model's drafts, and of prompt lookup's."""

    drafted: Draw
    looked_up: Draw | None


@dataclass(slots=True)
class Row:
    """A request in the batch: tokens of its prompt that are not fed yet, tokens that it misses, its last outcome, when its tokens left.

    context: tokens of it that have been fed or decoded.
    """

    request: Request
    place: int
    arrival: float
    unfed: int
    missing: int
    context: int = 0
    outcome: Verdict | None = None
    token_seconds: list[float] = field(default_factory=list)

    def served(self) -> Served:
        """The record of it."""
        asked = self.request
        return Served(asked.name, asked.prompt_tokens, asked.output_tokens, self.arrival, tuple(self.token_seconds))


# Of a row in a round: request, proposal, accepted, committed, seconds of the verification and of the wait, start.
Play = tuple[str, Proposal, int, int, float, float, float]


class Target(Device):
    """Runs the target model over all requests of a scenario; without a draft (no streams, one a row) every draft is empty.

    spent: also the seconds of "overhead", and where those of a round went: "draft" and "link" of its waits, "prompt" of its forwards.
    """

    def __init__(
        self,
        scenario: Scenario,
        marks: list[Mark] | None,
        rng: Random,
        inbox: Link,
        outbox: Link,
        requests: Sequence[Request],
        streams: Sequence[Stream],
    ) -> None:
        super().__init__("target", scenario, marks, rng, scenario.target_residuals)
        self.inbox, self.outbox, self.waiting, self.streams = inbox, outbox, deque(requests), streams
        self.rows: list[Row] = []
        self.plays: list[Play] | None = None if marks is None else []
        self.kinds: Counter[Kind] = Counter()
        self.verify_seconds = self.wait_seconds = 0.0
        self.served: list[Served] = []
        self.number = 0
        # Until then it does without the draft, which has been lost; what it has served meanwhile the draft does not know.
        self.back: float | None = None
        self.free_slots = math.inf if scenario.slots is None else scenario.slots

    def run(self) -> Steps:
        """Serve all requests, then tell the draft to end."""
        while self.waiting or self.rows:
            self._idle()
            self._admit()
            yield from self._round()
            self.number += 1
        self.outbox.send(None, self.now)

    def _idle(self) -> None:
        """With nobody to serve, wait for the next request; the draft, too, stops working for those that have left."""
        arrival = self.waiting[0].arrival if self.waiting else None
        if not self.rows and arrival is not None and arrival > self.now:
            if self.back is None:
                self.outbox.send(Turn(self.number), self.now)
            self.names = ()
            self.rest(arrival, self.number)

    def _admit(self) -> None:
        """Give requests that have come their rows, in their order, while there are rows and room for keys and values."""
        while self.waiting and len(self.rows) < self.scenario.batch_size and (self.waiting[0].arrival or 0.0) <= self.now:
            needed = self._slots_of(self.waiting[0])
            if needed > self.free_slots:
                return
            asked = self.waiting.popleft()
            self.free_slots -= needed
            place = min(set(range(self.scenario.batch_size)) - {row.place for row in self.rows})
            arrival = self.now if asked.arrival is None else asked.arrival
            self.rows.append(Row(asked, place, arrival, asked.prompt_tokens, asked.output_tokens))

    def _slots_of(self, request: Request) -> int:
        return self.scenario.slots_of(request.prompt_tokens, request.output_tokens)

    def _round(self) -> Steps:
        """One forward: the drafts of all running rows, and of the first prompt that waits a piece."""
        running = [row for row in self.rows if row.outcome is not None]
        feeding = next((row for row in self.rows if row.outcome is None), None) if len(running) < len(self.rows) else None
        piece = self._piece(feeding) if feeding else None
        start, self.names = self.now, tuple([row.request.name for row in running])
        proposals = yield from self._ask(running, piece)
        waited, since = self.now - start, self.now
        drafted = len(proposals) + sum([proposal.drafted for proposal in proposals])
        tokens = drafted + (piece.tokens if piece else 0)
        self._forward(running, piece, drafted)
        if piece and not running:
            self.names = (piece.request,)
        self.log("verify" if running else "prefill", since, self.number)
        verified = self.now - since
        if tokens:
            self.now += self.scenario.overhead_seconds
            self.spent["overhead"] += self.scenario.overhead_seconds
        for row, proposal in zip(running, proposals, strict=True):
            self._settle(row, proposal, verified, waited, start)
        if feeding and piece:
            feeding.unfed -= piece.tokens
            feeding.context = piece.context
            if piece.last:
                self._commit(feeding, self._verdict(feeding, NOTHING), 1)

    def _piece(self, row: Row) -> Piece:
        tokens = min(self.scenario.prompt_chunk, row.unfed)
        whole = not self.scenario.prompt_chunk
        return Piece(row.request.name, tokens, whole or tokens == row.unfed, row.context + (row.unfed if whole else tokens))

    def _forward(self, running: Sequence[Row], piece: Piece | None, drafted: int) -> None:
        """Run the forward of so many tokens of running rows, drafts and all, and a piece."""
        verify, context = self.scenario.verify, sum([row.context for row in running])
        of_rows = verify(drafted, context) if drafted else 0.0
        whole = of_rows
        if piece:
            tokens = drafted + piece.tokens
            whole = (verify(tokens, context + piece.context) if tokens else 0.0) + self.scenario.target_prefill_seconds
        seconds = self.forward_seconds(whole)
        self.now += seconds
        if piece and whole:
            self.spent["prompt"] += seconds * max(0.0, 1 - of_rows / whole)

    def _ask(self, running: Sequence[Row], piece: Piece | None) -> Generator[simpy.Event, Any, Sequence[Proposal]]:
        """Tell the draft what happened and what comes next, and wait for the drafts of the running rows."""
        empty = [NOTHING] * len(running)
        if not self.streams or (self.back is not None and self.now < self.back):
            return empty
        unknown = () if self.back is None else self._unknown()
        self.back = None
        outcomes = tuple([row.outcome for row in running if row.outcome])
        size = OUTCOME_BYTES * len(outcomes) + TOKEN_BYTES * (sum(unknown) + (piece.tokens if piece else 0))
        start = self.now
        there = self.outbox.send(Turn(self.number, outcomes, piece, unknown), start, size)
        if not running and not (piece and self.scenario.one_device):
            return empty
        message: Message = yield self.inbox.receive()
        self.now = message.arrived
        self.log("wait", start, self.number)
        # A draft may turn out to be lost while the turn is on its way.
        link = min(there, message.arrived) - start + message.arrived - message.sent
        self.spent["link"] += link
        self.spent["draft"] += message.arrived - start - link
        if isinstance(message.content, Lost):
            self.back = message.content.back
            return empty
        proposals: Sequence[Proposal] = message.content
        return proposals

    def _unknown(self) -> tuple[int, ...]:
        """What a draft that is back has to be fed of each row."""
        contexts = [row.context for row in self.rows if row.outcome is not None or row.context]
        return tuple(context if self.scenario.prompt_chunk else 0 for context in contexts)

    def _settle(self, row: Row, proposal: Proposal, verified: float, waited: float, start: float) -> None:
        outcome = self._verdict(row, proposal)
        accepted = outcome.accepted
        committed = min(accepted + 1, row.missing)
        self.kinds[proposal.drafted, min(accepted, committed), proposal.hit, proposal.backup] += 1
        self.verify_seconds += verified
        self.wait_seconds += waited
        if self.plays is not None:
            self.plays.append((row.request.name, proposal, accepted, committed, verified, waited, start))
        self._commit(row, outcome, committed)

    def _commit(self, row: Row, outcome: Verdict, tokens: int) -> None:
        row.missing -= tokens
        row.context += tokens
        row.outcome = outcome
        row.token_seconds.append(self.now)
        if not row.missing:
            self.rows.remove(row)
            self.free_slots += self._slots_of(row.request)
            self.served.append(row.served())

    def _verdict(self, row: Row, proposal: Proposal) -> Verdict:
        if not self.streams:
            return Verdict(row.request.name, 0, 1)
        stream = self.streams[row.place]
        draw = stream.looked_up if proposal.backup and proposal.drafted and stream.looked_up else stream.drafted
        accepted, rank = draw(proposal.drafted, proposal.hit is True)
        return Verdict(row.request.name, accepted, rank, row.context + min(accepted + 1, row.missing))
