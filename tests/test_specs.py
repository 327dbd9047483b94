"""The values between planner, engine and user: frozen, documented with units, JSON both ways."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ssd import specs
from ssd.specs import (
    Configuration,
    ForwardLatency,
    Hardware,
    Models,
    Placement,
    Plan,
    Prediction,
    Profile,
    SamplingParams,
    Spec,
    Texts,
    Workload,
    check_fan_out,
)
from tests.plans import hand_typed, two_cores

KINDS = [kind for kind in vars(specs).values() if isinstance(kind, type) and issubclass(kind, Spec) and kind is not Spec]
UNIT = re.compile(
    r"second|bytes|FLOP|dollars|\((ratio|count|counts|tokens|token ids|rank|list|yes or no|no unit)"
    r"|tokens|units in its own fields|list of devices|logits|probability|token id to|token id or"
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_says_its_unit_and_every_value_is_frozen(kind):
    for name, field in kind.model_fields.items():
        assert field.description, f"{kind.__name__}.{name} has no description"
        assert UNIT.search(field.description), f"{kind.__name__}.{name}: {field.description}"
    assert kind.model_config["frozen"]
    assert kind.model_config["extra"] == "forbid"


def examples() -> list[Spec]:
    plan = hand_typed("a", "b")
    table = ForwardLatency(model="target", devices=("cpu:0",), tokens=(1, 2), seconds=(0.1, 0.2))
    profile = Profile(
        hardware="x",
        models=Models(target="a", draft="b"),
        texts=(Texts(prompt_set="code", traces=((1, 2, 1),), draft_acceptance_rate=0.8, acceptance_source="measured"),),
        forwards=(table,),
        prefill_seconds_per_token=0.01,
        link_seconds=0.0,
        overhead_seconds=0.001,
    )
    return [
        plan,
        plan.model_copy(update={"profile": profile}),
        profile,
        two_cores(),
        Models(target="a"),
        Workload(),
        SamplingParams(),
        table,
    ]


@pytest.mark.parametrize("value", examples(), ids=lambda value: type(value).__name__)
def test_json_and_back_is_the_same_value(value, tmp_path):
    value.save(tmp_path / "value.json")
    assert type(value).load(tmp_path / "value.json") == value


def test_a_saved_value_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        SamplingParams().max_tokens = 3


@given(st.sampled_from(KINDS), st.data())
def test_an_unknown_key_is_refused_with_the_nearest_known_one(kind, data):
    known = data.draw(st.sampled_from(sorted(kind.model_fields)))
    typed = known[:-1] + "zz" if len(known) > 4 else known + "z"
    with pytest.raises(ValueError, match=f"{kind.__name__} has no option {typed!r}") as caught:
        kind(**{typed: 1})
    near = re.search(r"did you mean '(\w+)'", str(caught.value))
    assert near is None or near.group(1) in kind.model_fields


def test_an_unknown_key_deep_in_a_file_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    hand_typed("a", "b").save(path)
    path.write_text(path.read_text().replace('"memory_bytes"', '"memory_byte"', 1))
    with pytest.raises(ValueError, match="Device has no option 'memory_byte': did you mean 'memory_bytes'"):
        Plan.load(path)


@given(st.integers(1, 8), st.lists(st.integers(-1, 3), max_size=10).map(tuple))
def test_a_fan_out_is_k_plus_one_counts_with_one_above_zero(K, fan_out):
    good = len(fan_out) == K + 1 and min(fan_out) >= 0 and any(fan_out)
    if good:
        check_fan_out("fan_out_hit", fan_out, K)
    else:
        with pytest.raises(ValueError, match="fan_out_hit"):
            check_fan_out("fan_out_hit", fan_out, K)


def test_another_configuration_in_a_plan_keeps_what_the_plan_is_for():
    plan = hand_typed("a", "b")
    other = Configuration(
        mode="sd", num_speculative_tokens=5, placement=Placement(target=plan.placement.target, draft=plan.placement.target)
    )
    changed = plan.with_configuration(other)
    assert (changed.mode, changed.num_speculative_tokens, changed.fan_out_hit) == ("sd", 5, ())
    assert (changed.hardware, changed.models, changed.workload) == (plan.hardware, plan.models, plan.workload)


def test_a_plans_configuration_is_taken_out_as_it_was_put_in_and_told_apart_without_its_prediction():
    here = hand_typed("a", "b")
    numbers = dict.fromkeys(("tokens_per_second", "speedup_vs_ar", "speedup_vs_ar_equal_devices", "mean_acceptance_length"), 2.0)
    expected = Prediction(**numbers, verify_seconds=0.1, method="theory")
    bare = Configuration(mode="ar", placement=here.placement)
    foretold = bare.model_copy(update={"predicted": expected})
    plan = Plan.of(foretold, hardware=here.hardware, models=here.models, objective="throughput")
    assert (plan.hardware, plan.models, plan.objective) == (here.hardware, here.models, "throughput")
    assert type(plan.alone()) is Configuration
    assert plan.alone() == foretold != bare
    assert plan.unpredicted() == foretold.unpredicted() == bare.unpredicted() == bare
    assert Plan.of(plan, hardware=here.hardware, models=here.models, predicted=None).alone() == bare
    assert here.with_configuration(plan) == here.with_configuration(foretold)


def test_two_devices_of_one_name_are_refused():
    device = two_cores().devices[0]
    with pytest.raises(ValueError, match="names a device twice"):
        Hardware(name="twins", devices=(device, device))


def test_a_latency_table_must_rise_and_match():
    with pytest.raises(ValueError, match="must rise and match"):
        ForwardLatency(model="draft", devices=("cpu:0",), tokens=(2, 1), seconds=(1.0, 2.0))
