"""What the command line's options mean: from typed words to hardware, models, workload and a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import ValidationError

from ssd.asked import TYPED, Asked
from ssd.devices import are_cores, is_core
from ssd.placements import placements
from ssd.specs import Configuration, Hardware, Mode, Models, Objective, Placement, Plan, Profile, Spec, Workload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ssd.progress import Progress


S = TypeVar("S", bound=Spec)
N = TypeVar("N", int, float)


LOAD = ("prompt_tokens", "output_tokens", "batch_size", "temperature", "max_seconds_per_token", "prompt_set")
# What a saved plan does not settle: how much to decode, and on which prompts.
FREE_WITH_PLAN = ("plan", "output_tokens", "prompt_set")


def plan_for(asked: Asked, tell: Progress | None = None, machine: Hardware | None = None, profile: Profile | None = None) -> Plan:
    """Return the saved plan, the configuration typed by hand, or what the planner says; ValueError where options contradict each other.

    tell hears how a profile of this machine, where one is needed, comes along; machine and profile: those that are known already.
    """
    if asked.plan is not None:
        _refuse_beside("plan", asked)
        return read(Plan, "plan", asked.plan)
    machine, pair, load = machine or hardware_for(asked), models_for(asked), workload_for(asked)
    mode: Mode | None = _choice("mode", asked.mode, Mode)
    if any(getattr(asked, name) is not None for name in TYPED):
        return _typed(asked, machine, pair, load)
    from ssd.planner import check, plan

    objective: Objective = _choice("objective", asked.objective, Objective) or "latency"
    others = further_drafts(asked)
    check(machine, pair, objective, mode, load, others)
    # Each draft is measured by itself.
    known = profile or (None if others and asked.profile is None else _profile_for(asked, machine, pair, load, tell))
    return plan(machine, pair, workload=load, objective=objective, profile=known, mode=mode, drafts=others)


def _profile_for(asked: Asked, machine: Hardware, pair: Models, load: Workload, tell: Progress | None) -> Profile | None:
    if asked.profile is not None:
        return read(Profile, "profile", asked.profile)
    if not machine.is_local:
        return None
    from ssd.profiler import profile

    return profile(machine, pair, load, progress=tell)


def plan_to_run(asked: Asked, tell: Progress | None = None, machine: Hardware | None = None, profile: Profile | None = None) -> Plan:
    """Return the plan as plan_for does, refusing one for another machine."""
    if asked.plan is None and asked.hardware not in (None, "local") and not str(asked.hardware).endswith(".json"):
        raise ValueError(f"--hardware={asked.hardware!r} is another machine: leave it out to run here, or ask `ssd plan` about it")
    found = plan_for(asked, tell, machine, profile)
    if not found.hardware.is_local:
        raise ValueError(f"the plan is for hardware {found.hardware.name!r}, not for this machine: plan again with --hardware local")
    return found


@dataclass(frozen=True, slots=True)
class Axes:
    """The values that a benchmark runs over; no list of a kind leaves it to the plan."""

    batch_sizes: tuple[int, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    num_speculative_tokens: tuple[int, ...] = ()
    budgets: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = (0.0,)

    @classmethod
    def typed(cls, batch_size: str | None, prompt_tokens: str | None, K: str | None, budget: str | None, temperature: str) -> Axes:
        """Read lists with commas; ValueError names the option."""
        return cls(
            listed("batch_size", batch_size, int),
            listed("prompt_tokens", prompt_tokens, int),
            listed("num_speculative_tokens", K, int),
            listed("budget", budget, int),
            listed("temperature", temperature, float),
        )

    def points(self) -> list[dict[str, int]]:
        """Return the options of every point but for temperatures, those that were given."""
        # Here, for it takes scipy a second to come, and only a benchmark asks.
        from sim.sweep import grid

        axes = {
            "batch_size": self.batch_sizes,
            "prompt_tokens": self.prompt_tokens,
            "num_speculative_tokens": self.num_speculative_tokens,
            "budget": self.budgets,
        }
        return grid({name: values for name, values in axes.items() if values})


def listed(name: str, text: str | None, kind: type[N]) -> tuple[N, ...]:
    """Return the numbers of 0 or more, each once, that stand in `text` with commas between."""
    if text is None:
        return ()
    try:
        found = tuple(kind(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or len(set(found)) < len(found) or not all(0 <= value < math.inf for value in found):
        example = "0,1" if kind is float else "1,2,4"
        raise ValueError(f"{flag(name)}={text!r}: write numbers of 0 or more with commas, each once, such as {example}")
    return found


def plans_to_run(asked: Asked, axes: Axes, tell: Progress | None = None) -> list[Plan]:
    """Return a plan for each point of the axes; this machine is measured once, with the largest batch and the longest prompts.

    A saved plan is taken to other batch sizes and prompts as it is, without its predictions.
    """
    points = axes.points()
    if asked.plan is not None:
        _refuse_typed_beside_plan(axes)
        saved = plan_to_run(asked, tell)
        return [_for_load(saved, point) for point in points]
    machine = hardware_for(asked)
    heaviest = max(points, key=lambda point: (point.get("batch_size", 1), point.get("prompt_tokens", 0)))
    first = plan_to_run(_at(asked, heaviest), tell, machine)
    return [first if point == heaviest else plan_to_run(_at(asked, point), tell, machine, first.profile) for point in points]


def _at(asked: Asked, point: Mapping[str, int]) -> Asked:
    given: dict[str, Any] = dict(point)
    return replace(asked, **given)


def _refuse_typed_beside_plan(axes: Axes) -> None:
    for name, given in (("num_speculative_tokens", axes.num_speculative_tokens), ("budget", axes.budgets)):
        if given:
            raise ValueError(f"--plan settles {flag(name)} already: leave one or the other out")


def _for_load(plan: Plan, load: Mapping[str, int]) -> Plan:
    workload = Workload.model_validate({**plan.workload.model_dump(), **load})
    if workload == plan.workload:
        return plan
    others = tuple(one.unpredicted() for one in plan.alternatives)
    return plan.model_copy(update={"workload": workload, "predicted": None, "alternatives": others})


def hardware_for(asked: Asked) -> Hardware:
    """Return this machine, a named one, or one described in a .json file."""
    name = asked.hardware or "local"
    if name == "local":
        return Hardware.local()
    return read(Hardware, "hardware", Path(name)) if name.endswith(".json") else Hardware.named(name)


def models_for(asked: Asked) -> Models:
    """Return the pair, by default the embedded one; of several drafts the first."""
    given = {name: getattr(asked, name) for name in ("target", "dtype", "max_model_len", "draft_weights")}
    return Models.model_validate(_without_none(given | {"draft": asked.draft[0] if asked.draft else None}))


def further_drafts(asked: Asked) -> tuple[str, ...]:
    """Return the drafts after the first, for the planner to choose among."""
    return tuple(asked.draft[1:]) if asked.draft else ()


def one_draft(asked: Asked) -> None:
    """Refuse several drafts where there is nobody to choose."""
    if further_drafts(asked):
        raise ValueError(f"--draft is given {len(asked.draft or ())} times: only the planner chooses among drafts; name one here")


def workload_for(asked: Asked) -> Workload:
    """Return the load, by default the workload's own numbers."""
    given = {name: getattr(asked, name) for name in LOAD}
    return Workload.model_validate(_without_none(given))


