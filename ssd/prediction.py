"""What a configuration is expected to do: its rounds simulated, or reckoned by theory for large batches and for prompt lookup.

Its speed is held against AR and SD on the same and on all its devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, Protocol

from sim.outcomes import Outcomes
from sim.scenario import Scenario
from sim.simulate import Result, simulate
from ssd.pace import Pace
from ssd.search import Search
from ssd.specs import Configuration, Mode, Prediction, Workload

# Enough for a standard error of about 1 %; all configurations meet the same random numbers, so their order is surer than that.
SIMULATED_TOKENS = 2000
# Enough to tell which few are worth so many.
SCREENED_TOKENS = 400
# Without chance, a few rounds tell all.
SIMULATED_TOKENS_AR = 16
# Of larger batches each play would take half a second; theory, within a few percent of it where outputs are long, reckons them.
SIMULATED_ROWS = 16
# The engine's own rule.
INTERRUPT = "moot"


@dataclass(frozen=True, slots=True)
class Played:
    """A configuration and how it does: tokens a second of the whole batch, and rates as ssd.specs.Prediction has them."""

    configuration: Configuration
    pace: Pace
    tokens_per_second: float
    hit_rate: float | None
    draft_acceptance_rate: float | None
    mean_acceptance_length: float
    method: Literal["theory", "simulation"]
    rows: int = 1

    def critical_batch_size(self, search: Search) -> int | None:
        """The batch size from which on the fast backup is ahead of `jit`, none without a cache or where it never is."""
        return search.critical_batch_size(self.configuration, self.pace) if self.configuration.mode == "ssd" else None

    @property
    def seconds_per_token(self) -> float:
        """Mean seconds between the tokens of a request."""
        return self.rows / self.tokens_per_second if self.tokens_per_second else float("inf")

    @property
    def rows_drafted_for(self) -> float:
        """Rows that the draft drafts for while the target waits: all of the batch in SD, else as many as miss together on average."""
        if self.hit_rate is None:
            return self.rows
        return self.rows * (1 - self.hit_rate) / (1 - self.hit_rate**self.rows) if self.hit_rate < 1 else 1.0


def play(configuration: Configuration, pace: Pace, outcomes: Outcomes, workload: Workload, tokens: int = SIMULATED_TOKENS) -> Played:
    """Simulate `tokens` tokens in requests of the workload's lengths, a batch at a time; those before their first token are not timed."""
    result = simulate(scenario(configuration, pace, outcomes, workload, tokens))
    metrics, rows = result.metrics, workload.batch_size
    return Played(
        configuration,
        pace,
        tokens_per_second=1 / (metrics.time_per_output_token or float("inf")) if rows == 1 else _of_full_batch(result, rows),
        hit_rate=metrics.cache_hit_rate,
        draft_acceptance_rate=metrics.draft_acceptance_rate,
        mean_acceptance_length=1 + metrics.num_accepted_tokens / metrics.num_rounds,
        method="simulation",
        rows=rows,
    )


def _of_full_batch(result: Result, rows: int) -> float:
    """Tokens a second after the first of each request, from when the last row was filled to when the first stays empty."""
    first, last = (sorted(served.token_seconds[end] for served in result.requests) for end in (0, -1))
    start, end = first[rows - 1], last[-rows]
    return sum(r.committed for r in result.rounds if start <= r.start < end) / (end - start)


def reckon(configuration: Configuration, pace: Pace, search: Search, workload: Workload) -> Played:
    """Expect what theory does of requests of the workload's length in a batch that is always full."""
    expected = search.expected(configuration, pace)
    after_first = max(1, workload.output_tokens - 1)
    kept = after_first / (after_first + expected.tokens_cut_off)
    return Played(
        configuration,
        pace,
        tokens_per_second=search.rows * kept / expected.seconds_per_token,
        hit_rate=expected.hit_rate,
        draft_acceptance_rate=expected.draft_acceptance_rate,
        mean_acceptance_length=expected.mean_acceptance_length,
        method="theory",
        rows=search.rows,
    )


class Doubtful(Protocol):
    """Whoever knows how far a speed may be off."""

    def interval(self, played: Played) -> tuple[float, float]:
        """Tokens a second between which it lies, 9 times in 10."""
        ...


