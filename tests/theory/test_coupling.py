import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theory.acceptance import acceptance_rate
from theory.coupling import coupled_acceptance_bound, coupled_acceptance_rate, coupled_agreement

seeds = st.integers(0, 2**32 - 1)


def pair(seed: int, vocabulary: int) -> np.ndarray:
    """Two random laws, some of whose tokens have no mass."""
    rng = np.random.default_rng(seed)
    laws = rng.dirichlet(np.full(vocabulary, 0.5), 2) * (rng.random((2, vocabulary)) > 0.2) + 1e-12 * np.eye(vocabulary)[0]
    return laws / laws.sum(-1, keepdims=True)


@given(seeds, st.integers(1, 12))
def test_agreement_is_the_printed_double_sum(seed, vocabulary):
    p, q = pair(seed, vocabulary)
    brute = [1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(vocabulary)) if p[x] > 0 and q[x] > 0 else 0.0 for x in range(vocabulary)]
    np.testing.assert_allclose(coupled_agreement(p, q), brute, atol=1e-12)


def test_agreement_is_how_often_both_choose_the_token_under_shared_gumbel_noise():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(5), 2)
    noise, n = rng.gumbel(size=(200_000, 5)), 200_000
    ours, theirs = (np.log(law) + noise for law in (p, q))
    both = np.bincount(ours.argmax(1)[ours.argmax(1) == theirs.argmax(1)], minlength=5) / n
    np.testing.assert_allclose(both, coupled_agreement(p, q), atol=5 * np.sqrt(0.25 / n))


@given(seeds, st.integers(1, 30))
def test_coupled_acceptance_lies_between_its_bound_and_that_of_rejection(seed, vocabulary):
    p, q = pair(seed, vocabulary)
    alpha, rate = acceptance_rate(p, q), coupled_acceptance_rate(p, q)
    assert coupled_acceptance_bound(alpha) - 1e-9 <= rate <= alpha + 1e-9


def test_the_bound_is_reached_by_laws_that_differ_in_two_tokens_of_their_own():
    p, q = [0.6, 0.4, 0.0], [0.6, 0.0, 0.4]
    assert coupled_acceptance_rate(p, q) == pytest.approx(float(coupled_acceptance_bound(0.6))) == pytest.approx(0.6 / 1.4)


def test_equal_laws_always_agree_and_disjoint_ones_never():
    assert coupled_acceptance_rate([0.3, 0.7], [0.3, 0.7]) == pytest.approx(1)
    assert coupled_acceptance_rate([1.0, 0.0], [0.0, 1.0]) == 0
    np.testing.assert_allclose(coupled_acceptance_bound([0, 1]), [0, 1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: coupled_acceptance_rate([0.5, 0.2], [0.5, 0.5]), "p=.*normalise"),
        (lambda: coupled_acceptance_rate([1.0], [0.5, 0.5]), r"p \(1,\), q \(2,\) differ"),
        (lambda: coupled_acceptance_bound(2), "alpha=2"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
