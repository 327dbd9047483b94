from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theory.acceptance import accepted_length_law
from theory.fanout import geometric, optimal, rounded, shortened, uniform
from theory.hits import PowerLaw, hit_probability

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
        (lambda: shortened((1, 2), 2), "drafted=2 needs 3 fan-outs"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
