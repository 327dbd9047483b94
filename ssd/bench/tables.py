"""A benchmark as text: the answer in a sentence, the table with the speed against AR first, and the field's result block."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ssd.bench.result import BenchResult, BenchRow, Latencies, ServingResult
from ssd.specs import Configuration


def report(result: BenchResult) -> RenderableType:
    """Return all of it for rich to print."""
    return Group(Text(verdict(result)), Text(), table(result), Text(footnotes(result)), Text(), Text(serving_block(result.serving)))


def verdict(result: BenchResult) -> str:
    """Say in a sentence or two how the plan's speed compares, plainly where speculation is slower than AR."""
    plan = result.rows[0]
    rivals = [row for row in result.rows if row.configuration.mode != "ar"]
    best = max(rivals, key=lambda row: row.tokens_per_second.median, default=None)
    if best is None:
        return f"AR: {_speed(plan)}. Nothing else could run: give a draft to compare with speculation."
    said = [_compared(best, "The fastest speculation" if best is not plan else "The plan")]
    if best is not plan:
        said.append(_compared(plan, "The plan"))
    if slower := _slower(best):
        said.insert(0, slower)
    return "\n".join(said)


def _slower(row: BenchRow) -> str | None:
    alone, equal = row.speedup_vs_ar, row.speedup_vs_ar_equal_devices
    losses = []
    if alone is not None and alone < 1:
        losses.append(f"{alone:.2f} times the speed of AR on the target's devices alone")
    if equal is not None and equal < 1 and equal != alone:
        losses.append(f"{equal:.2f} times the speed of AR on the same devices")
    return f"Speculation is slower than AR here: {' and '.join(losses)}. Use mode='ar'." if losses else None


def _compared(row: BenchRow, who: str) -> str:
    used = row.configuration.placement
    if row.configuration.mode == "ar":
        return f"{who} is AR on {', '.join(used.target)}: {_speed(row)}."
    extra = len(used.devices) - len(used.target)
    alone = f"{_ratio(row.speedup_vs_ar)} AR" + (f" on {extra} {'device' if extra == 1 else 'devices'} fewer" if extra else "")
    equal = f", {_ratio(row.speedup_vs_ar_equal_devices)} AR on the same devices" if extra else ""
    return f"{who} is {label(row.configuration)} on {_where(row.configuration)}: {_speed(row)}, {alone}{equal}."


def _speed(row: BenchRow) -> str:
    return f"{row.tokens_per_second.median:.1f} tokens/s"


def label(configuration: Configuration) -> str:
    """Return a short name such as `SSD K=3 F=1,1,1,2`; the fan-out after a miss only where it differs."""
    name = configuration.mode.upper()
    if configuration.mode != "ar":
        name += f" K={configuration.num_speculative_tokens}"
    if configuration.mode == "ssd":
        name += f" F={_counts(configuration.fan_out_hit)}"
        if configuration.fan_out_miss != configuration.fan_out_hit:
            name += f"/{_counts(configuration.fan_out_miss)}"
        name += "" if configuration.backup == "jit" else f" backup={configuration.backup}"
    return name


def _counts(fan_out: tuple[int, ...]) -> str:
    return ",".join(map(str, fan_out))


def _where(configuration: Configuration) -> str:
    placement = configuration.placement
    target = " ".join(placement.target)
    return target if configuration.mode == "ar" or placement.draft == placement.target else f"{target} + {' '.join(placement.draft)}"


def table(result: BenchResult) -> Table:
    """Return a row a configuration, the plan's marked and first; speed against AR leads, hit rate stands beside acceptance."""
    titles = ["vs AR", "vs SD", "vs AR =", "vs SD =", "tokens/s", "quartiles", "predicted", "hit rate", "acceptance", "length"]
    title = f"{result.models.target} with {result.models.draft} on {result.hardware}"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("configuration", no_wrap=True)
    shown.add_column("devices", overflow="fold")
    for name in [*titles, "first token", "verify", "wait", "overlap"]:
        shown.add_column(name, justify="right", overflow="fold")
    for place, row in enumerate(result.rows):
        shown.add_row(("* " if place == 0 else "  ") + label(row.configuration), _where(row.configuration), *_cells(row))
    return shown


