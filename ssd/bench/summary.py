"""From runs to rows: medians over groups of prompts, ratios group by group, and the field's result block."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from sim.metrics import Metrics
from sim.timeline import Timeline
from ssd.bench.result import BenchRow, Cell, Difference, Latencies, Memory, Quartiles, RoundTimes, ServingResult, Skipped
from ssd.bench.run import Run, Runs, median_speed, total
from ssd.bench.setting import Setting, Who
from ssd.rivals.messages import Rival
from ssd.specs import Configuration

Planned = Mapping[Who, tuple[int, int]]
Differences = Mapping[Who, tuple[Difference, ...]]


def summarise(
    setting: Setting, runs: Runs, skipped: Sequence[Skipped] = (), *, differences: Differences | None = None, planned: Planned | None = None
) -> Cell:
    """Return what the runs of everybody, in the order of the groups of prompts, amount to.

    differences: outputs that are not AR's, none where they need not be the same; planned: bytes of target and draft.
    """
    rows = (_row(who, runs, None if differences is None else differences[who], (planned or {}).get(who)) for who in runs)
    return Cell(setting=setting, rows=tuple(rows), skipped=tuple(skipped))


def _row(who: Who, runs: Runs, differences: tuple[Difference, ...] | None, planned: tuple[int, int] | None) -> BenchRow:
    ours = runs[who]
    totals, seconds = total(ours), sum(run.decode_seconds for run in ours)
    alone, used, inside = set(who.placement.target), _used(who), isinstance(who, Configuration)
    firsts = [output.metrics.time_to_first_token or 0.0 for run in ours for output in run.outputs]
    speeds = tuple(run.tokens_per_second for run in ours)
    return BenchRow(
        configuration=who,
        speeds=speeds,
        tokens_per_second=Quartiles.of(speeds),
        time_to_first_token=statistics.median(firsts),
        speedup_vs_ar=_speedup(ours, _fastest("ar", alone, runs)),
        speedup_vs_sd=_speedup(ours, _fastest("sd", alone, runs)),
        speedup_vs_ar_equal_devices=_speedup(ours, _fastest("ar", used, runs, within=True)),
        speedup_vs_sd_equal_devices=_speedup(ours, _fastest("sd", used, runs, within=True)),
        speedup_vs_rivals={
            rival.mode: ratio for rival, column in runs.items() if isinstance(rival, Rival) and (ratio := _speedup(ours, column))
        },
        hit_rate=totals.cache_hit_rate,
        draft_acceptance_rate=totals.draft_acceptance_rate,
        mean_acceptance_length=totals.mean_acceptance_length,
        verify_share=totals.verify_seconds / seconds if inside else None,
        wait_share=totals.wait_seconds / seconds if inside else None,
        overlap=Timeline(span for run in ours for span in run.timeline.spans).overlap(),
        round=_round(ours) if inside else None,
        memory=_memory(ours, planned),
        differences=differences,
        serving=_serving(ours),
    )


def _fastest(mode: str, devices: set[str], runs: Runs, *, within: bool = False) -> list[Run] | None:
    """Return the runs of the fastest configuration of a mode on exactly these devices, or within them: it may leave some idle."""
    found = [column for who, column in runs.items() if who.mode == mode and (_used(who) <= devices if within else _used(who) == devices)]
    return max(found, key=median_speed, default=None)


def _used(who: Who) -> set[str]:
    """Return the devices at work: AR leaves a draft's alone."""
    return set(who.placement.target if who.mode == "ar" else who.placement.devices)


def _speedup(ours: Sequence[Run], theirs: Sequence[Run] | None) -> Quartiles | None:
    """Return our speed over theirs, group by group."""
    if theirs is None:
        return None
    return Quartiles.of([a.tokens_per_second / b.tokens_per_second for a, b in zip(ours, theirs, strict=True)])


def _round(runs: Sequence[Run]) -> RoundTimes | None:
    rounds = [entry for run in runs for output in run.outputs for entry in output.rounds]
    if not rounds:
        return None
    rests = [rest for run in runs for rest in run.rests()]
    return RoundTimes(
        verify=Quartiles.of([entry.verify_seconds for entry in rounds]),
        wait=Quartiles.of([entry.wait_seconds for entry in rounds]),
        rest=Quartiles.of(rests) if rests else None,
    )


def _memory(runs: Sequence[Run], planned: tuple[int, int] | None) -> Memory:
    columns = zip(*(run.peaks for run in runs), strict=True)
    peaks = [max((peak for peak in column if peak is not None), default=None) for column in columns]
    target, draft = [*peaks, None, None][:2]
    by_plan = {} if planned is None else {"target_planned": planned[0], "draft_planned": planned[1] or None}
    return Memory(target_peak=target, draft_peak=draft, **by_plan)


def _serving(runs: Sequence[Run]) -> ServingResult:
    totals, outputs = total(runs), [output for run in runs for output in run.outputs]
    metrics = [output.metrics for output in outputs]
    return ServingResult(
        successful_requests=len(outputs),
        duration=totals.total_seconds,
        total_input_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        total_generated_tokens=totals.num_output_tokens,
        time_to_first_token=Latencies.of([m.time_to_first_token or 0.0 for m in metrics]),
        time_per_output_token=Latencies.of([m.time_per_output_token or 0.0 for m in metrics]),
        inter_token_latency=Latencies.of([gap for run in runs for gap in run.gaps()] or [0.0]),
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
