"""The simulator against the closed forms where they are exact, and against rounds worked out by hand."""

import dataclasses

import numpy as np
import pytest

from sim.latency import Latency
from sim.outcomes import IID, Replay, TwoState
from sim.scenario import Scenario
from sim.simulate import simulate
from theory.acceptance import accepted_length_law, expected_tokens
from theory.hits import PowerLaw, hit_probability, stationary_hit_rate
from theory.interruption import interrupted_round_seconds
from theory.speed import round_seconds, sd_seconds_per_token, ssd_seconds_per_token, two_state_seconds_per_token

K, ALPHA = 4, 0.8
FAN_OUT = (4, 3, 2, 2, 4)
CURVE = tuple(PowerLaw(r=0.5, c=0.5).curve(40).tolist())
HIT_RATE = hit_probability(accepted_length_law(ALPHA, K), FAN_OUT, [CURVE] * (K + 1))
E = float(expected_tokens(ALPHA, K))

SSD = Scenario(
    mode="ssd",
    verify=Latency.constant(10.0),
    draft_step=Latency.of({1: 1.0, 15: 1.5}),
    outcomes=IID(ALPHA, CURVE),
    num_speculative_tokens=K,
    fan_out_hit=FAN_OUT,
    fan_out_miss=FAN_OUT,
    output_tokens=40_000,
    target_prefill_seconds=20.0,
    draft_prefill_seconds=3.0,
)
SLOW_BUILD = dataclasses.replace(SSD, draft_step=Latency.of({1: 1.7, 15: 3.0}))  # T_p = 13.7 > T_v = 10


def always(k: int, rank: int) -> Replay:
    return Replay(((k, rank),), lookahead=K)


def short(**changes):
    return dataclasses.replace(SSD, **{"output_tokens": 11, **changes})


def agrees(metrics, hit, miss, seconds_per_token):
    """Rounds last what theory says, given how many of them hit; and the tokens a second follow within Monte-Carlo error."""
    h = metrics.cache_hit_rate or 0.0
    per_round = (metrics.total_seconds - metrics.time_to_first_token) / metrics.num_rounds
    assert per_round == pytest.approx(float(h * hit + (1 - h) * miss), rel=1e-4)  # the round after the prefill is another one
    assert metrics.time_per_output_token == pytest.approx(float(seconds_per_token), rel=0.02)


def spans(result, device, activity):
    return [(s.start, s.end) for s in result.timeline.spans if s.device == device and s.activity == activity]


def test_ar_takes_one_verification_a_token():
    result = simulate(Scenario("ar", Latency.of({1: 7.0, 5: 9.0}), output_tokens=101, target_prefill_seconds=3.0, overhead_seconds=0.5))
    m = result.metrics
    assert (m.total_seconds, m.time_to_first_token, m.time_per_output_token) == (753, 3, 7.5)
    assert (m.num_rounds, m.num_drafts, m.wait_seconds, m.cache_hit_rate) == (100, 0, 0, None)
    assert result.timeline.busy("draft") == 0


def test_sd_agrees_with_theory():
    scenario = dataclasses.replace(SSD, mode="sd", link_seconds=0.25, overhead_seconds=0.5)
    m = simulate(scenario, seed=1).metrics
    agrees(m, 0.0, 15.0, sd_seconds_per_token(10 + 2 * 0.25 + 0.5, K * 1.0, E))
    assert m.mean_acceptance_length == pytest.approx(E, rel=0.02)
    assert (m.cache_hit_rate, m.num_backups) == (None, 0)


def test_ssd_agrees_with_theorem_7_where_the_build_fits_into_the_verification():
    m = simulate(SSD, seed=2).metrics
    assert m.cache_hit_rate == pytest.approx(HIT_RATE, abs=0.015)
    agrees(m, *round_seconds(10.0, 7.0, K * 1.0), ssd_seconds_per_token(10.0, 7.0, K * 1.0, HIT_RATE, E, E))


def test_link_and_overhead_lengthen_every_round():
    m = simulate(dataclasses.replace(SSD, link_seconds=0.25, overhead_seconds=0.5), seed=2).metrics
    agrees(m, *round_seconds(11.0, 7.0, K * 1.0), ssd_seconds_per_token(11.0, 7.0, K * 1.0, HIT_RATE, E, E))


