"""Play a scenario: two processes, target and draft, and two links between them."""

from dataclasses import dataclass, replace

import numpy as np
import simpy
from numpy.random import SeedSequence, default_rng

from sim.draft import Draft
from sim.link import Link
from sim.load import LATENCIES, Served, requests
from sim.metrics import Metrics, Round
from sim.scenario import Scenario
from sim.target import Stream, Target
from sim.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Result:
    """What a simulated run amounts to: sums, spans of both devices (seconds from the start), the rounds and requests in order.

    Seconds of a round are those of its whole batch, in each row's record; total_seconds and output_tokens_per_second of the metrics are by
    wall clock, the times to and between tokens means over requests.
    """

    metrics: Metrics
    timeline: Timeline
    rounds: tuple[Round, ...]
    requests: tuple[Served, ...] = ()

    def percentile(self, latency: str, percent: float) -> float | None:
        """Seconds that so many percent of "ttft", "tpot", "itl" or "e2e" (sim.load.Served) do not exceed; None where there are none."""
        if latency not in LATENCIES:
            raise ValueError(f"latency={latency!r} is unknown: use one of {tuple(LATENCIES)}")
        if not 0 <= percent <= 100:
            raise ValueError(f"percent={percent!r} must lie between 0 and 100")
        values = [seconds for served in self.requests for seconds in LATENCIES[latency](served) if seconds is not None]
        return float(np.percentile(values, percent)) if values else None

    def busy_share(self, device: str) -> float:
        """Share of the wall clock, 0..1, in which a device worked."""
        end = self.metrics.total_seconds
        # The draft may still be working when the last request leaves.
        within = Timeline(replace(span, end=min(span.end, end)) for span in self.timeline.spans if span.start < end)
        return within.busy(device) / end if end else 0.0


def simulate(scenario: Scenario, seed: int = 0) -> Result:
    """Play all requests of a scenario; the same scenario and seed give the same result.

    Outcomes (of each row of the batch), noise of target and draft, load and prompt lookup are separate streams of random numbers, so two
    scenarios that differ in their latencies only meet the same outcomes, at batch size 1 in the same order. ValueError if the outcome model
    cannot answer for K drafted tokens.
    """
    env, timeline = simpy.Environment(), Timeline()
    of_outcomes, of_target, of_draft, of_load, of_lookup = SeedSequence(seed).spawn(5)
    to_draft, to_target = Link(env, scenario.link_seconds), Link(env, scenario.link_seconds)
    streams = _streams(scenario, of_outcomes)
    if streams and scenario.draft_step:
        rngs = default_rng(of_draft), default_rng(of_lookup)
        env.process(Draft(env, scenario, timeline, *rngs, to_draft, to_target, scenario.draft_step).run())
    asked = requests(scenario, default_rng(of_load))
    target = Target(env, scenario, timeline, default_rng(of_target), to_target, to_draft, asked, streams)
    env.process(target.run())
    env.run()
    timeline.rounds += target.rounds
    return Result(_metrics(target), timeline, tuple(target.rounds), tuple(target.served))


def _streams(scenario: Scenario, seeds: SeedSequence) -> list[Stream]:
    """One for each row of the batch; the first is what it would be alone."""
    if scenario.mode == "ar" or scenario.outcomes is None:
        return []
    looked_up = scenario.ngram_outcomes if scenario.mode == "ssd" and scenario.backup == "ngram" else None
    rngs = [default_rng(seed) for seed in (seeds, *seeds.spawn(scenario.batch_size - 1))]
    return [Stream(scenario.outcomes.start(rng), looked_up.start(rng) if looked_up else None) for rng in rngs]


def _metrics(target: Target) -> Metrics:
    served = target.served
    # Requests overlap in time: seconds between their tokens are summed over them, the tokens a second are by wall clock.
    return Metrics.from_rounds(
        target.rounds,
        num_output_tokens=sum(one.output_tokens for one in served),
        total_seconds=sum(one.e2e for one in served),
        time_to_first_token=float(np.mean([one.ttft for one in served])),
        num_requests=len(served),
    ).over(max(one.token_seconds[-1] for one in served))
