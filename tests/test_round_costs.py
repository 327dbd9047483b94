"""What rounds take beyond their forwards: told to the simulator, it is read off what the simulator plays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.metrics import Round
from sim.scenario import Scenario
from sim.simulate import simulate
from sim.timeline import Span, Timeline
from ssd import prediction
from ssd.outcomes import outcome_model
from ssd.pace import Pace, pace
from ssd.placements import placements
from ssd.round_costs import Watched, round_cost, watched_configurations
from ssd.specs import Configuration, Hardware, Mode, Placement, RoundCost, Verification, Workload
from tests.profiles import cores, synthetic, texts

TWO = cores(2)
APART, SHARED = placements(TWO)[0], placements(TWO)[-1]
TABLES = synthetic(TWO, traces=texts(0.7), overhead=1e-3, link=0.2e-3)
LOAD = Workload(prompt_tokens=8, output_tokens=200)


def told(
    mode: Mode, place: Placement, *, verify: tuple[float, float] = (2e-3, 4e-3), verification: Verification = "rejection"
) -> RoundCost:
    drafts = mode != "ar"
    return RoundCost(
        mode=mode,
        placement=place,
        verification=verification,
        tokens=(1.0, 6.0) if drafts else (1.0,),
        verify=verify if drafts else verify[:1],
        answer=0.8e-3 if drafts else 0.0,
        step=0.3e-3 if drafts else 0.0,
        build_step=0.2e-3 if mode == "ssd" else 0.0,
    )


def played(its: Pace, mode: Mode, place: Placement) -> list[Watched]:
    """The simulator in the engine's place."""
    found = []
    for configuration in watched_configurations(mode, place, "rejection"):
        scenario: Scenario = prediction.scenario(configuration, its, outcome_model(TABLES).simulated(), LOAD, 4000)
        found.append(Watched(configuration, (simulate(replace(scenario, num_requests=20)).timeline,), 1))
    return found


@pytest.mark.parametrize(("mode", "place"), [("ar", Placement(target=SHARED.target)), ("sd", SHARED), ("ssd", APART)])
def test_what_the_simulator_was_told_is_read_off_its_rounds(mode, place):
    cost = told(mode, place)
    its = pace(TABLES.model_copy(update={"rounds": (cost,)}), place, mode)
    raw = pace(TABLES, place, mode)
    assert its is not None
    assert raw is not None
    found = round_cost(raw, played(its, mode, place))
    assert found is not None
    assert (found.mode, found.placement) == (mode, place)
    assert found.answer == pytest.approx(cost.answer, abs=1e-5)
    assert found.step == pytest.approx(cost.step, abs=1e-5)
    for tokens, seconds in zip(found.tokens, found.verify, strict=True):
        assert seconds == pytest.approx(cost.verify[0] + (tokens - 1) * 0.4e-3 if mode != "ar" else cost.verify[0], abs=1e-4)


def test_the_pace_is_that_of_the_tables_and_the_costs_together():
    cost = told("ssd", APART)
    raw, its = (pace(TABLES.model_copy(update={"rounds": rounds}), APART, "ssd") for rounds in ((), (cost,)))
    assert raw is not None
    assert its is not None
    assert its.verify(1) == pytest.approx(raw.verify(1) + 2e-3)
    assert its.verify(3.5) == pytest.approx(raw.verify(3.5) + 3e-3)
    assert its.verify(32) == pytest.approx(raw.verify(32) + 4e-3), "beyond what was watched the last is taken"
    assert its.alone(1) == pytest.approx(raw.alone(1) + 0.3e-3)
    assert its.step(4) == pytest.approx(raw.step(4) + 0.2e-3)
    assert its.step(1) == its.alone(1)
    assert its.link_seconds == pytest.approx(0.2e-3 + 0.4e-3)


def test_a_forward_in_a_round_takes_half_of_what_it_takes_alone_or_more():
    cost = told("ssd", APART, verify=(-1.0, -1.0)).model_copy(update={"step": -1.0, "build_step": -1.0})
    raw, its = (pace(TABLES.model_copy(update={"rounds": rounds}), APART, "ssd") for rounds in ((), (cost,)))
    assert raw is not None
    assert its is not None
    for size in (1, 4, 16):
        for ours, alone in ((its.verify, raw.verify), (its.alone, raw.alone), (its.step, raw.step)):
            assert ours(size) == pytest.approx(alone(size) / 2)