def read(kind: type[S], option: str, path: Path) -> S:
    """Read a saved value; ValueError names the option and the file."""
    try:
        return kind.load(path)
    except ValidationError as error:
        raise ValueError(f"--{option}={str(path)!r} is not a {kind.__name__} that was saved: {explain(error)}") from error
    except ValueError as error:
        raise ValueError(f"--{option}: {error}") from error


def _typed(asked: Asked, hardware: Hardware, models: Models, workload: Workload) -> Plan:
    """Return the configuration that options spell out, with no prediction."""
    one_draft(asked)
    mode, K = asked.mode, asked.num_speculative_tokens
    for name in ("profile", "objective"):
        if getattr(asked, name) is not None:
            raise ValueError(f"{flag(name)} guides the planner, which is not asked beside --num-speculative-tokens: leave one of them out")
    if mode not in ("sd", "ssd") or K is None:
        raise ValueError(
            f"--mode={mode} with --num-speculative-tokens={K}: a configuration typed by hand needs --mode sd or ssd and a number of tokens"
        )
    if mode == "ssd" and asked.fan_out is None and asked.budget is None:
        ones = ",".join("1" * (K + 1))
        raise ValueError(
            f"--fan-out is missing: --mode ssd with --num-speculative-tokens={K} needs F_0 to F_{K}, such as {ones}, or a --budget"
        )
    fan_out = _counts(asked.fan_out) if asked.fan_out is not None else ()
    given = {name: getattr(asked, name) for name in ("budget", "building", "backup")}
    lists = {"fan_out_hit": fan_out, "fan_out_miss": fan_out}
    place = _placement(mode, hardware, 1 if asked.draft_workers is None else asked.draft_workers)
    configuration = Configuration.model_validate(
        {"mode": mode, "num_speculative_tokens": K, "placement": place, **lists, **_without_none(given)}
    )
    return Plan.of(configuration, hardware=hardware, models=models, workload=workload)


