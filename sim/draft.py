"""The draft's process: answer from the cache, build the next one while the target verifies, wait for the outcomes."""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import simpy
from numpy.random import Generator as Random

from sim.device import Device
from sim.latency import Latency
from sim.link import Link, Piece, Proposal, Steps, Turn, Verdict
from sim.scenario import Scenario
from sim.timeline import Timeline
from theory.fanout import shortened

FanOuts = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Cache:
    """The outcomes being drafted for: of each request F_k with k accepted, and how many tokens all of them have so far."""

    fan_outs: FanOuts
    tokens: int

    def has(self, outcome: Verdict) -> bool:
        """Whether it holds at least a first token for this outcome."""
        return self.tokens > 0 and _holds(self.fan_outs, outcome)


class Draft(Device):
    """Runs the draft model in the modes "sd" (no cache) and "ssd". lookup: chance for what prompt lookup finds."""

    name = "draft"

    def __init__(
        self,
        env: simpy.Environment,
        scenario: Scenario,
        timeline: Timeline,
        rng: Random,
        lookup: Random,
        inbox: Link,
        outbox: Link,
        step: Latency,
    ) -> None:
        super().__init__(env, scenario, timeline, rng)
        self.lookup, self.inbox, self.outbox, self.step, self.alone = lookup, inbox, outbox, step, scenario.draft_alone or step
        self.cache = Cache({}, 0)

    def run(self) -> Steps:
        """Serve until the message None arrives."""
        turn: Turn | None = yield self.inbox.receive()
        while turn is not None:
            proposals = yield from self._answer(turn)
            if turn.piece:
                yield from self._feed(turn.piece, turn.round)
            turn = yield from self._build(turn, proposals)

    def _answer(self, turn: Turn) -> Generator[simpy.Event, Any, Sequence[Proposal]]:
        """Send a draft for each outcome, after drafting what is missing of all that lack tokens, in one forward a step."""
        if not turn.outcomes:
            return ()
        self.request, start = ", ".join(outcome.request for outcome in turn.outcomes), self.env.now
        hits = [self.cache.has(outcome) for outcome in turn.outcomes]
        missing = [self._missing(hit) for hit in hits]
        for step in range(max(missing)):
            yield self.env.timeout(self.forward_seconds(self.alone(sum(tokens > step for tokens in missing))))
        self.log("answer", start, turn.round)
        proposals = tuple(map(self._proposal, hits))
        self.outbox.send(proposals)
        return proposals

    def _missing(self, hit: bool) -> int:
        """Tokens that the draft model has yet to draft for a row."""
        K = self.scenario.num_speculative_tokens
        if hit:
            return K - self.cache.tokens
        return K if self.scenario.mode == "sd" or self.scenario.backup == "jit" else 0

    def _proposal(self, hit: bool) -> Proposal:
        K, backup = self.scenario.num_speculative_tokens, self.scenario.backup
        if self.scenario.mode == "sd":
            return Proposal(K)
        found = hit or backup == "jit" or (backup == "ngram" and self.lookup.random() < self.scenario.ngram_found)
        return Proposal(K if found else 0, hit, backup=not hit)

    def _feed(self, piece: Piece, number: int) -> Steps:
        self.request, start = piece.request, self.env.now
        yield self.env.timeout(self.forward_seconds(self.step(piece.tokens) if piece.tokens else self.scenario.draft_prefill_seconds))
        self.log("prefill", start, number)

    def _build(self, turn: Turn, proposals: Sequence[Proposal]) -> Generator[simpy.Event, Any, Turn | None]:
        """Build the cache for the outcomes of this round until it is complete or a message comes; return that message."""
        pending = self.inbox.receive()
        if self.scenario.mode == "ssd":
            fan_outs = self._fan_outs(turn, proposals)
            self.request, start = ", ".join(fan_outs), self.env.now
            # The last token of a running row must be fed first: the candidates after it are not known before.
            catch_up = len(turn.outcomes)
            done = yield from self._until(pending, fan_outs, catch_up)
            self.cache = Cache(fan_outs, max(0, done - (catch_up > 0)))
            self.log("build", start, turn.round)
        start = self.env.now
        message: Turn | None = yield pending
        self.log("idle", start, turn.round)
        return message

    def _fan_outs(self, turn: Turn, proposals: Sequence[Proposal]) -> FanOuts:
        """Of the rows whose drafts are verified, and of a prompt that ends: a round with an empty draft."""
        rows = [(outcome.request, proposal) for outcome, proposal in zip(turn.outcomes, proposals, strict=True)]
        rows += [(turn.piece.request, Proposal())] if turn.piece and turn.piece.last else []
        after_hit, after_miss = self.scenario.fan_out_hit, self.scenario.fan_out_miss
        return {request: shortened(after_hit if proposal.hit else after_miss, proposal.drafted) for request, proposal in rows}

    def _until(self, pending: simpy.Event, fan_outs: FanOuts, catch_up: int) -> Generator[simpy.Event, Any, int]:
        """Run the catch-up step of so many rows and those of all branches until a message is pending; return how many were completed."""
        branches = sum(map(sum, fan_outs.values()))
        steps: list[tuple[int, FanOuts]] = [(catch_up, {})] if catch_up else []
        steps += [(branches, fan_outs)] * self.scenario.num_speculative_tokens if branches else []
        for done, (size, growing) in enumerate(steps):
            if pending.triggered or not (yield from self._interruptible(pending, self.forward_seconds(self.step(size)), growing)):
                return done
        return len(steps)

    def _interruptible(self, pending: simpy.Event, seconds: float, growing: FanOuts) -> Generator[simpy.Event, Any, bool]:
        """Run one forward, in which the branches of these fan-outs grow; return whether it was completed rather than given up."""
        start, forward = self.env.now, self.env.timeout(seconds)
        yield forward if self.scenario.interrupt == "step" else forward | pending
        if not forward.processed and self.scenario.interrupt == "moot" and _grows(pending.value, growing):
            yield forward
        if forward.processed or self.env.now >= start + seconds:
            return True
        layer = seconds / self.scenario.draft_layers
        begun = math.ceil((self.env.now - start) / layer)
        yield self.env.timeout(max(0.0, start + begun * layer - self.env.now))
        return begun >= self.scenario.draft_layers


def _holds(fan_outs: FanOuts, outcome: Verdict) -> bool:
    fan_out = fan_outs.get(outcome.request)
    return fan_out is not None and outcome.rank <= fan_out[outcome.accepted]


def _grows(turn: Turn | None, growing: FanOuts) -> bool:
    """Whether the true branch of some row is among these. All branches are as long, so it is short as long as any is."""
    return turn is not None and any(_holds(growing, outcome) for outcome in turn.outcomes)
