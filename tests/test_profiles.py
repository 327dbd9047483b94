"""What a profile says of a load: its texts, the rounds watched at its temperature, latency tables at its context."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ssd
from sim.outcomes import NEVER
from ssd.outcomes import LARGEST_BUDGET, Traced, outcome_model
from ssd.pace import pace
from ssd.placements import placements
from ssd.specs import ForwardLatency, Placement, Plan, Profile, RoundCost, Texts, Workload
from tests.profiles import PAIR, cores, synthetic, texts, with_texts

TWO = cores(2)
contexts = st.integers(0, 100_000)


@st.composite
def tables(draw) -> ForwardLatency:
    """Tables of which no forward takes longer than in proportion to the context, as the profiler makes them."""
    tokens = tuple(sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=6))))
    context = draw(st.integers(1, 4096))
    seconds = tuple(draw(st.floats(1e-6, 10)) for _ in tokens)
    growth = tuple(each / context * draw(st.floats(0, 1)) for each in seconds)
    return ForwardLatency(model="target", devices=("cpu:0",), tokens=tokens, seconds=seconds, context=context, growth=growth)


@given(tables())
def test_a_table_at_its_own_context_is_itself(table):
    assert table.at(table.context) == table


@given(tables(), contexts, contexts)
def test_forwards_never_get_faster_with_context_nor_take_less_than_no_time(table, one, other):
    for shorter, longer in zip(*(table.at(context).seconds for context in sorted((one, other))), strict=True):
        assert 0 <= shorter <= longer


@given(tables(), contexts, contexts, st.floats(0, 1))
def test_forwards_are_linear_in_context(table, one, other, part):
    between = round(one + part * (other - one))
    ends = [table.at(context).seconds for context in (one, other)]
    share = (between - one) / (other - one) if other != one else 0.0
    expected = (1 - share) * np.asarray(ends[0]) + share * np.asarray(ends[1])
    np.testing.assert_allclose(table.at(between).seconds, expected, rtol=1e-9, atol=1e-12)


@given(tables(), contexts, contexts)
def test_it_is_the_same_by_whatever_context_one_comes(table, way, end):
    np.testing.assert_allclose(table.at(way).at(end).seconds, table.at(end).seconds, rtol=1e-9, atol=1e-12)


def test_a_table_of_one_context_is_taken_as_it_is():
    table = ForwardLatency(model="draft", devices=("cpu:0",), tokens=(1,), seconds=(0.1,), context=100)
    assert table.at(1000) is table


def test_what_context_adds_must_match_the_tokens_and_not_be_negative():
    known = {"model": "draft", "devices": ("cpu:0",), "tokens": (1, 2), "seconds": (0.1, 0.2)}
    with pytest.raises(ValueError, match=r"growth=\(0.1,\) must match tokens=\(1, 2\) one to one"):
        ForwardLatency(**known, growth=(0.1,))
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        ForwardLatency(**known, growth=(0.1, -0.1))


def grown(profile: Profile) -> Profile:
    """With forwards that were timed at 192 tokens and take twice as long at 384."""
    forwards = [t.model_copy(update={"context": 192, "growth": tuple(s / 192 for s in t.seconds)}) for t in profile.forwards]
    return profile.model_copy(update={"forwards": tuple(forwards)})


def test_a_plan_for_longer_prompts_is_of_slower_forwards():
    profile = grown(synthetic(TWO))
    near, far = (ssd.plan(TWO, PAIR, Workload(prompt_tokens=length), profile=profile, mode="ar") for length in (128, 320))
    assert near.predicted.verify_seconds == pytest.approx(10e-3)
    assert far.predicted.verify_seconds == pytest.approx(20e-3)
    assert near.predicted.tokens_per_second == pytest.approx(2 * far.predicted.tokens_per_second)
    # And from the plan's own profile as from the whole.
    again = ssd.plan(TWO, PAIR, Workload(prompt_tokens=128), profile=far.profile, mode="ar")
    assert again.predicted.verify_seconds == pytest.approx(10e-3)


def test_a_plan_says_where_latencies_are_of_another_context():
    alone = tuple(table.model_copy(update={"context": 192}) for table in synthetic(TWO).forwards)
    plan, longer = (
        ssd.plan(TWO, PAIR, Workload(prompt_tokens=length), profile=synthetic(TWO).model_copy(update={"forwards": alone}), mode="ar")
        for length in (128, 1000)
    )
    assert "tokens of context" not in plan.explain()
    assert "latency at 1064 tokens of context: taken as at 192" in longer.explain().split("assumed:")[1]
    assert "tokens of context" not in ssd.plan(TWO, PAIR, Workload(prompt_tokens=1000), profile=grown(synthetic(TWO)), mode="ar").explain()


def several() -> Profile:
    """Three loads; rounds of SD were watched at both temperatures."""
    shared = placements(TWO)[-1]
    its = [
        Texts(prompt_set="code", traces=texts(0.9), draft_acceptance_rate=0.9, acceptance_source="measured"),
        Texts(prompt_set="chat", traces=texts(0.7), draft_acceptance_rate=0.7, acceptance_source="measured"),
        Texts(prompt_set="chat", temperature=1.0, traces=texts(0.5), draft_acceptance_rate=0.5, acceptance_source="measured"),
    ]
    costs = [
        RoundCost(mode="sd", placement=shared, temperature=temperature, tokens=(1.0,), verify=(seconds,))
        for temperature, seconds in ((0.0, 1e-3), (1.0, 5e-3))
    ]
    return synthetic(TWO).model_copy(update={"texts": tuple(its), "rounds": tuple(costs), "measured_on": "2026-01-02"})


@pytest.mark.parametrize(("kind", "temperature", "place"), [("code", 0, 0), ("chat", 0, 1), ("chat", 1, 2)])
def test_what_is_known_of_a_load_is_its_texts_and_the_rounds_at_its_temperature(kind, temperature, place):
    profile, load = several(), Workload(prompt_set=kind, temperature=temperature)
    found = profile.of(load)
    assert found.texts == profile.texts[place : place + 1]
    assert {cost.temperature for cost in found.rounds} == {temperature}
    assert found.of(load) == found
    assert outcome_model(found) == Traced(profile.texts[place].traces)
    its = pace(found, placements(TWO)[-1], "sd")
    assert its.verify(1) == pytest.approx(10e-3 + (5e-3 if temperature else 1e-3))


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"prompt_set": "library"}, "workload.prompt_set='library' does not fit the profile, made with 'code' and 'chat' on 2026-01-02"),
        ({"temperature": 0.7}, "workload.temperature=0.7 does not fit the profile, made with 0.0 and 1.0 on 2026-01-02: profile again"),
        ({"temperature": 1.0}, "workload.prompt_set='code' does not fit the profile, made with 'chat' on 2026-01-02"),
    ],
)
def test_a_load_that_was_not_measured_is_refused_with_those_that_were(load, message):
    with pytest.raises(ValueError, match=message):
        several().of(Workload(**load))
    with pytest.raises(ValueError, match=message):
        ssd.plan(TWO, PAIR, Workload(**load), profile=several())


def test_texts_on_given_prompts_fit_every_prompt_set_but_its_own_come_first():
    given_, code = (several().texts[1].model_copy(update={"prompt_set": name}) for name in ("given", "code"))
    profile = several().model_copy(update={"texts": (given_, code)})
    assert profile.of(Workload(prompt_set="code")).texts == (code,)
    assert profile.of(Workload(prompt_set="library")).texts == (given_,)


def test_a_file_of_one_load_from_before_still_loads(tmp_path):
    new = with_texts(synthetic(TWO), temperature=1.0, traces=texts(0.5), end_traces=texts(0.6))
    cost = RoundCost(mode="sd", placement=Placement(target=("cpu:0",), draft=("cpu:0",)), temperature=1.0, tokens=(1.0,), verify=(1e-3,))
    new = new.model_copy(update={"rounds": (cost,)})
    old = json.loads(new.model_dump_json())
    (its,) = old.pop("texts")
    old |= {name: its[name] for name in Texts.model_fields}
    for table in old["forwards"]:
        del table["context"], table["growth"]
    for name in ("temperature", "plan", "weigh"):
        del old["rounds"][0][name]
    del old["draft_layers"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert Profile.load(tmp_path / "old.json") == new
    # As plans have it.
    plan = ssd.plan(TWO, PAIR, Workload(temperature=1.0), profile=new, mode="ar")
    saved = json.loads(plan.model_dump_json())
    (tmp_path / "plan.json").write_text(json.dumps({**saved, "profile": old}))
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_file_tells_acceptance_by_position_and_where_the_bonus_stands_after_hits_and_misses(tmp_path):
    # Three tokens that are the draft's own, then its second choice: of every 3 draft tokens all are accepted, and the bonus is second.
    profile = with_texts(synthetic(TWO), traces=((1, 1, 1, 2) * 40,))
    profile.save(tmp_path / "profile.json")
    (its,) = json.loads((tmp_path / "profile.json").read_text())["texts"]
    assert Profile.load(tmp_path / "profile.json") == profile
    assert its["acceptance_by_position"] == list(profile.texts[0].acceptance_by_position)
    # Begun at any place, at most three are accepted; then as many as were not: the fourth never is, if three were.
    assert len(its["acceptance_by_position"]) == 4
    assert its["acceptance_by_position"][3] == 0
    assert all(share > 0 for share in its["acceptance_by_position"][:3])


@given(st.floats(0.2, 0.9), st.floats(0.2, 0.9), st.integers(0, 5))
def test_where_places_are_independent_so_are_positions_and_rounds(alpha, hit, seed):
    """Every position is accepted with the same chance, and after hits and misses the bonus stands where it stands on average."""
    its = Texts(
        prompt_set="code",
        traces=texts(alpha, hit, seed, count=40, length=400),
        draft_acceptance_rate=alpha,
        acceptance_source="measured",
    )
    assert its.acceptance_by_position[:3] == pytest.approx([alpha] * 3, abs=0.06)
    law, curves = Traced(its.traces).law(3), Traced(its.traces).curves(3, True)
    mean = sum(P * curve for P, curve in zip(law, curves, strict=True))
    for curve in (its.bonus_after_hit, its.bonus_after_miss):
        assert len(curve) == LARGEST_BUDGET + 1
        assert curve[0] == 0
        assert list(curve) == sorted(curve)
        np.testing.assert_allclose(curve, mean, atol=0.08)


def test_hard_places_that_come_together_are_seen_after_misses():
    easy, hard = texts(0.9, 0.95, length=60, count=1)[0], texts(0.2, 0.2, length=60, count=1)[0]
    its = Texts(prompt_set="code", traces=((*easy, *hard) * 8,) * 2, draft_acceptance_rate=0.5, acceptance_source="measured")
    assert its.bonus_after_hit[1] > its.bonus_after_miss[1] + 0.2


def test_without_traces_or_rounds_of_a_kind_there_is_nothing_to_tell():
    none = synthetic(TWO).texts[0]
    assert none.acceptance_by_position == none.bonus_after_hit == none.bonus_after_miss == ()
    never = none.model_copy(update={"traces": ((NEVER,) * 50,)})
    assert never.acceptance_by_position == (0.0,)
    assert never.bonus_after_hit == ()
    assert set(never.bonus_after_miss) == {0.0}


def test_a_profile_explains_every_load():
    profile = several()
    lines = profile.explain().splitlines()
    for its in profile.texts:
        line = f"{its.prompt_set} prompts at temperature {its.temperature:g}: acceptance {its.draft_acceptance_rate:.0%} (measured)"
        at = lines.index(line)
        assert lines[at + 1] == f"  by position: {' '.join(f'{share:.0%}' for share in its.acceptance_by_position)}"
        assert [line.split(":")[0].split()[-1] for line in lines[at + 2 : at + 4]] == ["hit", "miss"]
