"""Grids of scenarios, played in parallel, and what they did as a table."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

from sim.names import unknown
from sim.scenario import Scenario
from sim.summary import Tell, over, played

Point = dict[str, Any]
Rows = list[dict[str, Any]]


def grid(axes: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Every combination of the axes' values, the last axis turning fastest. ValueError for an axis without values."""
    for name, values in axes.items():
        if not values:
            raise ValueError(f"{name}=() leaves nothing to sweep over: give at least one value")
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def sweep(
    scenario: Scenario,
    axes: Mapping[str, Sequence[Any]],
    *,
    replications: int = 1,
    seed: int = 0,
    jobs: int = -1,
    tell: Tell | None = None,
) -> Rows:
    """Play a scenario with every combination of values for some of its fields; see `table` for what is returned."""
    known = [field.name for field in fields(Scenario)]
    for name in axes:
        if name not in known:
            raise ValueError(unknown("a scenario", name, known))
    points = grid(axes)
    return table(points, [replace(scenario, **point) for point in points], replications=replications, seed=seed, jobs=jobs, tell=tell)


def table(
    points: Sequence[Point],
    scenarios: Sequence[Scenario],
    *,
    replications: int = 1,
    seed: int = 0,
    jobs: int = -1,
    tell: Tell | None = None,
) -> Rows:
    """Play a scenario for each point, in `jobs` processes (joblib's count; -1: as many as there are cores).

    A row has the point's values, then every number of sim.summary.summary, a mean over the replications; where there are several, also
    the ends of its 95 % interval as `<name>_low` and `<name>_high`.
    """
    rows = []
    for place, runs in groupby(played(scenarios, replications, seed, jobs, tell), key=lambda run: run[0]):
        row = {name: _cell(value) for name, value in points[place].items()}
        for name, interval in over([numbers for _, numbers in runs]).items():
            row[name] = interval and interval.mean
            if replications > 1:
                row |= {f"{name}_low": interval and interval.low, f"{name}_high": interval and interval.high}
        rows.append(row)
    return rows


def save(rows: Rows, path: str | Path) -> None:
    """Write a table as .csv or .parquet. ValueError for another ending, and where Parquet needs pyarrow."""
    path = Path(path)
    # Not every scenario of a grid has the same devices.
    names = list(dict.fromkeys(name for row in rows for name in row))
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
        return
    if path.suffix != ".parquet":
        raise ValueError(f"path={str(path)!r}: a table is written as .csv or .parquet")
    try:
        from pyarrow import Table
        from pyarrow.parquet import write_table
    except ImportError as error:
        raise ValueError(f"path={str(path)!r}: Parquet needs pyarrow; pip install 'ssd-decoding[tables]', or write .csv") from error
    write_table(Table.from_pydict({name: _column([row.get(name) for row in rows]) for name in names}), path)


def _column(values: list[Any]) -> list[Any]:
    """Values of one type: words where any is one."""
    return [value if value is None else str(value) for value in values] if any(isinstance(value, str) for value in values) else values


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else str(value)
