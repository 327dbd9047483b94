"""A profile of a pair on this machine: forwards of both models where a plan may place them, the link, acceptance on real prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial as bound
from itertools import product
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from sim.outcomes import rounds_of
from ssd import forwards
from ssd.devices import pinned
from ssd.engine.engine import Engine, Prompt
from ssd.engine.link import Ping, Score, Scored
from ssd.engine.ngram import Lookup
from ssd.engine.shares import leaders
from ssd.forwards import Forwards
from ssd.lookup import accepted_lengths
from ssd.models import LoadedModel, compute_dtype, keeps_int8
from ssd.models import load as load_model
from ssd.pace import pace
from ssd.placements import placements
from ssd.progress import Course, Progress
from ssd.prompts import prompts as prompt_texts
from ssd.round_costs import Watched, round_cost, watched_configurations
from ssd.scoring import replay
from ssd.specs import (
    Calibrated,
    Configuration,
    ForwardLatency,
    Hardware,
    Mode,
    Models,
    Placement,
    Plan,
    Profile,
    RoundCost,
    SamplingParams,
    Texts,
    Verification,
    Workload,
)
from ssd.stages import Stages
from theory.calibration import Calibration

PROMPTS = 6
TRACE_TOKENS = 64
TEXT_LOOKAHEAD = 3
# How often the draft's part in a sampled text is drawn anew.
REPLAYS = 4
# What that takes for each token and each entry of the vocabulary, roughly, to tell how long a profile will take.
REPLAY_SECONDS = 1e-7
# Tokens that prompt lookup is asked for.
LOOKUP_TOKENS = 8
# Of each configuration whose rounds are watched, at the least and at the most.
WATCHED_BATCHES, MOST_BATCHES, WATCHED_TOKENS = 2, 40, 33

# Token ids of prompts and outputs; host seconds a round apart from the rest; prefill seconds a token; of greedy texts what the draft said.
Read = tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], float, float, list[Scored]]
# A mode at a place under a verification, whose rounds are watched at a temperature.
Watch = tuple[Mode, Placement, Verification, float]
T = TypeVar("T")


def profile(
    hardware: Hardware,
    models: Models,
    workload: Workload | None = None,
    *,
    temperatures: Sequence[float] = (),
    prompt_sets: Sequence[str] = (),
    prompts: Sequence[Prompt] | None = None,
    progress: Progress | None = None,
    partial: Path | None = None,
    ignore_eos: bool = False,
    brief: bool = False,
) -> Profile:
    """Measure `models` on `hardware`, which must be this machine, in a few minutes for models of a billion weights and one load.

    Texts of each prompt set at each temperature first, by default the workload's own; then forwards, those of batches with the tokens of
    all their rows packed into one, at the workload's context and, the smallest and the largest, at a longer one; then, of each mode at each
    placement and temperature, what some rounds of the engine take beyond their forwards. prompts: texts, or their token ids, to measure
    acceptance on instead of a prompt set. progress is called with what is being measured and the share of the time that is over, 0..1, and
    at first with how long all will take. partial: a file for finished stages, so that the same call goes on after a break; it is gone when
    all is done. ignore_eos: read texts past the model's end tokens, for loads that do. brief: leave out longer contexts, and rounds, for
    whoever watches them later. ValueError where the hardware is another machine, and for prompt_sets beside prompts.
    """
    loads = _loads(workload or Workload(), temperatures, prompt_sets, prompts)
    if not hardware.is_local:
        raise ValueError(f"hardware {hardware.name!r} is not this machine: profile where the models will run, or plan without a profile")
    places = placements(hardware)
    if models.draft is None:
        places = tuple(Placement(target=place.target) for place in places if place.overlaps or len(hardware.devices) == 1)
    identity = [
        hardware.name,
        *(each.model_dump(mode="json") for each in (models, *loads)),
        [each if isinstance(each, str) else list(each) for each in prompts or ()],
        [ignore_eos, brief],
    ]
    tell, stages = progress or (lambda *_: None), Stages(partial, identity)
    tell("loading the models", 0.0)
    with Engine.from_plan(_first_plan(hardware, models, places), max_num_seqs=loads[0].batch_size) as engine:
        profiler = _Profiler(engine, loads, places, prompts, tell, stages, ignore_eos=ignore_eos, brief=brief)
        found = profiler.run()
    # The draft's process has left its memory to a draft in this one.
    found = profiler.replayed(found)
    stages.finish()
    return found


def _loads(
    workload: Workload, temperatures: Sequence[float], prompt_sets: Sequence[str], prompts: Sequence[Prompt] | None
) -> list[Workload]:
    """The workload on every prompt set at every temperature."""
    if prompts and prompt_sets:
        raise ValueError(f"prompt_sets={tuple(prompt_sets)} beside prompts of your own: give one of them")
    axes = dict.fromkeys(prompt_sets or [workload.prompt_set]), dict.fromkeys(temperatures or [workload.temperature])
    return [
        Workload.model_validate({**workload.model_dump(), "prompt_set": kind, "temperature": temperature})
        for kind, temperature in product(*axes)
    ]


def _first_plan(hardware: Hardware, models: Models, places: Sequence[Placement]) -> Plan:
    # The last placement is the whole machine: text comes fastest there, and acceptance does not depend on where.
    place = places[-1]
    if models.draft is None:
        return Plan(mode="ar", placement=place, hardware=hardware, models=models)
    return Plan(mode="sd", num_speculative_tokens=TEXT_LOOKAHEAD, placement=place, hardware=hardware, models=models)


class _Profiler:
    """The measurements on one running engine."""

    def __init__(
        self,
        engine: Engine,
        loads: Sequence[Workload],
        places: Sequence[Placement],
        prompts: Sequence[Prompt] | None,
        tell: Progress,
        stages: Stages,
        *,
        ignore_eos: bool = False,
        brief: bool = False,
    ) -> None:
        self.engine, self.loads, self.places, self.prompts = engine, loads, places, prompts
        self.stages, self.ignore_eos, self.brief = stages, ignore_eos, brief
        self.models, self.rows = engine.plan.models, loads[0].batch_size
        self.forwards = Forwards(engine, loads[0].context, self.rows, engine.pair.max_model_len, brief=brief)
        self.course = Course(tell, {name: seconds for name, seconds in self._steps() if name not in stages})
        self.read: list[Read] = []

    def run(self) -> Profile:
        """Measure everything but what is left to `replayed`, and put it together."""
        self.read = [self._once(_texts_of(load), Read, bound(self._decode, load)) for load in self.loads]
        kind = list[ForwardLatency]
        tables = [table for place in self.places for table in self._once(_forwards_on(place), kind, bound(self._forwards, place))]
        found = Profile(
            hardware=self.engine.plan.hardware.name,
            models=self.models,
            measured_on=date.today().isoformat(),
            texts=tuple(self._greedy(load, read) for load, read in zip(self.loads, self.read, strict=True)),
            forwards=tuple({(table.model, table.devices, table.contended): table for table in tables}.values()),
            prefill_seconds_per_token=statistics.median(prefill for _, _, prefill, _ in self.read),
            link_seconds=self._link(),
            overhead_seconds=statistics.median(overhead for _, overhead, _, _ in self.read),
            draft_layers=int(draft.config.num_hidden_layers) if (draft := self.engine.pair.draft) else 1,
        )
        costs = [self._once(_rounds_of(watch), RoundCost | None, bound(self._round_cost, found, watch)) for watch in self._watches()]
        return found.model_copy(update={"rounds": tuple(cost for cost in costs if cost is not None)})

    def replayed(self, found: Profile) -> Profile:
        """The profile with what would have been accepted and cached along sampled texts; the draft is loaded into this process."""
        drafts: list[LoadedModel] = []
        texts = tuple(
            self._once(_replay_of(load), Texts, bound(self._sampled, its, load, read, drafts)) if self._is_replayed(load) else its
            for its, load, read in zip(found.texts, self.loads, self.read, strict=True)
        )
        return found.model_copy(update={"texts": texts})

    def _once(self, name: str, kind: Any, measure: Callable[[], T]) -> T:
        """Take a step of the course unless that was done before."""

        def measured() -> T:
            self.course.at(name)
            return measure()

        return self.stages.once(name, kind, measured)

    def _steps(self) -> Iterator[tuple[str, float]]:
        """Every step in order, with roughly the seconds that it takes."""
        forward, count = self.forwards.probe(), len(self.prompts or range(PROMPTS))
        tokens = count * TRACE_TOKENS
        for load in self.loads:
            yield _texts_of(load), tokens * forward
        for place in self.places:
            yield _forwards_on(place), self.forwards.expected_seconds(place, forward)
        for watch in self._watches():
            batch = WATCHED_TOKENS * forward
            yield (
                _rounds_of(watch),
                len(watched_configurations(*watch[:3])) * (batch + max(forwards.LEAST_SECONDS, WATCHED_BATCHES * batch)),
            )
        for load in filter(self._is_replayed, self.loads):
            yield _replay_of(load), tokens * REPLAYS * self.engine.loaded.vocab_size * REPLAY_SECONDS + count * forward

    def _forwards(self, place: Placement) -> list[ForwardLatency]:
        return list(self.forwards.at(place))

    # Texts

    def _decode(self, load: Workload) -> Read:
        texts: list[Prompt] = list(self.prompts or prompt_texts(load.prompt_set, PROMPTS, self.engine.pair.tokenizer))
        outputs, overheads, prefills = [], [], []
        for place, text in enumerate(texts):
            self.course.at(_texts_of(load), place / len(texts))
            # A seed makes it the same text each time, and of the target's law as any other.
            params = SamplingParams(max_tokens=TRACE_TOKENS, temperature=load.temperature, seed=place, ignore_eos=self.ignore_eos)
            output = self.engine.generate(text, params)[0]
            metrics = output.metrics
            outputs.append((output.prompt_token_ids, output.token_ids))
            first = metrics.time_to_first_token or 0.0
            prefills.append(first / len(output.prompt_token_ids))
            if metrics.num_rounds:
                overheads.append((metrics.total_seconds - first - metrics.verify_seconds - metrics.wait_seconds) / metrics.num_rounds)
        greedy = self.models.draft is not None and load.temperature == 0
        scored = [self.forwards.ask(Score(prompt + output, len(prompt)), Scored) for prompt, output in outputs] if greedy else []
        return outputs, max(0.0, statistics.median(overheads or [0.0])), statistics.median(prefills), scored

    def _greedy(self, load: Workload, read: Read) -> Texts:
        """What the draft said of greedy texts; nothing yet of sampled ones."""
        outputs, _, _, scored = read
        traces = tuple(one.ranks for one in scored)
        rounds = rounds_of(traces, TEXT_LOOKAHEAD)
        accepted, tried = sum(k for k, _ in rounds), sum(min(k + 1, TEXT_LOOKAHEAD) for k, _ in rounds)
        return Texts(
            prompt_set=load.prompt_set if self.prompts is None else "given",
            temperature=load.temperature,
            traces=traces,
            ngram_accepted=tuple(accepted_lengths(*text, LOOKUP_TOKENS, Lookup()) for text in outputs[: len(traces)]),
            calibration=_calibration(scored),
            draft_acceptance_rate=accepted / tried if tried else 0.0,
            acceptance_source="measured" if traces else "assumed",
        )

    def _is_replayed(self, load: Workload) -> bool:
        return load.temperature > 0 and self.models.draft is not None

    def _sampled(self, its: Texts, load: Workload, read: Read, drafts: list[LoadedModel]) -> Texts:
        """What is drawn anew of the draft's part in sampled texts. drafts: the draft, once it is loaded."""
        if not drafts:
            drafts.append(self._load_draft())
        ranks, ends, accepted = [], [], []
        for place, (prompt, output) in enumerate(read[0]):
            self.course.at(_replay_of(load), place / len(read[0]))
            if len(output) < 2:
                continue
            for of_text, at_end in replay(self.engine.loaded, drafts[0], prompt + output, len(prompt), load.temperature, REPLAYS):
                ranks.append(of_text)
                ends.append(at_end)
                accepted.append(accepted_lengths(prompt, output, LOOKUP_TOKENS, Lookup()))
        every = [rank for text in ranks for rank in text]
        return its.model_copy(
            update={
                "traces": tuple(ranks),
                "end_traces": tuple(ends),
                "ngram_accepted": tuple(accepted),
                "draft_acceptance_rate": every.count(1) / len(every) if every else 0.0,
                "acceptance_source": "measured" if every else "assumed",
            }
        )

    def _load_draft(self) -> LoadedModel:
        pair, device = self.engine.pair, self.engine.loaded.device
        assert pair.draft is not None, "whoever asks has one"
        int8 = keeps_int8(self.models, pair.draft, device)
        return load_model(pair.draft, device, compute_dtype(self.models, device), drafts=True, int8=int8)

    # Rounds and the link

    def _watches(self) -> Iterator[Watch]:
        """Every mode wherever it may run, at each temperature and in each way to verify there is at that."""
        for temperature in dict.fromkeys(load.temperature for load in self.loads) if not self.brief else ():
            ways: tuple[Verification, ...] = ("rejection", "coupled") if temperature > 0 else ("rejection",)
            for place in self.places:
                if place.overlaps or not place.draft:
                    yield "ar", Placement(target=place.target), "rejection", temperature
                for verification in ways if self.models.draft is not None else ():
                    yield "sd" if place.overlaps else "ssd", place, verification, temperature

    def _round_cost(self, tables: Profile, watch: Watch) -> RoundCost | None:
        """What rounds take beyond the forwards in the tables."""
        mode, place, verification, temperature = watch
        raw = pace(tables, place, mode)
        watched = [self._watch(configuration, temperature) for configuration in watched_configurations(mode, place, verification)]
        return round_cost(raw, watched, temperature) if raw is not None else None

    def _watch(self, configuration: Configuration, temperature: float) -> Watched:
        """Decode a few batches, of prompts as long as the workload's, and see what that took."""
        outputs = next(read[0] for load, read in zip(self.loads, self.read, strict=True) if load.temperature == temperature)
        ids = [prompt[-self.loads[0].prompt_tokens :] for prompt, _ in outputs]
        params = SamplingParams(
            max_tokens=min(WATCHED_TOKENS, self.engine.pair.max_model_len - max(map(len, ids))),
            temperature=temperature,
            ignore_eos=True,
            verification=configuration.verification,
        )
        self.engine.configure(configuration)
        begin, timelines = inf, []
        for batch in range(1 + MOST_BATCHES):
            if batch > WATCHED_BATCHES and monotonic() > begin + forwards.LEAST_SECONDS:
                break
            self.engine.generate([ids[(batch * self.rows + row) % len(ids)] for row in range(self.rows)], params)
            # Each apart: what lies between two batches is no part of a round.
            timelines.append(self.engine.timeline())
            begin = min(begin, monotonic())
        # The first one only warms up.
        return Watched(configuration, tuple(timelines[1:]), self.rows)

    def _link(self) -> float:
        if self.forwards.peer is None:
            return 0.0
        with pinned(leaders(self.engine.plan.placement.target)):
            seconds = [_seconds_of(lambda: self.forwards.ask(Ping(), Ping)) for _ in range(50)]
        return statistics.median(seconds) / 2


