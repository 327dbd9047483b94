"""Play a scenario: the process of the target, which asks the draft over a link each way."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import simpy
from numpy.random import SeedSequence, default_rng

from sim.anytime import AnytimeDevice, AnytimeDraft
from sim.device import Device, Mark
from sim.draft import Draft, DraftDevice
from sim.link import Link
from sim.load import LATENCIES, Served, requests
from sim.metrics import Metrics, Round, drafter
from sim.outages import outages
from sim.scenario import Scenario
from sim.target import Play, Stream, Target
from sim.timeline import RESTING, Span, Timeline

# Where the time of the target goes, in the order of a round.
SHARES = ("draft", "link", "verify", "prompt", "overhead", "idle")


@dataclass(frozen=True)
class Result:
    """What a simulated run amounts to: sums, spans of all devices (seconds from the start), the rounds and requests in order.

    Seconds of a round are those of its whole batch, in each row's record; total_seconds and output_tokens_per_second of the metrics are by
    wall clock, the times to and between tokens means over requests. spent: of each device the seconds of every activity (sim.timeline.Span,
    and the target's "overhead"), which add up to total_seconds. shares: of the target's time, waits for the draft and for the link,
    verification, what prompts add to it, its own overhead, and rest; they add up to 1. rounds and timeline are there where they were kept.
    """

    metrics: Metrics
    requests: tuple[Served, ...]
    spent: Mapping[str, Mapping[str, float]]
    shares: Mapping[str, float]
    kept: tuple[list[Mark], list[Play], str] | None = None

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """Every row's rounds, in order."""
        _, plays, backup = self._kept()
        return tuple(
            Round(
                request=request,
                drafted=proposal.drafted,
                accepted=accepted,
                committed=committed,
                hit=proposal.hit,
                backup=proposal.backup,
                verify_seconds=verified,
                wait_seconds=waited,
                start=start,
                drafter=drafter(proposal.drafted, proposal.hit, proposal.backup, backup),
            )
            for request, proposal, accepted, committed, verified, waited, start in plays
        )

    @cached_property
    def timeline(self) -> Timeline:
        """What all devices did, and the rounds."""
        marks, _, _ = self._kept()
        return Timeline((Span(*mark[:5], request=", ".join(mark[5])) for mark in marks), self.rounds)

    def percentile(self, latency: str, percent: float) -> float | None:
        """Seconds that so many percent of "ttft", "tpot", "itl" or "e2e" (sim.load.Served) do not exceed; None where there are none."""
        if latency not in LATENCIES:
            raise ValueError(f"latency={latency!r} is unknown: use one of {tuple(LATENCIES)}")
        if not 0 <= percent <= 100:
            raise ValueError(f"percent={percent!r} must lie between 0 and 100")
        values = [seconds for served in self.requests for seconds in LATENCIES[latency](served) if seconds is not None]
        return float(np.percentile(values, percent)) if values else None

    def busy_share(self, device: str) -> float:
        """Share of the wall clock, 0..1, in which a device worked; the target's own overhead is no work of the device."""
        busy = math.fsum(seconds for activity, seconds in self.spent.get(device, {}).items() if activity not in (*RESTING, "overhead"))
        # The two are summed in another order.
        return min(1.0, busy / self.metrics.total_seconds) if self.metrics.total_seconds else 0.0

    def _kept(self) -> tuple[list[Mark], list[Play], str]:
        if self.kept is None:
            raise ValueError("record=False kept neither rounds nor a timeline: simulate with record=True")
        return self.kept


def simulate(scenario: Scenario, seed: int = 0, *, record: bool = True) -> Result:
    """Play all requests of a scenario; the same scenario and seed give the same result.

    record: whether rounds and spans are kept; without them long runs take less time and little memory, and all else is the same.
    Outcomes (of each row of the batch), noise of target and draft, load, prompt lookup and outages are separate streams of random numbers,
    so two scenarios that differ in their latencies only meet the same outcomes, at batch size 1 in the same order. ValueError if the
    outcome model cannot answer for K drafted tokens.
    """
    marks: list[Mark] | None = [] if record else None
    of_outcomes, of_target, of_draft, of_load, of_lookup, of_outages = SeedSequence(seed).spawn(6)
    streams = _streams(scenario, of_outcomes)
    devices = _draft_devices(scenario, marks, of_draft) if streams else []
    away = outages(scenario, default_rng(of_outages))
    outbox = Link(scenario.link_seconds, scenario.link_bandwidth)
    kind = AnytimeDraft if scenario.building == "anytime" else Draft
    draft = kind(scenario, devices, default_rng(of_lookup), away, outbox) if devices else None
    target = Target(scenario, marks, default_rng(of_target), draft, requests(scenario, default_rng(of_load)), streams)
    env = simpy.Environment()
    env.process(target.run(env))
    env.run()
    metrics = _metrics(target)
    kept = None if marks is None or target.plays is None else (marks, target.plays, scenario.backup)
    return Result(metrics, tuple(target.served), _spent([target, *devices]), _shares(target, metrics.total_seconds), kept)


def _draft_devices(scenario: Scenario, marks: list[Mark] | None, seeds: SeedSequence) -> list[DraftDevice]:
    """The first has the random numbers that it would have alone."""
    names = ["draft", *(f"draft-{index}" for index in range(2, scenario.draft_devices + 1))]
    rngs = [default_rng(seed) for seed in (seeds, *seeds.spawn(scenario.draft_devices - 1))]
    kind = AnytimeDevice if scenario.building == "anytime" else DraftDevice
    return [kind(name, scenario, marks, rng) for name, rng in zip(names, rngs, strict=True)]


def _streams(scenario: Scenario, seeds: SeedSequence) -> list[Stream]:
    """One for each row of the batch; the first is what it would be alone."""
    if scenario.mode == "ar" or scenario.outcomes is None:
        return []
    looked_up = scenario.ngram_outcomes if scenario.mode == "ssd" and scenario.backup == "ngram" else None
    rngs = [default_rng(seed) for seed in (seeds, *seeds.spawn(scenario.batch_size - 1))]
    return [Stream(scenario.outcomes, looked_up, rng) for rng in rngs]


def _metrics(target: Target) -> Metrics:
    served = target.served
    # Requests overlap in time: seconds between their tokens are summed over them, the tokens a second are by wall clock.
    return Metrics.from_kinds(
        target.kinds,
        verify_seconds=target.verify_seconds,
        wait_seconds=target.wait_seconds,
        num_output_tokens=sum(one.output_tokens for one in served),
        total_seconds=sum(one.e2e for one in served),
        time_to_first_token=float(np.mean([one.ttft for one in served])),
        num_requests=len(served),
    ).over(max(one.token_seconds[-1] for one in served))


def _spent(devices: list[Device]) -> dict[str, dict[str, float]]:
    return {device.name: {what: s for what, s in device.spent.items() if what not in ("draft", "link", "prompt")} for device in devices}


def _shares(target: Target, total: float) -> dict[str, float]:
    spent = target.spent
    seconds = {**spent, "verify": spent["verify"] + spent["prefill"] - spent["prompt"]}
    return {what: seconds.get(what, 0.0) / total if total else 0.0 for what in SHARES}
