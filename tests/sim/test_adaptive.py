"""Outcomes chosen by their chance, and a cache that is built for as long as there is time."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.choice import as_lists, ranked
from sim.files import scenario_of
from sim.latency import Latency
from sim.outcomes import IID, RANKS, Positional, Replay, Trace, TwoState
from sim.simulate import simulate
from tests.sim.test_batch import BY_HAND, CURVE, steady
from theory.acceptance import accepted_length_law
from theory.fanout import greedy
from theory.hits import hit_probability

K, ALPHA, B = 3, 0.7, 9
LAW, CURVES = accepted_length_law(ALPHA, K), [CURVE] * (K + 1)
LISTS = greedy(B, LAW, CURVES)
BY_LISTS = dataclasses.replace(steady(1, ALPHA, K, 1), fan_out_hit=LISTS, fan_out_miss=LISTS, interrupt="moot", draft_layers=1000)
BY_BUDGET = dataclasses.replace(BY_LISTS, fan_out_hit=(), fan_out_miss=(), budget=B)
ANYTIME = dataclasses.replace(BY_BUDGET, building="anytime")

models = st.one_of(
    st.builds(IID, st.floats(0, 1), st.just(CURVE), st.sampled_from([None, (0.0, 0.5, 0.6)])),
    st.builds(Positional, st.just((0.9, 0.5, 0.2)), st.just((CURVE, (0.0, 0.9), CURVE, (0.0, 0.1, 0.8)))),
    st.builds(TwoState, st.just(IID(0.9, CURVE)), st.just(IID(0.3, (0.0, 0.2, 0.3)))),
    st.builds(lambda text: Trace((tuple(text),)), st.lists(st.integers(1, 5), min_size=9, max_size=40)),
    st.builds(lambda rounds: Replay(tuple(rounds), K), st.lists(st.tuples(st.integers(0, K), st.integers(1, 40)), min_size=1)),
)


@given(models, st.integers(0, K), st.booleans())
def test_chances_are_those_of_the_outcomes_and_fall_with_the_rank(model, drafted, hit):
    chances = model.chances(drafted, hit)
    assert chances.shape == (drafted + 1, RANKS)
    assert (chances >= 0).all()
    assert chances.sum() <= 1 + 1e-9
    assert (np.diff(chances, axis=1) <= 1e-12).all()


KNOWN = IID(0.6, CURVE, (0.0, 0.5, 0.6)), TwoState(IID(0.9, CURVE), IID(0.3, CURVE)), Replay(((1, 2), (3, 1), (0, 1)), K)


@pytest.mark.parametrize("model", KNOWN)
@pytest.mark.parametrize("hit", [True, False])
def test_chances_are_how_often_outcomes_come(model, hit):
    draw = model.start(np.random.default_rng(1))
    found = np.zeros((K + 1, RANKS))
    for k, rank in (draw(K, hit) for _ in range(20_000)):
        if rank <= RANKS:
            found[k, rank - 1] += 1 / 20_000
    # A record's chances are made to fall with the rank, so only sums of both are the same.
    falling = not isinstance(model, Replay)
    assert found.sum(1) == pytest.approx(model.chances(K, hit).sum(1), abs=0.015)
    assert not falling or found == pytest.approx(model.chances(K, hit), abs=0.015)


@given(st.lists(st.tuples(models, st.integers(0, K), st.booleans()), min_size=1, max_size=4), st.integers(0, 60))
def test_a_budget_takes_the_likeliest_outcomes_of_all_rows(rows, budget):
    tables = [model.chances(drafted, hit) for model, drafted, hit in rows]
    lists = as_lists(ranked(tables)[:budget], [drafted for _, drafted, _ in rows])
    possible = sum(int((table > 0).sum()) for table in tables)
    assert sum(map(sum, lists)) == min(budget, possible)
    taken = [c for table, row in zip(tables, lists, strict=True) for k, F in enumerate(row) for c in table[k, :F]]
    left = [c for table, row in zip(tables, lists, strict=True) for k, F in enumerate(row) for c in table[k, F:]]
    assert not taken or not left or min(taken) >= max(left) - 1e-12


# A budget


@pytest.mark.parametrize("changes", [{}, {"batch_size": 3, "num_requests": 3}, {"backup": "none"}, {"draft_devices": 2}])
def test_where_rows_are_alike_a_budget_caches_what_the_best_lists_do(changes):
    lists, budget = (simulate(dataclasses.replace(s, output_tokens=300, **changes), 4) for s in (BY_LISTS, BY_BUDGET))
    assert budget.rounds == lists.rounds
    assert budget.timeline.spans == lists.timeline.spans


def test_a_budget_hits_as_often_as_theory_says():
    found = simulate(dataclasses.replace(BY_BUDGET, output_tokens=30_000), 1, record=False).metrics
    assert found.cache_hit_rate == pytest.approx(hit_probability(LAW, LISTS, CURVES), abs=0.012)


def test_rows_that_are_sure_leave_their_outcomes_to_rows_that_are_not():
    # After a hit the outcome is certain, after a miss one of many: with lists alike for both, a third of the branches is idle.
    outcomes = TwoState(IID(1.0, (0.0, 1.0)), IID(0.0, tuple(np.linspace(0, 1, 31))))
    uneven = dataclasses.replace(BY_BUDGET, outcomes=outcomes, batch_size=4, num_requests=4, output_tokens=4000, backup="jit")
    even = dataclasses.replace(uneven, budget=0, fan_out_hit=(0, 0, 0, B), fan_out_miss=(B, 0, 0, 0))
    budget, lists = (simulate(s, 2, record=False).metrics for s in (uneven, even))
    assert budget.cache_hit_rate > lists.cache_hit_rate


# Any time


def test_a_draft_that_is_fast_beyond_measure_builds_twice_the_plan_and_nobody_waits():
    scenario = dataclasses.replace(ANYTIME, draft_step=Latency.constant(1e-9), draft_alone=None, output_tokens=20_000)
    fast = simulate(scenario, 1, record=False)
    assert fast.metrics.cache_hit_rate == pytest.approx(hit_probability(LAW, greedy(2 * B, LAW, CURVES), CURVES), abs=0.015)
    assert fast.metrics.wait_seconds < 1e-6 * fast.metrics.total_seconds
    assert fast.metrics.num_draft_tokens == K * fast.metrics.num_rounds


def test_a_draft_that_is_slow_beyond_measure_leaves_ar_once_that_is_known():
    slow = {"draft_step": Latency.constant(50.0), "draft_alone": None, "draft_layers": 10**6}
    rounds = simulate(dataclasses.replace(ANYTIME, output_tokens=400, **slow), 1).rounds[20:]
    assert {(r.drafted, r.committed) for r in rounds} == {(0, 1)}
    assert max(r.wait_seconds for r in rounds) < 1e-3
    fixed = simulate(dataclasses.replace(BY_BUDGET, output_tokens=400, **slow), 1)
    assert min(r.wait_seconds for r in fixed.rounds) >= 150


@pytest.mark.parametrize("step", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_slow_draft_that_sends_short_drafts_is_not_slower_than_one_that_sends_late_ones(step, batch):
    pace = {"draft_step": Latency.of({1: step, 20: 2 * step}), "draft_alone": None, "batch_size": batch, "num_requests": batch}
    fixed, anytime = (
        simulate(dataclasses.replace(s, output_tokens=1500, **pace), 1, record=False).metrics.output_tokens_per_second
        for s in (BY_BUDGET, ANYTIME)
    )
    assert anytime > 0.98 * fixed


def test_the_likeliest_outcomes_are_drafted_for_first():
    # Twelve seconds a verification: time for the step that catches up, and for one narrow wave, but not for all that is planned.
    pace = {"draft_step": Latency.of({1: 2.0, 2: 2.2, 18: 6.0}), "verify": Latency.constant(12.0)}
    tight = dataclasses.replace(ANYTIME, output_tokens=1500, **pace)
    of = {s.building: simulate(s, 3) for s in (tight, dataclasses.replace(tight, building="fixed"))}
    assert of["anytime"].metrics.output_tokens_per_second > of["fixed"].metrics.output_tokens_per_second
    assert of["anytime"].metrics.cache_hit_rate < of["fixed"].metrics.cache_hit_rate


# What is asked


def test_a_file_may_ask_for_both():
    document = {"mode": "ssd", "verify": 0.02, "draft_step": 0.001, "outcomes": {"iid": {"alpha": 0.8, "curve": [0, 0.7]}}}
    asked = scenario_of({**document, "output_tokens": 5, "num_speculative_tokens": 2, "budget": 6, "building": "anytime"})
    assert (asked.budget, asked.building, asked.fan_out_hit) == (6, "anytime", ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": -1}, "budget=-1 must be a whole number"),
        ({"budget": 3}, r"fan_out_hit=\(1, 1, 1\) with budget=3, which chooses by itself: leave one of them out"),
        ({"building": "slowly"}, "building='slowly' is unknown: use one of .*anytime"),
        ({"mode": "sd", "building": "anytime"}, "building='anytime' with mode='sd': only mode 'ssd' has a cache"),
        ({"mode": "ar", "budget": 3}, "budget=3, .* with mode='ar': only mode 'ssd' has a cache"),
        ({"building": "anytime", "draft_devices": 2}, "building='anytime' with draft_devices=2: only one is built on so, use 'fixed'"),
    ],
)
def test_nonsense_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BY_HAND, **changes)
