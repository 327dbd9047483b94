"""Scenarios in files: YAML or JSON whose keys are the fields of sim.scenario.Scenario, with shorter forms for tables and curves."""

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import yaml

from sim.latency import Latency, LatencyByContext, Seconds
from sim.names import unknown
from sim.outcomes import IID, Outcomes, Positional, Replay, Trace, TwoState
from sim.scenario import Scenario
from theory.hits import PowerLaw

# How far a curve given as a power law reaches, in candidates.
LONGEST_CURVE = 128
TRACE_COLUMNS = ("arrival_seconds", "prompt_tokens", "output_tokens")
OUTCOMES: Mapping[str, Callable[..., Outcomes]] = {
    "iid": IID,
    "positional": Positional,
    "two_state": TwoState,
    "replay": Replay,
    "trace": Trace,
}
TABLES = ("verify", "draft_step", "draft_alone")
KINDS = ("outcomes", "ngram_outcomes")

Document = dict[str, Any]


def read_scenario(path: str | Path) -> Scenario:
    """Read a scenario from a YAML or JSON file. ValueError names the key, the value and the remedy."""
    return scenario_of(read_document(path), Path(path).parent)


def read_document(path: str | Path) -> Document:
    """Read what a scenario's file says, unchecked but for being a mapping."""
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read ({error.strerror}): give a scenario, a .yaml or .json file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is neither YAML nor JSON: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{str(path)!r} holds no scenario: write `key: value`, a line each, with the fields of a scenario as keys")
    return found


def with_values(document: Document, values: Mapping[str, Any]) -> Document:
    """The document with other values; a dotted key, such as outcomes.iid.alpha, reaches inside. ValueError where it leads nowhere."""
    changed: Document = json.loads(json.dumps(document))
    for key, value in values.items():
        *path, last = key.split(".")
        inner = changed
        for name in path:
            if not isinstance(inner.get(name), dict):
                raise ValueError(f"{key}: {unknown('the scenario', name, inner)}")
            inner = inner[name]
        if path and last not in inner:
            raise ValueError(f"{key}: {unknown('the scenario', last, inner)}")
        inner[last] = value
    return changed


def scenario_of(document: Mapping[str, Any], folder: Path = Path()) -> Scenario:
    """Make a scenario of a document; files that it names are looked for in `folder`. ValueError names the key, the value and the remedy."""
    known = {field.name: field for field in fields(Scenario)}
    for key in document:
        if key not in known:
            raise ValueError(unknown("a scenario", key, known))
    for name, field in known.items():
        if field.default is MISSING and document.get(name) is None:
            raise ValueError(f"{name} is missing: a scenario needs it")
    given = {key: _value(key, value, known[key].type, folder) for key, value in document.items() if value is not None}
    for name in ("fan_out_hit", "fan_out_miss"):
        if isinstance(given.get(name), int):
            given[name] = (given[name],) * (given.get("num_speculative_tokens", 0) + 1)
    return Scenario(**given)


def _value(key: str, value: Any, kind: Any, folder: Path) -> Any:
    if key in TABLES:
        return _table(key, value)
    if key in KINDS:
        return _outcomes(key, value, folder)
    if key == "trace":
        return _requests(value, folder)
    if kind is str or kind is bool:
        if not isinstance(value, kind):
            raise ValueError(f"{key}={value!r} must be {'a word' if kind is str else 'true or false'}")
        return value
    return _numbers(key, value, deep="tuple" in str(kind) or "Lengths" in str(kind) or key.startswith("fan_out"))


def _numbers(key: str, value: Any, deep: bool = True) -> Any:
    """Numbers, or lists of them as tuples."""
    if isinstance(value, list) and deep:
        return tuple(_numbers(key, entry) for entry in value)
    # YAML takes 1e-3, without a point, for a word.
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{key}={value!r} must be a number{' or a list of numbers' if deep else ''}") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{key}={value!r} must be a number{' or a list of numbers' if deep else ''}")
    return value


def _table(key: str, value: Any) -> Seconds:
    """Seconds for every size; or by size; or by context and size."""
    if not isinstance(value, dict):
        return Latency.constant(_numbers(key, value, deep=False))
    try:
        if all(isinstance(inner, dict) for inner in value.values()):
            return LatencyByContext.of({_size(key, context): _points(key, inner) for context, inner in value.items()})
        return Latency.of(_points(key, value))
    except ValueError as error:
        raise ValueError(f"{key}: {str(error).removeprefix(f'{key}: ')}") from error


def _points(key: str, value: Mapping[Any, Any]) -> dict[int, float]:
    return {_size(key, size): _numbers(key, seconds, deep=False) for size, seconds in value.items()}


