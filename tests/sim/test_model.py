"""What the simulator models beyond rounds: contexts, residuals, bandwidth, several draft devices, memory, outages, one device for SD."""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.draft import fitting
from sim.latency import Latency, LatencyByContext
from sim.outcomes import IID, Replay
from sim.scenario import Scenario
from sim.simulate import simulate
from tests.sim.test_batch import BY_HAND, CURVE, off_by, steady, within
from tests.sim.test_batch import scenarios as loads
from theory.acceptance import accepted_length_law, expected_tokens
from theory.devices import build_seconds
from theory.hits import hit_probability
from theory.interruption import interrupted_round_seconds
from theory.speed import ssd_seconds_per_token

K = 2
ONE = dataclasses.replace(BY_HAND, num_requests=1, batch_size=1)
ALWAYS = Replay(((K, 1),), lookahead=K)


def spans(result, device, activity):
    return [(s.start, pytest.approx(s.end)) for s in result.timeline.spans if (s.device, s.activity) == (device, activity)]


# Contexts


def test_a_table_without_contexts_is_one_for_all_of_them():
    flat = LatencyByContext.of({context: {1: 10.0, 11: 20.0} for context in (0, 50, 900)})
    for load in ({}, {"prompt_tokens": 30, "prompt_chunk": 7, "target_prefill_seconds": 0.0, "draft_prefill_seconds": 0.0}):
        plain = dataclasses.replace(BY_HAND, outcomes=IID(0.6, CURVE), output_tokens=200, **load)
        found = [simulate(dataclasses.replace(plain, verify=table, draft_step=table)).rounds for table in (flat, BY_HAND.verify)]
        assert found[0] == found[1]


def test_a_forward_takes_longer_as_the_texts_that_it_reads_grow():
    table = LatencyByContext.of({0: {1: 10.0}, 100: {1: 20.0}})
    ar = Scenario("ar", table, output_tokens=4, prompt_tokens=(40,), prompt_chunk=40, num_requests=2, batch_size=2)
    # The prompts: 40 tokens read in 14 s; then beside the first row, 41 tokens, the second's: 81. Then 42 and 41 tokens, 43 and 42.
    assert [round(s.end - s.start, 6) for s in simulate(ar).timeline.spans] == [14, 18.1, 18.3, 18.5, 14.3]


def test_a_prompt_fed_whole_counts_where_contexts_do():
    table = LatencyByContext.of({0: {1: 10.0}, 100: {1: 20.0}})
    ar = Scenario("ar", table, output_tokens=3, prompt_tokens=50, target_prefill_seconds=7.0)
    assert [s.end - s.start for s in simulate(ar).timeline.spans] == pytest.approx([7, 15.1, 15.2])


# Residuals


def test_measured_residuals_are_drawn_as_often_as_they_were_measured():
    ratios = (0.5, 1.0, 1.0, 3.0)
    ar = Scenario("ar", Latency.constant(2.0), output_tokens=8001, target_residuals=ratios)
    seconds = [round(r.verify_seconds, 9) for r in simulate(ar).rounds]
    assert {s / 2 for s in seconds} == set(ratios)
    assert np.mean(seconds) == pytest.approx(2 * np.mean(ratios), rel=0.03)
    assert seconds.count(2.0) / 8000 == pytest.approx(0.5, abs=0.02)


def test_residuals_of_one_device_leave_the_other_alone():
    scenario = dataclasses.replace(ONE, draft_residuals=(0.25,), output_tokens=13)
    plain = dataclasses.replace(ONE, draft_step=Latency.of({1: 0.25, 11: 0.5}), draft_prefill_seconds=0.75, output_tokens=13)
    scaled, slow = (simulate(which).timeline.spans for which in (scenario, plain))
    assert [(s.device, s.activity, s.round) for s in scaled] == [(s.device, s.activity, s.round) for s in slow]
    assert np.array([(s.start, s.end) for s in scaled]) == pytest.approx(np.array([(s.start, s.end) for s in slow]))


