"""The target's process: prefill, then rounds of waiting for a draft, verifying it and telling the outcome."""

from collections.abc import Generator
from typing import Any

import simpy
from numpy.random import Generator as Random

from sim.device import Device
from sim.link import Link, Prompt, Proposal, Steps, Verdict
from sim.metrics import Round
from sim.outcomes import Draw
from sim.scenario import Scenario
from sim.timeline import Timeline


class Target(Device):
    """Runs the target model over all requests of a scenario; without a draft (draw=None) every draft is empty."""

    name = "target"

    def __init__(
        self, env: simpy.Environment, scenario: Scenario, timeline: Timeline, rng: Random, inbox: Link, outbox: Link, draw: Draw | None
    ) -> None:
        super().__init__(env, scenario, timeline, rng)
        self.inbox, self.outbox, self.draw = inbox, outbox, draw
        self.rounds: list[Round] = []
        self.first_token_seconds: list[float] = []
        self.finished_at = 0.0

    def run(self) -> Steps:
        """Serve all requests, then tell the draft to end."""
        for number in range(self.scenario.num_requests):
            self.request = f"request-{number}"
            yield from self._serve()
        self.finished_at = self.env.now
        self.outbox.send(None)

    def _serve(self) -> Steps:
        yield from self._prefill()
        outcome = self._verdict(0, Proposal(0, None, False))
        missing = self.scenario.output_tokens - 1
        while missing > 0:
            start = self.env.now
            proposal = yield from self._ask(outcome)
            waited, verifying_since = self.env.now - start, self.env.now
            yield self.env.timeout(self.forward_seconds(self.scenario.verify(1 + proposal.drafted)))
            self.log("verify", verifying_since, outcome.round + 1)
            verified = self.env.now - verifying_since
            yield self.env.timeout(self.scenario.overhead_seconds)
            outcome = self._verdict(outcome.round + 1, proposal)
            committed = min(outcome.accepted + 1, missing)
            missing -= committed
            self.rounds.append(
                Round(self.request, proposal.drafted, outcome.accepted, committed, proposal.hit, proposal.backup, verified, waited)
            )

    def _prefill(self) -> Steps:
        start = self.env.now
        self.outbox.send(Prompt(self.request))
        yield self.env.timeout(self.forward_seconds(self.scenario.target_prefill_seconds))
        self.log("prefill", start, 0)
        self.first_token_seconds.append(self.env.now - start)

    def _ask(self, outcome: Verdict) -> Generator[simpy.Event, Any, Proposal]:
        if self.draw is None:
            return Proposal(0, None, False)
        start = self.env.now
        self.outbox.send(outcome)
        proposal: Proposal = yield self.inbox.receive()
        self.log("wait", start, outcome.round + 1)
        return proposal

    def _verdict(self, number: int, proposal: Proposal) -> Verdict:
        accepted, rank = self.draw(proposal.drafted, proposal.hit is True) if self.draw else (0, 1)
        return Verdict(number, accepted, rank)