def predicted(
    played: Played, everything: Sequence[Played], doubt: Doubtful | None = None, critical_batch_size: int | None = None
) -> Configuration:
    """Return the configuration with its prediction; the AR and SD that it is compared with are the fastest in `everything`."""
    configuration, pace, rows = played.configuration, played.pace, played.rows
    K, drafts = configuration.num_speculative_tokens, configuration.mode != "ar"
    budget = configuration.budget or max(sum(configuration.fan_out_hit), sum(configuration.fan_out_miss))
    target, used = configuration.placement.target, configuration.placement.devices
    vs_ar, vs_ar_equal = _speedup(played, _on(everything, "ar", target)), _speedup(played, _within(everything, "ar", used))
    assert vs_ar is not None, "AR is played on the devices of every target"
    assert vs_ar_equal is not None
    prediction = Prediction(
        tokens_per_second=played.tokens_per_second,
        tokens_per_second_between=None if doubt is None else doubt.interval(played),
        speedup_vs_ar=vs_ar,
        speedup_vs_sd=_speedup(played, _on(everything, "sd", target)),
        speedup_vs_ar_equal_devices=vs_ar_equal,
        speedup_vs_sd_equal_devices=_speedup(played, _within(everything, "sd", used)),
        hit_rate=played.hit_rate,
        draft_acceptance_rate=played.draft_acceptance_rate,
        mean_acceptance_length=played.mean_acceptance_length,
        verify_seconds=pace.verify(rows * (1 + K)),
        build_seconds=pace.planning(configuration).build_seconds(K, budget, rows) if configuration.mode == "ssd" else None,
        backup_seconds=pace.backup_seconds(K if configuration.backup == "jit" else 0, played.rows_drafted_for) if drafts else None,
        critical_batch_size=critical_batch_size,
        method=played.method,
    )
    return configuration.model_copy(update={"predicted": prediction})


def scenario(configuration: Configuration, pace: Pace, outcomes: Outcomes, workload: Workload, tokens: int) -> Scenario:
    """Return what the simulator is asked: as many requests of the workload's lengths as have so many tokens."""
    drafts = configuration.mode != "ar"
    rows = workload.batch_size
    tokens = tokens if drafts or rows > 1 else SIMULATED_TOKENS_AR
    length = min(max(2, workload.output_tokens), tokens)
    # In a batch prompts are fed beside other rows; they are taken to cost nothing, as theory takes them.
    prefill = workload.prompt_tokens * pace.prefill_seconds_per_token if rows == 1 else 0.0
    return Scenario(
        mode=configuration.mode,
        verify=pace.verify,
        output_tokens=length,
        # A batch: one wave more, in which it is filled and runs dry.
        num_requests=ceil(tokens / length) if rows == 1 else rows * (1 + ceil(tokens / length / min(rows, 4))),
        batch_size=rows,
        target_prefill_seconds=prefill,
        # Not measured; in proportion to a forward of one token.
        draft_prefill_seconds=prefill * pace.step(1) / pace.verify(1),
        overhead_seconds=pace.overhead_seconds,
        outcomes=outcomes if drafts else None,
        draft_step=pace.step if drafts else None,
        draft_alone=pace.alone if drafts else None,
        draft_plan_seconds=pace.planning(configuration).plan_seconds,
        link_seconds=pace.link_seconds,
        num_speculative_tokens=configuration.num_speculative_tokens,
        fan_out_hit=configuration.fan_out_hit,
        fan_out_miss=configuration.fan_out_miss,
        budget=configuration.budget,
        building=configuration.building,
        backup=configuration.backup,
        interrupt=INTERRUPT,
        draft_layers=pace.draft_layers,
    )


def _on(everything: Iterable[Played], mode: Mode, target: tuple[str, ...]) -> list[Played]:
    return [p for p in everything if p.configuration.mode == mode and p.configuration.placement.target == target]


def _within(everything: Iterable[Played], mode: Mode, used: tuple[str, ...]) -> list[Played]:
    """Those on these devices or fewer of them: nobody is made to use a device that slows it."""
    return [p for p in everything if p.configuration.mode == mode and set(p.configuration.placement.devices) <= set(used)]


def _speedup(played: Played, others: Sequence[Played]) -> float | None:
    fastest = max((other.tokens_per_second for other in others), default=None)
    return None if fastest is None else played.tokens_per_second / fastest
