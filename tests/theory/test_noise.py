from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theory.coupling import coupled_acceptance_rate
from theory.hits import bonus_curves
from theory.noise import ranked_curve, shared_noise_curve

seeds = st.integers(0, 2**32 - 1)


def pair(seed: int, vocabulary: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(vocabulary, 0.7), 2)


@given(seeds, st.integers(1, 8))
def test_the_best_candidate_is_the_bonus_as_often_as_coupled_samples_agree(seed, vocabulary):
    r, q = pair(seed, vocabulary)
    assert shared_noise_curve(r, q, 1)[1] == pytest.approx(float(coupled_acceptance_rate(r, q)), abs=1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_the_curve_is_what_gumbel_noise_gives(seed):
    r, q = pair(seed, 12)
    n = 100_000
    noise = np.random.default_rng(seed).gumbel(size=(n, 12))
    bonus, order = (np.log(r) + noise).argmax(1), np.argsort(-(np.log(q) + noise), 1)
    rank = (order == bonus[:, None]).argmax(1)
    drawn = [(rank < F).mean() for F in range(13)]
    np.testing.assert_allclose(shared_noise_curve(r, q, 12), drawn, atol=5 * np.sqrt(0.25 / n))


@given(seeds, st.integers(1, 8), st.integers(0, 10))
def test_the_curves_rise_to_all_that_the_candidates_hold(seed, vocabulary, largest):
    r, q = pair(seed, vocabulary)
    for curve in (shared_noise_curve(r, q, largest), ranked_curve(r, q, largest)):
        assert curve[0] == 0
        assert np.all(np.diff(curve) >= -1e-12)
        if largest >= vocabulary:
            assert curve[-1] == pytest.approx(1, abs=1e-8)


def test_the_rank_by_q_is_the_mass_of_the_best():
    r = np.array([0.5, 0.3, 0.2])
    for order in permutations(range(3)):
        scores = np.argsort(order)[::-1]
        best = np.argsort(-scores)
        np.testing.assert_allclose(ranked_curve(r, scores, 4), [0, r[best[0]], r[best[:2]].sum(), 1, 1])
    np.testing.assert_allclose(ranked_curve([r, r[::-1]], [1.0, 2.0, -np.inf], 2), [[0, 0.3, 0.8], [0, 0.3, 0.5]])


def test_after_full_acceptance_the_rank_by_q_is_that_of_bonus_curves():
    p, q = pair(5, 9)
    np.testing.assert_allclose(ranked_curve(p, q, 9), bonus_curves(p, q, q, 9).accepted_hit)


def test_an_equal_draft_knows_the_bonus_and_a_sure_target_makes_the_noise_mislead():
    q = np.array([0.4, 0.3, 0.3])
    assert shared_noise_curve(q, q, 1)[1] == pytest.approx(1)
    assert ranked_curve(q, q, 1)[1] == pytest.approx(0.4)
    sure = np.array([1.0, 0.0, 0.0])
    assert ranked_curve(sure, q, 1)[1] == 1
    assert shared_noise_curve(sure, q, 1)[1] == pytest.approx(0.4)


def test_a_token_that_is_no_candidate_never_hits():
    assert shared_noise_curve([0.5, 0.5], [1.0, 0.0], 2)[2] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shared_noise_curve([0.5, 0.2], [0.5, 0.5], 1), "bonus=.*normalise"),
        (lambda: shared_noise_curve([[0.5, 0.5]], [[0.5, 0.5]], 1), r"\(1, 2\)"),
        (lambda: ranked_curve([0.5, 0.5], [1.0], 1), "differ along"),
        (lambda: ranked_curve([0.5, 0.5], [1.0, 0.0], -1), "largest=-1"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
