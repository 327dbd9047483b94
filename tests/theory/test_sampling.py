import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from theory.acceptance import acceptance_rate
from theory.sampling import sampling_law

rows = st.lists(st.floats(-5, 5), min_size=1, max_size=8)


def one_by_one(logits, temperature, top_k, top_p):
    """The law by its definition, token by token; for logits without ties."""
    best_first = sorted(range(len(logits)), key=lambda t: -logits[t])
    if temperature == 0:
        best_first, temperature = best_first[:1], 1.0
    if top_k:
        best_first = best_first[:top_k]
    weights = {t: np.exp(logits[t] / temperature) for t in best_first}
    total, mass, kept = sum(weights.values()), 0.0, {}
    for t in best_first:
        if mass < top_p:
            kept[t] = weights[t]
        mass += weights[t] / total
    return [kept.get(t, 0.0) / sum(kept.values()) for t in range(len(logits))]


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 0.3, 1.0, 2.0]), st.integers(0, 9), st.sampled_from([0.05, 0.5, 0.9, 1.0]))
def test_the_law_is_that_of_the_definition(seed, temperature, top_k, top_p):
    logits = np.random.default_rng(seed).normal(size=(3, 6)) * 2
    law = sampling_law(logits, temperature, top_k, top_p)
    np.testing.assert_allclose(law, [one_by_one(row, temperature, top_k, top_p) for row in logits], atol=1e-12)


@given(rows, st.floats(0, 3), st.integers(0, 9), st.floats(0.01, 1))
@example([0.0, 4e-237], 1.0, 0, 0.5)
def test_every_law_is_a_distribution_that_keeps_a_best_token(logits, temperature, top_k, top_p):
    law = sampling_law(logits, temperature, top_k, top_p)
    assert law.sum() == pytest.approx(1)
    # Logits that rounding makes one are equals, of which a nucleus may keep any.
    assert law[np.array(logits) >= max(logits) - 1e-12].max() > 0


def test_tokens_that_equal_the_last_of_the_top_k_are_kept():
    np.testing.assert_allclose(sampling_law([2.0, 1.0, 1.0, 0.0], top_k=2) > 0, [True, True, True, False])


def test_temperature_zero_is_a_point_mass_at_the_first_of_the_largest():
    np.testing.assert_array_equal(sampling_law([[0, 3, 3], [-np.inf, -np.inf, 0]], temperature=0), [[0, 1, 0], [0, 0, 1]])


def test_greedy_acceptance_from_logits_is_whether_the_argmaxes_agree():
    target, draft = np.array([[1.0, 2.0], [1.0, 2.0]]), np.array([[0.0, 9.0], [9.0, 0.0]])
    np.testing.assert_array_equal(acceptance_rate(sampling_law(target, 0), sampling_law(draft, 0)), [1, 0])


def test_acceptance_from_logits_tends_to_the_greedy_one_as_the_temperature_falls():
    rng = np.random.default_rng(0)
    p, q = rng.normal(size=(2, 50, 20))
    greedy = acceptance_rate(sampling_law(p, 0), sampling_law(q, 0))
    np.testing.assert_allclose(acceptance_rate(sampling_law(p, 1e-4), sampling_law(q, 1e-4)), greedy, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sampling_law([0.0], temperature=-1), "temperature=-1"),
        (lambda: sampling_law([0.0], top_k=-1), "top_k=-1"),
        (lambda: sampling_law([0.0], top_p=0.0), r"top_p=.*greater than 0"),
        (lambda: sampling_law([0.0], top_p=1.5), r"top_p=1\.5"),
        (lambda: sampling_law([float("nan")]), "logits="),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
