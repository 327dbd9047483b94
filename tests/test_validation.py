"""The simulator beside the engine, on a tiny pair: that everything is measured and predicted, not how well."""

from __future__ import annotations

from itertools import pairwise

import pytest

import ssd
from sim.simulate import simulate
from ssd.engine.prefix import PREFILL_CHUNK
from ssd.outcomes import outcome_model
from ssd.pace import pace
from ssd.placements import placements
from ssd.prediction import play
from ssd.specs import Configuration, Hardware, Models, Placement, Workload
from ssd.validation import Case, Compared, Numbers, Validation, _predicted, cases, scenario
from tests.plans import CORES, two_cores
from tests.profiles import PAIR, cores, synthetic

APART = placements(cores(2))[0]
SSD = Configuration(mode="ssd", num_speculative_tokens=2, fan_out_hit=(1, 1, 1), fan_out_miss=(1, 1, 1), placement=APART)
AR = Configuration(mode="ar", placement=Placement(target=APART.target))


def test_there_are_a_dozen_cases_or_more_and_all_differ():
    found = cases(cores(2))
    assert len({case.name for case in found}) == len(found) >= 12
    assert {case.configuration.mode for case in found} == {"ar", "sd", "ssd"}
    assert {case.batch_size for case in found} >= {1, 2, 3, 4}
    assert len({case.temperature for case in found}) > 1
    assert len({case.prompt_tokens for case in found}) > 1
    assert len({case.configuration.num_speculative_tokens for case in found}) > 3


def test_one_device_has_no_cases():
    with pytest.raises(ValueError, match="has one device: SSD, which is to be validated, needs two"):
        cases(cores(1))


def test_what_is_predicted_is_what_the_planner_plays():
    profile = synthetic(cores(2), overhead=0.5e-3, link=0.1e-3)
    adaptive = {"mode": "ssd", "num_speculative_tokens": 2, "budget": 4, "placement": APART}
    others = [Configuration(**adaptive, building=building) for building in ("fixed", "anytime")]
    for configuration in (AR, SSD, *others):
        its = pace(profile, configuration.placement, configuration.mode)
        load = Workload(prompt_tokens=64, output_tokens=100)
        planned = play(configuration, its, outcome_model(profile).simulated(), load)
        ours = _predicted(Case(configuration=configuration), profile, 100)
        assert ours.tokens_per_second == pytest.approx(planned.tokens_per_second, rel=0.03)
        assert ours.time_to_first_token == pytest.approx(64 * 1e-3)