# Bandwidth


def test_a_message_takes_its_bytes_over_the_bandwidth_after_the_latency():
    slow = dataclasses.replace(ONE, link_seconds=0.5, link_bandwidth=16.0, draft_token_bytes=8.0, outcomes=ALWAYS)
    # An outcome, 8 bytes, .5 s; two draft tokens, 16 bytes, 1 s; and twice the latency.
    assert {r.wait_seconds for r in simulate(slow).rounds} == {0.5 + 1.0 + 2 * 0.5}
    assert simulate(slow).shares["link"] == pytest.approx(2 * 2.5 / simulate(slow).metrics.total_seconds)


def test_a_bandwidth_without_end_changes_nothing():
    scenario = dataclasses.replace(BY_HAND, outcomes=IID(0.6, CURVE), output_tokens=100, link_seconds=0.25)
    assert simulate(dataclasses.replace(scenario, link_bandwidth=1e300)).rounds == simulate(scenario).rounds


# Several draft devices


def test_branches_are_dealt_out_and_each_device_grows_its_share():
    two = dataclasses.replace(ONE, draft_devices=2, fan_out_hit=(2, 2, 3), fan_out_miss=(2, 2, 3), outcomes=ALWAYS)
    result = simulate(two)
    # Seven branches: four and three, 1.3 and 1.2 s a step, two for tokens and one that feeds the last. What the first has drafted came
    # true: the other one has to catch up with it.
    assert spans(result, "draft", "build")[1] == (20, 20 + 3 * 1.3)
    assert spans(result, "draft-2", "build")[1] == (20, 20 + 1 + 3 * 1.2)