@pytest.mark.parametrize("planning", [0.0, 0.5])
def test_ssd_agrees_with_the_interrupted_round_where_the_build_is_longer(planning):
    result = simulate(dataclasses.replace(SLOW_BUILD, draft_plan_seconds=planning), seed=3)
    # 1.7 + 3 steps of 3.0 = 10.7, and what the host takes to choose: the fourth token of the branch that hit is drafted alone.
    hit, miss = interrupted_round_seconds(10.0, K, 1.7 + planning, 3.0, 1.7, K * 1.7)
    assert (float(hit), float(miss)) == pytest.approx((10.7 + planning + 1.7, 10.7 + planning + 4 * 1.7))
    rounds = result.rounds[1:]  # the first one had the prefill to build in
    assert {r.hit: round(10 + r.wait_seconds, 6) for r in rounds} == {True: 12.4 + planning, False: 17.5 + planning}
    agrees(result.metrics, hit, miss, (HIT_RATE * hit + (1 - HIT_RATE) * miss) / E)


def test_an_empty_backup_agrees_with_the_two_state_chain():
    scenario = dataclasses.replace(SSD, backup="none", verify=Latency.of({1: 8.0, 5: 10.0}))
    m = simulate(scenario, seed=4).metrics
    h, after_miss = HIT_RATE, CURVE[sum(FAN_OUT)]
    seconds = two_state_seconds_per_token(h, after_miss, (10.0, 10.0), (8.0, 8.0), E, 1.0)
    assert m.cache_hit_rate == pytest.approx(float(stationary_hit_rate(h, after_miss)), abs=0.015)
    assert m.time_per_output_token == pytest.approx(float(seconds), rel=0.02)
    assert m.mean_acceptance_length_on_miss == 1
    assert m.num_backups == m.num_cache_misses == m.num_rounds - m.num_drafts


def test_ssd_is_faster_than_sd_and_sd_than_ar():
    speeds = [
        simulate(dataclasses.replace(SSD, mode=mode, output_tokens=2000), seed=5).metrics.output_tokens_per_second
        for mode in ("ar", "sd", "ssd")
    ]
    assert speeds == sorted(speeds)


def test_a_hit_is_answered_at_once_and_the_next_cache_built_behind_the_verification():
    result = simulate(short(outcomes=always(K, 1)))
    # 11 tokens: the prefill's, and two rounds of five. B = 15 branches: a step takes 1.5 s, and a fifth feeds their last tokens.
    assert spans(result, "target", "prefill") == [(0, 20)]
    assert spans(result, "target", "verify") == [(20, 30), (30, 40)]
    assert spans(result, "draft", "prefill") == [(0, 3)]
    assert spans(result, "draft", "build") == [(3, 10.5), (20, 27.5), (30, 37.5)]
    assert spans(result, "draft", "idle") == [(10.5, 20), (27.5, 30), (37.5, 40)]
    assert spans(result, "draft", "answer") == spans(result, "target", "wait") == []
    assert result.timeline.overlap() == pytest.approx(15 / 25.5)
    assert [(s.activity, s.round) for s in result.timeline.spans if s.device == "target"] == [("prefill", 0), ("verify", 1), ("verify", 2)]
    assert [s.round for s in result.timeline.spans if s.activity == "build"] == [0, 1, 2]


def test_a_miss_is_answered_by_k_steps_of_one_branch():
    result = simulate(short(outcomes=IID(1.0, curve=(0.0,))))
    assert spans(result, "draft", "answer") == [(20, 24), (34, 38)]
    assert spans(result, "target", "wait") == [(20, 24), (34, 38)]
    assert spans(result, "target", "verify") == [(24, 34), (38, 48)]
    assert all(r.hit is False and r.backup for r in result.rounds)


def test_a_miss_without_a_backup_is_answered_at_once_with_nothing():
    result = simulate(short(outcomes=always(0, 99), backup="none"))
    assert spans(result, "draft", "answer") == []
    assert [(r.drafted, r.committed) for r in result.rounds] == [(0, 1)] * 10


