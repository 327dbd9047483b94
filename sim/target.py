"""The target's process: rounds of waiting for the drafts, verifying them with pieces of prompts beside, and telling the outcomes."""

import heapq
import math
from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import simpy
from numpy.random import Generator as Random

from sim.device import Device, Mark
from sim.draft import Draft
from sim.link import Link, Piece, Proposal, Turn, Verdict
from sim.load import Request, Served
from sim.metrics import Kind
from sim.outcomes import Draw, Outcome, Outcomes
from sim.scenario import Scenario

# On the link: of a row's outcome, and of a prompt's token.
OUTCOME_BYTES, TOKEN_BYTES = 8, 4
NOTHING = Proposal()
# Of a row whose prompt is not fed yet.
NO_VERDICT = Verdict("", 0, 0)


@dataclass(slots=True)
class Stream:
    """Where the outcomes of one row of the batch come from, whoever is in it: of the draft model's drafts, and of prompt lookup's."""

    outcomes: Outcomes
    of_lookup: Outcomes | None
    rng: Random
    drafted: Draw = field(init=False)
    looked_up: Draw | None = field(default=None, init=False)

    def begin(self) -> None:
        """Begin a request."""
        self.drafted = self.outcomes.start(self.rng)
        self.looked_up = self.of_lookup.start(self.rng) if self.of_lookup else None


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
    outcome: Verdict = NO_VERDICT
    token_seconds: list[float] = field(default_factory=list)

    def served(self) -> Served:
        """The record of it."""
        asked = self.request
        return Served(asked.name, asked.prompt_tokens, asked.output_tokens, self.arrival, tuple(self.token_seconds))


# Of a row in a round: request, proposal, accepted, committed, seconds of the verification and of the wait, start.
Play = tuple[str, Proposal, int, int, float, float, float]


