"""Two results side by side: speeds of what is in both, and what else is not the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ssd.bench.result import BenchResult, BenchRow, Quartiles
from ssd.bench.setting import Setting
from ssd.bench.tables import label, where
from ssd.specs import Spec

Key = tuple[Setting, str, str]


class Compared(Spec):
    """One configuration in two results."""

    setting: Setting = Field(description="what was decoded (units in its own fields)")
    configuration: str = Field(description="its short name (no unit)")
    devices: str = Field(description="what it ran on (no unit)")
    first: float = Field(ge=0, description="median speed in the first, tokens per second")
    second: float = Field(ge=0, description="median speed in the second, tokens per second")
    ratio: Quartiles = Field(description="the second's speed over the first's (ratios)")
    paired: bool = Field(description="whether prompt by prompt; of medians otherwise, which have no spread (yes or no)")


def compare(first: BenchResult, second: BenchResult) -> tuple[Compared, ...]:
    """Return what ran in both, with the second's speed over the first's: prompt by prompt where prompts are the same, else of medians.

    Ratios of medians have no spread; they then stand three times. ValueError where nothing ran in both.
    """
    ours, theirs = _by_key(first), _by_key(second)
    found = tuple(_compared(key, row, theirs[key], first, second) for key, row in ours.items() if key in theirs)
    if not found:
        raise ValueError(f"nothing ran in both: the first has {_names(ours)}, the second {_names(theirs)}; compare runs of the same axes")
    return found


def _by_key(result: BenchResult) -> dict[Key, BenchRow]:
    return {(cell.setting, label(row.configuration), where(row.configuration)): row for cell in result.cells for row in cell.rows}


def _names(rows: dict[Key, BenchRow]) -> str:
    return "; ".join(_name(key) for key in rows)


def _name(key: Key) -> str:
    setting, what, devices = key
    return f"{what} on {devices} ({setting})"


def _compared(key: Key, a: BenchRow, b: BenchRow, first: BenchResult, second: BenchResult) -> Compared:
    paired = first.set_up.prompts == second.set_up.prompts and len(a.speeds) == len(b.speeds)
    x, y = a.tokens_per_second.median, b.tokens_per_second.median
    ratios = [after / before for before, after in zip(a.speeds, b.speeds, strict=True)] if paired else [y / x]
    setting, what, devices = key
    return Compared(setting=setting, configuration=what, devices=devices, first=x, second=y, ratio=Quartiles.of(ratios), paired=paired)


def set_up_differences(first: BenchResult, second: BenchResult) -> Iterator[str]:
    """Yield a line for everything in which the set-ups differ, and for what ran in one of them only."""
    a, b = _flat(first.set_up.model_dump()), _flat(second.set_up.model_dump())
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            yield f"{name}: {_shown(a.get(name))} -> {_shown(b.get(name))}"
    ours, theirs = _by_key(first), _by_key(second)
    for which, here, there in (("first", ours, theirs), ("second", theirs, ours)):
        yield from (f"only in the {which}: {_name(key)}" for key in here if key not in there)


# These differ between any two runs, and say nothing about what was run.
INCIDENTAL = ("date", "load_seconds", "command")


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in tree.items():
        if not prefix and name in INCIDENTAL:
            continue
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _shown(value: object) -> str:
    return f"{len(value)} texts" if isinstance(value, tuple) else "nothing" if value is None else str(value)


def comparison(first: BenchResult, second: BenchResult) -> RenderableType:
    """Return all of it for rich to print."""
    rows = compare(first, second)
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("setting", "configuration", "devices"):
        shown.add_column(name, overflow="fold")
    for name in ("first", "second", "second / first", "quartiles"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        ratio = row.ratio
        quartiles = f"{ratio.lower:.2f}-{ratio.upper:.2f}" if row.paired else "of medians"
        speeds = f"{row.first:.1f}", f"{row.second:.1f}"
        shown.add_row(str(row.setting), row.configuration, row.devices, *speeds, f"{ratio.median:.2f}x", quartiles)
    told = list(set_up_differences(first, second)) or ["nothing"]
    return Group(shown, Text("\n  ".join(["What else differs:", *told])))