@pytest.mark.parametrize(("accepted", "whose"), [(0, "draft"), (1, "draft-2"), (2, "draft")])
def test_the_device_that_grew_the_true_branch_answers(accepted, whose):
    # A branch a position, dealt to the devices in turn; verified in 20 s, when each branch lacks its second token.
    slow = {"draft_step": Latency.constant(8.0), "verify": Latency.constant(20.0), "interrupt": "layer", "draft_layers": 1000}
    result = simulate(dataclasses.replace(ONE, draft_devices=2, outcomes=Replay(((accepted, 1),), K), output_tokens=7, **slow))
    assert {s.device for s in result.timeline.spans if s.activity == "answer"} == {whose}
    assert {r.hit for r in result.rounds} == {True}


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_devices_share_a_build_as_theory_says(devices):
    F, length = 3, 4
    step = Latency.of({1: 1.0, 15: 4.3})
    scenario = dataclasses.replace(
        steady(1, 0.8, length, F), draft_step=step, draft_alone=Latency.constant(1.0), draft_devices=devices, output_tokens=3000
    )
    branches = F * (length + 1)
    T_p = float(build_seconds(length, branches, 1.0, [0.0, *(step(n) for n in range(1, branches + 1))], devices))
    waits = [r.wait_seconds for r in simulate(scenario, 1).rounds if r.hit][1:]
    # The device with the most branches makes the target wait longest.
    hit, _ = interrupted_round_seconds(10.0, length, 1.0, step(-(-branches // devices)), 1.0, 0.0)
    assert 10 + max(waits) == pytest.approx(float(hit))
    assert (max(waits) == 0) == (T_p <= 10)


def test_more_devices_hit_as_often_and_wait_less():
    found = []
    for devices in (1, 2, 4, 8):
        scenario = dataclasses.replace(steady(4, 0.8, 4, 3), draft_step=Latency.of({1: 1.0, 60: 9.0}), draft_devices=devices)
        found.append(simulate(dataclasses.replace(scenario, interrupt="moot", draft_layers=1000), 2).metrics)
    speeds = [m.output_tokens_per_second for m in found]
    assert speeds == sorted(speeds)
    assert max(m.cache_hit_rate for m in found) - min(m.cache_hit_rate for m in found) < 0.03


def test_with_a_build_that_fits_any_number_of_devices_obeys_theorem_7():
    distances = []
    for devices in (1, 2, 3, 5):
        scenario = dataclasses.replace(steady(1, 0.75, 3, 2), draft_devices=devices, draft_alone=Latency.constant(1.0))
        h = hit_probability(accepted_length_law(0.75, 3), scenario.fan_out_hit, [CURVE] * 4)
        E = expected_tokens(0.75, 3)
        distances.append(off_by(scenario, ssd_seconds_per_token(10.0, 4.0, 3.0, h, E, E), devices))
    within(distances)


# Memory


def test_a_request_waits_until_there_is_room_for_it():
    # Prompt and output: 20 key-values each; 50 are room for two.
    ar = Scenario("ar", Latency.constant(1.0), output_tokens=8, prompt_tokens=12, num_requests=4, batch_size=4, target_slots=50)
    result = simulate(ar)
    ends = sorted(served.token_seconds[-1] for served in result.requests)
    assert [served.arrival for served in sorted(result.requests, key=lambda s: s.request)] == [0, 0, *ends[:2]]
    assert max(s.request.count("request") for s in result.timeline.spans) == 2


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 8), st.integers(0, 9))
def test_no_more_requests_run_at_a_time_than_there_is_room_for(room, seed):
    scenario = dataclasses.replace(
        BY_HAND, num_requests=12, batch_size=6, target_slots=room * (7 + K), outcomes=IID(0.6, CURVE), request_rate=0.05
    )
    result = simulate(scenario, seed)
    for start in {r.start for r in result.rounds}:
        assert len([r for r in result.rounds if r.start == start]) <= room


def test_the_speculation_cache_is_cut_to_what_texts_leave():
    # 21 tokens of text, then 24, and 2 draft tokens a branch: 5 branches fit, then 3.
    tight = dataclasses.replace(ONE, prompt_tokens=20, fan_out_hit=(2, 2, 2), fan_out_miss=(2, 2, 2), draft_slots=31, outcomes=ALWAYS)
    sizes = [round((s.end - s.start) / 3 * 10 - 9) for s in simulate(tight).timeline.spans if s.activity == "build" and s.round]
    assert sizes == [5, 3]


@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(0, 60))
def test_a_cut_cache_keeps_the_best_candidates_and_the_budget(rows, budget):
    fan_outs = {f"request-{i}": tuple(row) for i, row in enumerate(rows)}
    kept = fitting(fan_outs, budget)
    all_of_them = [F for row in fan_outs.values() for F in row]
    after = [F for row in kept.values() for F in row]
    assert list(kept) == list(fan_outs)
    assert sum(after) == min(budget, sum(all_of_them))
    assert all(new <= old for new, old in zip(after, all_of_them, strict=True))
    cut = [new for new, old in zip(after, all_of_them, strict=True) if new < old]
    assert not cut or max(after) <= min(cut) + 1


# Outages


def test_a_draft_that_dies_is_lost_and_taken_back_between_two_rounds():
    once = dataclasses.replace(ONE, output_tokens=19, outcomes=ALWAYS, draft_outages=((35.0, 60.0),), lost_after_seconds=2.0)
    result = simulate(once)
    # Rounds of 12 s from 20: the second, from 32, has its draft; at 44 the target asks in vain for 2 s and goes on alone, 10 s a token.
    rounds = [(r.start, r.drafted, r.hit, r.wait_seconds) for r in result.rounds]
    assert rounds[:3] == [(20, 2, True, 0), (32, 2, True, 0), (44, 0, None, 2)]
    assert [r[:2] for r in rounds[3:5]] == [(56, 0), (66, 2)]
    # At 66 the draft is back: it feeds the text, 3 s, and drafts what it lacks.
    assert rounds[4] == (66, 2, False, 3 + 2 * 1.0)
    assert rounds[5][2] is True
    assert spans(result, "draft", "lost") == [(35, 60)]


