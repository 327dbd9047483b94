"""The simulator held against the engine: one profile, then configurations that it did not see, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import Field

from sim.simulate import simulate
from ssd import prediction
from ssd.bench.measure import run_once
from ssd.bench.run import total
from ssd.bench.tables import label
from ssd.engine.engine import Engine
from ssd.models import inspect
from ssd.outcomes import OutcomeModel, Traced, outcome_model
from ssd.pace import pace
from ssd.placements import placements
from ssd.profiler import profile as measure_profile
from ssd.prompts import Kind, of_length
from ssd.prompts import prompts as prompt_texts
from ssd.round_costs import Watched, round_cost, watched_configurations
from ssd.specs import (
    Building,
    Configuration,
    Hardware,
    Models,
    Placement,
    Plan,
    Profile,
    RequestOutput,
    RoundCost,
    SamplingParams,
    Spec,
    Workload,
)

if TYPE_CHECKING:
    from sim.metrics import Metrics
    from sim.scenario import Scenario
    from sim.timeline import Timeline
    from ssd.progress import Progress

# Simulated requests of a case: texts differ much, and are drawn at random.
SIMULATED_REQUESTS = 1000


# Token ids of all prompts, cut or filled to each length that is asked for.
Pools = Mapping[int, Sequence[tuple[int, ...]]]


class Case(Spec):
    """One configuration under one load: so many requests at once, each with a prompt and an output of the same length."""

    configuration: Configuration = Field(description="how to decode (no unit)")
    batch_size: int = Field(1, ge=1, description="requests that are asked for together (count)")
    prompt_tokens: int = Field(64, ge=1, description="length of a prompt, tokens")
    temperature: float = Field(0.0, ge=0, description="sampling temperature (no unit)")

    @property
    def name(self) -> str:
        """What it is called in a table."""
        return f"{label(self.configuration)} b={self.batch_size} prompt {self.prompt_tokens} T={self.temperature:g}"


class Numbers(Spec):
    """What is compared."""

    tokens_per_second: float = Field(ge=0, description="tokens a second of all its requests together, after the first of each")
    mean_acceptance_length: float | None = Field(None, description="tokens of a round with a draft, bonus included (tokens)")
    hit_rate: float | None = Field(None, ge=0, le=1, description="share of rounds whose outcome was cached (ratio)")
    time_to_first_token: float = Field(ge=0, description="mean over its requests, seconds")


class Compared(Spec):
    """A case, what it did and what was predicted."""

    case: Case = Field(description="what was run (no unit)")
    measured: Numbers = Field(description="by the engine")
    predicted: Numbers = Field(description="by the simulator")

    @property
    def error(self) -> float:
        """Predicted over measured tokens a second, less 1."""
        return self.predicted.tokens_per_second / self.measured.tokens_per_second - 1


class Validation(Spec):
    """Predictions beside measurements."""

    hardware: str = Field(description="name of the machine (no unit)")
    models: Models = Field(description="the pair (no unit)")
    prompt_set: str = Field(description="where the prompts are from (no unit)")
    output_tokens: int = Field(description="length of an output, tokens")
    repeats: int = Field(description="times that each case was run (count)")
    rows: tuple[Compared, ...] = Field(min_length=1, description="the cases (list)")

    @property
    def mean_absolute_error(self) -> float:
        """Of tokens a second, relative."""
        return fmean(abs(row.error) for row in self.rows)

    @property
    def worst(self) -> Compared:
        """The case with the largest error of tokens a second."""
        return max(self.rows, key=lambda row: abs(row.error))

    def table(self) -> str:
        """Markdown: measured, predicted, and the difference."""
        head = "| case | tokens/s | | error | acceptance length | hit rate | time to first token, ms |\n|---|---|---|---|---|---|---|"
        lines = [head, "| | measured | predicted | | measured / predicted | measured / predicted | measured / predicted |"]
        for row in self.rows:
            m, p = row.measured, row.predicted
            pairs = (
                (m.mean_acceptance_length, p.mean_acceptance_length, 1.0, ".2f"),
                (m.hit_rate, p.hit_rate, 1.0, ".2f"),
                (m.time_to_first_token, p.time_to_first_token, 1e3, ".1f"),
            )
            cells = [f"{_text(a, scale, form)} / {_text(b, scale, form)}" for a, b, scale, form in pairs]
            speeds = f"{m.tokens_per_second:.1f} | {p.tokens_per_second:.1f} | {row.error:+.1%}"
            lines.append(f"| {row.case.name} | {speeds} | {' | '.join(cells)} |")
        worst = self.worst
        lines.append(f"\nMean absolute error {self.mean_absolute_error:.1%}; worst {worst.error:+.1%}, {worst.case.name}.")
        return "\n".join(lines)


def cases(hardware: Hardware, prompt_tokens: int = 64) -> tuple[Case, ...]:
    """Sixteen that differ in mode, K, cache, backup, batch size, prompt length and temperature. ValueError on a single device."""
    apart, shared = placements(hardware)[0], placements(hardware)[-1]
    if apart.overlaps:
        raise ValueError(f"hardware {hardware.name!r} has one device: SSD, which is to be validated, needs two")
    alone = Placement(target=apart.target)

    def ssd(K: int, last: int, each: int = 1, backup: str = "jit") -> Configuration:
        lists: dict[str, Any] = dict.fromkeys(("fan_out_hit", "fan_out_miss"), (each,) * K + (last,))
        return Configuration.model_validate({"mode": "ssd", "num_speculative_tokens": K, "placement": apart, "backup": backup, **lists})

    def sd(K: int) -> Configuration:
        return Configuration(mode="sd", num_speculative_tokens=K, placement=shared)

    def adaptive(building: Building) -> Configuration:
        return Configuration(mode="ssd", num_speculative_tokens=3, budget=8, building=building, placement=apart)

    ar = Configuration(mode="ar", placement=alone)
    loads: list[tuple[Configuration, dict[str, float]]] = [
        (ar, {}),
        (ar, {"batch_size": 4}),
        (sd(2), {}),
        (sd(5), {}),
        (sd(3), {"batch_size": 3}),
        (ssd(2, 1), {}),
        (ssd(3, 2), {}),
        (ssd(5, 2), {}),
        (ssd(3, 3, 3), {}),
        (ssd(3, 2, backup="none"), {}),
        (ssd(3, 2), {"batch_size": 2}),
        (ssd(3, 2), {"batch_size": 4}),
        (ssd(3, 2), {"prompt_tokens": 3 * prompt_tokens}),
        (ssd(3, 2), {"temperature": 1.0}),
        (adaptive("fixed"), {}),
        (adaptive("anytime"), {}),
    ]
    return tuple(Case.model_validate({"configuration": c, "prompt_tokens": prompt_tokens, **load}) for c, load in loads)


def validate(
    hardware: Hardware,
    models: Models,
    *,
    chosen: Sequence[Case] | None = None,
    prompt_set: Kind = "code",
    prompts: Sequence[str] | None = None,
    output_tokens: int = 64,
    repeats: int = 4,
    progress: Progress | None = None,
) -> Validation:
    """Profile, predict each case, and measure it `repeats` times, all cases in turn on one engine.

    chosen: default `cases(hardware)`. prompts: texts to use instead of the prompt set's. A profile is of a load: there is one for each
    temperature, length of prompts and batch size. It measures acceptance on the very prompts that the cases then decode, so that what
    differs is the prediction and not the prompts. What rounds take beyond their forwards is watched in turn with the cases, since a shared
    machine is not the same from one minute to the next, on configurations that are no cases (ssd.round_costs). ValueError for what cannot
    be run, RuntimeError if the draft is lost meanwhile.
    """
    chosen = tuple(cases(hardware) if chosen is None else chosen)
    tell = progress or (lambda *_: None)
    _check(hardware, models, chosen, output_tokens, repeats)
    texts, tokenizer = list(prompts or prompt_texts(prompt_set, None)), inspect(models).tokenizer
    pools = {length: of_length(texts, length, tokenizer) for length in {case.prompt_tokens for case in chosen}}
    loads = {case: _load(case, output_tokens, prompt_set) for case in chosen}
    profiles: dict[Workload, Profile] = {}
    for number, load in enumerate(dict.fromkeys(loads.values())):

        def told(what: str, share: float, load: Workload = load, number: int = number) -> None:
            tell(f"profile of {_title(load)}: {what}", 0.5 * (number + share) / len(set(loads.values())))

        its = _prompts(pools, load, repeats)
        profiles[load] = measure_profile(hardware, models, load, prompts=its, progress=told, ignore_eos=True, brief=True)
    watched = {Run(c, load) for case, load in loads.items() for c in _watched(case.configuration)}
    runs = {case: Run(case.configuration, load) for case, load in loads.items()}
    asked = list(dict.fromkeys([*runs.values(), *watched]))
    seen = _measured(hardware, models, asked, pools, repeats, lambda what, share: tell(what, 0.5 + 0.5 * share))
    rows = []
    for case, load in loads.items():
        cost = _cost(case.configuration, load, profiles[load], seen)
        profile = profiles[load].model_copy(update={"rounds": (cost,) if cost else ()})
        predicted = _predicted(case, profile, output_tokens)
        rows.append(Compared(case=case, measured=_of_outputs(case, seen[runs[case]].outputs), predicted=predicted))
    return Validation(
        hardware=hardware.name, models=models, prompt_set=prompt_set, output_tokens=output_tokens, repeats=repeats, rows=tuple(rows)
    )


def _load(case: Case, output_tokens: int, prompt_set: Kind) -> Workload:
    """What is profiled for a case."""
    return Workload(
        batch_size=case.batch_size,
        prompt_tokens=case.prompt_tokens,
        output_tokens=output_tokens,
        temperature=case.temperature,
        prompt_set=prompt_set,
    )


def _title(load: Workload) -> str:
    return f"batch {load.batch_size}, prompt {load.prompt_tokens}, temperature {load.temperature:g}"


def _check(hardware: Hardware, models: Models, chosen: Sequence[Case], output_tokens: int, repeats: int) -> None:
    if not hardware.is_local:
        raise ValueError(f"hardware {hardware.name!r} is not this machine: validation measures, so leave hardware out")
    if models.draft is None:
        raise ValueError("models.draft is missing: validation compares modes that need one")
    if not chosen:
        raise ValueError("chosen=() leaves nothing to validate: give at least one case")
    if output_tokens < 2:
        raise ValueError(f"output_tokens={output_tokens}: the speed of decoding needs at least 2")
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: give 1 or more")


# Predictions


def _predicted(case: Case, profile: Profile, output_tokens: int) -> Numbers:
    played = scenario(case, profile, output_tokens)
    result = simulate(played, record=False)
    firsts = [served.ttft for served in result.requests]
    return _numbers(case, result.metrics, [served.tpot for served in result.requests], firsts)


def scenario(case: Case, profile: Profile, output_tokens: int) -> Scenario:
    """What the planner would play for the case, under the load that is measured: whole waves of requests that come together."""
    configuration = case.configuration
    its = pace(profile, configuration.placement, configuration.mode, configuration.verification)
    if its is None:
        raise ValueError(f"case {case.name!r}: the profile has no latencies for its placement: use one of ssd.placements.placements")
    load = Workload(batch_size=case.batch_size, prompt_tokens=case.prompt_tokens, output_tokens=output_tokens)
    played = prediction.scenario(configuration, its, _outcomes(case, profile, output_tokens).simulated(), load, prediction.SIMULATED_TOKENS)
    prefill = case.prompt_tokens * its.prefill_seconds_per_token
    # Waves that come apart, each when the one before has long left.
    longest = 10 * case.batch_size * (prefill + output_tokens * its.verify(case.batch_size * (1 + configuration.num_speculative_tokens)))
    waves = -(-SIMULATED_REQUESTS // case.batch_size)
    return replace(
        played,
        output_tokens=output_tokens,
        num_requests=waves * case.batch_size,
        arrival_seconds=tuple(longest * wave for wave in range(waves) for _ in range(case.batch_size)),
        target_prefill_seconds=prefill,
        draft_prefill_seconds=prefill * its.step(1) / its.verify(1),
    )


def _outcomes(case: Case, profile: Profile, output_tokens: int) -> OutcomeModel:
    """What the case's texts say, as far as they are decoded."""
    model = outcome_model(profile, case.configuration.verification)
    if not isinstance(model, Traced):
        return model
    return replace(
        model, ranks=tuple(text[:output_tokens] for text in model.ranks), ends=tuple(text[:output_tokens] for text in model.ends)
    )


