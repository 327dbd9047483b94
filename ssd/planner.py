"""Plan how to decode: profile, search by theory, simulate the best few or, in large batches, reckon them, rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from sim.outcomes import Outcomes
from ssd.lookup import recorded
from ssd.outcomes import outcome_model
from ssd.pace import Pace, pace
from ssd.placements import placements
from ssd.prediction import SIMULATED_ROWS, Played, play, predicted, reckon
from ssd.search import Search
from ssd.specs import Backup, Configuration, Hardware, Mode, Models, Objective, Placement, Plan, Profile, Workload

# Kept of what theory ranks, for each mode and placement; AR and SD hardly leave theory a choice.
KEPT: dict[Mode, int] = {"ar": 1, "sd": 2, "ssd": 4}
MAX_ALTERNATIVES = 8
# Where two are this near in what is optimised, the simpler one is chosen.
TIE = 0.005
SIMPLEST: tuple[Mode, ...] = ("ar", "sd", "ssd")
SIMPLEST_BACKUP: tuple[Backup, ...] = ("jit", "none", "ngram")


def plan(
    hardware: Hardware,
    models: Models,
    workload: Workload | None = None,
    objective: Objective = "latency",
    profile: Profile | None = None,
    mode: Mode | None = None,
) -> Plan:
    """Return the configuration to bet on for `workload`, with the ranked rest as its alternatives.

    objective: "latency" and "throughput" maximise tokens a second, which at a given batch size is the same; "cost" minimises dollars a
    token.
    profile: measured here if the hardware is this machine, else computed from the models' shapes. mode: choose within it. ValueError,
    with the remedy, for what cannot be planned.
    """
    workload = workload or Workload()
    check(hardware, models, objective, mode)
    profile = profile or _profile(hardware, models, workload)
    _check_profile(profile, hardware, models, workload)
    paces = _paces(profile, hardware, models)
    if mode is not None and not any(place_mode == mode for place_mode, _ in paces):
        raise ValueError(_no_table(hardware, models, mode))
    outcomes = outcome_model(profile)
    search = Search(outcomes, workload.batch_size, recorded(profile))
    played = _played(search, paces, outcomes.simulated(), workload)
    ranking = _Ranking(hardware, objective)
    best = ranking.best([p for p in played if mode in (None, p.configuration.mode)])
    chosen = predicted(best, played, best.critical_batch_size(search))
    rest = tuple(predicted(p, played) for p in ranking.rest(best, played))
    fields = {name: getattr(chosen, name) for name in Configuration.model_fields}
    return Plan(**fields, hardware=hardware, models=models, workload=workload, objective=objective, alternatives=rest, profile=profile)


def check(hardware: Hardware, models: Models, objective: str, mode: str | None) -> None:
    """Refuse, with the remedy, what could not be planned whatever a profile said."""
    if objective not in get_args(Objective):
        raise ValueError(f"objective={objective!r} is unknown: use one of {', '.join(get_args(Objective))}")
    if mode is not None and mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r} is unknown: use one of {', '.join(get_args(Mode))}, or none to let the planner choose")
    if mode in ("sd", "ssd") and models.draft is None:
        raise ValueError(f"models.draft is missing: mode={mode!r} needs a draft model; name one, or use mode='ar'")
    if mode == "ssd" and len(hardware.devices) < 2:
        raise ValueError(f"mode='ssd' needs two devices, hardware {hardware.name!r} has one: use mode='sd', or add a device for the draft")
    unpriced = next((device for device in hardware.devices if device.price_per_hour is None), None)
    if objective == "cost" and unpriced is not None:
        raise ValueError(f"objective='cost' needs a price: device {unpriced.id!r} of {hardware.name!r} has none; set its price_per_hour")


def _profile(hardware: Hardware, models: Models, workload: Workload) -> Profile:
    if hardware.is_local:
        from ssd.profiler import profile

        return profile(hardware, models, workload)
    from ssd.roofline import roofline_profile

    return roofline_profile(hardware, models, workload)


def _check_profile(profile: Profile, hardware: Hardware, models: Models, workload: Workload) -> None:
    """Refuse a profile of something else; one on prompts of the user's own fits every workload."""
    for option, ours, theirs in (
        ("hardware", hardware.name, profile.hardware),
        ("models.target", models.target, profile.models.target),
        ("models.draft", models.draft, profile.models.draft),
        ("models.draft_weights", models.draft_weights, profile.models.draft_weights),
        ("workload.prompt_set", workload.prompt_set, profile.prompt_set),
    ):
        if ours != theirs and not (option == "workload.prompt_set" and theirs == "given"):
            raise ValueError(f"{option}={ours!r} does not fit the profile, made with {theirs!r}: profile again, or leave profile out")
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