def test_a_draft_that_never_comes_back_leaves_ar():
    gone = dataclasses.replace(ONE, output_tokens=300, draft_outages=((0.0, math.inf),))
    ar = dataclasses.replace(gone, mode="ar")
    assert simulate(gone).requests == simulate(ar).requests
    assert simulate(gone).busy_share("draft") == 0


def test_in_the_long_run_speed_lies_between_ar_and_ssd_by_availability():
    base = dataclasses.replace(ONE, outcomes=IID(0.8, CURVE), output_tokens=3000, draft_prefill_seconds=0.0)
    ssd, ar = (simulate(dataclasses.replace(base, mode=mode)).metrics.output_tokens_per_second for mode in ("ssd", "ar"))
    away = []
    for seed in range(8):
        result = simulate(dataclasses.replace(base, draft_mtbf=1500.0, draft_repair_seconds=500.0), seed)
        away.append(result.spent["draft"]["lost"] / result.metrics.total_seconds)
        expected = (1 - away[-1]) * ssd + away[-1] * ar
        # Each failure costs the round that it strikes, and one is under way when the draft is back.
        assert 0.95 * expected < result.metrics.output_tokens_per_second < 1.02 * expected
    assert np.mean(away) == pytest.approx(0.25, abs=3 * np.std(away, ddof=1) / np.sqrt(8))


# One device


def test_on_one_device_the_models_take_turns_with_prompts_too():
    apart = dataclasses.replace(BY_HAND, mode="sd", num_requests=1, batch_size=1)
    assert simulate(apart).requests[0].ttft == 20
    together = simulate(dataclasses.replace(apart, one_device=True))
    assert together.requests[0].ttft == 23
    work = [s for s in together.timeline.spans if s.activity in ("prefill", "answer", "verify")]
    assert all(before.end <= after.start + 1e-9 for before, after in pairwise(sorted(work, key=lambda s: s.start)))


# Traces


def test_a_trace_is_played_as_it_is():
    ar = Scenario("ar", Latency.constant(1.0), trace=((0.0, 5, 2), (50.0, 7, 3), (50.0, 1, 1)), prompt_chunk=4)
    assert [(s.arrival, s.prompt_tokens, s.output_tokens) for s in simulate(ar).requests] == [(0, 5, 2), (50, 7, 3), (50, 1, 1)]


# Anything together

failures = st.one_of(
    st.just({}),
    st.builds(
        lambda m, r, w: {"draft_mtbf": m, "draft_repair_seconds": r, "lost_after_seconds": w}, *[st.floats(1, 90)] * 2, st.floats(0, 5)
    ),
    st.builds(lambda a, b: {"draft_outages": ((a, a + b), (200.0, math.inf))}, st.floats(0, 99), st.floats(0, 99)),
)


@st.composite
def anything(draw):
    scenario = draw(loads)
    changes = {**draw(failures), "noise": 0.0}
    if draw(st.booleans()):
        changes |= {"link_bandwidth": draw(st.floats(1, 100)), "draft_token_bytes": draw(st.floats(0, 50))}
    if draw(st.booleans()):
        changes |= {"target_residuals": (0.8, 1.0, 1.5), "draft_residuals": (1.0, 2.0)}
    if draw(st.booleans()):
        changes |= {"target_slots": draw(st.integers(26, 60)), "draft_slots": draw(st.integers(26, 60))}
    if draw(st.booleans()):
        changes |= {"verify": LatencyByContext.of({0: {1: 10.0, 11: 20.0}, 40: {1: 11.0, 11: 26.0}})}
    if scenario.mode == "ssd":
        changes |= {"draft_devices": draw(st.integers(1, 3))}
        if draw(st.booleans()):
            changes |= {"fan_out_hit": (), "fan_out_miss": (), "budget": draw(st.integers(1, 6))}
        if draw(st.booleans()):
            changes |= {"building": "anytime", "draft_devices": 1}
    if scenario.mode == "sd":
        changes |= {"one_device": draw(st.booleans())}
    return dataclasses.replace(scenario, **changes)