def _size(key: str, size: Any) -> int:
    # The keys of JSON are words.
    try:
        return int(size)
    except (TypeError, ValueError):
        raise ValueError(f"{key}: {size!r} is no number of tokens: write `tokens: seconds`, or `context: {{tokens: seconds}}`") from None


def _outcomes(key: str, value: Any, folder: Path) -> Outcomes:
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(f"{key}={value!r} must be one of {', '.join(OUTCOMES)} with its options, such as iid: {{alpha: 0.8, curve: ...}}")
    ((name, options),) = value.items()
    if name not in OUTCOMES:
        raise ValueError(unknown(key, name, OUTCOMES))
    place, make = f"{key}.{name}", OUTCOMES[name]
    if not isinstance(options, dict):
        raise ValueError(f"{place}={options!r} must have options, such as alpha: 0.8")
    known = [field.name for field in fields(make)]  # type: ignore[arg-type]
    if name in ("replay", "trace") and "file" in options:
        options = {**{k: v for k, v in options.items() if k != "file"}, known[0]: _recorded(place, options["file"], folder, name)}
    for option in options:
        if option not in known:
            raise ValueError(unknown(place, option, known))
    try:
        return make(**{option: _option(f"{place}.{option}", given, folder) for option, given in options.items()})
    except TypeError:
        missing = [f.name for f in fields(make) if f.default is MISSING and f.name not in options]  # type: ignore[arg-type]
        raise ValueError(f"{place} lacks {', '.join(missing)}") from None
    except ValueError as error:
        raise ValueError(f"{place}: {str(error).removeprefix(f'{place}: ')}") from error


def _option(place: str, value: Any, folder: Path) -> Any:
    name = place.rpartition(".")[2]
    if name.startswith("after_"):
        return _outcomes(place, value, folder)
    if name.startswith("curve"):
        return tuple(_curve(place, each) for each in value) if name == "curves" and isinstance(value, list) else _curve(place, value)
    return _numbers(place, value)


def _curve(place: str, value: Any) -> tuple[float, ...]:
    """A list indexed by F; or the power law 1 - c F^-r."""
    if not isinstance(value, dict):
        return tuple(_numbers(place, value)) if isinstance(value, list) else (_numbers(place, value),)
    for name in value:
        if name not in ("r", "c"):
            raise ValueError(unknown(place, name, ("r", "c")))
    if "r" not in value:
        raise ValueError(f"{place}={value!r} lacks r: a power law is 1 - c F^-r")
    law = PowerLaw(**{name: _numbers(f"{place}.{name}", number, deep=False) for name, number in value.items()})
    return tuple(law.curve(LONGEST_CURVE).tolist())


def _recorded(place: str, name: Any, folder: Path, kind: str) -> Any:
    """What a JSON file holds: a list, or the traces of the one load that a profile of `ssd profile` is of."""
    found = read_json(f"{place}.file", folder / str(name))
    if kind == "trace" and isinstance(found, dict):
        loads = found.get("texts", [found])
        if len(loads) != 1:
            raise ValueError(f"{place}.file={name!r} is a profile of {len(loads)} loads: profile one prompt set at one temperature")
        found = loads[0].get("traces")
    if not isinstance(found, list):
        raise ValueError(f"{place}.file={name!r} holds no list: give recorded rounds or ranks, or a saved profile")
    return found


def read_json(key: str, path: Path) -> Any:
    """Read a JSON file that a key of a scenario names."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}={str(path)!r} cannot be read as JSON ({error}): give another file") from error


def _requests(value: Any, folder: Path) -> tuple[tuple[float, int, int], ...]:
    """Arrival, prompt and output tokens of each request: a list of lists, or a CSV file with these columns."""
    if isinstance(value, list):
        return tuple((_numbers("trace", a, deep=False), int(p), int(o)) for a, p, o in _triples(value))
    try:
        with (folder / str(value)).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise ValueError(f"trace={value!r} cannot be read ({error.strerror}): give a .csv file") from error
    if not rows or not set(TRACE_COLUMNS) <= set(rows[0]):
        raise ValueError(f"trace={value!r} must have the columns {', '.join(TRACE_COLUMNS)} and at least one request")
    cells = [[_numbers(f"trace, {column}", row[column] or "", deep=False) for column in TRACE_COLUMNS] for row in rows]
    return tuple((arrival, int(prompt), int(output)) for arrival, prompt, output in cells)


def _triples(value: Sequence[Any]) -> Sequence[Any]:
    for entry in value:
        if not isinstance(entry, list) or len(entry) != 3 or any(isinstance(v, bool) or not isinstance(v, int | float) for v in entry):
            raise ValueError(f"trace has {entry!r}: give arrival seconds, prompt tokens and output tokens of each request")
    return value
