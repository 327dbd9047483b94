"""What a configuration is expected to do: its rounds simulated, its speed held against AR and SD on the same and on all its devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from sim.metrics import Metrics
from sim.outcomes import Outcomes
from sim.scenario import Scenario
from sim.simulate import simulate
from ssd.pace import Pace
from ssd.specs import Configuration, Mode, Prediction, Workload

# Enough for a standard error of about 1 %; all configurations meet the same random numbers, so their order is surer than that.
SIMULATED_TOKENS = 2000
# Without chance, a few rounds tell all.
SIMULATED_TOKENS_AR = 16
# The engine's own rule. Looking between layers, it notices an outcome almost at once; how many layers there are hardly matters.
INTERRUPT = "moot"
DRAFT_LAYERS = 24


@dataclass(frozen=True)
class Played:
    """A configuration and how its simulation went."""

    configuration: Configuration
    pace: Pace
    metrics: Metrics

    @cached_property
    def tokens_per_second(self) -> float:
        """Tokens a second after the first of each request."""
        return 1 / (self.metrics.time_per_output_token or float("inf"))


def play(configuration: Configuration, pace: Pace, outcomes: Outcomes, workload: Workload) -> Played:
    """Simulate requests of the workload's lengths; what they take before their first token is not counted."""
    return Played(configuration, pace, simulate(_scenario(configuration, pace, outcomes, workload)).metrics)


def predicted(played: Played, everything: Sequence[Played]) -> Configuration:
    """Return the configuration with its prediction; the AR and SD that it is compared with are the fastest in `everything`."""
    configuration, pace, metrics = played.configuration, played.pace, played.metrics
    K, drafts = configuration.num_speculative_tokens, configuration.mode != "ar"
    budget = max(sum(configuration.fan_out_hit), sum(configuration.fan_out_miss))
    target, used = configuration.placement.target, configuration.placement.devices
    vs_ar, vs_ar_equal = _speedup(played, _on(everything, "ar", target)), _speedup(played, _within(everything, "ar", used))
    assert vs_ar is not None, "AR is played on the devices of every target"
    assert vs_ar_equal is not None
    prediction = Prediction(
        tokens_per_second=played.tokens_per_second,
        speedup_vs_ar=vs_ar,
        speedup_vs_sd=_speedup(played, _on(everything, "sd", target)),
        speedup_vs_ar_equal_devices=vs_ar_equal,
        speedup_vs_sd_equal_devices=_speedup(played, _within(everything, "sd", used)),
        hit_rate=metrics.cache_hit_rate,
        draft_acceptance_rate=metrics.draft_acceptance_rate,
        mean_acceptance_length=1 + metrics.num_accepted_tokens / metrics.num_rounds,
        verify_seconds=pace.verify(1 + K),
        build_seconds=pace.build_seconds(K, budget) if configuration.mode == "ssd" else None,
        backup_seconds=pace.backup_seconds(K if configuration.backup == "jit" else 0) if drafts else None,
        method="simulation",
    )
    return configuration.model_copy(update={"predicted": prediction})


def _scenario(configuration: Configuration, pace: Pace, outcomes: Outcomes, workload: Workload) -> Scenario:
    drafts = configuration.mode != "ar"
    tokens = SIMULATED_TOKENS if drafts else SIMULATED_TOKENS_AR
    length = min(max(2, workload.output_tokens), tokens)
    prefill = workload.prompt_tokens * pace.prefill_seconds_per_token
    return Scenario(
        mode=configuration.mode,
        verify=pace.verify,
        output_tokens=length,
        num_requests=ceil(tokens / length),
        target_prefill_seconds=prefill,
        # Not measured; in proportion to a forward of one token.
        draft_prefill_seconds=prefill * pace.step(1) / pace.verify(1),
        overhead_seconds=pace.overhead_seconds,
        outcomes=outcomes if drafts else None,
        draft_step=pace.step if drafts else None,
        link_seconds=pace.link_seconds,
        num_speculative_tokens=configuration.num_speculative_tokens,
        fan_out_hit=configuration.fan_out_hit,
        fan_out_miss=configuration.fan_out_miss,
        backup=configuration.backup,
        interrupt=INTERRUPT,
        draft_layers=DRAFT_LAYERS,
    )


def _on(everything: Iterable[Played], mode: Mode, target: tuple[str, ...]) -> list[Played]:
    return [p for p in everything if p.configuration.mode == mode and p.configuration.placement.target == target]


def _within(everything: Iterable[Played], mode: Mode, used: tuple[str, ...]) -> list[Played]:
    """Those on these devices or fewer of them: nobody is made to use a device that slows it."""
    return [p for p in everything if p.configuration.mode == mode and set(p.configuration.placement.devices) <= set(used)]


def _speedup(played: Played, others: Sequence[Played]) -> float | None:
    fastest = max((other.tokens_per_second for other in others), default=None)
    return None if fastest is None else played.tokens_per_second / fastest
