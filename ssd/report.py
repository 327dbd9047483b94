"""A plan in words."""

from __future__ import annotations

from collections.abc import Iterator

from ssd.pace import pace
from ssd.specs import Configuration, Hardware, Placement, Plan, Prediction, Profile, Texts

MAX_SHOWN = 4
# What a profile notes that follows from data sheets and configurations alone.
STATED = ("target: shape", "draft: shape", "memory:")


def explain(plan: Plan) -> str:
    """Say in plain text what was chosen, how fast it should be and why, what else there was, and which inputs were measured or assumed."""
    return "\n".join([*_choice(plan), *_prediction(plan), *_alternatives(plan), *_considered(plan), *_changes(plan), *_inputs(plan)])


def _choice(plan: Plan) -> Iterator[str]:
    pair = plan.models.target if plan.models.draft is None else f"{plan.models.target} with draft {plan.models.draft}"
    yield f"Plan for {pair} on {plan.hardware.name}"
    yield f"  chosen for {plan.objective}: {describe(plan)}"
    if plan.budget:
        yield "  outcomes cached: each round those most probable by the draft's calibrated confidence; predicted as lists of as many do"
    elif plan.mode == "ssd":
        lists = f"{_list(plan.fan_out_hit)} after a hit, {_list(plan.fan_out_miss)} after a miss"
        yield f"  outcomes cached with 0..{plan.num_speculative_tokens} accepted: {lists}"


def describe(configuration: Configuration) -> str:
    """Name a configuration in a line: mode, lookahead K, cached outcomes, backup and devices."""
    parts: list[str] = [configuration.mode]
    if configuration.mode != "ar":
        parts.append(f"K={configuration.num_speculative_tokens}")
    if configuration.mode == "ssd":
        outcomes = configuration.budget or sum(configuration.fan_out_hit)
        parts.append(f"{outcomes} cached outcome{'s' * (outcomes != 1)}{' chosen anew' * bool(configuration.budget)}")
        parts.append(f"backup {configuration.backup}")
    if configuration.verification == "coupled":
        parts.append("coupled")
    return ", ".join([*parts, _where(configuration.placement)])


def _where(placement: Placement) -> str:
    target = f"target on {' '.join(placement.target)}"
    if not placement.draft:
        return target
    if placement.overlaps:
        return f"{target} shared with the draft"
    workers = " and ".join(" ".join(ids) for ids in placement.workers)
    return f"{target}, {'draft' if placement.draft_workers == 1 else 'a draft each'} on {workers}"


def _prediction(plan: Plan) -> Iterator[str]:
    predicted = plan.predicted
    if predicted is None:
        yield "  predicted: nothing, this configuration was typed by hand; ssd.plan predicts"
        return
    batch = f" for {plan.workload.batch_size} requests together" if plan.workload.batch_size > 1 else ""
    yield f"  predicted by {predicted.method}: {predicted.tokens_per_second:.1f} tokens/s of decoding{batch}, prefill apart{_cost(plan)}"
    if predicted.tokens_per_second_between is not None:
        low, high = predicted.tokens_per_second_between
        yield f"  between {low:.1f} and {high:.1f} tokens/s 9 times in 10, as far as the inputs' errors are known"
    more = len(plan.placement.devices) - len(plan.placement.target)
    where = f"{_devices(more)} more than the target's" if more else "the same devices"
    yield f"  speed with {where}: {_speedups(predicted.speedup_vs_ar, predicted.speedup_vs_sd)}"
    equal = _speedups(predicted.speedup_vs_ar_equal_devices, predicted.speedup_vs_sd_equal_devices)
    yield f"  speed at equal devices, the others free to use all {len(plan.placement.devices)}: {equal}"
    yield from _rates(predicted)
    yield from _times(predicted)
    yield from _why_lookahead(plan)
    if predicted.critical_batch_size is not None:
        lookup = plan.profile is not None and plan.profile.texts[0].ngram_accepted
        fast, first = "ngram" if lookup else "none", predicted.critical_batch_size
        yield f"  critical batch size b* = {first}: from so many requests on, backup {fast} is faster than jit, all else as here"


def _rates(predicted: Prediction) -> Iterator[str]:
    if predicted.draft_acceptance_rate is None:
        return
    hits = "" if predicted.hit_rate is None else f"hit rate {predicted.hit_rate:.0%} with "
    length = f"{predicted.mean_acceptance_length:.2f} tokens a round"
    yield f"  {hits}acceptance {predicted.draft_acceptance_rate:.0%}, {length}, {predicted.speedup_vs_ar:.2f} x AR"