def _placement(mode: str, hardware: Hardware, workers: int) -> Placement:
    """Give the draft the last device in mode ssd, or the last ones; in mode sd let both share all cores, or the first accelerator."""
    apart, shared = placements(hardware)[0], placements(hardware)[-1]
    if mode == "sd":
        return shared.model_copy(update={"draft_workers": workers})
    if apart.overlaps:
        raise ValueError(f"--mode=ssd needs a device for the draft alone, but {hardware.name!r} has one: use --mode sd")
    return apart if workers == 1 else _several(apart, hardware, workers)


def _several(apart: Placement, hardware: Hardware, workers: int) -> Placement:
    """Give each worker of the draft a device, the last ones; beside one accelerator the cores, in equal parts."""
    ids = tuple(device.id for device in hardware.devices)
    if are_cores(apart.draft) and not are_cores(ids):
        return Placement(target=apart.target, draft=apart.draft, draft_workers=workers)
    # The target takes what is left, but for accelerators here, of which it has as many as there are processes.
    takes_all = are_cores(ids) or not hardware.is_local
    free = tuple(name for name in ids[1 if takes_all else len(apart.target) :] if is_core(name) == are_cores(ids))
    if not 1 <= workers <= len(free):
        raise ValueError(
            f"--draft-workers={workers} needs as many devices beside the target's, but {hardware.name!r} has {len(free)}: give fewer"
        )
    return Placement(target=ids[:-workers] if takes_all else apart.target, draft=free[-workers:], draft_workers=workers)


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--fan-out={text!r} is no list of counts: write F_0 to F_K with commas, such as 1,1,1,2") from None


def _refuse_beside(option: str, asked: Asked) -> None:
    beside = [flag(field.name) for field in fields(asked) if field.name not in FREE_WITH_PLAN and getattr(asked, field.name) is not None]
    if beside:
        raise ValueError(f"--{option} settles {', '.join(beside)} already: leave one or the other out")


def _choice(name: str, value: str | None, allowed: object) -> Any:
    """Return `value` if the literal type `allowed` has it."""
    known: Sequence[str] = get_args(allowed)
    if value is not None and value not in known:
        raise ValueError(f"{flag(name)}={value!r} is unknown: use {', '.join(known[:-1])} or {known[-1]}")
    return value


def flag(name: str) -> str:
    """Return how an option is typed."""
    return "--" + name.replace("_", "-")


def _without_none(given: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in given.items() if value is not None}


def explain(error: ValueError) -> str:
    """Return one line for a mistake of the user: option, value, remedy."""
    if isinstance(error, ValidationError):
        return "; ".join(_explain_one(detail) for detail in error.errors(include_url=False, include_context=False))
    return " ".join(str(error).split())


def _explain_one(detail: object) -> str:
    assert isinstance(detail, dict)
    place, message = ".".join(map(str, detail["loc"])), str(detail["msg"]).removeprefix("Value error, ")
    kind = detail["type"]
    if kind == "value_error":
        return message
    if kind in ("missing", "json_invalid") or not isinstance(detail["input"], str | int | float | bool):
        return f"{place}: {message}" if place else message
    return f"{place}={detail['input']!r}: {message[:1].lower()}{message[1:]}"
