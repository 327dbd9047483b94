"""The target's process: rounds of waiting for the drafts, verifying them with a piece of a prompt beside, and telling the outcomes."""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy
from numpy.random import Generator as Random

from sim.device import Device
from sim.link import Link, Piece, Proposal, Steps, Turn, Verdict
from sim.load import Request, Served
from sim.metrics import Round, drafter
from sim.outcomes import Draw
from sim.scenario import Scenario
from sim.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Stream:
    """Where the outcomes of one row of the batch come from, whoever is in it: of the draft model's drafts, and of prompt lookup's."""

    drafted: Draw
    looked_up: Draw | None


@dataclass(slots=True)
class Row:
    """A request in the batch: tokens of its prompt that are not fed yet, tokens that it misses, its last outcome, when its tokens left."""

    request: Request
    place: int
    arrival: float
    unfed: int
    missing: int
    outcome: Verdict | None = None
    token_seconds: list[float] = field(default_factory=list)

    def served(self) -> Served:
        """The record of it."""
        asked = self.request
        return Served(asked.name, asked.prompt_tokens, asked.output_tokens, self.arrival, tuple(self.token_seconds))


class Target(Device):
    """Runs the target model over all requests of a scenario; without a draft (no streams, one a row) every draft is empty."""

    name = "target"

    def __init__(
        self,
        env: simpy.Environment,
        scenario: Scenario,
        timeline: Timeline,
        rng: Random,
        inbox: Link,
        outbox: Link,
        requests: Sequence[Request],
        streams: Sequence[Stream],
    ) -> None:
        super().__init__(env, scenario, timeline, rng)
        self.inbox, self.outbox, self.waiting, self.streams = inbox, outbox, deque(requests), streams
        self.rows: list[Row] = []
        self.rounds: list[Round] = []
        self.served: list[Served] = []
        self.number = 0

    def run(self) -> Steps:
        """Serve all requests, then tell the draft to end."""
        while self.waiting or self.rows:
            yield from self._idle()
            self._admit()
            yield from self._round()
            self.number += 1
        self.outbox.send(None)

    def _idle(self) -> Steps:
        """With nobody to serve, wait for the next request; the draft, too, stops working for those that have left."""
        start, arrival = self.env.now, self.waiting[0].arrival if self.waiting else None
        if not self.rows and arrival is not None and arrival > start:
            self.outbox.send(Turn(self.number))
            yield self.env.timeout(arrival - start)
            self.request = ""
            self.log("idle", start, self.number)

    def _admit(self) -> None:
        while self.waiting and len(self.rows) < self.scenario.batch_size and (self.waiting[0].arrival or 0.0) <= self.env.now:
            asked = self.waiting.popleft()
            place = min(set(range(self.scenario.batch_size)) - {row.place for row in self.rows})
            arrival = self.env.now if asked.arrival is None else asked.arrival
            self.rows.append(Row(asked, place, arrival, asked.prompt_tokens, asked.output_tokens))

    def _round(self) -> Steps:
        """One forward: the drafts of all running rows, and of the first prompt that waits a piece."""
        running = [row for row in self.rows if row.outcome is not None]
        feeding = next((row for row in self.rows if row.outcome is None), None)
        piece = self._piece(feeding) if feeding else None
        start = self.env.now
        proposals = yield from self._ask(running, piece)
        since = self.env.now
        tokens = sum(1 + proposal.drafted for proposal in proposals) + (piece.tokens if piece else 0)
        whole = self.scenario.target_prefill_seconds if piece else 0.0
        yield self.env.timeout(self.forward_seconds((self.scenario.verify(tokens) if tokens else 0.0) + whole))
        self.request = ", ".join(row.request.name for row in running) or (piece.request if piece else "")
        self.log("verify" if running else "prefill", since, self.number)
        verified = self.env.now - since
        if tokens:
            yield self.env.timeout(self.scenario.overhead_seconds)
        for row, proposal in zip(running, proposals, strict=True):
            self._settle(row, proposal, verified, since - start, start)
        if feeding and piece:
            feeding.unfed -= piece.tokens
            if piece.last:
                self._commit(feeding, self._verdict(feeding, Proposal()), 1)

    def _piece(self, row: Row) -> Piece:
        tokens = min(self.scenario.prompt_chunk, row.unfed)
        return Piece(row.request.name, tokens, last=tokens == row.unfed)

    def _ask(self, running: Sequence[Row], piece: Piece | None) -> Generator[simpy.Event, Any, Sequence[Proposal]]:
        """Tell the draft what happened and what comes next, and wait for the drafts of the running rows."""
        if not self.streams:
            return [Proposal()] * len(running)
        start = self.env.now
        self.outbox.send(Turn(self.number, tuple(row.outcome for row in running if row.outcome), piece))
        if not running:
            return ()
        proposals: Sequence[Proposal] = yield self.inbox.receive()
        self.request = ", ".join(row.request.name for row in running)
        self.log("wait", start, self.number)
        return proposals

    def _settle(self, row: Row, proposal: Proposal, verified: float, waited: float, start: float) -> None:
        outcome = self._verdict(row, proposal)
        committed = min(outcome.accepted + 1, row.missing)
        self.rounds.append(
            Round(
                request=row.request.name,
                drafted=proposal.drafted,
                accepted=outcome.accepted,
                committed=committed,
                hit=proposal.hit,
                backup=proposal.backup,
                verify_seconds=verified,
                wait_seconds=waited,
                start=start,
                drafter=drafter(proposal.drafted, proposal.hit, proposal.backup, self.scenario.backup),
            )
        )
        self._commit(row, outcome, committed)

    def _commit(self, row: Row, outcome: Verdict, tokens: int) -> None:
        row.outcome = outcome
        row.missing -= tokens
        row.token_seconds.append(self.env.now)
        if not row.missing:
            self.rows.remove(row)
            self.served.append(row.served())

    def _verdict(self, row: Row, proposal: Proposal) -> Verdict:
        if not self.streams:
            return Verdict(row.request.name, 0, 1)
        stream = self.streams[row.place]
        looked_up = stream.looked_up if proposal.backup and proposal.drafted else None
        accepted, rank = (looked_up or stream.drafted)(proposal.drafted, proposal.hit is True)
        return Verdict(row.request.name, accepted, rank)