def _times(predicted: Prediction) -> Iterator[str]:
    parts = [f"T_v {_ms(predicted.verify_seconds)} to verify"]
    if predicted.build_seconds is not None:
        parts.append(f"T_p {_ms(predicted.build_seconds)} to build the cache meanwhile")
    if predicted.backup_seconds is not None:
        parts.append(f"T_b {_ms(predicted.backup_seconds)} to draft {'before it' if predicted.build_seconds is None else 'after a miss'}")
    yield f"  a round: {', '.join(parts)}"


def _why_lookahead(plan: Plan) -> Iterator[str]:
    """Why a cache is not built for longer drafts: what one token more would take beside what a round lasts."""
    its = None if plan.profile is None or plan.mode != "ssd" else pace(plan.profile, plan.placement, "ssd", plan.verification)
    if its is None:
        return
    K, rows = plan.num_speculative_tokens, plan.workload.batch_size
    branches = plan.budget or max(sum(plan.fan_out_hit), sum(plan.fan_out_miss))
    its = its.planning(plan)
    lasts, built, longer = its.round_seconds(K, rows), its.build_seconds(K, branches, rows), its.build_seconds(K + 1, branches, rows)
    verdict = "more than" if longer > lasts else "still within"
    yield (
        f"  why K={K}: the cache is built in {K} + 1 draft steps, {_ms(built)} of the {_ms(lasts)} that a round lasts; "
        f"K={K + 1} would take {_ms(longer)}, {verdict} that"
    )


def _considered(plan: Plan) -> Iterator[str]:
    if plan.considered:
        yield "Drafts considered"
    for each in plan.considered:
        speed = "" if each.tokens_per_second is None else f"{each.tokens_per_second:.1f} tokens/s: "
        yield f"  {each.draft}: {speed}{each.best}"


def _changes(plan: Plan) -> Iterator[str]:
    if plan.sensitivity:
        yield "What would change the choice"
    for each in plan.sensitivity:
        ends = [
            f"{which} {_amount(at, each.unit)} {mode}"
            for which, at, mode in (("below", each.below, each.becomes_below), ("above", each.above, each.becomes_above))
            if at is not None
        ]
        yield f"  {each.name}, now {_amount(each.value, each.unit)}: {', '.join(ends) or 'nothing within reach'}"


def _amount(value: float, unit: str) -> str:
    return _ms(value) if unit == "s" else f"{value:.2f}"


def _alternatives(plan: Plan) -> Iterator[str]:
    if not plan.alternatives:
        return
    yield "Alternatives"
    best: dict[tuple[str, Placement], Configuration] = {}
    for other in plan.alternatives:
        best.setdefault((other.mode, other.placement), other)
    for other in list(best.values())[:MAX_SHOWN]:
        speed = "" if other.predicted is None else f"{other.predicted.tokens_per_second:.1f} tokens/s: "
        yield f"  {speed}{describe(other)}"


def _inputs(plan: Plan) -> Iterator[str]:
    for title, lines in provenance(plan).items():
        yield from (f"{title}:", *(f"  {line}" for line in lines or ["nothing"]))


def provenance(plan: Plan) -> dict[str, list[str]]:
    """What the prediction rests on, in lines: measured, from data sheets, assumed."""
    profile = plan.profile
    measured, assumed = ([], []) if profile is None else (list(_measured(profile)), [*_assumed(profile), *_elsewhere(profile, plan)])
    sheets = dict.fromkeys(f"{device.name}: {device.source}" for device in plan.hardware.devices if device.source)
    if plan.hardware.is_local:
        return {"measured": measured, "assumed": assumed}
    stated = [line for line in assumed if line.startswith(STATED)]
    return {"measured": measured, "data sheet": [*sheets, *stated], "assumed": [line for line in assumed if line not in stated]}


