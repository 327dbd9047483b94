"""Play a scenario: two processes, target and draft, and two links between them."""

from dataclasses import dataclass

import numpy as np
import simpy

from sim.draft import Draft
from sim.link import Link
from sim.metrics import Metrics, Round
from sim.scenario import Scenario
from sim.target import Target
from sim.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Result:
    """What a simulated run amounts to: sums, spans of both devices (seconds from the start), and the rounds in order."""

    metrics: Metrics
    timeline: Timeline
    rounds: tuple[Round, ...]


def simulate(scenario: Scenario, seed: int = 0) -> Result:
    """Play all requests of a scenario; the same scenario and seed give the same result.

    Outcomes, target noise and draft noise are separate streams of random numbers, so two scenarios that differ in their latencies
    only meet the same outcomes. ValueError if the outcome model cannot answer for K drafted tokens.
    """
    env, timeline = simpy.Environment(), Timeline()
    outcome_rng, target_rng, draft_rng = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(3))
    to_draft, to_target = Link(env, scenario.link_seconds), Link(env, scenario.link_seconds)
    draw = None
    if scenario.mode != "ar" and scenario.outcomes and scenario.draft_step:
        draw = scenario.outcomes.start(outcome_rng)
        env.process(Draft(env, scenario, timeline, draft_rng, to_draft, to_target, scenario.draft_step).run())
    target = Target(env, scenario, timeline, target_rng, to_target, to_draft, draw)
    env.process(target.run())
    env.run()
    return Result(_metrics(scenario, target), timeline, tuple(target.rounds))


def _metrics(scenario: Scenario, target: Target) -> Metrics:
    return Metrics.from_rounds(
        target.rounds,
        num_output_tokens=scenario.output_tokens * scenario.num_requests,
        total_seconds=target.finished_at,
        time_to_first_token=float(np.mean(target.first_token_seconds)),
        num_requests=scenario.num_requests,
    )
