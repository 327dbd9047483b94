from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from theory.acceptance import accepted_length_law
from theory.fanout import best_hit_rates, geometric, greedy, lagrange, optimal, optimal_two_lists, rounded, shortened, uniform
from theory.hits import PowerLaw, hit_probability, stationary_hit_rate

budgets = st.integers(0, 40)
lengths = st.integers(0, 7)
rates = st.floats(0, 1)
exponents = st.floats(0.05, 2)
rank_laws = st.lists(st.floats(0.0, 1), min_size=1, max_size=6)


def as_curve(weights: list[float]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(weights)]) / max(sum(weights), 1)


@given(budgets, lengths)
def test_uniform_spends_the_budget_and_favours_the_end(budget, K):
    fan_out = uniform(budget, K)
    assert sum(fan_out) == budget
    assert len(fan_out) == K + 1
    assert fan_out == tuple(sorted(fan_out))
    assert fan_out[-1] - fan_out[0] <= 1


@given(st.floats(0, 100), lengths, rates, exponents)
def test_geometric_and_its_rounding_spend_the_budget(budget, K, alpha, r):
    real = geometric(budget, K, alpha, r)
    assert real.sum() == pytest.approx(budget)
    whole = rounded(real)
    assert sum(whole) == round(float(real.sum()))
    assert np.all(np.abs(whole - real) < 1 + 1e-9)


@given(st.floats(0.1, 0.95), exponents)
def test_geometric_has_the_shape_of_theorem_12(a, r):
    F = geometric(50, 5, a, r)
    np.testing.assert_allclose(F[1:5] / F[:4], a ** (1 / (1 + r)))
    np.testing.assert_allclose(F[5] / F[0], a ** (5 / (1 + r)) * (1 - a) ** (-1 / (1 + r)))


def test_geometric_is_the_optimum_of_real_valued_fan_outs():
    law, power = accepted_length_law(0.8, 7), PowerLaw(r=0.6)
    best = geometric(64, 7, 0.8, 0.6)
    hits = law @ power.hit(best)
    for i, j in product(range(8), repeat=2):
        moved = best.copy()
        moved[i], moved[j] = moved[i] + 0.01, moved[j] - 0.01
        assert law @ power.hit(moved) <= hits + 1e-12


def test_the_papers_example():
    law, power = accepted_length_law(0.8, 7), PowerLaw(r=0.6)
    curves = [power.curve(64)] * 8
    assert law @ power.hit(geometric(64, 7, 0.8, 0.6)) == pytest.approx(0.724, abs=5e-4)
    assert hit_probability(law, uniform(64, 7), curves) == pytest.approx(0.713, abs=5e-4)
    best = optimal(64, law, curves)
    assert best == (11, 10, 8, 7, 6, 6, 5, 11)
    assert hit_probability(law, best, curves) == pytest.approx(0.724, abs=5e-4)


@given(st.integers(0, 7), st.lists(rates, min_size=2, max_size=2), st.lists(rank_laws, min_size=3, max_size=3))
def test_optimal_equals_the_best_of_all_allocations(budget, alphas, weights):
    law, curves = accepted_length_law(alphas, 2), [as_curve(w) for w in weights]
    best = max(hit_probability(law, fan_out, curves) for fan_out in product(range(budget + 1), repeat=3) if sum(fan_out) <= budget)
    fan_out = optimal(budget, law, curves)
    assert sum(fan_out) <= budget
    assert hit_probability(law, fan_out, curves) == pytest.approx(best, abs=1e-12)


@given(budgets, lengths, rates, exponents, st.floats(0.1, 1), st.floats(0, 0.2))
def test_optimal_is_no_worse_than_uniform_or_any_rounding_of_geometric(budget, K, alpha, r, c, floor):
    law, curves = accepted_length_law(alpha, K), [PowerLaw(r, c, floor).curve(budget)] * (K + 1)
    best = hit_probability(law, optimal(budget, law, curves), curves)
    whole = rounded(geometric(budget, K, alpha, r))
    rotated = whole[1:] + whole[:1]
    assert all(best >= hit_probability(law, other, curves) - 1e-12 for other in (uniform(budget, K), whole, rotated))


