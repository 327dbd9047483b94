"""A benchmark as text: the answer in a sentence, tables with the speed against AR first, and the field's result block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ssd.bench.result import BenchResult, BenchRow, Cell, Latencies, Quartiles, ServingResult
from ssd.bench.setting import Setting, Who
from ssd.rivals.messages import Rival, Way
from ssd.specs import Configuration


def report(result: BenchResult) -> RenderableType:
    """Return all of it for rich to print."""
    set_up, first = result.set_up, result.cells[0]
    parts: list[RenderableType] = [Text(f"{set_up.models.target} with {set_up.models.draft} on {set_up.hardware}"), Text()]
    for cell in result.cells:
        parts += [Text(f"{_sentence(cell.setting)}. {verdict(cell)}"), Text(), table(cell), Text(left_out(cell))]
    parts += [Text(footnotes(result)), Text(), Text(serving_block(label(first.fastest.configuration), result.serving))]
    return Group(*parts)


def _sentence(setting: Setting) -> str:
    said = str(setting)
    return said[0].upper() + said[1:]


def verdict(cell: Cell) -> str:
    """Say in a sentence or two how the plan's speed compares, plainly where speculation is slower than AR."""
    plan = cell.rows[0]
    ours = [row for row in cell.rows if isinstance(row.configuration, Configuration) and row.configuration.mode != "ar"]
    best = max(ours, key=lambda row: row.tokens_per_second.median, default=None)
    if best is None:
        return f"AR: {_speed(plan)}. Nothing else could run: give a draft to compare with speculation."
    said = [_compared(best, "The fastest speculation" if best is not plan else "The plan")]
    if best is not plan:
        said.append(_compared(plan, "The plan"))
    if slower := _slower(best):
        said.insert(0, slower)
    return "\n".join(said)


def _slower(row: BenchRow) -> str | None:
    alone, equal = _median(row.speedup_vs_ar), _median(row.speedup_vs_ar_equal_devices)
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
    return f"{who} is {label(row.configuration)} on {where(row.configuration)}: {_speed(row)}, {alone}{equal}."


def _speed(row: BenchRow) -> str:
    return f"{row.tokens_per_second.median:.1f} tokens/s"


def label(configuration: Who) -> str:
    """Return a short name such as `SSD K=3 F=1,1,1,2`, `SSD K=4 B=10` or `llama.cpp Q4_K_M`; the fan-out after a miss where it differs."""
    if isinstance(configuration, Rival):
        return f"{configuration.mode} {configuration.weights}"
    name = configuration.mode.upper()
    if configuration.mode != "ar":
        name += f" K={configuration.num_speculative_tokens}"
    if configuration.mode == "ssd" and configuration.budget:
        name += f" B={configuration.budget}"
    elif configuration.mode == "ssd":
        name += f" F={_counts(configuration.fan_out_hit)}"
        if configuration.fan_out_miss != configuration.fan_out_hit:
            name += f"/{_counts(configuration.fan_out_miss)}"
    name += "" if configuration.backup == "jit" else f" backup={configuration.backup}"
    return name + ("" if configuration.building == "fixed" else f" {configuration.building}")


def _counts(fan_out: tuple[int, ...]) -> str:
    return ",".join(map(str, fan_out))


def where(configuration: Who) -> str:
    """Return devices, such as `cpu:0 + 1`, the draft's own after the plus."""
    placement = configuration.placement
    if configuration.mode == "ar" or placement.draft in ((), placement.target):
        return _short(placement.target)
    kind = placement.target[0].split(":")[0] + ":"
    return f"{_short(placement.target)} + {_short(placement.draft).removeprefix(kind)}"


def _short(ids: Sequence[str]) -> str:
    """Return ids with a common kind said once: `cpu:0,1`."""
    kinds = {name.split(":")[0] for name in ids}
    return " ".join(ids) if len(kinds) > 1 else f"{kinds.pop()}:{','.join(name.split(':')[1] for name in ids)}"


Column = tuple[str, Callable[[BenchRow], str]]

