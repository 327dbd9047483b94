"""What theory expects of a configuration beside its simulation, and the pace that both take from a profile."""

from dataclasses import replace

import pytest

import ssd
from ssd.outcomes import outcome_model
from ssd.pace import pace
from ssd.placements import placements
from ssd.prediction import play
from ssd.search import Search
from ssd.specs import Configuration
from tests.profiles import cores, synthetic, texts

TWO = cores(2)
APART, SHARED = placements(TWO)[0], placements(TWO)[1]
LOAD = ssd.Workload(output_tokens=2000)


def test_a_round_lasts_a_verification_two_messages_and_host_work():
    its = pace(synthetic(TWO, overhead=2e-3, link=0.5e-3), APART, "ssd")
    assert its.round_seconds(4) == pytest.approx(10e-3 + 4 * 0.1e-3 + 2e-3 + 2 * 0.5e-3)
    assert its.backup_seconds(4) == pytest.approx(4e-3)
    assert its.build_seconds(4, 11) == pytest.approx(1e-3 + 4 * 1.2e-3)


def test_ar_sends_no_message():
    its = pace(synthetic(TWO, overhead=2e-3, link=0.5e-3), ssd.Placement(target=("cpu:0",)), "ar")
    assert its.round_seconds(0) == pytest.approx(12e-3)


@pytest.mark.parametrize("profile", [synthetic(TWO, link=0.3e-3), synthetic(TWO, traces=texts(0.8, length=2000), overhead=1e-3)])
@pytest.mark.parametrize("backup", ["jit", "none"])
def test_theory_agrees_with_the_simulation_where_the_build_fits(profile, backup):
    outcomes, its = outcome_model(profile), pace(profile, APART, "ssd")
    search = Search(outcomes)
    first = next(c for c in search.ranked("ssd", its) if c.backup == backup and c.num_speculative_tokens == 5)
    lists = first.fan_out_hit, first.fan_out_miss
    assert its.build_seconds(5, sum(first.fan_out_hit)) < its.round_seconds(0)
    seconds = search.ssd_seconds_per_token(its, 5, *lists, backup)
    assert 1 / seconds == pytest.approx(play(first, its, outcomes.simulated(), LOAD).tokens_per_second, rel=0.06)


@pytest.mark.parametrize("layers", [1, 24])
@pytest.mark.parametrize("choice", [{"fan_out_hit": (2,) * 6, "fan_out_miss": (2,) * 6}, {"budget": 12}])
def test_theory_agrees_with_the_simulation_where_the_host_takes_long_to_choose_and_steps_are_given_up_late(choice, layers):
    """Choosing takes the time of several steps, more where outcomes are weighed; with one layer a miss waits for the step under way."""
    profile = synthetic(TWO, traces=texts(0.7, length=2000), step=1.8e-3)
    outcomes, its = outcome_model(profile), pace(profile, APART, "ssd")
    its = replace(its, plan_seconds=2e-3, weigh_seconds=5e-3, draft_layers=layers)
    asked = Configuration(mode="ssd", num_speculative_tokens=5, placement=APART, **choice)
    played = play(asked, its, outcomes.simulated(), LOAD).tokens_per_second

    def expected(**changes) -> float:
        return 1 / Search(outcomes).seconds_per_token(asked, replace(its, **changes))

    assert expected() == pytest.approx(played, rel=0.02)
    # Both tell.
    assert expected(plan_seconds=0.0, weigh_seconds=0.0) > 1.05 * played
    assert expected(draft_layers=1) < 0.998 * expected(draft_layers=24)


def test_theory_agrees_with_the_simulation_of_sd():
    profile = synthetic(TWO, link=0.3e-3)
    outcomes, its = outcome_model(profile), pace(profile, SHARED, "sd")
    best = Search(outcomes).ranked("sd", its)[0]
    speeds = {
        c.num_speculative_tokens: play(c, its, outcomes.simulated(), LOAD).tokens_per_second for c in Search(outcomes).ranked("sd", its)
    }
    assert speeds[best.num_speculative_tokens] > 0.97 * max(speeds.values())


def test_a_build_that_never_begins_hits_nothing():
    profile = synthetic(TWO, step=20e-3, step_more=0.0)
    its = pace(profile, APART, "ssd")
    seconds = Search(outcome_model(profile)).ssd_seconds_per_token(its, 1, (1, 1), (1, 1), "jit")
    assert seconds == pytest.approx((10.1e-3 + 20e-3) / 1.8)
