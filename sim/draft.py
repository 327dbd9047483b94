"""The draft: answer from the cache, build the next one while the target verifies, wait for the outcomes; on one device or several."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from numpy.random import Generator as Random

from sim.choice import as_lists, ranked
from sim.device import Device, Mark
from sim.draws import one_by_one
from sim.link import Answer, Link, Proposal, Turn, Verdict
from sim.outages import Outage
from sim.scenario import Scenario
from theory.check import FloatArray
from theory.fanout import shortened

FanOuts = Mapping[str, tuple[int, ...]]
# The index of a device, and whether it holds a branch.
Owner = tuple[int, bool]


class DraftDevice(Device):
    """One draft device: its share of the branches of the speculation cache, how many tokens these have, and whether their last is fed."""

    heard = 0.0
    branches, tokens, catch_up, context, round = 0, 0, 0, 0, 0
    fed = False

    def __init__(self, name: str, scenario: Scenario, marks: list[Mark] | None, rng: Random) -> None:
        super().__init__(name, scenario, marks, rng, scenario.draft_residuals)
        assert scenario.draft_step is not None
        self.step, self.alone = scenario.draft_step, scenario.draft_alone or scenario.draft_step

    def draft(self, missing: Sequence[int], context: int, number: int) -> None:
        """Draft what rows lack, so many tokens each, in one forward a step."""
        start, done = self.now, 0
        for tokens in sorted(set(missing)):
            rows = sum([lacking > done for lacking in missing])
            self.run(self.alone(rows, context), tokens - done)
            done = tokens
        self.log("answer", start, number)

    def feed(self, tokens: int, context: int, number: int) -> None:
        """Feed tokens of a prompt, or where prompts are fed whole one prompt."""
        start = self.now
        self.run(self.step(tokens, context) if tokens else self.scenario.draft_prefill_seconds)
        self.log("prefill", start, number)

    def build(self, until: float, grows: bool) -> None:
        """Play the build under way until a message comes, and wait for it.

        grows: whether the message says that a branch of this device is the true one.
        """
        if self.scenario.mode == "ssd":
            start = self.now
            # A build does not begin where the message is there already.
            self.tokens = self._grown(until, grows) if until > start else 0
            self.fed = self.tokens == self.scenario.num_speculative_tokens and self._feeds(until)
            if self.now > start:
                self.log("build", start, self.round)
        if until > self.now:
            self.rest(until, self.round)

    def forget(self) -> None:
        """Have nothing cached, and nothing to build."""
        self.tokens = self.branches = self.catch_up = 0
        self.fed = False

    def _feeds(self, until: float) -> bool:
        """Feed the last token of every branch, so that there is nothing to catch up with should it come true, where there is time."""
        latency = self.step(self.branches, self.context)
        return self.now + latency <= until and self._forward(until, latency, False)

    def _grown(self, until: float, grows: bool) -> int:
        """Run the step that catches up and those of all branches until a message comes; return the tokens that each branch then has."""
        if self.catch_up and not self._forward(until, self.step(self.catch_up, self.context), False):
            return 0
        if not self.branches:
            return 0
        self.now += self.scenario.draft_plan_seconds
        if self._late(until, grows):
            return 0
        K, each = self.scenario.num_speculative_tokens, self.step(self.branches, self.context)
        if not self.noisy and self.now + K * each <= until:
            self.run(each, K)
            return K
        tokens = 0
        while tokens < K and (until >= self.now or not tokens) and self._forward(until, each, grows):
            tokens += 1
        return tokens

    def _late(self, until: float, grows: bool) -> bool:
        """Whether what came while the host was choosing keeps the first step from beginning; under "moot" not one of a true branch."""
        return until < self.now and not (grows and self.scenario.interrupt == "moot")

    def run(self, latency: float, times: int = 1) -> None:
        """Run forwards that nothing interrupts."""
        self.now += sum([self.forward_seconds(latency) for _ in range(times)]) if self.noisy else latency * times

    def _forward(self, until: float, latency: float, grows: bool) -> bool:
        """Run one forward; return whether it was completed rather than given up for a message."""
        seconds, interrupt = self.forward_seconds(latency), self.scenario.interrupt
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

    def __init__(self, scenario: Scenario, devices: Sequence[DraftDevice], lookup: Random, outages: Iterator[Outage], outbox: Link) -> None:
        self.scenario, self.devices, self.lookup, self.outages, self.outbox = scenario, devices, one_by_one(lookup.random), outages, outbox
        self.caches, self.one_device, self.contexts = scenario.mode == "ssd", scenario.one_device, scenario.reads_contexts
        self.fan_outs: FanOuts = {}
        self.firsts: dict[str, int] = {}
        self.K = K = scenario.num_speculative_tokens
        self.drafts = not self.caches or scenario.backup == "jit"
        self.looks_up = self.caches and scenario.backup == "ngram"
        self.on_hit, self.looked_up = Proposal(K, True), Proposal(K, False, True)
        self.on_miss = Proposal(K if self.drafts else 0, False, True) if self.caches else Proposal(K)
        self._fan_out, self._chosen = cache(self._listed), cache(self._likeliest)
        # When it is back, known once the target has noticed that it was away.
        self.back: float | None = None
        self._await_outage(0.0)

    def hear(self, turn: Turn) -> Answer | None:
        """Play on until a turn has arrived and been answered; return the answer, none where no draft is due."""
        for device in self.devices:
            device.settle(turn.sent)
        if self.back is not None:
            self._return(self.back)
        expected = bool(turn.outcomes) or bool(turn.pieces and self.one_device)
        if self.outage[0] <= turn.arrived:
            self._die()
        else:
            owners = self._built(turn)
            proposals, ready = self._answer(turn, owners)
            if ready <= self.outage[0]:
                self._plan(turn, proposals, ready, owners)
                return self._sent(proposals, ready) if expected else None
            self._die()
        if not expected:
            return None
        notice = max(self.outage[0], turn.sent) + self.scenario.lost_after_seconds
        self.back = max(self.outage[1], notice)
        return Answer((), notice, notice, self.back)

    def _sent(self, proposals: Sequence[Proposal], ready: float) -> Answer:
        size = self.scenario.draft_token_bytes * sum([each.drafted for each in proposals]) if self.outbox.bandwidth else 0.0
        return Answer(proposals, ready, self.outbox.arrival(ready, size))

    def _built(self, turn: Turn) -> list[Owner]:
        """Play the builds under way until the turn arrives; return who is to answer for each outcome."""
        owners = self._owners(turn.outcomes)
        for index, device in enumerate(self.devices):
            device.build(turn.arrived, (index, True) in owners)
        return owners

    def _owners(self, outcomes: Sequence[Verdict]) -> list[Owner]:
        """Which device is to answer for each outcome, and whether a branch of it was begun for that."""
        count, owners = len(self.devices), []
        for place, (request, accepted, rank, _) in enumerate(outcomes):
            fan_out = self.fan_outs.get(request)
            if fan_out is None or rank > fan_out[accepted]:
                owners.append((place % count, False))
            else:
                owners.append(((self.firsts[request] + sum(fan_out[:accepted]) + rank - 1) % count if count > 1 else 0, True))
        return owners

    def _answer(self, turn: Turn, owners: Sequence[Owner]) -> tuple[list[Proposal], float]:
        """Draft what is missing of the rows that lack tokens; return a proposal for each outcome, and when the last one is ready."""
        devices = self.devices
        if turn.unknown and self.drafts:
            self._feed(turn.unknown, turn)
        proposals = self._proposals(turn, owners)
        ready = devices[0].now if len(devices) == 1 else max([devices[0].now, *[devices[index].now for index, _ in owners]])
        if turn.unknown and not self.drafts:
            self._feed(turn.unknown, turn)
        if turn.pieces and self.one_device:
            self._feed_pieces(turn)
            ready = devices[0].now
        return proposals, ready

    def _proposals(self, turn: Turn, owners: Sequence[Owner]) -> list[Proposal]:
        """What the cache holds for each outcome, or what the backup gives; whatever is short is drafted to its end."""
        proposals, missing = [], []
        for index, cached in owners:
            # A branch without a token is no help.
            tokens = self.devices[index].tokens if cached else 0
            proposals.append(self.on_hit if tokens else self._on_miss())
            missing.append(self.K - tokens if tokens or self.drafts else 0)
        if any(missing):
            self._draft(turn, missing, owners)
        return proposals

    def _draft(self, turn: Turn, missing: Sequence[int], owners: Sequence[Owner]) -> None:
        """Let each device draft what its rows lack."""
        for index, device in enumerate(self.devices):
            its = [place for place, (owner, _) in enumerate(owners) if owner == index]
            if its:
                device.names = tuple([turn.outcomes[place].request for place in its])
                context = sum([turn.outcomes[place].context for place in its]) if self.contexts else 0
                device.draft([missing[place] for place in its], context, turn.round)

    def _on_miss(self) -> Proposal:
        return self.looked_up if self.looks_up and next(self.lookup) < self.scenario.ngram_found else self.on_miss

    # What follows an answer

    def _plan(self, turn: Turn, proposals: Sequence[Proposal], ready: float, owners: Sequence[Owner]) -> None:
        """Tell each other the drafts, feed pieces of prompts, and begin to build for the outcomes of this round."""
        if len(self.devices) > 1:
            for device in self.devices:
                device.rest(ready + self.scenario.link_seconds, turn.round)
        if turn.pieces and not self.one_device:
            self._feed_pieces(turn)
        for device in self.devices:
            device.round = turn.round
        if self.caches:
            self._deal(turn, proposals, owners)

    def _deal(self, turn: Turn, proposals: Sequence[Proposal], owners: Sequence[Owner]) -> None:
        """Deal the branches out to the devices."""
        context = context_of(turn) if self.contexts else 0
        self.fan_outs = self._fan_outs(turn, proposals, context)
        dealt, count, self.firsts = 0, len(self.devices), {}
        for request, fan_out in self.fan_outs.items():
            self.firsts[request] = dealt
            dealt += sum(fan_out)
        names = tuple(self.fan_outs)
        for index, device in enumerate(self.devices):
            # The last token of a running row must be fed first, where it is not yet: the candidates after it are not known before.
            rooted = owners.count((index, True)) if device.fed else 0
            device.catch_up, device.branches = len(turn.outcomes) - rooted, -(-(dealt - index) // count)
            device.context, device.names = context, names

    def _fan_outs(self, turn: Turn, proposals: Sequence[Proposal], context: int) -> FanOuts:
        """Of the rows whose drafts are verified, and of prompts that end: a round with an empty draft; as many as memory has room for."""
        rows = rows_of(turn, proposals)
        lists = self._chosen(tuple(rows.values())) if self.scenario.budget else map(self._fan_out, rows.values())
        found = dict(zip(rows, lists, strict=True))
        if self.scenario.draft_slots is None:
            return found
        room = max(0, self.scenario.draft_slots - context) // self.K
        return fitting(found, room * len(self.devices))

    def _likeliest(self, proposals: tuple[Proposal, ...]) -> list[tuple[int, ...]]:
        """The budget's outcomes over all rows."""
        chosen = ranked([self._chances(proposal) for proposal in proposals])[: self.scenario.budget * len(proposals)]
        return as_lists(chosen, [proposal.drafted for proposal in proposals])

    def _chances(self, proposal: Proposal) -> FloatArray:
        """What is known of the outcome of a draft."""
        found = proposal.backup and proposal.drafted and self.looks_up
        model = self.scenario.ngram_outcomes if found else self.scenario.outcomes
        assert model is not None
        return model.chances(proposal.drafted, proposal.hit is True)

    def _listed(self, proposal: Proposal) -> tuple[int, ...]:
        return shortened(self.scenario.fan_out_hit if proposal.hit else self.scenario.fan_out_miss, proposal.drafted)

    def _feed_pieces(self, turn: Turn) -> None:
        for device in self.devices:
            for piece in turn.pieces:
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
            device.forget()
            device.now = death
        self.fan_outs = {}

    def _return(self, back: float) -> None:
        self.back = None
        self._await_outage(back)
        for device in self.devices:
            device.rest(back, device.round, "lost")

    def end(self, end: float) -> None:
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
            device.finish(end)


def rows_of(turn: Turn, proposals: Sequence[Proposal]) -> dict[str, Proposal]:
    """The drafts that are to be verified, and those of prompts that end, empty ones."""
    rows = {outcome.request: proposal for outcome, proposal in zip(turn.outcomes, proposals, strict=True)}
    return rows | {piece.request: Proposal() for piece in turn.pieces if piece.last}


def context_of(turn: Turn) -> int:
    """Tokens whose keys and values the draft reads."""
    return sum([outcome.context for outcome in turn.outcomes]) + sum([piece.context for piece in turn.pieces])


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