def _numbers(case: Case, metrics: Metrics, gaps: Sequence[float | None], firsts: Sequence[float | None]) -> Numbers:
    known = [gap for gap in gaps if gap is not None]
    return Numbers(
        tokens_per_second=case.batch_size / fmean(known),
        mean_acceptance_length=metrics.mean_acceptance_length,
        hit_rate=metrics.cache_hit_rate,
        time_to_first_token=fmean(first or 0.0 for first in firsts),
    )


# Measurements


@dataclass(frozen=True)
class Run:
    """A configuration that decodes waves of a load."""

    configuration: Configuration
    load: Workload


@dataclass
class Seen:
    """What came of it, the wave that warms up apart."""

    outputs: list[RequestOutput] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)


def _watched(configuration: Configuration) -> tuple[Configuration, ...]:
    return watched_configurations(configuration.mode, configuration.placement, configuration.verification)


def _cost(configuration: Configuration, load: Workload, profile: Profile, seen: Mapping[Run, Seen]) -> RoundCost | None:
    """What rounds of a mode at its place took beyond the profile's forwards."""
    raw = pace(profile, configuration.placement, configuration.mode)
    found = [Watched(c, tuple(seen[Run(c, load)].timelines), load.batch_size) for c in _watched(configuration)]
    return None if raw is None else round_cost(raw, found, load.temperature)


