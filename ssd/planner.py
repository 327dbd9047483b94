"""Plan how to decode: profile, search by theory, simulate the best few or, in large batches, reckon them, rank, and say how sure it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, get_args

from ssd.lookup import recorded
from ssd.outcomes import OutcomeModel, outcome_model
from ssd.pace import Pace, pace
from ssd.placements import placements
from ssd.prediction import SCREENED_TOKENS, SIMULATED_ROWS, SIMULATED_TOKENS, Played, play, predicted, reckon
from ssd.report import describe
from ssd.search import Search
from ssd.specs import Backup, Configuration, Considered, Hardware, Mode, Models, Objective, Placement, Plan, Profile, Verification, Workload
from ssd.uncertainty import SIMPLEST, TIE, Doubt, sensitivity

# Of what theory ranks of SSD at all placements, so many are simulated for a short while, and so many of these for long.
SCREENED, SIMULATED = 24, 6
MAX_ALTERNATIVES = 10
# Speeds by theory are good to so much: what it finds this much too slow is not played.
THEORY_ERROR = 0.15
SIMPLEST_BACKUP: tuple[Backup, ...] = ("jit", "none", "ngram")

# To weigh outcomes takes the draft about a millisecond a round, which must be little beside a verification.
WORTH_WEIGHING = 20e-3


def plan(
    hardware: Hardware,
    models: Models,
    workload: Workload | None = None,
    objective: Objective = "latency",
    profile: Profile | None = None,
    mode: Mode | None = None,
    drafts: Sequence[str] = (),
) -> Plan:
    """Return the configuration to bet on for `workload`, with the ranked rest as its alternatives.

    objective: "latency" and "throughput" maximise tokens a second, "cost" minimises dollars a token. With
    workload.max_seconds_per_token, the latter two also choose how many requests to decode together, up to workload.batch_size.
    profile: measured here if the hardware is this machine, else computed from the models' shapes. mode: choose within it. drafts: further
    draft models, of which the best is chosen. ValueError, with the remedy, for what cannot be planned.
    """
    workload = workload or Workload()
    check(hardware, models, objective, mode, workload, drafts)
    if not drafts:
        return _of_pair(hardware, models, workload, objective, profile, mode)
    found: dict[str | None, Plan | ValueError] = {}
    for draft in dict.fromkeys((models.draft, *drafts)):
        try:
            pair = models.model_copy(update={"draft": draft})
            found[draft] = _of_pair(hardware, pair, workload, objective, profile, mode)
        except ValueError as error:
            found[draft] = error
    plans = [each for each in found.values() if isinstance(each, Plan)]
    if not plans:
        raise next(each for each in found.values() if isinstance(each, ValueError))
    best = max(plans, key=lambda each: _worth(each, hardware, objective))
    return best.model_copy(update={"considered": tuple(_considered(draft, each) for draft, each in found.items())})


def check(
    hardware: Hardware, models: Models, objective: str, mode: str | None, workload: Workload | None = None, drafts: Sequence[str] = ()
) -> None:
    """Refuse, with the remedy, what could not be planned whatever a profile said."""
    if objective not in get_args(Objective):
        raise ValueError(f"objective={objective!r} is unknown: use one of {', '.join(get_args(Objective))}")
    if mode is not None and mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r} is unknown: use one of {', '.join(get_args(Mode))}, or none to let the planner choose")
    if mode in ("sd", "ssd") and models.draft is None:
        raise ValueError(f"models.draft is missing: mode={mode!r} needs a draft model; name one, or use mode='ar'")
    if drafts and models.draft is None:
        raise ValueError(f"drafts={tuple(drafts)} but models.draft is missing: name the first of them there")
    if mode == "ssd" and len(hardware.devices) < 2:
        raise ValueError(f"mode='ssd' needs two devices, hardware {hardware.name!r} has one: use mode='sd', or add a device for the draft")
    unpriced = next((device for device in hardware.devices if device.price_per_hour is None), None)
    if objective == "cost" and unpriced is not None:
        raise ValueError(f"objective='cost' needs a price: device {unpriced.id!r} of {hardware.name!r} has none; set its price_per_hour")
    if workload is not None and workload.max_seconds_per_token is not None and objective == "latency":
        raise ValueError(
            f"workload.max_seconds_per_token={workload.max_seconds_per_token} contradicts objective='latency', which takes the least there "
            "is: use objective='throughput' or 'cost', or leave the limit out"
        )


def _worth(plan: Plan, hardware: Hardware, objective: Objective) -> float:
    return _value(plan, plan.predicted.tokens_per_second if plan.predicted else 0.0, hardware, objective)


def _considered(draft: str | None, found: Plan | ValueError) -> Considered:
    if isinstance(found, ValueError):
        return Considered(draft=draft, best=f"none: {found}")
    return Considered(draft=draft, best=describe(found), tokens_per_second=found.predicted.tokens_per_second if found.predicted else None)


def _of_pair(
    hardware: Hardware, models: Models, workload: Workload, objective: Objective, profile: Profile | None, mode: Mode | None
) -> Plan:
    """The plan for one pair: under a limit of latency for the most requests that keep it."""
    if profile is None and hardware.is_local:
        from ssd.profiler import profile as measure

        profile = measure(hardware, models, workload)
    profile = None if profile is None else profile.of(workload)
    found = _verified(hardware, models, workload, objective, profile, mode, "rejection")
    if profile is None or not profile.texts[0].end_traces or (found.mode == "ar" and mode is None):
        return found
    coupled = _verified(hardware, models, workload, objective, profile, mode, "coupled")
    # Rejection is at home everywhere: coupling must be ahead.
    ahead = _worth(coupled, hardware, objective) > _worth(found, hardware, objective) * (1 + TIE)
    return coupled if ahead and coupled.mode != "ar" else found


def _verified(
    hardware: Hardware,
    models: Models,
    workload: Workload,
    objective: Objective,
    profile: Profile | None,
    mode: Mode | None,
    verification: Verification,
) -> Plan:
    limit, reached = workload.max_seconds_per_token, inf
    for load in _loads(workload):
        task = _Task(hardware, models, load, objective, profile or _computed(hardware, models, load), mode, verification)
        least = task.least_seconds_per_token
        if limit is None or least < limit * (1 + THEORY_ERROR):
            played = task.played()
            within = [p for p in played if limit is None or p.seconds_per_token <= limit]
            if task.eligible(within):
                return task.plan(within, played)
            least = min(p.seconds_per_token for p in task.eligible(played))
        reached = min(reached, least)
    raise ValueError(
        f"workload.max_seconds_per_token={limit} is less than {reached:.2g}, the nearest to it that one request at a time comes: raise it, "
        "or use faster devices, more of them or smaller models"
    )


def _loads(workload: Workload) -> Iterator[Workload]:
    """The workload, and under a limit the same with ever fewer requests together, down to one."""
    rows = workload.batch_size
    yield workload
    while workload.max_seconds_per_token is not None and rows > 1:
        rows = -(-rows // 2)
        yield workload.model_copy(update={"batch_size": rows})


def _computed(hardware: Hardware, models: Models, workload: Workload) -> Profile:
    from ssd.roofline import roofline_profile

    return roofline_profile(hardware, models, workload)


def _check_profile(profile: Profile, hardware: Hardware, models: Models, workload: Workload) -> None:
    """Refuse a profile of something else."""
    for option, ours, theirs in (
        ("hardware", hardware.name, profile.hardware),
        ("models.target", models.target, profile.models.target),
        ("models.draft", models.draft, profile.models.draft),
        ("models.draft_weights", models.draft_weights, profile.models.draft_weights),
    ):
        if ours != theirs:
            when = f" on {profile.measured_on}" if profile.measured_on else ""
            raise ValueError(f"{option}={ours!r} does not fit the profile, made with {theirs!r}{when}: profile again, or leave profile out")
    devices = {device.id for device in hardware.devices}
    unknown = {name for table in profile.forwards for name in table.devices} - devices
    if unknown:
        raise ValueError(
            f"the profile has forwards on {', '.join(sorted(unknown))}, which {hardware.name!r} does not have (it has "
            f"{', '.join(sorted(devices))}): it is of another machine, or of other cores of this one; profile again, or leave profile out"
        )
    _check_reach(profile, workload.batch_size)


def _check_reach(profile: Profile, batch_size: int) -> None:
    """Refuse tables that end before one draft token of every row; what is a little beyond their end follows the line they end with."""
    for table in profile.forwards if batch_size > 1 else ():
        needed = batch_size * (2 if table.model == "target" and profile.models.draft is not None else 1)
        if table.tokens[-1] < needed:
            raise ValueError(
                f"workload.batch_size={batch_size} needs forwards of {needed} tokens, but the profile's of the {table.model} on "
                f"{', '.join(table.devices)} end at {table.tokens[-1]}: profile again with this batch size, or leave profile out"
            )


def _paces(profile: Profile, hardware: Hardware, models: Models, verification: Verification = "rejection") -> list[tuple[Mode, Pace]]:
    """Return each mode at each placement that the profile has tables for."""
    found: list[tuple[Mode, Pace | None]] = []
    for place in placements(hardware):
        if place.overlaps:
            found.append(("ar", pace(profile, Placement(target=place.target), "ar")))
        if models.draft is not None:
            mode: Mode = "sd" if place.overlaps else "ssd"
            found.append((mode, pace(profile, place, mode, verification)))
    known = [(mode, its) for mode, its in found if its is not None]
    if not any(mode == "ar" for mode, _ in known):
        raise ValueError(_no_table(hardware, models, "ar"))
    return known


def _no_table(hardware: Hardware, models: Models, mode: Mode) -> str:
    fits = "" if mode == "ar" else f", or draft {models.draft!r} does not fit beside target {models.target!r}"
    return (
        f"mode={mode!r} has no placement on {hardware.name!r}: the profile has no forward latencies for one{fits}; "
        "profile this hardware again, or use another mode, more devices or smaller models"
    )


@dataclass(frozen=True)
class _Task:
    """One pair under one load, from its profile to its plan."""

    hardware: Hardware
    models: Models
    workload: Workload
    objective: Objective
    profile: Profile
    mode: Mode | None
    verification: Verification = "rejection"

    def __post_init__(self) -> None:
        _check_profile(self.profile, self.hardware, self.models, self.workload)
        if self.mode is not None and not any(mode == self.mode for mode, _ in self.paces):
            raise ValueError(_no_table(self.hardware, self.models, self.mode))

    @cached_property
    def paces(self) -> list[tuple[Mode, Pace]]:
        """Each mode at each placement."""
        return _paces(self.profile, self.hardware, self.models, self.verification)

    @cached_property
    def outcomes(self) -> OutcomeModel:
        """What the target decides."""
        return outcome_model(self.profile, self.verification)

    @cached_property
    def search(self) -> Search:
        """Theory for this load."""
        return Search(self.outcomes, self.workload.batch_size, recorded(self.profile))

    @cached_property
    def least_seconds_per_token(self) -> float:
        """Seconds between the tokens of a request if every draft token were accepted and every outcome cached: less there is not."""
        rows = self.workload.batch_size
        drafted = [0, *self.search.lookaheads]
        return min(its.round_seconds(K, rows) / (K + 1) for mode, its in self.paces for K in (drafted if mode != "ar" else [0]))

    @property
    def _is_calibrated(self) -> bool:
        """Whether the draft's confidence is known, as it is after greedy texts."""
        its = self.profile.texts[0]
        return bool(its.calibration) and its.temperature == 0

    def eligible(self, played: Sequence[Played]) -> list[Played]:
        """Those of the mode that was asked for."""
        return [p for p in played if self.mode in (None, p.configuration.mode)]

    @cached_property
    def found(self) -> list[tuple[Pace, list[tuple[float, Configuration]]]]:
        """What theory finds of each mode at each placement, the best first."""
        return [(its, _different(self.search.scored(mode, its))) for mode, its in self.paces]

    def played(self) -> list[Played]:
        """AR and SD of each placement, and the best of SSD: theory ranks, a short simulation screens some dozens, a long one tells.

        Large batches and prompt lookup are reckoned by theory instead.
        """
        plain = [self._play(ranked[0][1], its) for its, ranked in self.found if ranked[0][1].mode != "ssd"]
        rivals = [(seconds, c, its) for its, ranked in self.found for seconds, c in ranked if c.mode == "ssd"]
        rivals.sort(key=lambda rival: -_value(rival[1], 1 / max(rival[0], 1e-12), self.hardware, self.objective))
        screened = [self._play(c, its, SCREENED_TOKENS) for _, c, its in rivals[:SCREENED]]
        screened.sort(key=lambda p: -self._value(p))
        return plain + [self._play(self._anew(p.configuration, p.pace), p.pace) for p in screened[:SIMULATED]]

    def _anew(self, configuration: Configuration, its: Pace) -> Configuration:
        """The same with outcomes chosen anew each round, which hit no less than lists, where that is known to be worth the draft's time."""
        if not self._is_calibrated or its.verify(1) < WORTH_WEIGHING:
            return configuration
        budget = max(sum(configuration.fan_out_hit), sum(configuration.fan_out_miss))
        return configuration.model_copy(update={"fan_out_hit": (), "fan_out_miss": (), "budget": budget})

    def _play(self, configuration: Configuration, its: Pace, tokens: int = SIMULATED_TOKENS) -> Played:
        if self.workload.batch_size <= SIMULATED_ROWS and configuration.backup != "ngram":
            return play(configuration, its, self.outcomes.simulated(), self.workload, tokens)
        return reckon(configuration, its, self.search, self.workload)

    def plan(self, candidates: Sequence[Played], played: Sequence[Played]) -> Plan:
        """The best of the candidates, held against everything that was played."""
        best = self._best(self.eligible(candidates))
        doubt = Doubt(self.profile, self.search)
        chosen = predicted(best, played, doubt, best.critical_batch_size(self.search))
        rest = tuple(predicted(p, played, doubt) for p in self._rest(best, played))
        fields: dict[str, Any] = {"verification": self.verification} if chosen.mode != "ar" else {}
        return Plan.of(
            chosen,
            **fields,
            hardware=self.hardware,
            models=self.models,
            workload=self.workload,
            objective=self.objective,
            alternatives=rest,
            sensitivity=sensitivity(best, self._scaled(played), self.search, self._value) if self.mode is None else (),
            profile=self.profile,
        )

    def _scaled(self, played: Sequence[Played]) -> list[Played]:
        """All that theory found, slower where the fastest of its mode and placement was played slower than theory has it."""
        fastest: dict[tuple[Mode, Placement], float] = {}
        for p in played:
            fastest[_kind(p)] = max(p.tokens_per_second, fastest.get(_kind(p), 0.0))
        found = []
        for its, ranked in self.found:
            all_of_it = [reckon(c, its, self.search, self.workload) for _, c in ranked]
            by_theory = max(p.tokens_per_second for p in all_of_it)
            factor = min(1.0, fastest.get(_kind(all_of_it[0]), by_theory) / by_theory)
            found += [replace(p, tokens_per_second=p.tokens_per_second * factor) for p in all_of_it]
        return found

    def _value(self, played: Played, speed: float | None = None) -> float:
        return _value(played.configuration, played.tokens_per_second if speed is None else speed, self.hardware, self.objective)

    def _best(self, played: Sequence[Played]) -> Played:
        """The best, or the simplest of those that are as good."""
        limit = max(map(self._value, played)) * (1 - TIE)
        return min((p for p in played if self._value(p) >= limit), key=lambda p: (*_complexity(p.configuration), -self._value(p)))

    def _rest(self, best: Played, played: Sequence[Played]) -> list[Played]:
        """What it is compared with, the best of each mode and placement, then the runners-up, while there is room; ranked together."""
        ranked = sorted((p for p in played if p is not best), key=lambda p: -self._value(p))
        used = best.configuration.placement
        baselines: list[Played] = []
        leaders: list[Played] = []
        seen = {_kind(best)}
        for p in ranked:
            if _kind(p) in seen:
                continue
            seen.add(_kind(p))
            where = p.configuration.placement
            compared = p.configuration.mode != "ssd" and where.target in (used.target, used.devices, _all(self.hardware))
            (baselines if compared else leaders).append(p)
        rest = [p for p in ranked if p not in baselines and p not in leaders]
        kept = baselines + [*leaders, *rest][: max(0, MAX_ALTERNATIVES - len(baselines))]
        if not any(p.configuration.mode == "ssd" for p in [best, *kept]):
            kept += [p for p in leaders if p.configuration.mode == "ssd"][:1]
        return sorted(kept, key=lambda p: -self._value(p))


def _value(configuration: Configuration, tokens_per_second: float, hardware: Hardware, objective: Objective) -> float:
    """What is maximised: tokens a second, or tokens a dollar."""
    if objective != "cost":
        return tokens_per_second
    dollars = sum(device.price_per_hour or 0.0 for device in hardware.select(configuration.placement.devices)) / 3600
    return tokens_per_second / dollars if dollars else inf


def _different(ranked: Sequence[tuple[float, Configuration]]) -> list[tuple[float, Configuration]]:
    """The best of each lookahead and backup: those that differ in fan-out alone are nearly alike."""
    best: dict[tuple[int, str], tuple[float, Configuration]] = {}
    for seconds, configuration in ranked:
        best.setdefault((configuration.num_speculative_tokens, configuration.backup), (seconds, configuration))
    return list(best.values())


def _all(hardware: Hardware) -> tuple[str, ...]:
    return tuple(device.id for device in hardware.devices)


def _complexity(configuration: Configuration) -> tuple[int, int, int]:
    return SIMPLEST.index(configuration.mode), len(configuration.placement.devices), SIMPLEST_BACKUP.index(configuration.backup)


def _kind(played: Played) -> tuple[Mode, Placement]:
    return played.configuration.mode, played.configuration.placement
