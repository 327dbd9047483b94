"""How fast a profile says that the two models go at a placement."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sim.latency import Latency
from ssd.devices import are_cores
from ssd.specs import Configuration, ForwardLatency, Mode, Placement, Profile, RoundCost, Verification

# Of a forward alone, what it takes in a round at the least.
LEAST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds at one placement in one mode.

    verify: a target forward by its tokens. step: a draft forward by its branches; that of one branch, which drafts while the target
    waits, is taken alone, those of more beside a working target. alone: a draft forward by its rows while the target waits. Rows of a
    batch are packed: their forward costs what its tokens cost in one row. Seconds of a message one way, of a round's host work (however
    many rows) and of the target's prefill, a prompt token. plan, weigh: of the draft's host, a round, to choose what is drafted for by
    lists, or by estimated chances. draft_layers: pieces of a draft step between which the draft looks whether outcomes have come.
    """

    placement: Placement
    verify: Latency
    step: Latency
    alone: Latency
    link_seconds: float
    overhead_seconds: float
    prefill_seconds_per_token: float
    plan_seconds: float = 0.0
    weigh_seconds: float = 0.0
    draft_layers: int = 1

    def planning(self, configuration: Configuration) -> Pace:
        """The pace of one configuration: where its outcomes are weighed, plan_seconds are those of weighing."""
        weighs = configuration.budget > 0 or configuration.building == "anytime"
        return replace(self, plan_seconds=self.weigh_seconds) if weighs else self

    def round_seconds(self, drafted: float, rows: int = 1) -> float:
        """Seconds from sending `rows` drafts of so many tokens, on average, to hearing their outcomes, as the draft sees them."""
        return self.verify(rows * (1 + drafted)) + self.overhead_seconds + 2 * self.link_seconds

    def backup_seconds(self, K: int, rows: float = 1) -> float:
        """Seconds of drafting K tokens for each of `rows` rows, at least 1, after the outcome is known."""
        return K * self.alone(rows)

    def catch_up_seconds(self, rows: int = 1) -> float:
        """Seconds of a build before the first step of its branches: the last token of every row is fed, then chosen what to draft for."""
        return self.step(rows) + self.plan_seconds

    def build_seconds(self, K: int, budget: float, rows: int = 1) -> float:
        """Seconds of what comes first and K steps, each with `budget` branches for every one of `rows` rows."""
        return self.catch_up_seconds(rows) + K * self.step(rows * budget)


def pace(profile: Profile, placement: Placement, mode: Mode, verification: Verification = "rejection") -> Pace | None:
    """Return the pace of `mode` at `placement`, none where the profile lacks a table for it; AR gets a draft step of no time.

    Forwards take what the tables say and what rounds were seen to take beyond them.
    """
    together = mode == "ssd"
    verify = profile.forward("target", placement.target, contended=together)
    alone, beside = (profile.forward("draft", placement.draft, contended=contended) for contended in (False, together))
    if verify is None or (mode != "ar" and (alone is None or beside is None)):
        return None
    cost = profile.round_cost(mode, placement, verification)
    step = waited = Latency.constant(0.0)
    if alone is not None and beside is not None:
        waited = _raised(alone, cost.step if cost else 0.0)
        step = _step(waited, _raised(beside, cost.build_step if cost else 0.0))
    return Pace(
        placement=placement,
        verify=_verify(verify, cost),
        step=step,
        alone=waited,
        link_seconds=0.0 if mode == "ar" else max(0.0, profile.link_seconds + (cost.answer / 2 if cost else 0.0)),
        # Computed forwards were calibrated on AR, with all that its rounds take.
        overhead_seconds=0.0 if mode == "ar" and verify.source == "roofline" else profile.overhead_seconds,
        prefill_seconds_per_token=profile.prefill_seconds_per_token,
        plan_seconds=cost.plan if cost else 0.0,
        weigh_seconds=cost.weigh if cost else 0.0,
        # An accelerator is given a step at once.
        draft_layers=profile.draft_layers if are_cores(placement.draft) else 1,
    )


def _together(forward: float, more: float) -> float:
    """Seconds of a forward in a round: not much less than alone; where it seems so, the machine was slow when it was alone."""
    return max(forward + more, LEAST_SHARE * forward)


def _verify(table: ForwardLatency, cost: RoundCost | None) -> Latency:
    forward = Latency(table.tokens, table.seconds)
    if cost is None:
        return forward
    sizes = sorted({*table.tokens, *cost.tokens})
    return Latency.of({size: _together(forward(size), float(np.interp(size, cost.tokens, cost.verify))) for size in sizes})


def _raised(table: ForwardLatency, by: float) -> Latency:
    return Latency(table.tokens, tuple(_together(seconds, by) for seconds in table.seconds))


def _step(alone: Latency, beside: Latency) -> Latency:
    more = {size: seconds for size, seconds in zip(beside.sizes, beside.seconds, strict=True) if size > 1}
    return Latency.of({1: alone(1), **more})