def _measured(hardware: Hardware, models: Models, asked: Sequence[Run], pools: Pools, repeats: int, tell: Progress) -> dict[Run, Seen]:
    first = min((run.configuration for run in asked), key=lambda c: ("ssd", "sd", "ar").index(c.mode))
    seen = {run: Seen() for run in asked}
    waves = {run: _waves(pools, run.load, repeats) for run in asked}
    with Engine.from_plan(
        Plan.of(first, hardware=hardware, models=models), max_num_seqs=max(run.load.batch_size for run in asked)
    ) as engine:
        for again in range(repeats + 1):
            tell(f"round {again} of {repeats}", again / (repeats + 1))
            turn = again * len(asked) // (repeats + 1)
            for run in [*asked[turn:], *asked[:turn]]:
                params = SamplingParams(max_tokens=run.load.output_tokens, ignore_eos=True, temperature=run.load.temperature)
                found = run_once(engine, run.configuration, waves[run][again], params)
                # The first round warms up.
                if again:
                    seen[run].outputs += found.outputs
                    seen[run].timelines.append(found.timeline)
    return seen


def _prompts(pools: Pools, load: Workload, waves: int) -> list[tuple[int, ...]]:
    """Prompts for so many waves of a load, another text each while there are any."""
    return list(islice(cycle(pools[load.prompt_tokens]), waves * load.batch_size))


def _waves(pools: Pools, load: Workload, repeats: int) -> list[list[tuple[int, ...]]]:
    """The prompts of each round of a load: those that were profiled, and before them others to warm up."""
    size, its = load.batch_size, _prompts(pools, load, repeats + 1)
    return [its[(again - 1) % (repeats + 1) * size :][:size] for again in range(repeats + 1)]


def _of_outputs(case: Case, outputs: Sequence[RequestOutput]) -> Numbers:
    each = [output.metrics for output in outputs]
    return _numbers(case, total(outputs), [m.time_per_output_token for m in each], [m.time_to_first_token for m in each])


def _text(value: float | None, scale: float, form: str) -> str:
    return "none" if value is None else format(value * scale, form)