def _measured(profile: Profile) -> Iterator[str]:
    tables = [table for table in profile.forwards if table.source == "measured"]
    if tables:
        models = {model: sum(table.model == model for table in tables) for model in ("target", "draft")}
        counts = " and ".join(f"{count} of the {model}" for model, count in models.items() if count)
        yield f"latency tables: {counts}"
        yield f"link {_ms(profile.link_seconds)} one way, host work {_ms(profile.overhead_seconds)} a round"
    if profile.rounds:
        yield f"what rounds take beyond their forwards, watched in the engine: {len(profile.rounds)} of mode, place and verification"
    its = profile.texts[0]
    if its.acceptance_source == "measured":
        warmth = f" at temperature {its.temperature:g}" if its.temperature else ""
        day = f", {profile.measured_on}" if profile.measured_on else ""
        yield f"acceptance {its.draft_acceptance_rate:.2f} on {its.prompt_set} prompts{warmth}{day}"
    lookups = [accepted for text in its.ngram_accepted for accepted in text]
    proposed = [accepted for accepted in lookups if accepted >= 0]
    if lookups:
        worth = f", {sum(proposed) / len(proposed):.1f} accepted of each" if proposed else ""
        yield f"prompt lookup: proposals at {len(proposed)} of {len(lookups)} tokens{worth}"
    if its.traces:
        yield f"hits: ranks of {sum(map(len, its.traces))} tokens in {len(its.traces)} texts"


def _assumed(profile: Profile) -> Iterator[str]:
    its = profile.texts[0]
    yield from profile.notes
    if not any(table.source == "measured" for table in profile.forwards):
        yield f"link: {_ms(profile.link_seconds)} one way, from the hardware's description"
    if profile.models.draft is None or its.traces or any(note.startswith("hits:") for note in profile.notes):
        return
    yield f"hits: published curves of Llama-3.1-70B with Llama-3.2-1B at temperature {its.temperature:g}"
    if its.acceptance_source != "measured" and not any(note.startswith("acceptance:") for note in profile.notes):
        yield f"acceptance {its.draft_acceptance_rate:.2f} at every position"


def _elsewhere(profile: Profile, plan: Plan) -> Iterator[str]:
    """Forwards that were timed at one context, where the workload's is another."""
    others = {table.context for table in profile.forwards if table.context not in (0, plan.workload.context)}
    if others:
        yield f"latency at {plan.workload.context} tokens of context: taken as at {' and '.join(map(str, sorted(others)))}"


def explain_profile(profile: Profile) -> str:
    """Say in plain text what was measured: forwards, link and host work, and of each load acceptance, hits and confidence."""
    contexts = " and ".join(map(str, sorted({table.context for table in profile.forwards}))) or "no"
    grown = sum(bool(table.growth) for table in profile.forwards)
    tables = f"{len(profile.forwards)} latency tables on {profile.hardware}"
    lines = [
        f"{tables} at {contexts} tokens of context, {grown} of them with what each token more adds",
        f"link {_ms(profile.link_seconds)} one way, host work {_ms(profile.overhead_seconds)} a round",
        f"what rounds take beyond their forwards: {len(profile.rounds)} of mode, place, verification and temperature",
    ]
    return "\n".join([*lines, *(line for its in profile.texts for line in _of_texts(its))])


def _of_texts(its: Texts) -> Iterator[str]:
    acceptance = f"acceptance {its.draft_acceptance_rate:.0%} ({its.acceptance_source})"
    yield f"{its.prompt_set} prompts at temperature {its.temperature:g}: {acceptance}"
    if its.acceptance_by_position:
        yield f"  by position: {' '.join(f'{share:.0%}' for share in its.acceptance_by_position)}"
    for state, curve in (("hit", its.bonus_after_hit), ("miss", its.bonus_after_miss)):
        if curve:
            yield f"  bonus among the best 1, 2, 4, 8 candidates after a {state}: {' '.join(f'{curve[F]:.0%}' for F in (1, 2, 4, 8))}"
    if its.calibration:
        yield f"  confidence calibrated on {sum(sum(one.trials) for one in its.calibration):.0f} outcomes"


def _cost(plan: Plan) -> str:
    cost = cost_per_million(plan, plan.hardware)
    return "" if cost is None else f", ${cost:.2f} a million tokens"


def cost_per_million(configuration: Configuration, hardware: Hardware) -> float | None:
    """Return what a million output tokens cost in dollars, none where a device has no price or nothing is predicted."""
    prices = [device.price_per_hour for device in hardware.select(configuration.placement.devices)]
    known = [price for price in prices if price is not None]
    if configuration.predicted is None or len(known) < len(prices) or not configuration.predicted.tokens_per_second:
        return None
    return sum(known) / 3600 / configuration.predicted.tokens_per_second * 1e6


def _speedups(ar: float, sd: float | None) -> str:
    return f"{ar:.2f} x AR" if sd is None else f"{ar:.2f} x AR, {sd:.2f} x SD"


def _devices(count: int) -> str:
    return "one device" if count == 1 else f"{count} devices"


def _list(counts: tuple[int, ...]) -> str:
    return " ".join(map(str, counts))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