def test_the_prompt_gives_the_whole_budget_to_its_only_position():
    ranks = Replay(((0, sum(FAN_OUT)),), lookahead=0)
    assert simulate(short(outcomes=TwoState(always(K, 1), ranks), fan_out_hit=(1,) * (K + 1))).rounds[0].hit
    beyond = Replay(((0, sum(FAN_OUT) + 1),), lookahead=0)
    assert not simulate(short(outcomes=TwoState(always(K, 1), beyond), backup="none")).rounds[0].hit


def test_the_fan_out_of_a_round_is_chosen_by_whether_its_draft_was_a_hit():
    lists = {"fan_out_hit": (0, 0, 0, 0, 1), "fan_out_miss": (0, 0, 0, 0, 3)}
    # The round after the prompt hits (full acceptance of nothing has rank 1). Rank 3 is cached after a miss and not after a hit.
    hits = [r.hit for r in simulate(short(outcomes=always(K, 3), **lists)).rounds]
    assert hits == [True, False]
    assert [r.hit for r in simulate(short(outcomes=always(K, 3), output_tokens=21, **lists)).rounds] == [
        True,
        False,
    ] * 2


def test_an_outcome_before_the_first_token_of_its_branch_is_a_miss():
    # The outcome comes during the catch-up step (12 s), when no branch has a token.
    result = simulate(short(outcomes=always(K, 1), draft_step=Latency.constant(12.0)))
    assert [r.hit for r in result.rounds] == [True, False]
    assert result.rounds[1].wait_seconds == pytest.approx(2 + 4 * 12)


def test_interruption_between_layers_gives_up_the_step_under_way():
    slow = short(outcomes=always(K, 1), draft_step=Latency.constant(4.0), target_prefill_seconds=30.0)
    # Verification 30-40: two tokens at 38, the third step under way until 42.
    by_step = simulate(slow)
    assert spans(by_step, "draft", "build")[1] == (30, 42)
    assert by_step.rounds[1].wait_seconds == 2 + 4
    by_layer = simulate(dataclasses.replace(slow, interrupt="layer", draft_layers=3))
    # Layers of 4/3 s: the outcome at 40 is noticed at 38 + 2 * 4/3, and one token more is missing.
    assert spans(by_layer, "draft", "build")[1] == (30, pytest.approx(38 + 8 / 3))
    assert by_layer.rounds[1].wait_seconds == pytest.approx(2 / 3 + 2 * 4)


def test_a_moot_step_is_given_up_and_one_that_grows_the_true_branch_is_finished():
    slow = short(draft_step=Latency.constant(4.0), target_prefill_seconds=30.0, interrupt="moot", draft_layers=4)
    hit, miss = (simulate(dataclasses.replace(slow, outcomes=always(K, rank))) for rank in (1, 100))
    assert spans(hit, "draft", "build")[1] == (30, 42)
    assert hit.rounds[1].wait_seconds == 2 + 4
    # The prompt's round hits whatever the rank is later; the round after it does not, and its step ends with a layer, at 40.
    assert miss.rounds[1].hit is False
    assert spans(miss, "draft", "build")[1][1] == pytest.approx(40)


@pytest.mark.parametrize("building", ["fixed", "anytime"])
def test_what_comes_while_the_host_chooses_helps_only_the_true_branch(building):
    # Verification 80-90, and nothing to catch up with: the host chooses until 92, and the first step of the true branch ends at 96.
    slow = short(
        draft_step=Latency.constant(4.0),
        target_prefill_seconds=80.0,
        interrupt="moot",
        draft_layers=4,
        draft_plan_seconds=12.0,
        building=building,
    )
    hit, miss = (simulate(dataclasses.replace(slow, outcomes=always(K, rank))) for rank in (1, 100))
    assert spans(hit, "draft", "build")[:2] == [(3, 3 + 12 + 5 * 4), (80, 96)]
    assert hit.rounds[1].hit
    assert not miss.rounds[1].hit
    # What builds at any time knows that nothing it could draft for will come true, and has nothing to choose.
    assert spans(miss, "draft", "build")[1] == ((80, 92) if building == "fixed" else (98, 118))