COLUMNS: tuple[Column, ...] = (
    ("vs AR", lambda row: _ratio(row.speedup_vs_ar)),
    ("vs SD", lambda row: _ratio(row.speedup_vs_sd)),
    ("AR =", lambda row: _ratio(row.speedup_vs_ar_equal_devices)),
    ("SD =", lambda row: _ratio(row.speedup_vs_sd_equal_devices)),
)
RATES: tuple[Column, ...] = (
    ("tokens/s", lambda row: f"{row.tokens_per_second.median:.1f}"),
    ("±", lambda row: f"{_spread(row.tokens_per_second):.0%}"),
    ("hit", lambda row: _number(row.hit_rate, ".0%")),
    ("acc.", lambda row: _number(row.draft_acceptance_rate, ".0%")),
    ("len.", lambda row: _number(row.mean_acceptance_length, ".2f")),
    ("wait", lambda row: "" if row.configuration.mode == "ar" else _number(row.wait_share, ".0%")),
    ("TTFT", lambda row: f"{1e3 * row.time_to_first_token:.0f}"),
)
SHORT: dict[Way, str] = {"transformers": "vs HF", "transformers assisted": "vs HF+", "llama.cpp": "vs L"}


def table(cell: Cell) -> Table:
    """Return a row a configuration, the plan's marked and first; speed against AR leads, hit rate stands beside acceptance."""
    shown = Table(box=box.SIMPLE_HEAD, padding=0)
    shown.add_column("configuration", overflow="fold", min_width=20, max_width=28)
    shown.add_column("devices", overflow="fold")
    columns = [*COLUMNS, *_against(cell), *RATES]
    for name, _ in columns:
        shown.add_column(name, justify="right", no_wrap=True)
    for place, row in enumerate(cell.rows):
        name = ("* " if place == 0 else "  ") + label(row.configuration)
        shown.add_row(name, where(row.configuration), *(show(row) for _, show in columns))
    return shown


def _against(cell: Cell) -> Iterator[Column]:
    """Yield a column for every rival that ran."""
    for row in cell.rows:
        if isinstance(row.configuration, Rival):
            yield _column(row.configuration.mode)


def _column(way: Way) -> Column:
    return SHORT[way], lambda row: _ratio(row.speedup_vs_rivals.get(way))


def _median(found: Quartiles | None) -> float | None:
    return None if found is None else found.median


def _ratio(found: Quartiles | None) -> str:
    return "" if found is None else f"{found.median:.2f}x"


def _spread(found: Quartiles) -> float:
    """Return half the interquartile range over the median, both sides of which it lies on."""
    return (found.upper - found.lower) / 2 / found.median if found.median else 0.0


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def footnotes(result: BenchResult) -> str:
    """Return how to read the tables."""
    set_up = result.set_up
    lines = [
        f"* the plan. {len(set_up.prompts)} prompts, {set_up.output_tokens} tokens each, in turn. Medians over prompts or batches; ±: half "
        "the interquartile range; TTFT in ms.",
        "vs AR, vs SD: against AR and the fastest SD on the target's own devices; AR =, SD =: free to use all that the row uses.",
    ]
    if any(isinstance(row.configuration, Rival) for row in result.rows):
        lines.append("vs HF, HF+, L: against transformers' generate, its assisted generation, and llama.cpp, on all devices.")
    if any(cell.setting.batch_size > 1 for cell in result.cells):
        lines.append("tokens/s: of one prompt at a time, decoding alone; of batches, from their start to their end, prompts included.")
    return "\n".join(lines)


def left_out(cell: Cell) -> str:
    """Return whether outputs agree, and what was left out."""
    lines = [line for row in cell.rows if (line := _agreement(row))]
    if cell.setting.temperature == 0 and not lines:
        lines.append(f"Same tokens in every row: {cell.rows[0].serving.successful_requests} of as many outputs.")
    lines += [f"Left out: {label(left.configuration)} on {where(left.configuration)}: {left.reason}" for left in cell.skipped]
    return "\n".join([*lines, ""])


def _agreement(row: BenchRow) -> str | None:
    """Say which outputs are not AR's."""
    if not row.differences:
        return None
    ties = f"; {row.near_ties} more at a near tie" if row.near_ties else ""
    named = f" ({_listed(row.differing_prompts)}, from 0)" if row.differing_prompts else ""
    count = f"{len(row.differing_prompts)} of {row.serving.successful_requests}"
    return f"Other tokens than AR's: {label(row.configuration)} on {where(row.configuration)}, {count} prompts{named}{ties}."


def _listed(prompts: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, prompts[:most])) + (", ..." if len(prompts) > most else "")


WIDTH = 58


def serving_block(name: str, serving: ServingResult) -> str:
    """Return the field's result block, its titles in the field's order; tokens come in bursts, so TPOT is the headline."""
    seconds, generated = serving.duration, serving.total_generated_tokens
    every = generated + serving.total_input_tokens
    lines = [
        _title("Serving Benchmark Result", "="),
        _line("Configuration:", name),
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
