from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theory.acceptance import accepted_length_law
from theory.hits import PowerLaw, bonus_curves, hit_probability, stationary_hit_rate


def test_power_law_with_unit_prefactor_never_hits_with_one_candidate():
    np.testing.assert_allclose(PowerLaw(r=0.5).curve(4), [0, 0, 1 - 2**-0.5, 1 - 3**-0.5, 0.5])


def test_prefactor_and_floor_shape_the_miss_rate():
    law = PowerLaw(r=0.5, c=0.3, floor=0.02)
    np.testing.assert_allclose(1 - law.hit([0, 1, 4, 1e12]), [1, 0.32, 0.17, 0.02], atol=1e-6)


def test_power_law_never_leaves_the_probabilities():
    assert PowerLaw(r=0.5, c=3.0).hit(0.5) == 0
    np.testing.assert_allclose(PowerLaw(r=0.5, c=0.0, floor=0.25).hit([0, 1]), [0, 0.75])


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


def enumerated(p, q, scores, largest):
    """The three answers of bonus_curves by going through every sent token and every bonus."""
    order = sorted(range(len(p)), key=lambda t: -scores[t])
    excess = np.maximum(p - q, 0)
    acceptance, rejected, accepted = 0.0, np.zeros(largest + 1), np.zeros(largest + 1)
    for x in range(len(p)):
        if q[x] == 0:
            continue
        accept = min(1.0, p[x] / q[x])
        acceptance += q[x] * accept
        without = [t for t in order if t != x]
        for F, bonus in product(range(largest + 1), range(len(p))):
            if accept < 1 and bonus in without[:F]:
                rejected[F] += q[x] * (1 - accept) * excess[bonus] / excess.sum()
    for F in range(largest + 1):
        accepted[F] = p[order[:F]].sum()
    return acceptance, rejected, accepted


@given(
    st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(0, 8), st.sampled_from(["soft", "one-hot p", "one-hot q", "one-hot", "same"])
)
def test_bonus_curves_equal_the_enumeration_of_sent_tokens_and_bonuses(seed, vocabulary, largest, kind):
    rng = np.random.default_rng(seed)
    p, q, scores = rng.dirichlet(np.ones(vocabulary)), rng.dirichlet(np.ones(vocabulary)), rng.normal(size=vocabulary)
    if kind in ("one-hot p", "one-hot"):
        p = np.eye(vocabulary)[rng.integers(vocabulary)]
    if kind in ("one-hot q", "one-hot"):
        q = np.eye(vocabulary)[rng.integers(vocabulary)]
    q = p if kind == "same" else q
    for ours, brute in zip(bonus_curves(p, q, scores, largest), enumerated(p, q, scores, largest), strict=True):
        np.testing.assert_allclose(ours, brute, atol=1e-12)


def test_bonus_curves_of_many_positions_in_float32_rise_to_all_that_is_rejected():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.full(500, 0.1), (2, 3, 4)).astype(np.float32)
    acceptance, rejected, accepted = bonus_curves(p, q, np.log(q + 1e-30), 500)
    assert (acceptance.shape, rejected.shape, accepted.shape) == ((3, 4), (3, 4, 501), (3, 4, 501))
    assert np.all(np.diff(rejected, axis=-1) >= -1e-12)
    assert np.all(np.diff(accepted, axis=-1) >= 0)
    np.testing.assert_allclose(rejected[..., -1], 1 - acceptance, atol=1e-12)
    np.testing.assert_allclose(accepted[..., -1], 1, atol=1e-12)
    np.testing.assert_allclose(bonus_curves(p[1, 2], q[1, 2], np.log(q[1, 2] + 1e-30), 7).rejected_hit, rejected[1, 2, :8])


def test_rounding_in_float32_rejects_nothing():
    p = np.random.default_rng(1).dirichlet(np.ones(1000)).astype(np.float32)
    assert bonus_curves(p, p, p, 3).acceptance == 1
    assert bonus_curves(p, p * np.float32(1.00001), p, 3).acceptance == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PowerLaw(r=0.0), r"r=0\.0"),
        (lambda: PowerLaw(r=1.0, floor=1.5), r"floor=1\.5"),
        (lambda: hit_probability([0.5, 0.5], [1], [[0, 1], [0, 1]]), "2 lengths, 1 fan-outs"),
        (lambda: hit_probability([1.0], [1], [[0, 0.5, 0.4]]), r"curves\[0\].*cumulative"),
        (lambda: hit_probability([1.0], [1], [[0.1, 0.5]]), r"curves\[0\].*0 first"),
        (lambda: hit_probability([1.0], [1], [[0, 1.5]]), r"curves\[0\].*at most 1"),
        (lambda: hit_probability([1.0], [-1], [[0, 0.5]]), r"fan_out\[0\]=-1"),
        (lambda: bonus_curves([0.5, 0.2], [0.5, 0.5], [1, 2], 1), "p=.*normalise"),
        (lambda: bonus_curves([0.5, 0.5], [0.5, 0.5], [1, np.nan], 1), "scores="),
        (lambda: bonus_curves([0.5, 0.5], [0.5, 0.5], [-np.inf, -np.inf], 1), "scores=.*finite"),
        (lambda: bonus_curves([0.5, 0.5], [0.5, 0.5], [1], 1), r"scores \(1,\) differ"),
        (lambda: bonus_curves([0.5, 0.5], [0.5, 0.5], [1, 2], -1), "largest=-1"),
        (lambda: bonus_curves([0.5, 0.5], [0.5, 0.5], [1, 2, 3], 1), r"scores \(3,\) differ"),
        (lambda: stationary_hit_rate(1.0, 0.0), "no single long-run rate"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