def test_what_is_fed_beforehand_is_not_fed_again_and_what_has_no_time_is_not_begun():
    # Steps of 1.5 s, catching up in 1.0; a prompt of 10 s leaves no time to feed the last tokens.
    always_hit = short(outcomes=always(K, 1), interrupt="moot", draft_layers=1000)
    fed, cut = (simulate(dataclasses.replace(always_hit, target_prefill_seconds=prefill)) for prefill in (20.0, 10.0))
    assert spans(fed, "draft", "build")[:2] == [(3, 10.5), (20, 27.5)]
    assert np.array(spans(cut, "draft", "build")[:2]) == pytest.approx(np.array([(3, 9), (10, 18.5)]))
    # After a miss there is no branch whose last token could have been fed.
    missed = simulate(short(outcomes=always(K, 100), interrupt="moot"))
    begin, end = spans(missed, "draft", "build")[2]
    assert end - begin == pytest.approx(1 + 4 * 1.5 + 1.5)


def test_requests_run_one_after_another():
    result = simulate(short(outcomes=always(K, 1), num_requests=3))
    assert spans(result, "target", "prefill") == [(0, 20), (40, 60), (80, 100)]
    assert [r.request for r in result.rounds] == ["request-0"] * 2 + ["request-1"] * 2 + ["request-2"] * 2
    m = result.metrics
    assert (m.num_output_tokens, m.total_seconds, m.time_to_first_token, m.time_per_output_token) == (33, 120, 20, 2)


def test_the_last_round_is_cropped_to_the_tokens_asked_for():
    result = simulate(dataclasses.replace(SSD, outcomes=always(K, 1), output_tokens=9))
    assert [(r.accepted, r.committed) for r in result.rounds] == [(4, 5), (4, 3)]
    assert simulate(dataclasses.replace(SSD, output_tokens=1)).rounds == ()


def test_the_same_seed_gives_the_same_run():
    noisy = dataclasses.replace(SSD, output_tokens=300, noise=0.2)
    first, second, other = (simulate(noisy, seed) for seed in (7, 7, 8))
    assert first.rounds == second.rounds
    assert first.metrics == second.metrics
    assert first.timeline.spans == second.timeline.spans
    assert first.rounds != other.rounds


def test_noise_leaves_the_mean_latency_alone_and_the_outcomes_untouched():
    ar = Scenario("ar", Latency.constant(2.0), output_tokens=20_001, noise=0.5)
    m = simulate(ar, seed=1).metrics
    assert m.verify_seconds == pytest.approx(40_000, rel=0.02)
    assert m.verify_seconds != 40_000
    quiet, noisy = (simulate(dataclasses.replace(SSD, mode="sd", output_tokens=500, noise=s), seed=3).rounds for s in (0.0, 0.2))
    assert [r.accepted for r in quiet] == [r.accepted for r in noisy]
    assert np.std([r.verify_seconds for r in noisy]) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "fast"}, "mode='fast'.*'ar', 'sd', 'ssd'"),
        ({"backup": "ngram"}, "backup='ngram'"),
        ({"interrupt": "never"}, "interrupt='never'"),
        ({"output_tokens": 0}, "output_tokens=0"),
        ({"num_requests": 0}, "num_requests=0"),
        ({"draft_layers": 0}, "draft_layers=0"),
        ({"link_seconds": -1.0}, r"link_seconds=-1\.0"),
        ({"noise": float("nan")}, "noise=nan"),
        ({"mode": "sd", "num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        ({"draft_step": None}, "draft_step=None with mode='ssd'.*mode='ar'"),
        ({"outcomes": None}, "outcomes=None"),
        ({"fan_out_hit": (1, 1)}, "fan_out_hit=.*2 entries.*needs 5"),
        ({"fan_out_miss": (1, 1, 1, 1, -1)}, r"fan_out_miss\[4\]=-1"),
        ({"fan_out_miss": (0,) * 5}, "caches nothing.*mode='sd'"),
    ],
)
def test_a_bad_scenario_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SSD, **changes)
