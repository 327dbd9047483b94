"""What `ssd simulate` does: a scenario's file played once, several times or over a grid, and told in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sim.files import read_document, scenario_of, with_values
from sim.simulate import Result, simulate
from sim.summary import PERCENTILES, Interval, replicate, summary
from sim.sweep import Rows, grid, save, table

if TYPE_CHECKING:
    from ssd.progress import Progress

Named = dict[str, Interval | None]


def play(path: Path, seed: int) -> Result:
    """Play the scenario of a file once."""
    return simulate(scenario_of(read_document(path), path.parent), seed)


def numbers(path: Path, seed: int, replications: int, tell: Progress) -> Named:
    """Play it several times, on all cores; means and intervals."""
    return replicate(scenario_of(read_document(path), path.parent), replications, seed, jobs=-1, tell=tell)


def of_one(result: Result) -> Named:
    """The numbers of a single run."""
    return {name: None if value is None else Interval(value, None, None) for name, value in summary(result).items()}


def swept(path: Path, words: Sequence[str], seed: int, replications: int, tell: Progress) -> Rows:
    """Play it with every combination of the values in `words`, `key=v1,v2` each."""
    document, points = read_document(path), grid(dict(map(_axis, words)))
    scenarios = [scenario_of(with_values(document, point), path.parent) for point in points]
    return table(points, scenarios, replications=replications, seed=seed, tell=tell)


def write(rows: Rows, path: Path) -> None:
    """Write a table; ValueError where the file cannot be written."""
    try:
        save(rows, path)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written ({error.strerror}): give another file") from error


def _axis(word: str) -> tuple[str, list[Any]]:
    """A key and its values; what stands in brackets or braces is one value."""
    key, found, values = word.partition("=")
    try:
        listed = yaml.safe_load(f"[{values}]") if found and key else None
    except yaml.YAMLError:
        listed = None
    if not listed:
        raise ValueError(f"--sweep={word!r} is no sweep: write a key of the scenario and its values, such as num_speculative_tokens=2,4,8")
    return key, listed


# Told in groups: a title, a unit, and what belongs to it.
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between a round's tokens and the next",
    "e2e": "end to end",
}
WHERE = {
    "verify": "verification",
    "draft": "waiting for the draft",
    "link": "on the link",
    "prompt": "prompts",
    "overhead": "overhead",
    "idle": "idle",
}


def told(found: Named) -> str:
    """The numbers in a dozen lines."""
    lines = [f"{_text(found, 'output_tokens_per_second')} tokens/s over {_text(found, 'total_seconds', '.4g')} s"]
    if found["cache_hit_rate"] is not None:
        lines.append(f"hit rate {_text(found, 'cache_hit_rate', '.1%')}")
    if found["mean_acceptance_length"] is not None:
        of_draft = f"acceptance {_text(found, 'draft_acceptance_rate', '.1%')}"
        lines.append(f"mean acceptance length {_text(found, 'mean_acceptance_length', '.2f')}, {of_draft}")
    for name, title in LATENCIES.items():
        if found[f"{name}_p50"] is not None:
            lines.append(f"{title}, ms: " + ", ".join(f"p{p} {_text(found, f'{name}_p{p}', '.4g', 1e3)}" for p in PERCENTILES))
    devices = [name.removesuffix("_busy") for name in found if name.endswith("_busy")]
    lines.append("busy: " + ", ".join(f"{device} {_text(found, f'{device}_busy', '.1%')}" for device in devices))
    lines.append("the target's time: " + ", ".join(f"{title} {_text(found, f'share_{name}', '.1%')}" for name, title in WHERE.items()))
    return "\n".join(lines)


def _text(found: Named, name: str, form: str = ".1f", scale: float = 1.0) -> str:
    interval = found[name]
    if interval is None:
        return "none"
    mean = format(interval.mean * scale, form)
    return mean if interval.high is None else f"{mean} ±{format((interval.high - interval.mean) * scale, form)}"