def _paces(profile: Profile, hardware: Hardware, models: Models) -> list[tuple[Mode, Pace]]:
    """Return each mode at each placement that the profile has tables for."""
    found: list[tuple[Mode, Pace | None]] = []
    for place in placements(hardware):
        if place.overlaps:
            found.append(("ar", pace(profile, Placement(target=place.target), "ar")))
        if models.draft is not None:
            found.append(("sd", pace(profile, place, "sd")) if place.overlaps else ("ssd", pace(profile, place, "ssd")))
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


def _played(search: Search, paces: Sequence[tuple[Mode, Pace]], outcomes: Outcomes, workload: Workload) -> list[Played]:
    """The best few of each mode and placement as the simulator plays them; theory reckons large batches and prompt lookup."""
    played = []
    for mode, its in paces:
        ranked = _different(search.ranked(mode, its))
        simulable = [configuration for configuration in ranked if workload.batch_size <= SIMULATED_ROWS and configuration.backup != "ngram"]
        reckoned = [configuration for configuration in ranked if configuration not in simulable]
        played += [play(configuration, its, outcomes, workload) for configuration in simulable[: KEPT[mode]]]
        played += [reckon(configuration, its, search, workload) for configuration in reckoned[: KEPT[mode]]]
    return played


def _different(ranked: Sequence[Configuration]) -> list[Configuration]:
    """The best of each lookahead and backup: those that differ in fan-out alone are nearly alike."""
    best: dict[tuple[int, str], Configuration] = {}
    for configuration in ranked:
        best.setdefault((configuration.num_speculative_tokens, configuration.backup), configuration)
    return list(best.values())


@dataclass(frozen=True)
class _Ranking:
    """The order of configurations under an objective."""

    hardware: Hardware
    objective: Objective

    def value(self, played: Played) -> float:
        """What is maximised: tokens a second, or tokens a dollar."""
        if self.objective != "cost":
            return played.tokens_per_second
        devices = self.hardware.select(played.configuration.placement.devices)
        dollars_per_second = sum(device.price_per_hour or 0.0 for device in devices) / 3600
        return played.tokens_per_second / dollars_per_second if dollars_per_second else float("inf")

    def best(self, played: Sequence[Played]) -> Played:
        """The best, or the simplest of those that are as good."""
        limit = max(map(self.value, played)) * (1 - TIE)
        return min((p for p in played if self.value(p) >= limit), key=lambda p: (*_complexity(p.configuration), -self.value(p)))

    def rest(self, best: Played, played: Sequence[Played]) -> list[Played]:
        """The best of each mode and placement, then the runners-up while there is room, ranked together."""
        ranked = sorted((p for p in played if p is not best), key=lambda p: -self.value(p))
        seen = {_kind(best)}
        leaders = []
        for p in ranked:
            if _kind(p) not in seen:
                seen.add(_kind(p))
                leaders.append(p)
        others = [p for p in ranked if p not in leaders]
        kept = leaders + others[: max(0, MAX_ALTERNATIVES - len(leaders))]
        return sorted(kept, key=lambda p: -self.value(p))


def _complexity(configuration: Configuration) -> tuple[int, int, int]:
    return SIMPLEST.index(configuration.mode), len(configuration.placement.devices), SIMPLEST_BACKUP.index(configuration.backup)


def _kind(played: Played) -> tuple[Mode, Placement]:
    return played.configuration.mode, played.configuration.placement
