"""From runs to rows: medians over prompts, ratios prompt by prompt, and the field's result block."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from sim.metrics import Metrics
from sim.timeline import Timeline
from ssd.bench.result import BenchResult, BenchRow, Latencies, Quartiles, ServingResult, Skipped
from ssd.bench.run import Run, Runs, median_speed, total
from ssd.specs import Configuration, Plan


def summarise(plan: Plan, num_prompts: int, output_tokens: int, runs: Runs, skipped: Sequence[Skipped]) -> BenchResult:
    """Return what the runs of each configuration, in the order of the prompts, amount to."""
    rows = tuple(_row(configuration, runs) for configuration in runs)
    fastest = max(runs, key=lambda configuration: median_speed(runs[configuration]))
    return BenchResult(
        hardware=plan.hardware.name,
        models=plan.models,
        num_prompts=num_prompts,
        output_tokens=output_tokens,
        rows=rows,
        skipped=tuple(skipped),
        differing_prompts=_differing(runs),
        serving=_serving(fastest, runs[fastest]),
    )


def _differing(runs: Runs) -> tuple[int, ...]:
    """Return the prompts whose token ids are not the same in all configurations."""
    outputs = zip(*([run.output.token_ids for run in column] for column in runs.values()), strict=True)
    return tuple(place for place, tokens in enumerate(outputs) if len(set(tokens)) > 1)


def _row(configuration: Configuration, runs: Runs) -> BenchRow:
    ours = runs[configuration]
    totals, seconds = total(ours), sum(run.decode_seconds for run in ours)
    alone, used = set(configuration.placement.target), _used(configuration)
    spans = Timeline(span for run in ours for span in run.timeline.spans)
    return BenchRow(
        configuration=configuration,
        tokens_per_second=Quartiles.of([run.tokens_per_second for run in ours]),
        time_to_first_token=statistics.median(run.metrics.time_to_first_token or 0.0 for run in ours),
        speedup_vs_ar=_speedup(ours, _rival("ar", alone, runs)),
        speedup_vs_sd=_speedup(ours, _rival("sd", alone, runs)),
        speedup_vs_ar_equal_devices=_speedup(ours, _rival("ar", used, runs, within=True)),
        speedup_vs_sd_equal_devices=_speedup(ours, _rival("sd", used, runs, within=True)),
        hit_rate=totals.cache_hit_rate,
        draft_acceptance_rate=totals.draft_acceptance_rate,
        mean_acceptance_length=totals.mean_acceptance_length,
        verify_share=totals.verify_seconds / seconds,
        wait_share=totals.wait_seconds / seconds,
        overlap=spans.overlap(),
    )


def _rival(mode: str, devices: set[str], runs: Runs, *, within: bool = False) -> list[Run] | None:
    """Return the runs of the fastest configuration of a mode on exactly these devices, or within them: it may leave some idle."""
    found = [
        column
        for configuration, column in runs.items()
        if configuration.mode == mode and (_used(configuration) <= devices if within else _used(configuration) == devices)
    ]
    return max(found, key=median_speed, default=None)


def _used(configuration: Configuration) -> set[str]:
    """Return the devices at work: AR leaves a draft's alone."""
    placement = configuration.placement
    return set(placement.target if configuration.mode == "ar" else placement.devices)


def _speedup(ours: Sequence[Run], theirs: Sequence[Run] | None) -> float | None:
    """Return the median over prompts of our speed over theirs."""
    if theirs is None:
        return None
    return statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in zip(ours, theirs, strict=True))


def _serving(configuration: Configuration, runs: Sequence[Run]) -> ServingResult:
    totals, metrics = total(runs), [run.metrics for run in runs]
    return ServingResult(
        configuration=configuration,
        successful_requests=len(runs),
        duration=totals.total_seconds,
        total_input_tokens=sum(len(run.output.prompt_token_ids) for run in runs),
        total_generated_tokens=totals.num_output_tokens,
        time_to_first_token=Latencies.of([m.time_to_first_token or 0.0 for m in metrics]),
        time_per_output_token=Latencies.of([m.time_per_output_token or 0.0 for m in metrics]),
        inter_token_latency=Latencies.of([gap for run in runs for gap in run.gaps()]),
        end_to_end_latency=Latencies.of([m.total_seconds for m in metrics]),
        num_drafts=totals.num_drafts,
        num_draft_tokens=totals.num_draft_tokens,
        num_accepted_tokens=totals.num_accepted_tokens,
        acceptance_per_position=_acceptance_per_position(totals),
    )


def _acceptance_per_position(totals: Metrics) -> tuple[float, ...]:
    """Return, for each place in a draft, the share of drafts whose token there was accepted."""
    histogram = totals.acceptance_histogram
    return tuple(sum(histogram[k + 1 :]) / totals.num_drafts for k in range(len(histogram) - 1))