def test_prompts_that_are_fed_in_one_piece_delay_nobody_and_the_first_tokens_come_at_once():
    profile = synthetic(cores(2))
    for rows in (1, 4):
        found = _predicted(Case(configuration=AR, batch_size=rows, prompt_tokens=PREFILL_CHUNK // 4), profile, 50)
        assert found.time_to_first_token == pytest.approx(rows * PREFILL_CHUNK // 4 * 1e-3, rel=0.2)
        assert found.tokens_per_second == pytest.approx(rows / pace(profile, AR.placement, "ar").verify(rows), rel=0.03)
    longer = Case(configuration=AR, batch_size=4, prompt_tokens=PREFILL_CHUNK // 4 + 1)
    assert scenario(longer, profile, 50).target_prefill_seconds == pytest.approx((PREFILL_CHUNK // 4 + 1) * 1e-3)


def test_texts_are_read_as_far_as_they_are_decoded():
    easy_then_hard = ((1,) * 40 + (50,) * 160,) * 4
    profile = synthetic(cores(2), traces=easy_then_hard)
    assert _predicted(Case(configuration=SSD), profile, 40).mean_acceptance_length == pytest.approx(3, abs=0.1)
    assert _predicted(Case(configuration=SSD), profile, 200).mean_acceptance_length < 1.6


def test_requests_of_a_wave_come_together_and_waves_apart():
    served = simulate(scenario(Case(configuration=SSD, batch_size=4), synthetic(cores(2)), 20))
    ends = {}
    for one in served.requests:
        ends.setdefault(one.arrival, []).append(one.token_seconds[-1])
    starts = sorted(ends)
    assert all(len(wave) == 4 for wave in ends.values())
    assert all(max(ends[before]) < after for before, after in pairwise(starts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hardware": cores(2).model_copy(update={"is_local": False})}, "is not this machine: validation measures"),
        ({"models": Models(target="target")}, "models.draft is missing"),
        ({"chosen": ()}, r"chosen=\(\) leaves nothing to validate: give at least one case"),
        ({"output_tokens": 1}, "output_tokens=1: the speed of decoding needs at least 2"),
        ({"repeats": 0}, "repeats=0: give 1 or more"),
    ],
)
def test_what_cannot_be_validated_is_refused_before_anything_is_measured(changes, message):
    asked = {"hardware": cores(2), "models": PAIR, "chosen": [Case(configuration=AR)], **changes}
    with pytest.raises(ValueError, match=message):
        ssd.validate(asked.pop("hardware"), asked.pop("models"), **asked)


def test_a_budget_and_a_cache_built_at_any_time_are_handed_to_the_simulator():
    for building, named in (("fixed", ""), ("anytime", " anytime")):
        adaptive = Configuration(mode="ssd", num_speculative_tokens=2, budget=4, building=building, placement=APART)
        case = Case(configuration=adaptive)
        assert case.name == f"SSD K=2 B=4{named} b=1 prompt 64 T=0"
        played = scenario(case, synthetic(cores(2)), 32)
        assert (played.budget, played.building, played.fan_out_hit) == (4, building, ())


def test_errors_are_of_the_prediction_over_the_measurement():
    numbers = [Numbers(tokens_per_second=speed, time_to_first_token=0.1) for speed in (100.0, 110.0, 80.0)]
    rows = [Compared(case=Case(configuration=AR, batch_size=b), measured=numbers[0], predicted=numbers[b]) for b in (1, 2)]
    found = Validation(hardware="x", models=PAIR, prompt_set="code", output_tokens=9, repeats=1, rows=rows)
    assert [row.error for row in found.rows] == [pytest.approx(0.1), pytest.approx(-0.2)]
    assert found.mean_absolute_error == pytest.approx(0.15)
    assert found.worst.case.batch_size == 2
    assert "| AR b=1 prompt 64 T=0 | 100.0 | 110.0 | +10.0% | none / none | none / none | 100.0 / 100.0 |" in found.table()
    assert found.table().endswith("Mean absolute error 15.0%; worst -20.0%, AR b=2 prompt 64 T=0.")


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_the_whole_way_on_a_tiny_pair(tiny_pair):
    hardware: Hardware = two_cores()
    place = placements(hardware)
    chosen = [
        Case(configuration=Configuration(mode="ar", placement=Placement(target=place[0].target)), prompt_tokens=8),
        Case(configuration=Configuration(mode="sd", num_speculative_tokens=2, placement=place[-1]), prompt_tokens=8, batch_size=2),
        Case(configuration=SSD.model_copy(update={"placement": place[0]}), prompt_tokens=8, temperature=1.0),
    ]
    found = ssd.validate(
        hardware,
        Models(target=tiny_pair[0], draft=tiny_pair[1]),
        chosen=chosen,
        prompts=["a short text", "another"],
        output_tokens=12,
        repeats=2,
    )
    assert [row.case for row in found.rows] == chosen
    for row in found.rows:
        for numbers in (row.measured, row.predicted):
            assert numbers.tokens_per_second > 0
            assert numbers.time_to_first_token > 0
            assert (numbers.hit_rate is None) == (row.case.configuration.mode != "ssd")
            assert (numbers.mean_acceptance_length is None) == (row.case.configuration.mode == "ar")
    assert Validation.model_validate_json(found.model_dump_json()) == found
