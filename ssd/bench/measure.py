"""Run several configurations, and other programs, on the same prompts, in turn, and compare them prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from time import monotonic
from typing import Any

from ssd.bench.candidates import grid
from ssd.bench.identity import differences, gap_by, reference
from ssd.bench.memory import forget_peak, peak_bytes, planned_bytes, processes
from ssd.bench.result import BenchResult, Cell, SetUp, Skipped
from ssd.bench.run import Run, Runs
from ssd.bench.setting import Setting, Who
from ssd.bench.summary import summarise
from ssd.devices import host
from ssd.engine.engine import Engine, Params, Prompt
from ssd.progress import Progress
from ssd.prompts import of_length
from ssd.rivals.child import Child, RefusedError
from ssd.rivals.messages import Decode, Program, Rival
from ssd.rivals.start import check as check_rivals
from ssd.rivals.start import rivals, start, stored
from ssd.specs import Configuration, Plan, SamplingParams

Ids = tuple[int, ...]
Group = tuple[Ids, ...]
PACKAGES = ("ssd-decoding", "torch", "transformers", "cyllama")


def bench(
    plans: Plan | Sequence[Plan],
    *,
    prompts: Sequence[str],
    output_tokens: int,
    warmup: int = 1,
    temperatures: Sequence[float] = (0.0,),
    fit_prompts: bool = False,
    against: Sequence[Program] = (),
    prompt_set: str | None = None,
    command: str | None = None,
    progress: Progress | None = None,
    listen: str | None = None,
) -> BenchResult:
    """Decode every prompt to `output_tokens` by the plans, their best rivals and the baselines, one after another on one engine.

    Plans of one pair on one machine: those for the same batch size are compared with one another. fit_prompts: cut or fill prompts to the
    `prompt_tokens` of each plan's workload. against: other programs to decode the same, on all devices of this host. listen: where the
    draft of another host comes to, as for Engine.from_plan. The order turns from group to
    group; `warmup` runs of each configuration come first and do not count; progress is called with what is being done and the share
    done, 0..1; prompt_set and command are kept with the result. ValueError for prompts that repeat or do not fit or are too few for a
    batch and for programs that cannot be had, RuntimeError if the draft is lost meanwhile.
    """
    listed = [plans] if isinstance(plans, Plan) else list(plans)
    _check(listed, prompts, output_tokens, warmup, temperatures)
    plan, tell = listed[0], progress or (lambda *_: None)
    devices = tuple(dict.fromkeys(name for one in listed for name in one.placement.devices if host((name,)) is None))
    check_rivals(against, plan.models, devices)
    cells = grid(listed, temperatures, fit_prompts=fit_prompts)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    tell("loading models", 0.0)
    with ExitStack() as stack:
        begin = monotonic()
        rows = max(setting.batch_size for setting in cells)
        engine = stack.enter_context(Engine.from_plan(plan.with_configuration(_with_draft(cells)), max_num_seqs=rows, listen=listen))
        seconds = {"ssd": monotonic() - begin}
        groups = {setting: _groups(engine, prompts, setting, output_tokens) for setting in cells}
        longest = output_tokens + max(len(ids) for found in groups.values() for group in found for ids in group)
        others = rivals(against, plan.models, devices)
        children: dict[Program, Child] = {}
        for rival, program in others.items():
            if program not in children:
                tell(f"loading {program}", 0.0)
                children[program] = stack.enter_context(start(program, plan.models, rival.placement, rows, longest))
                seconds[program] = children[program].load_seconds
        stage = _Stage(engine, {rival: children[program] for rival, program in others.items()}, output_tokens)
        found = list(_measure(stage, cells, groups, warmup, tell))
    given = {"prompt_set": prompt_set, "prompts": tuple(prompts), "output_tokens": output_tokens, "warmup": warmup, "command": command}
    return BenchResult(set_up=_set_up(engine, date=date, load_seconds=seconds, **given), cells=tuple(found))


def _set_up(engine: Engine, **told: Any) -> SetUp:
    """Return what the benchmark was run with: what the engine knows, and what is told."""
    hardware, models = engine.plan.hardware, engine.plan.models
    return SetUp(
        hardware=hardware.name,
        devices={device.id: device.name for device in hardware.devices},
        models=models,
        weights=stored(engine.pair.target),
        versions=_versions(),
        **told,
    )


def _check(plans: Sequence[Plan], prompts: Sequence[str], output_tokens: int, warmup: int, temperatures: Sequence[float]) -> None:
    if not plans:
        raise ValueError("plans is empty: give at least one")
    if any((one.models, one.hardware) != (plans[0].models, plans[0].hardware) for one in plans):
        raise ValueError("plans are for several pairs or machines: compare those of one")
    if not prompts:
        raise ValueError("prompts is empty: give at least one")
    if len(set(prompts)) < len(prompts):
        raise ValueError(f"prompts repeat: {len(set(prompts))} of {len(prompts)} are distinct; a repeated prompt would count twice")
    most = max(one.workload.batch_size for one in plans)
    if most > len(prompts):
        raise ValueError(f"prompts has {len(prompts)} for workload.batch_size={most}: give at least as many as are decoded together")
    if output_tokens < 2:
        raise ValueError(f"output_tokens={output_tokens}: the speed of decoding needs at least 2")
    if warmup < 0:
        raise ValueError(f"warmup={warmup}: give 0 or more runs")
    if not temperatures or min(temperatures) < 0:
        raise ValueError(f"temperatures={tuple(temperatures)}: give at least one, none below 0")


def _with_draft(cells: dict[Setting, list[Configuration]]) -> Configuration:
    """Return what to start the engine from, so that a draft is loaded if any configuration needs one."""
    rank = {"ssd": 0, "sd": 1, "ar": 2}
    return min((one for column in cells.values() for one in column), key=lambda configuration: rank[configuration.mode])


def _groups(engine: Engine, prompts: Sequence[str], setting: Setting, output_tokens: int) -> list[Group]:
    """Return the prompts' token ids by what is decoded together; those that do not fill a last batch are left out."""
    tokenizer, size = engine.pair.tokenizer, setting.batch_size
    if setting.prompt_tokens is None:
        ids = [tuple(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    else:
        ids = of_length(prompts, setting.prompt_tokens, tokenizer)
    _check_room(engine, ids, output_tokens)
    return [tuple(ids[first : first + size]) for first in range(0, len(ids) - size + 1, size)]


def _check_room(engine: Engine, prompts: Sequence[Ids], output_tokens: int) -> None:
    room = engine.pair.max_model_len - output_tokens
    for place, ids in enumerate(prompts):
        if len(ids) > room:
            raise ValueError(
                f"prompt {place} has {len(ids)} tokens, but output_tokens={output_tokens} leaves {room} of max_model_len="
                f"{engine.pair.max_model_len}: shorten it, lower output_tokens or raise max_model_len"
            )


@dataclass(frozen=True)
class _Stage:
    """All that can decode, loaded."""

    engine: Engine
    rivals: dict[Rival, Child]
    output_tokens: int

    def run(self, who: Who, group: Group, number: int, temperature: float) -> Run:
        """Decode a group of prompts; its number makes the seeds."""
        if isinstance(who, Configuration):
            return run_once(self.engine, who, group, self._params(who, group, number, temperature))
        child = self.rivals[who]
        asked = Decode(way=who.mode, prompts=group, output_tokens=self.output_tokens, temperature=temperature, seed=number)
        forget_peak(child.process.pid)
        found = child.decode(asked)
        return Run.of_rival(group, found, peak_bytes(child.process.pid))

    def _params(self, who: Configuration, group: Group, number: int, temperature: float) -> list[SamplingParams]:
        common = {"max_tokens": self.output_tokens, "temperature": temperature, "ignore_eos": True, "verification": who.verification}
        return [SamplingParams.model_validate({**common, "seed": number * len(group) + place}) for place in range(len(group))]


def run_once(engine: Engine, configuration: Configuration, prompts: Prompt | Sequence[Prompt], params: Params) -> Run:
    """Decode prompts together. Taking the timeline also waits until the draft is at rest: the next run has the machine to itself.

    RuntimeError if the draft is lost meanwhile, or was lost and has been started again.
    """
    engine.configure(configuration)
    engine.timeline()
    before, pids = engine.health(), processes(engine, configuration)
    for pid in pids:
        forget_peak(pid)
    begin = monotonic()
    outputs = engine.generate(prompts, params)
    seconds = monotonic() - begin
    run = Run(tuple(outputs), engine.timeline(), seconds, tuple(map(peak_bytes, pids)))
    health = engine.health()
    if health.draft not in ("ok", "none") or health.restarts > before.restarts:
        raise RuntimeError(f"the draft was lost, so this was AR under another name: {health.reason or 'it has been started again'}")
    return run


def _measure(
    stage: _Stage, cells: dict[Setting, list[Configuration]], groups: dict[Setting, list[Group]], warmup: int, tell: Progress
) -> Iterator[Cell]:
    """Yield what ran in each setting. All settings go forward together, so that none has the quiet minutes to itself."""
    ready = {setting: _warm_up(stage, setting, [*column, *stage.rivals], groups[setting][0], warmup) for setting, column in cells.items()}
    runs: dict[Setting, Runs] = {setting: {who: [] for who in able} for setting, (able, _) in ready.items()}
    steps = sorted(
        ((number + 0.5) / len(groups[setting]), place, number)
        for place, setting in enumerate(cells)
        for number in range(len(groups[setting]))
    )
    settings = list(cells)
    for done, (_, place, number) in enumerate(steps):
        setting, columns = settings[place], runs[settings[place]]
        tell(f"group {number + 1} of {len(groups[setting])}, {setting}", done / len(steps))
        able = list(columns)
        turn = number % len(able)
        for who in [*able[turn:], *able[:turn]]:
            columns[who].append(stage.run(who, groups[setting][number], number, setting.temperature))
    for setting, columns in runs.items():
        yield _summarised(stage.engine, setting, columns, ready[setting][1])


def _summarised(engine: Engine, setting: Setting, runs: Runs, skipped: Sequence[Skipped]) -> Cell:
    planned: dict[Who, tuple[int, int]] = {who: planned_bytes(engine, who) for who in runs if isinstance(who, Configuration)}
    told = None
    if setting.temperature == 0:
        first = reference(runs)
        told = differences(runs, gap_by(engine, first if isinstance(first, Configuration) else engine.plan))
    return summarise(setting, runs, skipped, differences=told, planned=planned)


def _warm_up(stage: _Stage, setting: Setting, everybody: Sequence[Who], group: Group, warmup: int) -> tuple[list[Who], list[Skipped]]:
    """Return who can run here, the plan (first) by all means, and who cannot."""
    able: list[Who] = []
    skipped = []
    for place, who in enumerate(everybody):
        try:
            _check_runs(stage.engine, who, setting)
            for _ in range(warmup):
                stage.run(who, group, 0, setting.temperature)
        except (ValueError, RefusedError) as error:
            if place == 0:
                raise
            skipped.append(Skipped(configuration=who, reason=str(error)))
            continue
        able.append(who)
    return able, skipped


def _check_runs(engine: Engine, who: Who, setting: Setting) -> None:
    if isinstance(who, Configuration):
        engine.configure(who)
    elif who.mode == "transformers assisted" and setting.batch_size > 1:
        raise ValueError("assisted generation decodes one prompt at a time")


def _versions() -> dict[str, str]:
    found = {"python": python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