def _texts_of(load: Workload) -> str:
    return f"texts of {load.prompt_set} prompts at temperature {load.temperature:g}"


def _replay_of(load: Workload) -> str:
    return f"acceptance of {_texts_of(load)}"


def _forwards_on(place: Placement) -> str:
    return f"forwards on {' '.join(place.target)}" + (f" and {' '.join(place.draft)}" if place.draft and not place.overlaps else "")


def _rounds_of(watch: Watch) -> str:
    mode, place, verification, temperature = watch
    coupled = " coupled" if verification == "coupled" else ""
    return f"rounds of{coupled} {mode.upper()} on {' '.join(place.devices)} at temperature {temperature:g}"


def _calibration(scored: Sequence[Scored]) -> tuple[Calibrated, ...]:
    """Add up what the draft's confidence was worth on each text."""
    found: dict[str, Calibration] = {}
    for kind, trials, successes in (counts for one in scored for counts in one.calibration):
        found[kind] = found.get(kind, Calibration.empty()).merged(Calibration.from_lists(trials, successes))
    return tuple(
        Calibrated(kind=kind, trials=tuple(one.trials.tolist()), successes=tuple(one.successes.tolist())) for kind, one in found.items()
    )


def _seconds_of(action: Callable[[], object]) -> float:
    begin = monotonic()
    action()
    return monotonic() - begin
