"""How fast a profile says that the two models go at a placement."""

from __future__ import annotations

from dataclasses import dataclass

from sim.latency import Latency
from ssd.specs import ForwardLatency, Mode, Placement, Profile


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds at one placement in one mode.

    verify: a target forward by its tokens. step: a draft forward by its branches; that of one branch, which drafts while the target
    waits, is taken alone, those of more beside a working target. Seconds of a message one way, of a round's host work and of the target's
    prefill, a prompt token.
    """

    placement: Placement
    verify: Latency
    step: Latency
    link_seconds: float
    overhead_seconds: float
    prefill_seconds_per_token: float

    def round_seconds(self, drafted: int) -> float:
        """Seconds from sending a draft of so many tokens to hearing its outcome, as the draft sees them."""
        return self.verify(1 + drafted) + self.overhead_seconds + 2 * self.link_seconds

    def backup_seconds(self, K: int) -> float:
        """Seconds of drafting K tokens after the outcome is known."""
        return K * self.step(1)

    def build_seconds(self, K: int, budget: int) -> float:
        """Seconds of the catch-up step and K steps of `budget` branches."""
        return self.step(1) + K * self.step(budget)


def pace(profile: Profile, placement: Placement, mode: Mode) -> Pace | None:
    """Return the pace of `mode` at `placement`, none where the profile lacks a table for it; AR gets a draft step of no time."""
    together = mode == "ssd"
    verify = profile.forward("target", placement.target, contended=together)
    alone, beside = (profile.forward("draft", placement.draft, contended=contended) for contended in (False, together))
    if verify is None or (mode != "ar" and (alone is None or beside is None)):
        return None
    step = Latency.constant(0.0) if alone is None or beside is None else _step(alone, beside)
    link = 0.0 if mode == "ar" else profile.link_seconds
    return Pace(placement, Latency(verify.tokens, verify.seconds), step, link, profile.overhead_seconds, profile.prefill_seconds_per_token)


def _step(alone: ForwardLatency, beside: ForwardLatency) -> Latency:
    single = Latency(alone.tokens, alone.seconds)(1)
    return Latency.of({1: single, **{n: s for n, s in zip(beside.tokens, beside.seconds, strict=True) if n > 1}})
