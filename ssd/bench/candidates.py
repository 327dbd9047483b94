"""Which configurations a benchmark compares: the plans, the best of each mode and placement, and the baselines that ratios need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ssd.bench.setting import Setting
from ssd.devices import are_cores, host
from ssd.specs import Configuration, Placement, Plan


def grid(plans: Sequence[Plan], temperatures: Sequence[float], *, fit_prompts: bool) -> dict[Setting, list[Configuration]]:
    """Return what to run in each setting: what the plans for it say, the first one's own configuration first, each once."""
    found: dict[Setting, list[Configuration]] = {}
    for temperature in temperatures:
        for plan in plans:
            load = plan.workload
            length = load.prompt_tokens if fit_prompts else None
            setting = Setting(batch_size=load.batch_size, prompt_tokens=length, temperature=temperature)
            column = found.setdefault(setting, [])
            known = {_what(configuration) for configuration in column}
            column += [one for one in candidates(plan) if _what(one) not in known]
    return {setting: sorted(column, key=lambda one: one.mode != column[0].mode) for setting, column in found.items()}


def _what(configuration: Configuration) -> object:
    """Return what tells configurations apart: an AR's draft devices do not matter, nor does a prediction."""
    return configuration.unpredicted().model_copy(update={"placement": _place(configuration)})


def candidates(plan: Plan) -> list[Configuration]:
    """Return what to run, the plan first, each once; AR and SD on the target's devices and on all devices used are among them."""
    found: dict[object, Configuration] = {}
    for configuration in [plan.alone(), *_by_speed(plan.alternatives), *_baselines(plan)]:
        found.setdefault((configuration.mode, _place(configuration)), configuration)
    return list(found.values())


def _by_speed(alternatives: Iterable[Configuration]) -> list[Configuration]:
    return sorted(alternatives, key=lambda c: -(c.predicted.tokens_per_second if c.predicted else 0.0))


def _place(configuration: Configuration) -> Placement:
    """Return what tells placements apart: an AR's draft devices do not matter."""
    return Placement(target=configuration.placement.target) if configuration.mode == "ar" else configuration.placement


def _baselines(plan: Plan) -> Iterator[Configuration]:
    """Yield AR and SD with the plan's lookahead on the target's devices and on all, where no alternative takes their place; where the draft
    is on another host, AR here and SD on both."""
    K = plan.num_speculative_tokens or 3
    if host(plan.placement.draft) is not None:
        # Neither a draft nor a target moves to another host.
        yield Configuration(mode="ar", placement=Placement(target=plan.placement.target))
        yield Configuration(mode="sd", num_speculative_tokens=K, placement=plan.placement)
        return
    for devices in dict.fromkeys((plan.placement.target, plan.placement.devices)):
        if len(devices) > 1 and not are_cores(devices):
            continue
        known = [c for c in plan.alternatives if set(c.placement.devices) == set(devices)]
        if not any(c.mode == "ar" for c in known):
            yield Configuration(mode="ar", placement=Placement(target=devices))
        if plan.models.draft is not None and not any(c.mode == "sd" for c in known):
            yield Configuration(mode="sd", num_speculative_tokens=K, placement=Placement(target=devices, draft=devices))