def _cells(row: BenchRow) -> list[str]:
    speed = row.tokens_per_second
    ratios = (row.speedup_vs_ar, row.speedup_vs_sd, row.speedup_vs_ar_equal_devices, row.speedup_vs_sd_equal_devices)
    return [
        *map(_ratio, ratios),
        f"{speed.median:.1f}",
        f"{speed.lower:.1f}-{speed.upper:.1f}",
        _number(row.predicted_tokens_per_second, ".1f"),
        _number(row.hit_rate, ".0%"),
        _number(row.draft_acceptance_rate, ".0%"),
        _number(row.mean_acceptance_length, ".2f"),
        f"{1e3 * row.time_to_first_token:.0f} ms",
        f"{row.verify_share:.0%}",
        f"{row.wait_share:.0%}",
        "" if row.configuration.mode == "ar" else f"{row.overlap:.0%}",
    ]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def footnotes(result: BenchResult) -> str:
    """Return how to read the table, whether outputs agree, and what was left out."""
    lines = [
        f"* the plan. {result.num_prompts} prompts, {result.output_tokens} tokens each, greedy, in turn; medians over prompts.",
        "vs AR, vs SD: against AR and the fastest SD on the target's own devices; with =: free to use all that the row uses.",
        f"Same tokens in every configuration: {result.identical_prompts} of {result.num_prompts} prompts"
        + (f"; not prompts {', '.join(map(str, result.differing_prompts))} (from 0)." if result.differing_prompts else "."),
    ]
    return "\n".join(
        lines + [f"Left out: {label(left.configuration)} on {_where(left.configuration)}: {left.reason}" for left in result.skipped]
    )


WIDTH = 58


def serving_block(serving: ServingResult) -> str:
    """Return the field's result block, its titles in the field's order; tokens come in bursts, so TPOT is the headline."""
    seconds, generated = serving.duration, serving.total_generated_tokens
    every = generated + serving.total_input_tokens
    lines = [
        _title("Serving Benchmark Result", "="),
        _line("Configuration:", label(serving.configuration)),
        _line("Successful requests:", serving.successful_requests),
        _line("Benchmark duration (s):", f"{seconds:.2f}"),
        _line("Total input tokens:", serving.total_input_tokens),
        _line("Total generated tokens:", generated),
        _line("Request throughput (req/s):", f"{serving.successful_requests / seconds:.2f}"),
        _line("Output token throughput (tok/s):", f"{generated / seconds:.2f}"),
        _line("Total token throughput (tok/s):", f"{every / seconds:.2f}"),
        *_latency("Time to First Token", "TTFT", serving.time_to_first_token),
        *_latency("Time per Output Token (excl. 1st token)", "TPOT", serving.time_per_output_token),
        *_latency("Inter-token Latency", "ITL", serving.inter_token_latency),
        *_latency("End-to-end Latency", "E2EL", serving.end_to_end_latency),
        *_speculation(serving),
        "=" * WIDTH,
    ]
    return "\n".join(lines)


def _speculation(serving: ServingResult) -> list[str]:
    if not serving.num_drafts:
        return []
    return [
        _title("Speculative Decoding", "-"),
        _line("Acceptance rate (%):", f"{100 * serving.num_accepted_tokens / serving.num_draft_tokens:.2f}"),
        _line("Acceptance length:", f"{1 + serving.num_accepted_tokens / serving.num_drafts:.2f}"),
        _line("Drafts:", serving.num_drafts),
        _line("Draft tokens:", serving.num_draft_tokens),
        _line("Accepted tokens:", serving.num_accepted_tokens),
        "Per-position acceptance (%):",
        *(_line(f"  Position {place}:", f"{100 * share:.2f}") for place, share in enumerate(serving.acceptance_per_position)),
    ]


def _latency(title: str, short: str, found: Latencies) -> list[str]:
    values = (("Mean", found.mean), ("Median", found.median), ("P99", found.p99))
    return [_title(title, "-"), *(_line(f"{name} {short} (ms):", f"{1e3 * value:.2f}") for name, value in values)]


def _title(text: str, rule: str) -> str:
    return f" {text} ".center(WIDTH, rule)


def _line(name: str, value: object) -> str:
    return f"{name:<40} {value!s:>{WIDTH - 41}}"