def test_each_mode_and_place_has_its_own_costs_and_each_verification_where_it_was_watched():
    rejection, coupled, sd = told("ssd", APART), told("ssd", APART, verification="coupled", verify=(1e-3, 1e-3)), told("sd", SHARED)
    found = TABLES.model_copy(update={"rounds": (rejection, coupled, sd)})
    assert found.round_cost("ssd", APART) == rejection
    assert found.round_cost("ssd", APART, "coupled") == coupled
    assert found.round_cost("sd", SHARED, "coupled") == sd
    assert found.round_cost("ar", APART) is None
    assert found.round_cost("sd", APART) is None


def built(configuration: Configuration, raw: Pace, begin: float, between: float, more: float) -> Watched:
    """A round: a step that catches up and a prompt's piece, then four of all branches and one that was given up."""
    branches, K = configuration.budget or sum(configuration.fan_out_hit), configuration.num_speculative_tokens
    spans, at = [Span("draft", "answer", 0.0, 1.0, 1, "r")], 1.0 + begin
    for name, seconds in [("build", raw.step(1)), ("prefill", 7e-3), *[("build", raw.step(branches) + more)] * 4, ("build", 0.1e-3)]:
        spans.append(Span("draft", name, at, at + seconds, 1, "r"))
        at = spans[-1].end + between
    return Watched(configuration, (Timeline(spans, [Round("r", K, 1, 2, True, False, 20e-3, 0.4e-3, start=1.0)]),), 1)


def test_a_build_is_its_steps_and_what_lies_between_them_but_not_one_that_may_have_been_given_up():
    raw = pace(TABLES, APART, "ssd")
    assert raw is not None
    short, long, weighed = watched_configurations("ssd", APART, "rejection")
    watched = [built(short, raw, 9e-3, 9e-3, 9e-3), built(long, raw, 3e-3, 1e-3, 2e-3), built(weighed, raw, 5e-3, 1e-3, 8e-3)]
    found = round_cost(raw, watched)
    assert found is not None
    assert found.build_step == pytest.approx(2e-3)
    assert (found.plan, found.weigh) == pytest.approx((3e-3 + 5e-3, 5e-3 + 5e-3))


@pytest.mark.parametrize(("hardware", "pieces"), [(TWO, 7), (Hardware.named("2xH100-SXM"), 1)])
def test_a_step_is_given_up_between_layers_on_cores_while_an_accelerator_has_it_all_at_once(hardware, pieces):
    place = placements(hardware)[0]
    its = pace(synthetic(hardware, traces=texts(0.7)).model_copy(update={"draft_layers": 7}), place, "ssd")
    assert its is not None
    configuration = watched_configurations("ssd", place, "rejection")[1]
    played = prediction.scenario(configuration, its, outcome_model(TABLES).simulated(), LOAD, 100)
    assert (played.interrupt, played.draft_layers) == ("moot", pieces)


@pytest.mark.parametrize("weighs", [{}, {"budget": 3, "fan_out_hit": (), "fan_out_miss": ()}, {"building": "anytime"}])
def test_a_build_is_played_with_what_its_kind_of_choice_takes(weighs):
    cost = told("ssd", APART).model_copy(update={"plan": 1e-3, "weigh": 4e-3})
    its = pace(TABLES.model_copy(update={"rounds": (cost,)}), APART, "ssd")
    assert its is not None
    assert its.build_seconds(2, 3) == pytest.approx(its.step(1) + 1e-3 + 2 * its.step(3))
    configuration = watched_configurations("ssd", APART, "rejection")[1].model_copy(update=weighs)
    scenario = prediction.scenario(configuration, its, outcome_model(TABLES).simulated(), LOAD, 100)
    assert scenario.draft_plan_seconds == (4e-3 if weighs else 1e-3)


def test_a_round_that_not_all_rows_took_part_in_tells_nothing():
    raw = pace(TABLES, APART, "ssd")
    alone = Timeline([], [Round("r", 1, 1, 2, True, False, 1.0, 0.1, start=1.0)])
    assert raw is not None
    assert round_cost(raw, [Watched(one, (alone,), 2) for one in watched_configurations("ssd", APART, "rejection")]) is None
