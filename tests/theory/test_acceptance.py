from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theory.acceptance import acceptance_rate, accepted_length_law, expected_tokens, expected_tokens_of, residual, tokens_cut_off

weights = st.lists(st.floats(0.01, 1), min_size=4, max_size=4)
rates = st.lists(st.floats(0, 1), min_size=0, max_size=6)


def normalised(values: list[float]) -> np.ndarray:
    return np.array(values) / sum(values)


@given(weights, weights)
def test_acceptance_and_residual_together_reproduce_the_target_law(a, b):
    p, q = normalised(a), normalised(b)
    alpha = acceptance_rate(p, q)
    np.testing.assert_allclose(np.minimum(p, q) + (1 - alpha) * residual(p, q), p, atol=1e-12)
    np.testing.assert_allclose(alpha, 1 - np.abs(p - q).sum() / 2)


def test_acceptance_works_on_batches():
    p = np.array([[0.5, 0.5], [1.0, 0.0]])
    q = np.array([[0.5, 0.5], [0.25, 0.75]])
    np.testing.assert_allclose(acceptance_rate(p, q), [1, 0.25])
    np.testing.assert_allclose(residual(p, q), [[0.5, 0.5], [1, 0]])


@given(rates)
def test_length_law_equals_the_enumeration_of_all_verdicts(alphas):
    K = len(alphas)
    brute = np.zeros(K + 1)
    for verdicts in product([True, False], repeat=K):
        accepted = next((k for k, ok in enumerate(verdicts) if not ok), K)
        brute[accepted] += np.prod([a if ok else 1 - a for a, ok in zip(alphas, verdicts, strict=True)])
    np.testing.assert_allclose(accepted_length_law(alphas, K), brute, atol=1e-12)


@given(st.floats(0, 1), st.integers(0, 12))
def test_expected_tokens_is_the_mean_of_the_length_law(a, K):
    np.testing.assert_allclose(expected_tokens(a, K), expected_tokens_of(accepted_length_law(a, K)), rtol=1e-12)


def test_expected_tokens_is_exact_at_and_near_one():
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(1 - 1e-12, 7) == pytest.approx(8 - 28e-12, rel=1e-15, abs=0)
    assert expected_tokens(0.0, 7) == 1


def test_expected_tokens_broadcasts_over_rates_and_lengths():
    grid = expected_tokens(np.array([[0.5], [1.0]]), np.array([0, 1, 2]))
    np.testing.assert_allclose(grid, [[1, 1.5, 1.75], [1, 2, 3]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: accepted_length_law([0.5, 0.5], 3), "K=3"),
        (lambda: accepted_length_law(80, 3), "alpha=80 must lie between 0 and 1"),
        (lambda: accepted_length_law(0.5, -1), "K=-1"),
        (lambda: expected_tokens(1.5, 3), r"alpha=1\.5"),
        (lambda: acceptance_rate([0.5, 0.2], [0.5, 0.5]), "p=.*normalise"),
        (lambda: residual([0.5, 0.5], [1.5, -0.5]), "q="),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@given(st.floats(0.01, 0.99), st.integers(1, 5))
def test_the_tokens_cut_off_at_the_end_of_an_output_are_those_of_the_recursion_over_its_length(alpha, K):
    law, beyond = accepted_length_law(alpha, K), [0.0]
    for length in range(1, 400):
        ends = ((k + 1, chance) for k, chance in enumerate(law))
        beyond.append(sum(chance * (beyond[length - tokens] if tokens <= length else tokens - length) for tokens, chance in ends))
    # Over a stretch of lengths: next to alpha = 1 they swing.
    assert np.mean(beyond[-60:]) == pytest.approx(tokens_cut_off(law), abs=0.05)


def test_no_token_is_cut_off_where_a_round_gives_one():
    assert tokens_cut_off([1.0]) == tokens_cut_off([1.0, 0.0]) == 0
    np.testing.assert_allclose(tokens_cut_off([[0, 1], [0.5, 0.5]]), [0.5, (2.5 / 1.5 - 1) / 2])
