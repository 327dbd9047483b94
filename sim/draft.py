"""The draft: answer from the cache, build the next one while the target verifies, wait for the outcomes; on one device or several."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from numpy.random import Generator as Random

from sim.device import Device, Mark
from sim.link import Link, Lost, Message, Piece, Proposal, Steps, Turn, Verdict
from sim.outages import Outage
from sim.scenario import Scenario
from theory.fanout import shortened

FanOuts = Mapping[str, tuple[int, ...]]
_shortened = cache(shortened)


class DraftDevice(Device):
    """One draft device: its share of the branches of the speculation cache, and how many tokens these have."""

    branches, tokens, catch_up, context, round = 0, 0, 0, 0, 0

    def __init__(self, name: str, scenario: Scenario, marks: list[Mark] | None, rng: Random) -> None:
        super().__init__(name, scenario, marks, rng, scenario.draft_residuals)
        # What it did after the message that it last heard of was sent: the run may be over before.
        self.ahead: deque[Mark] = deque()
        self.heard = 0.0

    def note(self, mark: Mark) -> None:
        """Note a span, once it is sure to lie within the run."""
        if mark[3] <= self.heard:
            super().note(mark)
        else:
            self.ahead.append(mark)

    def settle(self, until: float) -> None:
        """Hear that the run goes on until then."""
        self.heard = until
        while self.ahead and self.ahead[0][3] <= until:
            super().note(self.ahead.popleft())

    def draft(self, missing: Sequence[int], context: int, number: int) -> None:
        """Draft what rows lack, so many tokens each, in one forward a step."""
        start, alone, most = self.now, self.scenario.draft_alone or self.scenario.draft_step, max(missing)
        assert alone is not None
        for step in range(most):
            self.now += self.forward_seconds(alone(sum([tokens > step for tokens in missing]), context))
        self.log("answer", start, number)

    def feed(self, tokens: int, context: int, number: int) -> None:
        """Feed tokens of a prompt, or where prompts are fed whole one prompt."""
        start, step = self.now, self.scenario.draft_step
        assert step is not None
        self.now += self.forward_seconds(step(tokens, context) if tokens else self.scenario.draft_prefill_seconds)
        self.log("prefill", start, number)

    def build(self, until: float, grows: bool) -> None:
        """Play the build under way until a message comes, and wait for it.

        grows: whether the message says that a branch of this device is the true one.
        """
        if self.scenario.mode == "ssd":
            start = self.now
            # A build does not begin where the message is there already.
            done = self._steps(until, grows) if until > start else 0
            self.tokens = max(0, done - (self.catch_up > 0))
            self.log("build", start, self.round)
        if until > self.now:
            self.rest(until, self.round)

    def _steps(self, until: float, grows: bool) -> int:
        """Run the catch-up step and those of all branches until a message comes; return how many were completed."""
        step, done, size = self.scenario.draft_step, 0, self.branches
        assert step is not None
        if self.catch_up:
            if not self._forward(until, step(self.catch_up, self.context), False):
                return 0
            done = 1
        each = step(size, self.context) if size else 0.0
        for _ in range(self.scenario.num_speculative_tokens if size else 0):
            if until < self.now or not self._forward(until, each, grows):
                break
            done += 1
        return done

    def _forward(self, until: float, latency: float, grows: bool) -> bool:
        """Run one forward; return whether it was completed rather than given up for a message."""
        seconds, interrupt = self.forward_seconds(latency) if self.noisy else latency, self.scenario.interrupt
        if until >= self.now + seconds or interrupt == "step" or (interrupt == "moot" and grows):
            self.now += seconds
            return True
        layer = seconds / self.scenario.draft_layers
        begun = math.ceil((until - self.now) / layer)
        self.now = until + max(0.0, self.now + begun * layer - until)
        return begun >= self.scenario.draft_layers


class Draft:
    """Runs the draft model in the modes "sd" (no cache) and "ssd" on its devices.

    The branches of every row are dealt out to the devices; an outcome is answered by the device that it was dealt to, one outside of the
    cache by the devices in turn, and all go on once all rows are answered. An outage strikes all devices. lookup: chance for what prompt
    lookup finds.
    """

    def __init__(
        self, scenario: Scenario, devices: Sequence[DraftDevice], lookup: Random, outages: Iterator[Outage], inbox: Link, outbox: Link
    ) -> None:
        self.scenario, self.devices, self.lookup, self.outages = scenario, devices, lookup, outages
        self.inbox, self.outbox = inbox, outbox
        self.fan_outs: FanOuts = {}
        self.firsts: dict[str, int] = {}
        K, backs_up = scenario.num_speculative_tokens, scenario.backup == "jit"
        self.on_hit, self.looked_up = Proposal(K, True), Proposal(K, False, True)
        self.on_miss = Proposal(K) if scenario.mode == "sd" else Proposal(K if backs_up else 0, False, True)
        # When it is back, known once the target has noticed that it was away.
        self.back: float | None = None
        self._await_outage(0.0)

    def run(self) -> Steps:
        """Serve until the message None arrives."""
        message: Message = yield self.inbox.receive()
        while message.content is not None:
            self._hear(message.content, message)
            message = yield self.inbox.receive()
        self._end(message.sent)

    def _hear(self, turn: Turn, message: Message) -> None:
        for device in self.devices:
            device.settle(message.sent)
        if self.back is not None:
            self._return(self.back)
        dealt = [self._dealt(place, outcome) for place, outcome in enumerate(turn.outcomes)]
        expected = bool(dealt) or (turn.piece is not None and self.scenario.one_device)
        if self.outage[0] <= message.arrived:
            self._die()
        else:
            growing = {index for index, cached in dealt if cached}
            for index, device in enumerate(self.devices):
                device.build(message.arrived, index in growing)
            proposals, ready = self._answer(turn, dealt)
            if ready <= self.outage[0]:
                if expected:
                    self.outbox.send(proposals, ready, self.scenario.draft_token_bytes * sum(each.drafted for each in proposals))
                self._plan(turn, proposals, ready)
                return
            self._die()
        if expected:
            notice = max(self.outage[0], message.sent) + self.scenario.lost_after_seconds
            self.back = max(self.outage[1], notice)
            self.outbox.tell(Lost(self.back), notice)

    def _dealt(self, place: int, outcome: Verdict) -> tuple[int, bool]:
        """Which device is to answer for an outcome, and whether a branch of it was begun for that."""
        fan_out = self.fan_outs.get(outcome.request)
        if fan_out is None or outcome.rank > fan_out[outcome.accepted]:
            return place % len(self.devices), False
        if len(self.devices) == 1:
            return 0, True
        branch = self.firsts[outcome.request] + sum(fan_out[: outcome.accepted]) + outcome.rank - 1
        return branch % len(self.devices), True

    def _answer(self, turn: Turn, dealt: Sequence[tuple[int, bool]]) -> tuple[tuple[Proposal, ...], float]:
        """Draft what is missing of the rows that lack tokens; return a proposal for each outcome, and when the last one is ready."""
        K, drafts = self.scenario.num_speculative_tokens, self.scenario.mode == "sd" or self.scenario.backup == "jit"
        hits = [cached and self.devices[index].tokens > 0 for index, cached in dealt]
        ready = self.devices[0].now
        if turn.unknown and drafts:
            self._feed(turn.unknown, turn)
        for device, its in zip(self.devices, self._shares(dealt), strict=True):
            if its:
                outcomes = [turn.outcomes[place] for place in its]
                device.names = tuple([outcome.request for outcome in outcomes])
                missing = [K - device.tokens if hits[place] else K * drafts for place in its]
                device.draft(missing, sum([outcome.context for outcome in outcomes]), turn.round)
                ready = max(ready, device.now)
        if turn.unknown and not drafts:
            self._feed(turn.unknown, turn)
        if turn.piece and self.scenario.one_device:
            self._feed_piece(turn.piece, turn)
            ready = self.devices[0].now
        return tuple([self.on_hit if hit else self._on_miss() for hit in hits]), ready

    def _shares(self, dealt: Sequence[tuple[int, bool]]) -> list[Sequence[int]]:
        """For each device the places of the outcomes that it is to answer for."""
        if len(self.devices) == 1:
            return [range(len(dealt))]
        return [[place for place, (whose, _) in enumerate(dealt) if whose == index] for index in range(len(self.devices))]

    def _on_miss(self) -> Proposal:
        looks_up = self.scenario.mode == "ssd" and self.scenario.backup == "ngram"
        return self.looked_up if looks_up and self.lookup.random() < self.scenario.ngram_found else self.on_miss

    # What follows an answer

    def _plan(self, turn: Turn, proposals: Sequence[Proposal], ready: float) -> None:
        """Tell each other the drafts, feed a piece of a prompt, and begin to build for the outcomes of this round."""
        if len(self.devices) > 1:
            for device in self.devices:
                device.rest(ready + self.scenario.link_seconds, turn.round)
        if turn.piece and not self.scenario.one_device:
            self._feed_piece(turn.piece, turn)
        for device in self.devices:
            device.round = turn.round
        if self.scenario.mode == "ssd":
            self._deal(turn, proposals)

    def _deal(self, turn: Turn, proposals: Sequence[Proposal]) -> None:
        """Deal the branches out to the devices."""
        context = sum(outcome.context for outcome in turn.outcomes) + (turn.piece.context if turn.piece else 0)
        self.fan_outs = self._fan_outs(turn, proposals, context)
        dealt, count, self.firsts = 0, len(self.devices), {}
        for request, fan_out in self.fan_outs.items():
            self.firsts[request] = dealt
            dealt += sum(fan_out)
        for index, device in enumerate(self.devices):
            # The last token of a running row must be fed first: the candidates after it are not known before.
            device.catch_up, device.branches, device.context = len(turn.outcomes), -(-(dealt - index) // count), context
            device.names = tuple(self.fan_outs)

    def _fan_outs(self, turn: Turn, proposals: Sequence[Proposal], context: int) -> FanOuts:
        """Of the rows whose drafts are verified, and of a prompt that ends: a round with an empty draft; as many as memory has room for."""
        rows = [(outcome.request, proposal) for outcome, proposal in zip(turn.outcomes, proposals, strict=True)]
        rows += [(turn.piece.request, Proposal())] if turn.piece and turn.piece.last else []
        after_hit, after_miss = self.scenario.fan_out_hit, self.scenario.fan_out_miss
        found = {request: _shortened(after_hit if proposal.hit else after_miss, proposal.drafted) for request, proposal in rows}
        if self.scenario.draft_slots is None:
            return found
        room = max(0, self.scenario.draft_slots - context) // self.scenario.num_speculative_tokens
        return fitting(found, room * len(self.devices))

    def _feed_piece(self, piece: Piece, turn: Turn) -> None:
        for device in self.devices:
            device.names = (piece.request,)
            device.feed(piece.tokens, piece.context, turn.round)

    def _feed(self, prompts: Sequence[int], turn: Turn) -> None:
        """Feed rows from their beginnings."""
        for device in self.devices:
            device.names = tuple(outcome.request for outcome in turn.outcomes)
            for tokens in prompts:
                device.feed(tokens, tokens, turn.round)

    # Being away

    def _await_outage(self, since: float) -> None:
        """Look forward to the next outage; those that would strike while it is away do not."""
        self.outage = next(outage for outage in self.outages if outage[0] >= since)
        for device in self.devices:
            device.limit = self.outage[0]

    def _die(self) -> None:
        """Give up whatever was being done at the outage's beginning, and forget everything."""
        death = self.outage[0]
        for device in self.devices:
            device.build(death, False)
            device.now, device.tokens, device.branches, device.catch_up = death, 0, 0, 0
        self.fan_outs = {}

    def _return(self, back: float) -> None:
        self.back = None
        self._await_outage(back)
        for device in self.devices:
            device.rest(back, device.round, "lost")

    def _end(self, end: float) -> None:
        """Account for the time until the last request has left, when the draft may still be working."""
        died = self.outage[0] <= end
        if died:
            self._die()
        for device in self.devices:
            if died:
                device.limit = math.inf
                device.rest(min(self.back or end, end), device.round, "lost")
            device.settle(end)
            device.build(end, False)
            for name, activity, start, _, number, names in device.ahead:
                if start < end:
                    Device.note(device, (name, activity, start, end, number, names))


def fitting(fan_outs: FanOuts, budget: int) -> FanOuts:
    """Fan-outs with no more branches than the budget: candidates of the highest rank are left out first, in all rows alike."""
    if sum(map(sum, fan_outs.values())) <= budget:
        return fan_outs
    rank = 0
    while sum(min(F, rank + 1) for fan_out in fan_outs.values() for F in fan_out) <= budget:
        rank += 1
    left = budget - sum(min(F, rank) for fan_out in fan_outs.values() for F in fan_out)
    found = {}
    for request, fan_out in fan_outs.items():
        cut = []
        for F in fan_out:
            further = left > 0 and rank < F
            left -= further
            cut.append(min(F, rank) + further)
        found[request] = tuple(cut)
    return found