def test_optimal_leaves_out_branches_that_gain_nothing():
    assert optimal(10, [0.5, 0.5], [[0, 0.5, 0.5], [0, 1.0]]) == (1, 1)
    assert optimal(10, [0.0, 1.0], [[0, 1.0], [0, 1.0]]) == (0, 1)


def test_optimal_sees_past_a_candidate_that_gains_nothing():
    assert optimal(2, [0.5, 0.5], [[0, 0.0, 0.9], [0, 0.1, 0.2]]) == (2, 0)


@given(st.floats(20, 200), lengths, st.floats(0.3, 0.8), exponents, st.floats(0.1, 1))
def test_lagrange_agrees_with_theorem_12_where_no_bound_is_reached(budget, K, alpha, r, c):
    law, stated = accepted_length_law(alpha, K), geometric(budget, K, alpha, r)
    least = min(1.0, stated.min() / 2)
    fan_out, multiplier = lagrange(budget, law, r, c, least)
    np.testing.assert_allclose(fan_out, stated, rtol=1e-9)
    assert multiplier == pytest.approx(r * c * ((law ** (1 / (1 + r))).sum() / budget) ** (1 + r), rel=1e-9)


def test_lagrange_is_the_optimum_that_a_general_solver_finds():
    rng, budget, least = np.random.default_rng(0), 12.0, np.full(5, 1.0)
    for _ in range(10):
        law, r, c = rng.dirichlet(np.ones(5)), rng.uniform(0.2, 1.5, 5), rng.uniform(0.1, 1, 5)
        fan_out, _ = lagrange(budget, law, r, c, least)
        found = minimize(
            lambda F, law=law, r=r, c=c: float(law @ (c * F**-r)),
            np.full(5, budget / 5),
            bounds=[(1.0, None)] * 5,
            constraints={"type": "eq", "fun": lambda F: F.sum() - budget},
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert law @ (c * fan_out**-r) == pytest.approx(found.fun, abs=1e-9)
        assert law @ (c * fan_out**-r) <= found.fun + 1e-12
        np.testing.assert_allclose(fan_out, found.x, atol=1e-3)


@given(st.floats(8, 60), st.lists(st.floats(0.01, 1), min_size=6, max_size=6), exponents)
def test_lagrange_spends_the_budget_keeps_the_bounds_and_satisfies_its_conditions(budget, weights, r):
    law = np.array(weights) / sum(weights)
    fan_out, multiplier = lagrange(budget, law, r)
    slope = law * r * fan_out ** -(1 + r)
    assert fan_out.sum() == pytest.approx(budget)
    assert np.all(fan_out >= 1)
    np.testing.assert_allclose(slope[fan_out > 1 + 1e-6], multiplier, rtol=1e-5)
    assert np.all(slope <= multiplier * (1 + 1e-6))


def test_the_multiplier_is_what_one_more_branch_adds():
    law, r, c = accepted_length_law(0.8, 5), 0.5, 0.3
    hits = [1 - law @ (c * lagrange(B, law, r, c).fan_out ** -r) for B in (40 - 1e-3, 40 + 1e-3)]
    assert lagrange(40, law, r, c).multiplier == pytest.approx((hits[1] - hits[0]) / 2e-3, rel=1e-4)
    curves = [PowerLaw(r, c).curve(100)] * 6
    assert np.diff(best_hit_rates(60, law, curves))[40] == pytest.approx(lagrange(40, law, r, c).multiplier, rel=0.1)


def test_lagrange_of_a_budget_of_ones_is_ones():
    assert lagrange(4, [0.5, 0.2, 0.2, 0.1], 0.5).fan_out.tolist() == [1, 1, 1, 1]
    assert lagrange(7, [1.0], 0.5).fan_out.tolist() == pytest.approx([7])


@given(budgets, st.lists(rates, min_size=3, max_size=3), st.lists(rank_laws, min_size=4, max_size=4))
def test_greedy_is_as_good_as_the_optimum_on_concave_curves(budget, alphas, weights):
    law, curves = accepted_length_law(alphas, 3), [as_curve(sorted(w, reverse=True)) for w in weights]
    fan_out = greedy(budget, law, curves)
    assert sum(fan_out) <= budget
    best = hit_probability(law, optimal(budget, law, curves), curves)
    assert hit_probability(law, fan_out, curves) == pytest.approx(best, abs=1e-12)


def test_greedy_leaves_out_branches_that_gain_nothing():
    assert greedy(10, [0.0, 1.0], [[0, 1.0], [0, 0.5, 0.5]]) == (0, 1)


@given(st.integers(0, 30), st.lists(rates, min_size=2, max_size=2), st.lists(rank_laws, min_size=3, max_size=3))
def test_best_hit_rates_are_those_of_the_optimal_fan_outs_at_every_budget(budget, alphas, weights):
    law, curves = accepted_length_law(alphas, 2), [as_curve(w) for w in weights]
    each = [hit_probability(law, optimal(b, law, curves), curves) for b in range(budget + 1)]
    np.testing.assert_allclose(best_hit_rates(budget, law, curves), each, atol=1e-12)
    assert np.all(np.diff(each) >= -1e-12)


@given(st.integers(0, 5), st.lists(rates, min_size=3, max_size=3), st.lists(rank_laws, min_size=5, max_size=5))
def test_two_lists_under_one_budget_equal_the_best_of_all_pairs(budget, alphas, weights):
    hit_law, miss_law = accepted_length_law(alphas[:2], 2), accepted_length_law(alphas[2:], 1)
    # Never a certain hit, so that every pair of lists has one long-run rate.
    curves = [0.9 * as_curve(w) for w in weights]
    best = max(
        float(stationary_hit_rate(hit_probability(hit_law, f[:3], curves[:3]), hit_probability(miss_law, f[3:], curves[3:])))
        for f in product(range(budget + 1), repeat=5)
        if sum(f) <= budget
    )
    after_hit, after_miss, hit_rate = optimal_two_lists(budget, hit_law, curves[:3], miss_law, curves[3:])
    assert sum(after_hit) + sum(after_miss) <= budget
    assert hit_rate == pytest.approx(best, abs=1e-12)
    h, m = hit_probability(hit_law, after_hit, curves[:3]), hit_probability(miss_law, after_miss, curves[3:])
    assert hit_rate == pytest.approx(float(stationary_hit_rate(h, m)), abs=1e-12)


def test_two_lists_that_could_never_miss_or_never_hit():
    assert optimal_two_lists(2, [1.0], [[0, 1.0]], [1.0], [[0, 0.5]]) == ((1,), (1,), 1.0)
    assert optimal_two_lists(0, [1.0], [[0, 1.0]], [1.0], [[0, 0.5]]) == ((0,), (0,), 0.0)


def test_positions_that_were_not_drafted_give_their_branches_to_the_last():
    assert shortened((4, 3, 2, 1), 3) == (4, 3, 2, 1)
    assert shortened((4, 3, 2, 1), 1) == (4, 6)
    assert shortened((4, 3, 2, 1), 0) == (10,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: uniform(-1, 3), "budget=-1"),
        (lambda: uniform(2.5, 3), r"budget=2\.5"),
        (lambda: geometric(8, 3, 0.8, 0), "r=0"),
        (lambda: rounded([1.0, -2.0]), "fan_out="),
        (lambda: optimal(4, [0.5, 0.5], [[0, 1]]), "2 entries and there are 1 curves"),
        (lambda: optimal(4, [1.0], [[0, 0.6, 0.5]]), r"curves\[0\].*never falling"),
        (lambda: lagrange(3, [0.25] * 4, 0.5), "budget=3 is less than .* 4"),
        (lambda: lagrange(8, [0.25] * 4, 0.0), r"r=0\.0"),
        (lambda: greedy(2, [0.5, 0.5], [[0, 0.0, 0.9], [0, 0.1, 0.2]]), r"curves\[0\].*use `optimal`"),
        (lambda: shortened((1, 2), 2), "drafted=2 needs 3 fan-outs"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
