from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theory.acceptance import accepted_length_law
from theory.hits import PowerLaw, fit_power_law, hit_probability, stationary_hit_rate

FAN_OUTS = [2, 4, 8, 16, 32, 64, 128]
MEASURED = {  # miss rates read from the paper's figure -> (c, r)
    (0.231, 0.134, 0.080, 0.053, 0.039, 0.029, 0.025): (0.28, 0.54),
    (0.457, 0.309, 0.202, 0.140, 0.104, 0.080, 0.067): (0.57, 0.47),
    (0.319, 0.210, 0.139, 0.092, 0.065, 0.046, 0.035): (0.44, 0.54),
    (0.551, 0.399, 0.284, 0.195, 0.134, 0.095, 0.074): (0.78, 0.50),
    (0.406, 0.304, 0.223, 0.170, 0.125, 0.094, 0.073): (0.54, 0.42),
    (0.642, 0.515, 0.402, 0.309, 0.229, 0.179, 0.142): (0.85, 0.37),
}


def test_power_law_with_unit_prefactor_never_hits_with_one_candidate():
    np.testing.assert_allclose(PowerLaw(r=0.5).curve(4), [0, 0, 1 - 2**-0.5, 1 - 3**-0.5, 0.5])


def test_prefactor_and_floor_shape_the_miss_rate():
    law = PowerLaw(r=0.5, c=0.3, floor=0.02)
    np.testing.assert_allclose(1 - law.hit([0, 1, 4, 1e12]), [1, 0.32, 0.17, 0.02], atol=1e-6)


def test_power_law_never_leaves_the_probabilities():
    assert PowerLaw(r=0.5, c=3.0).hit(0.5) == 0
    np.testing.assert_allclose(PowerLaw(r=0.5, c=0.0, floor=0.25).hit([0, 1]), [0, 0.75])


@pytest.mark.parametrize(("miss", "expected"), MEASURED.items())
def test_fit_finds_the_constants_of_the_measured_curves(miss, expected):
    law = fit_power_law(FAN_OUTS, miss)
    assert (round(law.c, 2), round(law.r, 2)) == expected


@given(st.floats(0.05, 2), st.floats(0.05, 1))
def test_fit_recovers_an_exact_law(r, c):
    law = fit_power_law(FAN_OUTS, c * np.array(FAN_OUTS, float) ** -r)
    assert (law.r, law.c) == pytest.approx((r, c))


@given(st.floats(0, 1), st.lists(st.integers(0, 5), min_size=4, max_size=4), st.lists(st.floats(0.01, 1), min_size=5, max_size=5))
def test_hit_probability_equals_the_enumeration_of_outcomes(alpha, fan_out, weights):
    rank_law = np.array(weights) / sum(weights)
    length_law = accepted_length_law(alpha, 3)
    curve = np.concatenate([[0], np.cumsum(rank_law)])
    brute = sum(length_law[k] * rank_law[rank - 1] for k, rank in product(range(4), range(1, 6)) if rank <= fan_out[k])
    assert hit_probability(length_law, fan_out, [curve] * 4) == pytest.approx(brute)


def test_a_curve_is_flat_past_its_end():
    assert hit_probability([1.0], [9], [[0, 0.5, 0.75]]) == 0.75


@given(st.floats(0, 1), st.floats(0, 1))
def test_stationary_rate_is_a_fixed_point_of_the_chain(h, m):
    if h == 1 and m == 0:
        return
    pi = stationary_hit_rate(h, m)
    assert pi == pytest.approx(pi * h + (1 - pi) * m)
    assert min(h, m) - 1e-12 <= pi <= max(h, m) + 1e-12 or h == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PowerLaw(r=0.0), r"r=0\.0"),
        (lambda: PowerLaw(r=1.0, floor=1.5), r"floor=1\.5"),
        (lambda: fit_power_law([1, 2], [0.1, 0.2]), "does not fall"),
        (lambda: fit_power_law([2, 2], [0.1, 0.2]), "two different"),
        (lambda: hit_probability([0.5, 0.5], [1], [[0, 1], [0, 1]]), "2 lengths, 1 fan-outs"),
        (lambda: hit_probability([1.0], [1], [[0, 0.5, 0.4]]), r"curves\[0\].*cumulative"),
        (lambda: hit_probability([1.0], [1], [[0.1, 0.5]]), r"curves\[0\].*0 first"),
        (lambda: hit_probability([1.0], [1], [[0, 1.5]]), r"curves\[0\].*at most 1"),
        (lambda: hit_probability([1.0], [-1], [[0, 0.5]]), r"fan_out\[0\]=-1"),
        (lambda: stationary_hit_rate(1.0, 0.0), "no single long-run rate"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