@settings(max_examples=100, deadline=None)
@given(anything(), st.integers(0, 99))
def test_whatever_happens_nothing_is_lost_and_every_second_of_every_device_is_accounted_for(scenario, seed):
    result = simulate(scenario, seed)
    total = result.metrics.total_seconds
    assert sorted(served.request for served in result.requests) == [f"request-{i}" for i in range(9)]
    for served in result.requests:
        assert 1 + sum(r.committed for r in result.rounds if r.request == served.request) == served.output_tokens
    assert set(result.spent) == {
        "target",
        *({"draft"} if scenario.mode != "ar" else ()),
        *(f"draft-{i}" for i in range(2, scenario.draft_devices + 1)),
    }
    for device, spent in result.spent.items():
        assert sum(spent.values()) == pytest.approx(total, abs=1e-6)
        its = [s for s in result.timeline.spans if s.device == device]
        assert all(before.end <= after.start + 1e-9 for before, after in pairwise(its))
        busy = result.timeline.busy(device)
        assert result.busy_share(device) * total == pytest.approx(busy, abs=1e-6)
        rest = result.timeline.busy(device, ["wait", "idle", "lost"]) + spent.get("overhead", 0.0)
        assert busy + rest == pytest.approx(total, abs=1e-6)
    assert sum(result.shares.values()) == pytest.approx(1 if total else 0)
    assert all(share >= -1e-9 for share in result.shares.values())
    again = simulate(scenario, seed, record=False)
    assert (again.metrics, again.requests, again.spent) == (result.metrics, result.requests, result.spent)


def test_what_was_not_kept_is_refused_with_the_remedy():
    result = simulate(BY_HAND, record=False)
    for name in ("rounds", "timeline"):
        with pytest.raises(ValueError, match="record=False kept neither rounds nor a timeline: simulate with record=True"):
            getattr(result, name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_devices": 0}, "draft_devices=0 must be a whole number of at least 1"),
        ({"mode": "sd", "draft_devices": 2}, "draft_devices=2 with mode='sd': only mode 'ssd' has branches"),
        ({"one_device": True}, "one_device=True with mode='ssd': only in mode 'sd'"),
        ({"link_bandwidth": 0.0}, r"link_bandwidth=0\.0 must be greater than 0"),
        ({"noise": 0.1, "target_residuals": (1.0,)}, r"noise=0\.1 and target_residuals are two spreads: leave one"),
        ({"draft_residuals": (-1.0,)}, r"draft_residuals=\(-1\.0,\)"),
        ({"draft_outages": ((5.0, 4.0),)}, "draft_outages=.* must be pairs of death and return"),
        ({"draft_outages": ((1.0, 4.0),), "draft_mtbf": 3.0}, r"draft_mtbf=3\.0 and draft_outages are two accounts"),
        ({"target_slots": 8}, "target_slots=8 has no room for a request of 9 tokens, drafts and all: raise it to 9 or more"),
        ({"draft_slots": 8}, "draft_slots=8 has no room"),
        ({"trace": ((0.0, 1, 1),)}, "output_tokens=7 stands in the trace: leave it out, or the trace"),
        ({"trace": ((1.0, 1, 1), (0.0, 1, 1)), "output_tokens": 0}, "trace: its arrivals must not fall: sort it"),
        ({"trace": ((0.0, 1, 0),), "output_tokens": 0, "num_requests": 1}, "trace, output_tokens=0"),
        ({"trace": ((0.0, 1, 1),), "output_tokens": 0, "num_requests": 3}, "num_requests=3 with a trace of 1 requests: leave it out"),
    ],
)
def test_nonsense_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BY_HAND, **changes)


def test_unsorted_contexts_are_refused():
    with pytest.raises(ValueError, match=r"contexts=.*come with 1 tables"):
        LatencyByContext((1.0, 2.0), (Latency.constant(1.0),))
    with pytest.raises(ValueError, match="must rise"):
        LatencyByContext((2.0, 1.0), (Latency.constant(1.0),) * 2)
