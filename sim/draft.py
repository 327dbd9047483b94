"""The draft's process: answer from the cache, build the next one while the target verifies, wait for the outcome."""

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import simpy
from numpy.random import Generator as Random

from sim.device import Device
from sim.latency import Latency
from sim.link import Link, Prompt, Proposal, Steps, Verdict
from sim.scenario import Scenario
from sim.timeline import Timeline
from theory.fanout import shortened


@dataclass(frozen=True, slots=True)
class Cache:
    """The outcomes being drafted for: F_k of them with k accepted, and how many tokens each has so far."""

    fan_out: tuple[int, ...]
    tokens: int

    def has(self, outcome: Verdict) -> bool:
        """Whether it holds at least a first token for this outcome."""
        return self.tokens > 0 and outcome.rank <= self.fan_out[outcome.accepted]


class Draft(Device):
    """Runs the draft model in the modes "sd" (no cache) and "ssd"."""

    name = "draft"

    def __init__(
        self, env: simpy.Environment, scenario: Scenario, timeline: Timeline, rng: Random, inbox: Link, outbox: Link, step: Latency
    ) -> None:
        super().__init__(env, scenario, timeline, rng)
        self.inbox, self.outbox, self.step = inbox, outbox, step
        self.cache = Cache((), 0)

    def run(self) -> Steps:
        """Serve until the message None arrives."""
        message = yield self.inbox.receive()
        while message is not None:
            if isinstance(message, Prompt):
                message = yield from self._start(message)
            else:
                message = yield from self._play(message)

    def _start(self, prompt: Prompt) -> Generator[simpy.Event, Any, object]:
        self.request = prompt.request
        start = self.env.now
        yield self.env.timeout(self.forward_seconds(self.scenario.draft_prefill_seconds))
        self.log("prefill", start, 0)
        # The prompt is a round with an empty draft, and its last token has just been fed.
        return (yield from self._build(0, drafted=0, hit=False, catch_up=False))

    def _play(self, outcome: Verdict) -> Generator[simpy.Event, Any, object]:
        hit = self.cache.has(outcome)
        start, K = self.env.now, self.scenario.num_speculative_tokens
        drafted = 0 if self.scenario.mode == "ssd" and self.scenario.backup == "none" and not hit else K
        for _ in range(drafted - (self.cache.tokens if hit else 0)):
            yield self.env.timeout(self.forward_seconds(self.step(1)))
        self.log("answer", start, outcome.round + 1)
        cached = self.scenario.mode == "ssd"
        self.outbox.send(Proposal(drafted, hit if cached else None, backup=cached and not hit))
        return (yield from self._build(outcome.round + 1, drafted, hit, catch_up=True))

    def _build(self, number: int, drafted: int, hit: bool, catch_up: bool) -> Generator[simpy.Event, Any, object]:
        """Build the cache for the outcome of this round until it is complete or a message comes; return that message."""
        pending = self.inbox.receive()
        if self.scenario.mode == "ssd":
            fan_out = shortened(self.scenario.fan_out_hit if hit else self.scenario.fan_out_miss, drafted)
            start = self.env.now
            # The last token must be fed first: the candidates after it are not known before.
            done = yield from self._until(pending, fan_out, catch_up)
            self.cache = Cache(fan_out, max(0, done - catch_up))
            self.log("build", start, number)
        start = self.env.now
        message: object = yield pending
        self.log("idle", start, number)
        return message

    def _until(self, pending: simpy.Event, fan_out: tuple[int, ...], catch_up: bool) -> Generator[simpy.Event, Any, int]:
        """Run the catch-up step and those of all branches until a message is pending; return how many were completed."""
        steps = [1] * catch_up + [sum(fan_out)] * self.scenario.num_speculative_tokens
        for done, branches in enumerate(steps):
            growing = fan_out if done >= catch_up else ()
            if pending.triggered or not (yield from self._interruptible(pending, self.forward_seconds(self.step(branches)), growing)):
                return done
        return len(steps)

    def _interruptible(self, pending: simpy.Event, seconds: float, growing: tuple[int, ...]) -> Generator[simpy.Event, Any, bool]:
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


def _grows(message: object, growing: tuple[int, ...]) -> bool:
    return bool(growing) and isinstance(message, Verdict) and message.rank <= growing[message.accepted]
