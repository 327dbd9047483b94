"""A short profile of a pair on this machine: forwards of both models where a plan may place them, the link, acceptance on real prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial as bound
from math import inf
from pathlib import Path
from time import monotonic
from typing import Literal, TypeVar

from sim.outcomes import rounds_of
from ssd.devices import pinned
from ssd.engine.engine import Engine, Prompt
from ssd.engine.link import Ping, Rehearse, Rehearsed, Score, Scored
from ssd.engine.ngram import Lookup
from ssd.engine.peer import DraftPeer
from ssd.engine.rehearsal import rehearse
from ssd.engine.shares import leaders
from ssd.lookup import accepted_lengths
from ssd.models import compute_dtype, keeps_int8, load
from ssd.pace import pace
from ssd.placements import placements
from ssd.progress import Progress
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
    Verification,
    Workload,
)
from ssd.stages import Stages
from theory.calibration import Calibration

VERIFY_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
BRANCHES = (1, 2, 3, 4, 6, 8, 12, 16)
REPEATS = 5
# Batches only: a forward is repeated less often to keep within this, and left out where one would take longer still.
POINT_SECONDS = 2.0
PROMPTS = 6
TRACE_TOKENS = 64
TEXT_LOOKAHEAD = 3
# How often the draft's part in a sampled text is drawn anew.
REPLAYS = 4
# Tokens that prompt lookup is asked for.
LOOKUP_TOKENS = 8
# Cores that share something with others change their speed several times a second: a table, and the rounds of a configuration, are
# measured over at least so many seconds.
LEAST_SECONDS = 2.0
# Of each configuration whose rounds are watched, at the least and at the most.
WATCHED_BATCHES, MOST_BATCHES, WATCHED_TOKENS = 2, 40, 33
# The draft's work beside which the target's contended forwards are timed, and the other way round.
BUSY_BRANCHES = 4
BUSY_TOKENS = 4

Model = Literal["target", "draft"]
# Token ids of prompts and outputs; host seconds a round apart from the rest; prefill seconds a token.
Decoded = tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], float, float]
T = TypeVar("T")


def profile(
    hardware: Hardware,
    models: Models,
    workload: Workload | None = None,
    *,
    prompts: Sequence[Prompt] | None = None,
    progress: Progress | None = None,
    partial: Path | None = None,
    ignore_eos: bool = False,
    watch_rounds: bool = True,
) -> Profile:
    """Measure `models` on `hardware`, which must be this machine, in a minute or two for models of a billion weights.

    Forwards first, those of batches with the tokens of all their rows packed into one; then, of each mode at each placement, what some
    rounds of the engine take beyond their forwards. prompts: texts, or their token ids, to measure acceptance on, else a few of the
    workload's prompt set. progress is called with what is being measured and the share done, 0..1. partial: a file for finished stages,
    so that the same call goes on after a break; it is gone when all is done. ignore_eos: read texts past the model's end tokens, for loads
    that do. watch_rounds: False leaves out what rounds take beyond forwards, for whoever watches them later.
    ValueError where the hardware is another machine.
    """
    workload = workload or Workload()
    if not hardware.is_local:
        raise ValueError(f"hardware {hardware.name!r} is not this machine: profile where the models will run, or plan without a profile")
    places = placements(hardware)
    if models.draft is None:
        places = tuple(Placement(target=place.target) for place in places if place.overlaps or len(hardware.devices) == 1)
    stages = Stages(
        partial,
        [
            hardware.name,
            *(each.model_dump(mode="json") for each in (models, workload)),
            [each if isinstance(each, str) else list(each) for each in prompts or ()],
        ],
    )
    with Engine.from_plan(_first_plan(hardware, models, places), max_num_seqs=workload.batch_size) as engine:
        profiler = _Profiler(engine, workload, progress or (lambda *_: None), stages, ignore_eos)
        found = profiler.run(places, prompts, watch_rounds=watch_rounds)
    found = profiler.replayed(found) if workload.temperature > 0 and models.draft is not None else found
    stages.finish()
    return found


def _first_plan(hardware: Hardware, models: Models, places: Sequence[Placement]) -> Plan:
    # The last placement is the whole machine: text comes fastest there, and acceptance does not depend on where.
    place = places[-1]
    if models.draft is None:
        return Plan(mode="ar", placement=place, hardware=hardware, models=models)
    return Plan(mode="sd", num_speculative_tokens=TEXT_LOOKAHEAD, placement=place, hardware=hardware, models=models)


class _Profiler:
    """The measurements on one running engine."""

    def __init__(
        self, engine: Engine, workload: Workload, progress: Progress, stages: Stages | None = None, ignore_eos: bool = False
    ) -> None:
        self.engine, self.workload, self.progress, self.ignore_eos = engine, workload, progress, ignore_eos
        self.once = (stages or Stages(None, None)).once
        self.context = workload.prompt_tokens + workload.output_tokens // 2
        self.rows = workload.batch_size

    def run(self, places: Sequence[Placement], prompts: Sequence[Prompt] | None, *, watch_rounds: bool) -> Profile:
        """Measure everything and put it together."""
        models = self.engine.plan.models
        texts: list[Prompt] = list(prompts or prompt_texts(self.workload.prompt_set, PROMPTS, self.engine.pair.tokenizer))
        outputs, overhead, prefill = self.once("texts", Decoded, lambda: self._decode(texts))
        self.outputs = outputs
        greedy = self.workload.temperature == 0
        scored = self.once("ranks", list[Scored], lambda: self._scored(outputs)) if models.draft is not None and greedy else []
        traces = tuple(one.ranks for one in scored)
        forwards = [table for place, share in _with_share(places) for table in self._at(place, share)]
        rounds = rounds_of(traces, TEXT_LOOKAHEAD) if traces else []
        accepted, tried = sum(k for k, _ in rounds), sum(min(k + 1, TEXT_LOOKAHEAD) for k, _ in rounds)
        found = Profile(
            hardware=self.engine.plan.hardware.name,
            models=models,
            prompt_set=self.workload.prompt_set if prompts is None else "given",
            temperature=self.workload.temperature,
            measured_on=date.today().isoformat(),
            forwards=tuple(_once(forwards)),
            prefill_seconds_per_token=prefill,
            traces=traces,
            ngram_accepted=tuple(accepted_lengths(*text, LOOKUP_TOKENS, Lookup()) for text in outputs[: len(traces)]),
            calibration=_calibration(scored),
            draft_acceptance_rate=accepted / tried if tried else 0.0,
            acceptance_source="measured" if traces else "assumed",
            link_seconds=self._link(),
            overhead_seconds=overhead,
        )
        if not watch_rounds:
            return found
        costs = self.once("rounds", list[RoundCost], lambda: list(self._round_costs(found, places)))
        return found.model_copy(update={"rounds": tuple(costs)})

    def _round_costs(self, tables: Profile, places: Sequence[Placement]) -> Iterator[RoundCost]:
        """What rounds take beyond the forwards in the tables: of every mode wherever it may run."""
        drafts, found = tables.models.draft is not None, list[tuple[Mode, Placement, Verification]]()
        for place in places:
            if place.overlaps or not place.draft:
                found.append(("ar", Placement(target=place.target), "rejection"))
            for verification in self._verifications if drafts else ():
                found.append(("sd" if place.overlaps else "ssd", place, verification))
        for number, (mode, place, verification) in enumerate(found):
            self.progress(f"rounds of {mode.upper()} on {', '.join(place.devices)}", 0.7 + 0.25 * number / len(found))
            raw = pace(tables, place, mode)
            watched = [self._watch(configuration) for configuration in watched_configurations(mode, place, verification)]
            cost = round_cost(raw, watched) if raw is not None else None
            if cost is not None:
                yield cost

    @property
    def _verifications(self) -> tuple[Verification, ...]:
        return ("rejection", "coupled") if self.workload.temperature > 0 else ("rejection",)

    def _watch(self, configuration: Configuration) -> Watched:
        """Decode a few batches, of prompts as long as the workload's, and see what that took."""
        ids = [prompt[-self.workload.prompt_tokens :] for prompt, _ in self.outputs]
        params = SamplingParams(
            max_tokens=min(WATCHED_TOKENS, self.engine.pair.max_model_len - max(map(len, ids))),
            temperature=self.workload.temperature,
            ignore_eos=True,
            verification=configuration.verification,
        )
        self.engine.configure(configuration)
        begin = inf
        for batch in range(1 + MOST_BATCHES):
            if batch > WATCHED_BATCHES and monotonic() > begin + LEAST_SECONDS:
                break
            self.engine.generate([ids[(batch * self.rows + row) % len(ids)] for row in range(self.rows)], params)
            if not batch:
                # The first one only warms up.
                self.engine.timeline()
                begin = monotonic()
        return Watched(configuration, (self.engine.timeline(),), self.rows)

    def replayed(self, found: Profile) -> Profile:
        """The profile with what would have been accepted and cached along the sampled texts; the draft is loaded into this process."""
        self.progress("acceptance of sampled texts", 0.95)
        pair, device = self.engine.pair, self.engine.loaded.device
        assert pair.draft is not None, "whoever asks has one"
        int8 = keeps_int8(found.models, pair.draft, device)
        draft = load(pair.draft, device, compute_dtype(found.models, device), drafts=True, int8=int8)
        ranks, ends, accepted = [], [], []
        for prompt, output in self.outputs:
            if len(output) < 2:
                continue
            for of_text, at_end in replay(self.engine.loaded, draft, prompt + output, len(prompt), self.workload.temperature, REPLAYS):
                ranks.append(of_text)
                ends.append(at_end)
                accepted.append(accepted_lengths(prompt, output, LOOKUP_TOKENS, Lookup()))
        every = [rank for text in ranks for rank in text]
        return found.model_copy(
            update={
                "traces": tuple(ranks),
                "end_traces": tuple(ends),
                "ngram_accepted": tuple(accepted),
                "draft_acceptance_rate": every.count(1) / len(every) if every else 0.0,
                "acceptance_source": "measured" if every else "assumed",
            }
        )

    def _decode(self, texts: Sequence[Prompt]) -> Decoded:
        """Decode the prompts; return (prompt, output) token ids, host seconds a round apart from the rest, prefill seconds a token."""
        outputs, overheads, prefills = [], [], []
        for place, text in enumerate(texts):
            self.progress("acceptance", 0.4 * place / len(texts))
            # A seed makes it the same text each time, and of the target's law as any other.
            params = SamplingParams(max_tokens=TRACE_TOKENS, temperature=self.workload.temperature, seed=place, ignore_eos=self.ignore_eos)
            output = self.engine.generate(text, params)[0]
            metrics = output.metrics
            outputs.append((output.prompt_token_ids, output.token_ids))
            first = metrics.time_to_first_token or 0.0
            prefills.append(first / len(output.prompt_token_ids))
            if metrics.num_rounds:
                overheads.append((metrics.total_seconds - first - metrics.verify_seconds - metrics.wait_seconds) / metrics.num_rounds)
        return outputs, max(0.0, statistics.median(overheads or [0.0])), statistics.median(prefills)

    def _scored(self, outputs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[Scored]:
        return [self._ask(Score(prompt + output, len(prompt)), Scored) for prompt, output in outputs]

    def _link(self) -> float:
        if self._peer is None:
            return 0.0
        with pinned(leaders(self.engine.plan.placement.target)):
            seconds = [_seconds_of(lambda: self._ask(Ping(), Ping)) for _ in range(50)]
        return statistics.median(seconds) / 2

    def _at(self, place: Placement, share: float) -> list[ForwardLatency]:
        name = f"forwards on {' '.join(place.target)} and {' '.join(place.draft)}"
        return self.once(name, list[ForwardLatency], lambda: list(self._forwards(place, share)))

    def _forwards(self, place: Placement, share: float) -> Iterator[ForwardLatency]:
        """Time both models at `place`: alone where they take turns there, each beside the other where they do not."""
        self.progress(f"forwards on {', '.join(place.devices)}", 0.4 + 0.3 * share)
        alone = place.overlaps or not place.draft
        if place.draft:
            # Of several workers, which are alike, one is asked.
            configuration = Configuration(mode="sd", num_speculative_tokens=1, placement=place.of_worker(-1))
            self.engine.configure(configuration)
        target, draft = (bound(measure, place, alone=alone) for measure in (self._target, self._draft))
        yield _table("target", place.target, self._timed(self._sizes(VERIFY_TOKENS), target), not alone)
        if place.draft:
            yield _table("draft", place.draft, self._timed(self._sizes(BRANCHES), draft), not alone)
            if not alone:
                # After a miss it drafts for the rows that missed while the target waits.
                waited = sorted({1, -(-self.rows // 4), -(-self.rows // 2), self.rows})
                yield _table("draft", place.draft, self._timed(waited, bound(self._draft, place, alone=True)), False)

    def _sizes(self, each: Sequence[int]) -> list[int]:
        """Tokens of a forward with so many in each row of the batch, every other of these where it has several, and of a forward of one."""
        return sorted({1, *(self.rows * tokens for tokens in (each if self.rows == 1 else (1, *each[1::2], each[-1])))})

    def _timed(self, sizes: Sequence[int], measure: Callable[[int, int], list[float]]) -> dict[int, list[float]]:
        """Seconds of forwards of rising sizes; the long ones of a batch are repeated less often, and left out past what a plan needs."""
        found: dict[int, list[float]] = {}
        repeats: dict[int, int] = {}
        expected = 0.0
        for size in sizes:
            if self.rows > 1 and expected * size > POINT_SECONDS and size > 2 * self.rows:
                break
            fewer = self.rows > 1 and expected
            repeats[size] = max(1, min(REPEATS, int(POINT_SECONDS / (expected * size)))) if fewer else REPEATS
            found[size] = measure(size, repeats[size])
            expected = statistics.median(found[size]) / size
        while sum(map(sum, found.values())) < LEAST_SECONDS:
            for size in found:
                found[size] += measure(size, repeats[size])
        return found

    def _target(self, place: Placement, tokens: int, repeats: int, alone: bool) -> list[float]:
        with pinned(leaders(place.target)), self._busy_draft(alone):
            return rehearse(self.engine.loaded, tokens, self.context, lambda done: done < repeats)

    @contextmanager
    def _busy_draft(self, alone: bool) -> Iterator[None]:
        if alone or self._peer is None:
            yield
            return
        self._peer.tell(Rehearse(self.rows * BUSY_BRANCHES, self.context, 0))
        try:
            yield
        finally:
            self._ask(Ping(), Rehearsed)
            self._peer.link.expect(Ping, deadline=self.engine.deadline)

    def _draft(self, place: Placement, tokens: int, repeats: int, alone: bool) -> list[float]:
        # Several workers share the branches of a cache; for the rows that missed one of them drafts.
        question = Rehearse(tokens if alone else -(-tokens // place.draft_workers), self.context, repeats)
        if alone or self._peer is None:
            return list(self._ask(question, Rehearsed).seconds)
        link = self._peer.link
        self._peer.tell(question)
        with pinned(leaders(place.target)):
            rehearse(self.engine.loaded, self.rows * BUSY_TOKENS, self.context, lambda _: link.peek() is None)
        return list(link.expect(Rehearsed, deadline=self.engine.deadline).seconds)

    @property
    def _peer(self) -> DraftPeer | None:
        """The draft's worker; of several, which are alike, the first."""
        return self.engine.peer.peers[0] if self.engine.peer is not None else None

    def _ask(self, question: object, kind: type[T]) -> T:
        peer = self._peer
        answer = peer.ask(question, kind) if peer is not None else None
        if answer is None:
            raise RuntimeError(f"the draft was lost while profiling: {peer.lost if peer is not None else 'there is none'}")
        return answer


def _calibration(scored: Sequence[Scored]) -> tuple[Calibrated, ...]:
    """Add up what the draft's confidence was worth on each text."""
    found: dict[str, Calibration] = {}
    for kind, trials, successes in (counts for one in scored for counts in one.calibration):
        found[kind] = found.get(kind, Calibration.empty()).merged(Calibration.from_lists(trials, successes))
    return tuple(
        Calibrated(kind=kind, trials=tuple(one.trials.tolist()), successes=tuple(one.successes.tolist())) for kind, one in found.items()
    )


def _with_share(places: Sequence[Placement]) -> Iterator[tuple[Placement, float]]:
    for index, place in enumerate(places):
        yield place, index / len(places)


def _once(tables: Sequence[ForwardLatency]) -> list[ForwardLatency]:
    """Keep one table for each model, devices and contention."""
    return list({(table.model, table.devices, table.contended): table for table in tables}.values())


def _table(model: Model, devices: tuple[str, ...], timed: dict[int, list[float]], contended: bool) -> ForwardLatency:
    means = tuple(statistics.fmean(values) for values in timed.values())
    return ForwardLatency(
        model=model,
        devices=devices,
        tokens=tuple(timed),
        seconds=means,
        spread=tuple(_spread(values) / mean for values, mean in zip(timed.values(), means, strict=True)),
        contended=contended,
    )


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


def _seconds_of(action: Callable[[], object]) -> float:
    begin = monotonic()
    action()
    return monotonic() - begin
