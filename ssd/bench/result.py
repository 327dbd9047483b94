"""What a benchmark found: one row a configuration, ratios taken prompt by prompt, and how many outputs agree."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import Field

from ssd.specs import Configuration, Models, Spec


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


class BenchRow(Spec):
    """One configuration as it ran."""

    configuration: Configuration = Field(description="what ran, with its prediction (no unit)")
    tokens_per_second: Quartiles = Field(description="output tokens per second of decoding, prefill apart; over prompts")
    time_to_first_token: float = Field(ge=0, description="median over prompts, seconds")
    speedup_vs_ar: float | None = Field(description="against AR on the target's devices, median over prompts (ratio)")
    speedup_vs_sd: float | None = Field(description="against the fastest SD on the target's devices, median over prompts (ratio)")
    speedup_vs_ar_equal_devices: float | None = Field(
        description="against the fastest AR within the devices used, median over prompts (ratio)"
    )
    speedup_vs_sd_equal_devices: float | None = Field(
        description="against the fastest SD within the devices used, median over prompts (ratio)"
    )
    hit_rate: float | None = Field(description="rounds whose outcome was cached, none without a cache (ratio)")
    draft_acceptance_rate: float | None = Field(description="accepted over drafted tokens (ratio)")
    mean_acceptance_length: float | None = Field(description="tokens a round, bonus included (tokens)")
    verify_share: float = Field(description="verifying, of the time after the first token (ratio)")
    wait_share: float = Field(description="the target waiting for a draft, of the time after the first token (ratio)")
    overlap: float = Field(description="the draft's work done while the target verified (ratio)")

    @property
    def predicted_tokens_per_second(self) -> float | None:
        """Tokens per second of decoding that the planner expected, none where it was not asked."""
        predicted = self.configuration.predicted
        return predicted.tokens_per_second if predicted is not None else None

    @property
    def measured_over_predicted(self) -> float | None:
        """Measured over predicted tokens per second, none without a prediction (ratio)."""
        predicted = self.predicted_tokens_per_second
        return self.tokens_per_second.median / predicted if predicted else None


class Skipped(Spec):
    """A configuration that could not run beside the others."""

    configuration: Configuration = Field(description="what was left out (no unit)")
    reason: str = Field(description="why, in words (no unit)")


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
    """The field's result block for one configuration, requests one after another."""

    configuration: Configuration = Field(description="what ran (no unit)")
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


class BenchResult(Spec):
    """Configurations of one pair, run in turn on the same prompts."""

    hardware: str = Field(description="name of the machine (no unit)")
    models: Models = Field(description="the pair (no unit)")
    num_prompts: int = Field(ge=1, description="distinct prompts, each decoded by every configuration (count)")
    output_tokens: int = Field(ge=2, description="tokens of every output")
    rows: tuple[BenchRow, ...] = Field(min_length=1, description="the plan first (list)")
    skipped: tuple[Skipped, ...] = Field((), description="what could not run beside the others (list)")
    differing_prompts: tuple[int, ...] = Field(description="prompts whose outputs are not the same everywhere (indices from 0)")
    serving: ServingResult = Field(description="the block of the fastest configuration")

    @property
    def identical_prompts(self) -> int:
        """Prompts whose token ids are the same in all configurations (count)."""
        return self.num_prompts - len(self.differing_prompts)

    @property
    def fastest(self) -> BenchRow:
        """The row with the highest median speed."""
        return max(self.rows, key=lambda row: row.tokens_per_second.median)
