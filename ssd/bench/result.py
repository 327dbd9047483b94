"""What a benchmark found: for each setting one row a configuration, ratios taken prompt by prompt, and how many outputs agree."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from ssd.bench.setting import Setting, Who
from ssd.rivals.messages import Way
from ssd.specs import Configuration, Models, Spec

# Goes up with every change that makes older files unreadable or their numbers another thing.
FORMAT = 2
# Logits closer than this may change places where sums are made in another order.
NEAR_TIE = 1e-3


class Quartiles(Spec):
    """The middle of some measurements and how far they spread."""

    lower: float = Field(description="a quarter of the prompts lie below (unit of the measurement)")
    median: float = Field(description="half of the prompts lie below (unit of the measurement)")
    upper: float = Field(description="a quarter of the prompts lie above (unit of the measurement)")

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Return the quartiles of at least one value."""
        lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
        return cls(lower=lower, median=middle, upper=upper)


class Latencies(Spec):
    """Mean, median and 99th percentile of one kind of latency."""

    mean: float = Field(ge=0, description="mean, seconds")
    median: float = Field(ge=0, description="median, seconds")
    p99: float = Field(ge=0, description="99th percentile, seconds")

    @classmethod
    def of(cls, values: Sequence[float]) -> Latencies:
        """Return the three of at least one value; percentiles are interpolated linearly."""
        ordered = sorted(values)
        place = 0.99 * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        p99 = ordered[low] + (place - low) * (ordered[high] - ordered[low])
        return cls(mean=statistics.fmean(ordered), median=statistics.median(ordered), p99=p99)


class ServingResult(Spec):
    """The field's result block for one configuration, groups of requests one after another."""

    successful_requests: int = Field(ge=0, description="requests (count)")
    duration: float = Field(ge=0, description="their seconds, those of other configurations apart")
    total_input_tokens: int = Field(ge=0, description="prompt tokens (count)")
    total_generated_tokens: int = Field(ge=0, description="output tokens (count)")
    time_to_first_token: Latencies = Field(description="a value a request")
    time_per_output_token: Latencies = Field(description="a value a request, the first token apart")
    inter_token_latency: Latencies = Field(description="a value a round: tokens come in bursts")
    end_to_end_latency: Latencies = Field(description="a value a request")
    num_drafts: int = Field(ge=0, description="drafts verified (count)")
    num_draft_tokens: int = Field(ge=0, description="tokens in them (count)")
    num_accepted_tokens: int = Field(ge=0, description="of those, accepted and kept (count)")
    acceptance_per_position: tuple[float, ...] = Field(description="for each place in a draft, accepted over drafts (ratio)")


class RoundTimes(Spec):
    """Where the time of a round goes, each over all rounds of all requests."""

    verify: Quartiles = Field(description="the target's forward, and deciding on its logits, seconds")
    wait: Quartiles = Field(description="the target waiting for a draft, seconds")
    rest: Quartiles | None = Field(description="everything else between two verifications, seconds; none where no request had two")


class Memory(Spec):
    """Resident memory while a configuration decoded, beside what a plan reckons with: weights and key-value slots alone."""

    target_peak: int | None = Field(None, ge=0, description="of the target's process, or the rival's, bytes; none where unknown")
    draft_peak: int | None = Field(None, ge=0, description="of the draft's process, bytes; none without a draft or where unknown")
    target_planned: int | None = Field(None, ge=0, description="the target's weights and slots, bytes; none for a rival")
    draft_planned: int | None = Field(None, ge=0, description="the draft's weights and slots, bytes; none without a draft")


class Difference(Spec):
    """An output that is not AR's."""

    prompt: int = Field(ge=0, description="which prompt (index from 0)")
    place: int = Field(ge=0, description="the first token that differs (index from 0)")
    gap: float | None = Field(ge=0, description="AR's two best logits there apart (nats); none where one output is only longer")