class Target(Device):
    """Runs the target model over all requests of a scenario; without a draft (and streams, one a row) every draft is empty.

    spent: also the seconds of "overhead", and where those of a round went: "draft" and "link" of its waits, "prompt" of its forwards.
    running, joining: requests that decode, and those whose prompts are not fed yet, in the order of their coming.
    """

    def __init__(
        self,
        scenario: Scenario,
        marks: list[Mark] | None,
        rng: Random,
        draft: Draft | None,
        requests: Sequence[Request],
        streams: Sequence[Stream],
    ) -> None:
        super().__init__("target", scenario, marks, rng, scenario.target_residuals)
        self.verify, self.contexts, self.overhead = scenario.verify, scenario.reads_contexts, scenario.overhead_seconds
        self.draft, self.waiting, self.streams = draft, deque(requests), streams
        self.outbox = Link(scenario.link_seconds, scenario.link_bandwidth)
        self.running: list[Row] = []
        self.joining: deque[Row] = deque()
        self.places = list(range(scenario.batch_size))
        self.plays: list[Play] | None = None if marks is None else []
        self.kinds: Counter[Kind] = Counter()
        self.verify_seconds = self.wait_seconds = 0.0
        self.served: list[Served] = []
        self.number = 0
        # Until then it does without the draft, which has been lost; what it has served meanwhile the draft does not know.
        self.back: float | None = None
        self.free_slots = math.inf if scenario.slots is None else scenario.slots

    def run(self, env: simpy.Environment) -> Generator[simpy.Event, object, None]:
        """Serve all requests. Rounds are reckoned one after another, and only where there is nobody to serve the world is waited for."""
        while self.waiting or self.running or self.joining:
            if not (self.running or self.joining):
                arrival = self.waiting[0].arrival or 0.0
                if arrival > self.now:
                    yield env.timeout(max(0.0, arrival - env.now))
                    self._idle(arrival)
            if self.waiting and self.places:
                self._admit()
            self._round()
            self.number += 1
        if self.draft is not None:
            self.draft.end(self.now)

    def _idle(self, arrival: float) -> None:
        """Have had nobody to serve until a request came; the draft, too, stopped working for those that had left."""
        if self.draft is not None and self.back is None:
            self.draft.hear(Turn(self.number, self.now, self.outbox.arrival(self.now, 0.0)))
        self.names = ()
        self.rest(arrival, self.number)

    def _admit(self) -> None:
        """Give requests that have come their rows, in their order, while there are rows and room for keys and values."""
        while self.places and self.waiting and (self.waiting[0].arrival or 0.0) <= self.now:
            needed = self._slots_of(self.waiting[0])
            if needed > self.free_slots:
                return
            asked = self.waiting.popleft()
            self.free_slots -= needed
            arrival = self.now if asked.arrival is None else asked.arrival
            self.joining.append(Row(asked, heapq.heappop(self.places), arrival, asked.prompt_tokens, asked.output_tokens))

    def _slots_of(self, request: Request) -> int:
        return self.scenario.slots_of(request.prompt_tokens, request.output_tokens)

    def _round(self) -> None:
        """One forward: the drafts of all running rows, and pieces of the prompts that wait."""
        running = self.running
        pieces = self._pieces() if self.joining else ()
        start = self.now
        if self.plays is not None:
            self.names = tuple([row.request.name for row in running])
        proposals = self._asked(running, pieces)
        since = self.now
        drafted = len(proposals)
        for proposal in proposals:
            drafted += proposal[0]
        self._forward(running, pieces, drafted)
        if pieces and not running:
            self.names = tuple([piece.request for piece in pieces])
        self.log("verify" if running else "prefill", since, self.number)
        verified, waited = self.now - since, since - start
        self.verify_seconds += len(running) * verified
        self.wait_seconds += len(running) * waited
        if drafted or any(piece.tokens for piece in pieces):
            self.now += self.overhead
            self.spent["overhead"] += self.overhead
        # Some of them leave.
        for row, proposal in zip(tuple(running), proposals, strict=True):
            accepted, committed = self._settle(row, proposal)
            if self.plays is not None:
                self.plays.append((row.request.name, proposal, accepted, committed, verified, waited, start))
        # The first ones of those that join.
        for row, piece in zip(tuple(self.joining), pieces, strict=False):
            self._fed(row, piece)

    def _pieces(self) -> list[Piece]:
        """What is fed of prompts, in the order in which they came: so many tokens, or of whole ones all that wait together, but one beside
        running rows."""
        if not self.scenario.prompt_chunk:
            rows = [self.joining[0]] if self.running else self.joining
            return [Piece(row.request.name, 0, True, row.context + row.unfed) for row in rows]
        left, pieces = self.scenario.prompt_chunk, []
        for row in self.joining:
            tokens = min(left, row.unfed)
            pieces.append(Piece(row.request.name, tokens, tokens == row.unfed, row.context + tokens))
            left -= tokens
            if not left:
                break
        return pieces

    def _forward(self, running: Sequence[Row], pieces: Sequence[Piece], drafted: int) -> None:
        """Run the forward of so many tokens of running rows, drafts and all, and of pieces."""
        verify, context = self.verify, sum([row.context for row in running]) if self.contexts else 0
        of_rows = verify(drafted, context) if drafted else 0.0
        if not pieces:
            self.now += self.forward_seconds(of_rows)
            return
        tokens = drafted + sum([piece.tokens for piece in pieces])
        reads = context + sum([piece.context for piece in pieces])
        whole = (verify(tokens, reads) if tokens else 0.0) + len(pieces) * self.scenario.target_prefill_seconds
        seconds = self.forward_seconds(whole)
        self.now += seconds
        if whole:
            self.spent["prompt"] += seconds * max(0.0, 1 - of_rows / whole)

    def _asked(self, running: Sequence[Row], pieces: Sequence[Piece]) -> Sequence[Proposal]:
        """Tell the draft what happened and what comes next, and wait for the drafts of the running rows."""
        if self.draft is None or (self.back is not None and self.now < self.back):
            return [NOTHING] * len(running)
        unknown = () if self.back is None else self._unknown()
        self.back = None
        outcomes = [row.outcome for row in running]
        size = OUTCOME_BYTES * len(outcomes) + TOKEN_BYTES * (sum(unknown) + sum([piece.tokens for piece in pieces]))
        start, there = self.now, self.outbox.arrival(self.now, size)
        answer = self.draft.hear(Turn(self.number, start, there, outcomes, pieces, unknown))
        if answer is None:
            return ()
        self.now = answer.arrived
        if self.now > start:
            self.log("wait", start, self.number)
            # A draft may turn out to be lost while the turn is on its way.
            link = min(there, self.now) - start + self.now - answer.sent
            self.spent["link"] += link
            self.spent["draft"] += self.now - start - link
        self.back = answer.back
        return answer.proposals if answer.back is None else [NOTHING] * len(running)

    def _unknown(self) -> tuple[int, ...]:
        """What a draft that is back has to be fed of each row."""
        contexts = [row.context for row in (*self.running, *self.joining) if row.context or row.outcome is not NO_VERDICT]
        return tuple(context if self.scenario.prompt_chunk else 0 for context in contexts)

    def _settle(self, row: Row, proposal: Proposal) -> tuple[int, int]:
        """Take the outcome of a draft in; return how many tokens of it were accepted, and how many are kept with the bonus."""
        accepted, rank = self._outcome(row, proposal)
        committed = accepted + 1 if accepted < row.missing else row.missing
        self.kinds[proposal.drafted, accepted if accepted < committed else committed, proposal.hit, proposal.backup] += 1
        self._commit(row, accepted, rank, committed)
        return accepted, committed

    def _fed(self, row: Row, piece: Piece) -> None:
        """Take in that a piece of a prompt was fed; its last one gives the first token."""
        row.unfed -= piece.tokens
        row.context = piece.context
        if piece.last:
            self.running.append(self.joining.popleft())
            if self.streams:
                self.streams[row.place].begin()
            self._commit(row, *self._outcome(row, NOTHING), 1)

    def _commit(self, row: Row, accepted: int, rank: int, tokens: int) -> None:
        row.missing -= tokens
        row.context += tokens
        row.outcome = Verdict(row.request.name, accepted, rank, row.context)
        row.token_seconds.append(self.now)
        if not row.missing:
            self.running.remove(row)
            heapq.heappush(self.places, row.place)
            self.free_slots += self._slots_of(row.request)
            self.served.append(row.served())

    def _outcome(self, row: Row, proposal: Proposal) -> Outcome:
        if self.draft is None:
            return 0, 1
        stream, drafted = self.streams[row.place], proposal.drafted
        draw = stream.looked_up if stream.looked_up and proposal.backup and drafted else stream.drafted
        return draw(drafted, proposal.hit is True)
