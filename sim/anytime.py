"""A draft that builds for as long as there is time, and sends what is there: the engine's rule (ssd.engine.draft), with its own Tempo."""

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from sim.choice import Place, Ranked, ranked
from sim.draft import Draft, DraftDevice, Owner, context_of, rows_of
from sim.link import Proposal, Turn
from sim.tempo import Tempo

# What is planned, and what may follow it.
Plans = tuple[Ranked, Ranked]
NO_PLANS: Plans = ((), ())


class AnytimeDevice(DraftDevice):
    """The draft device.

    plans: outcomes to draft for, the likeliest first. steps: those that each outcome's wave has run, of K that give a token and one that
    feeds the last. coming: the outcomes that the next message tells of. rooted: whether all rows that are caught up with have a draft.
    """

    plans, coming, rooted = NO_PLANS, frozenset[Place](), False

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.tempo = Tempo(lambda: self.now)
        self.steps: dict[Place, int] = {}

    def forget(self) -> None:
        """Have nothing cached, and nothing to build."""
        super().forget()
        self.plans, self.steps = NO_PLANS, {}

    def _grown(self, until: float, grows: bool) -> int:
        """Catch up, then draft in waves, each as wide as is worth most, until the message comes. The tokens differ by wave."""
        if self.catch_up and not self._step(until, self.catch_up, False, self.rooted):
            return 0
        if not any(self.plans):
            return 0
        self.now += self.scenario.draft_plan_seconds
        for wave in self._waves():
            alive = self.coming.intersection(wave)
            for step in range(self.scenario.num_speculative_tokens + 1):
                short = step < self.scenario.num_speculative_tokens
                if not short and not self.tempo.in_time(len(wave)):
                    break
                late = until < self.now if self.steps else self._late(until, bool(alive))
                if late or not self._step(until, len(wave), short and bool(alive)):
                    return 0
                self.steps |= dict.fromkeys(wave, step + 1)
        return 0

    def _waves(self) -> Iterator[list[Place]]:
        for outcomes in self.plans:
            while outcomes:
                width = self.tempo.best_width(np.array([chance for chance, _ in outcomes]), self.scenario.num_speculative_tokens)
                yield [place for _, place in outcomes[:width]]
                outcomes = outcomes[width:]

    def _step(self, until: float, tokens: int, grows: bool, measured: bool = True) -> bool:
        start = self.now
        completed = self._forward(until, self.step(tokens, self.context), grows)
        if completed and measured:
            self.tempo.stepped(tokens, self.now - start)
        return completed


class AnytimeDraft(Draft):
    """Runs an AnytimeDevice. What is short, and a row that missed, is drafted on only as long as that speeds the round up."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        (device,) = self.devices
        assert isinstance(device, AnytimeDevice)
        self.device, self.tempo = device, device.tempo
        self._plans = cache(self._planned)
        # Of the rows whose drafts are being verified: their places, and the tokens that were sent.
        self.places: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        self.behind = 0

    def _told(self, turn: Turn) -> list[Place]:
        """The outcomes that it tells of, by the places of their rows."""
        return [(self.places.get(outcome.request, -1), outcome.accepted, outcome.rank) for outcome in turn.outcomes]

    def _built(self, turn: Turn) -> list[Owner]:
        places = self._told(turn)
        self.device.coming = frozenset(places)
        self.device.build(turn.arrived, False)
        self.device.coming = frozenset()
        if turn.outcomes:
            self.tempo.heard()
        elif not turn.pieces:
            self.tempo.rest()
        for outcome in turn.outcomes:
            if drafted := self.sent.get(outcome.request, 0):
                self.tempo.verified(outcome.accepted, drafted)
        return [(0, place in self.device.steps) for place in places]

    def _proposals(self, turn: Turn, owners: Sequence[Owner]) -> list[Proposal]:
        device, K, start = self.device, self.K, self.device.now
        places = self._told(turn)
        steps = [device.steps.get(place, 0) for place in places]
        lengths = [min(K, count) for count in steps]
        hits = [length > 0 for length in lengths]
        drafting = [row for row, hit in enumerate(hits) if hit or self.drafts]
        context = sum(outcome.context for outcome in turn.outcomes)
        device.names = tuple(turn.outcomes[row].request for row in drafting)
        while short := [row for row in drafting if lengths[row] < K]:
            if not self.tempo.worthwhile(lengths, [lengths[row] for row in short], len(short)):
                break
            begin = device.now
            device.run(device.alone(len(short), context))
            if all(lengths[row] for row in short):
                self.tempo.stepped(len(short), device.now - begin)
            for row in short:
                lengths[row] += 1
        device.log("answer", start, turn.round)
        # Rows whose last draft token has been fed are known at once what may follow.
        self.behind = sum(count <= K for count in steps)
        device.rooted = all(length > 0 for length in lengths)
        return [self._proposal(hit, length) for hit, length in zip(hits, lengths, strict=True)]

    def _proposal(self, hit: bool, length: int) -> Proposal:
        found = None if hit or length else self._on_miss()
        return found if found is not None and found.drafted and self.looks_up else Proposal(length, hit, not hit)

    def _plan(self, turn: Turn, proposals: Sequence[Proposal], ready: float, owners: Sequence[Owner]) -> None:
        if turn.outcomes:
            self.tempo.sent()
        super()._plan(turn, proposals, ready, owners)

    def _deal(self, turn: Turn, proposals: Sequence[Proposal], owners: Sequence[Owner]) -> None:
        device, rows = self.device, rows_of(turn, proposals)
        self.places = {request: place for place, request in enumerate(rows)}
        self.sent = {request: proposal.drafted for request, proposal in rows.items()}
        planned, spare = self._plans(tuple(rows.values()))
        device.context = context_of(turn)
        if self.scenario.draft_slots is not None:
            room = max(0, self.scenario.draft_slots - device.context) // self.K
            planned, spare = planned[:room], spare[: max(0, room - len(planned))]
        device.plans, device.steps, device.names = (planned, spare), {}, tuple(rows)
        device.catch_up = self.behind if turn.outcomes else 0

    def _planned(self, proposals: tuple[Proposal, ...]) -> Plans:
        """What the budget or the lists grant the rows, and as many further outcomes."""
        order = ranked([self._chances(proposal) for proposal in proposals])
        if self.scenario.budget:
            total = self.scenario.budget * len(proposals)
            return order[:total], order[total : 2 * total]
        lists = [self._fan_out(proposal) for proposal in proposals]
        planned = tuple(each for each in order if each[1][2] <= lists[each[1][0]][each[1][1]])
        left, spare = [sum(fan_out) for fan_out in lists], []
        for chance, place in order:
            if place[2] > lists[place[0]][place[1]] and left[place[0]]:
                left[place[0]] -= 1
                spare.append((chance, place))
        return planned, tuple(spare)