class BenchRow(Spec):
    """One configuration, or rival, as it ran in one setting; ratios are taken group by group, a group being what is decoded together."""

    configuration: Who = Field(description="what ran, with its prediction (no unit)")
    speeds: tuple[float, ...] = Field(
        min_length=1,
        description="for each group in order, output tokens per second: of decoding, prefill apart, where one prompt is decoded at a "
        "time, else of the whole batch from its start to its end",
    )
    tokens_per_second: Quartiles = Field(description="of these speeds, output tokens per second")
    time_to_first_token: float = Field(ge=0, description="median over prompts, seconds")
    speedup_vs_ar: Quartiles | None = Field(description="against AR on the target's devices (ratio)")
    speedup_vs_sd: Quartiles | None = Field(description="against the fastest SD on the target's devices (ratio)")
    speedup_vs_ar_equal_devices: Quartiles | None = Field(description="against the fastest AR within the devices used (ratio)")
    speedup_vs_sd_equal_devices: Quartiles | None = Field(description="against the fastest SD within the devices used (ratio)")
    speedup_vs_rivals: dict[Way, Quartiles] = Field({}, description="against other programs on all devices (ratios)")
    hit_rate: float | None = Field(description="rounds whose outcome was cached, none without a cache (ratio)")
    draft_acceptance_rate: float | None = Field(description="accepted over drafted tokens (ratio)")
    mean_acceptance_length: float | None = Field(description="tokens a round, bonus included (tokens)")
    verify_share: float | None = Field(description="verifying, of the time after the first token (ratio); none for a rival")
    wait_share: float | None = Field(description="the target waiting for a draft, of that time (ratio); none for a rival")
    overlap: float = Field(description="the draft's work done while the target verified (ratio)")
    round: RoundTimes | None = Field(description="where a round's time goes; none for a rival")
    memory: Memory = Field(description="what it took (bytes)")
    differences: tuple[Difference, ...] | None = Field(description="greedy outputs that are not AR's (list); none above temperature 0")
    serving: ServingResult = Field(description="the field's result block")

    @property
    def differing_prompts(self) -> tuple[int, ...]:
        """Prompts whose output is not AR's and for which no near tie is the excuse (indices from 0)."""
        return tuple(one.prompt for one in self.differences or () if one.gap is None or one.gap >= NEAR_TIE)

    @property
    def near_ties(self) -> int:
        """Outputs that differ where the two best logits were as good as equal (count)."""
        return len(self.differences or ()) - len(self.differing_prompts)

    @property
    def predicted_tokens_per_second(self) -> float | None:
        """Tokens per second of decoding that the planner expected, none where it was not asked."""
        predicted = getattr(self.configuration, "predicted", None)
        return predicted.tokens_per_second if predicted is not None else None

    @property
    def measured_over_predicted(self) -> float | None:
        """Measured over predicted tokens per second, none without a prediction (ratio)."""
        predicted = self.predicted_tokens_per_second
        return self.tokens_per_second.median / predicted if predicted else None


class Skipped(Spec):
    """A configuration that could not run beside the others."""

    configuration: Who = Field(description="what was left out (no unit)")
    reason: str = Field(description="why, in words (no unit)")


class Cell(Spec):
    """All that ran in one setting, in turn on the same prompts."""

    setting: Setting = Field(description="what was decoded (no unit)")
    rows: tuple[BenchRow, ...] = Field(min_length=1, description="the plan first, rivals last (list)")
    skipped: tuple[Skipped, ...] = Field((), description="what could not run beside the others (list)")

    @property
    def fastest(self) -> BenchRow:
        """The engine's row with the highest median speed."""
        ours = [row for row in self.rows if isinstance(row.configuration, Configuration)]
        return max(ours, key=lambda row: row.tokens_per_second.median)


class SetUp(Spec):
    """What was measured, where and with what."""

    hardware: str = Field(description="name of the machine (no unit)")
    devices: dict[str, str] = Field(description="its devices by id (product names)")
    models: Models = Field(description="the pair (no unit)")
    weights: str = Field(description="what the target's checkpoint holds, such as bfloat16 or Q4_K_M (no unit)")
    versions: dict[str, str] = Field(description="of the programs (no unit)")
    prompt_set: str | None = Field(description="where the prompts are from (no unit)")
    prompts: tuple[str, ...] = Field(min_length=1, description="distinct texts, as they were given (no unit)")
    output_tokens: int = Field(ge=2, description="tokens of every output")
    warmup: int = Field(ge=0, description="runs before those that count (count)")
    load_seconds: dict[str, float] = Field(description="of the engine, both models, and of each rival, until ready (seconds)")
    date: str = Field(description="when it began, ISO 8601 (no unit)")
    command: str | None = Field(None, description="the command line (no unit)")


class BenchResult(Spec):
    """Configurations of one pair, run in turn on the same prompts in one or more settings."""

    format: int = Field(FORMAT, description="version of this format (no unit)")
    set_up: SetUp = Field(description="what was measured, where and with what")
    cells: tuple[Cell, ...] = Field(min_length=1, description="one a setting (list)")

    @model_validator(mode="before")
    @classmethod
    def _known_format(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("format", FORMAT if "cells" in data else None) != FORMAT:
            raise ValueError(f"format={data.get('format')} is of another version, and this one reads {FORMAT}: measure again")
        return data

    @property
    def rows(self) -> tuple[BenchRow, ...]:
        """All rows of all cells."""
        return tuple(row for cell in self.cells for row in cell.rows)

    @property
    def serving(self) -> ServingResult:
        """The result block of the fastest configuration in the first setting."""
        return self.cells[0].fastest.serving
