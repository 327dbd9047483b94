import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theory.acceptance import acceptance_rate, accepted_length_law
from theory.fanout import optimal
from theory.hits import bonus_curves, hit_probability
from theory.outcomes import best_outcomes, estimated_outcomes, hit_probability_of, true_outcomes

seeds = st.integers(0, 2**32 - 1)


def laws(seed: int, K: int, vocabulary: int):
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.ones(vocabulary), K + 1), rng.dirichlet(np.ones(vocabulary), K + 1)
    return p, q, np.array([rng.choice(vocabulary, p=row) for row in q[:K]], dtype=int)


@given(seeds, st.integers(0, 3), st.integers(2, 5))
def test_the_true_law_is_that_of_the_verification_step_by_step(seed, K, vocabulary):
    p, q, sent = laws(seed, K, vocabulary)
    brute, reached = np.zeros((K + 1, vocabulary)), 1.0
    for k in range(K):
        accept = min(1.0, p[k, sent[k]] / q[k, sent[k]])
        excess = np.maximum(p[k] - q[k], 0)
        brute[k] = reached * (1 - accept) * excess / excess.sum()
        reached *= accept
    brute[K] = reached * p[K]
    np.testing.assert_allclose(true_outcomes(p, q[:K], sent), brute, atol=1e-12)


def test_the_true_law_is_what_sampling_gives():
    p, q, sent = laws(3, 2, 3)
    rng, seen, n = np.random.default_rng(0), np.zeros((3, 3)), 20_000
    for _ in range(n):
        k = next((k for k in range(2) if rng.random() >= p[k, sent[k]] / q[k, sent[k]]), 2)
        law = np.maximum(p[k] - q[k], 0) if k < 2 else p[k]
        seen[k, rng.choice(3, p=law / law.sum())] += 1
    np.testing.assert_allclose(seen / n, true_outcomes(p, q[:2], sent), atol=5 * np.sqrt(0.25 / n))


@given(seeds, st.integers(0, 3), st.integers(2, 5))
def test_the_estimate_is_a_law_without_the_tokens_sent(seed, K, vocabulary):
    _, q, sent = laws(seed, K, vocabulary)
    a = np.random.default_rng(seed).random(K)
    law = estimated_outcomes(a, q, sent)
    np.testing.assert_allclose(law.sum(-1), accepted_length_law(a, K), atol=1e-12)
    assert all(law[k, sent[k]] == 0 for k in range(K))
    np.testing.assert_allclose(law[K], np.prod(a) * q[K], atol=1e-12)


@given(seeds, st.integers(0, 2), st.integers(2, 4), st.integers(0, 6))
def test_no_set_of_that_size_hits_more_than_the_oracle(seed, K, vocabulary, budget):
    p, q, sent = laws(seed, K, vocabulary)
    law = true_outcomes(p, q[:K], sent)
    best = hit_probability_of(law, best_outcomes(law, budget))
    assert best == pytest.approx(np.sort(law.ravel())[::-1][:budget].sum())


def test_the_adaptive_choice_beats_the_fixed_one_and_the_oracle_both():
    rng, K, vocabulary, budget = np.random.default_rng(0), 3, 12, 6
    totals, curves, a = np.zeros(2), [], []
    rounds = []
    for _ in range(400):
        z = rng.normal(size=(K + 1, vocabulary)) * rng.uniform(0.5, 5)
        p, q = np.exp(z + rng.normal(size=z.shape)), np.exp(z)
        p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
        sent = np.array([rng.choice(vocabulary, p=row) for row in q[:K]])
        rounds.append((p, q, sent))
        law = true_outcomes(p, q[:K], sent)
        guess = estimated_outcomes(acceptance_rate(p[:K], q[:K]), q, sent)
        totals += [hit_probability_of(law, best_outcomes(of, budget)) for of in (guess, law)]
    for k in range(K + 1):
        p, q = (np.array([r[i][k] for r in rounds]) for i in (0, 1))
        acceptance, rejected, accepted = bonus_curves(p, q, q, budget)
        a.append(acceptance.mean())
        curves.append(accepted.mean(0) if k == K else rejected.mean(0) / (1 - a[-1]))
    length_law = accepted_length_law(a[:K], K)
    fixed = hit_probability(length_law, optimal(budget, length_law, curves), curves)
    adaptive, oracle = totals / 400
    assert fixed + 0.03 < adaptive < oracle - 0.03


def test_rounds_are_computed_side_by_side():
    many = [laws(seed, 2, 4) for seed in range(5)]
    p, q, sent = (np.array([r[i] for r in many]) for i in range(3))
    law = true_outcomes(p, q[:, :2], sent)
    cached = best_outcomes(law, 3)
    assert cached.accepted.shape == (5, 3)
    for i, (one_p, one_q, one_sent) in enumerate(many):
        one = true_outcomes(one_p, one_q[:2], one_sent)
        np.testing.assert_allclose(law[i], one)
        assert hit_probability_of(law, cached)[i] == pytest.approx(float(hit_probability_of(one, best_outcomes(one, 3))))
        guess = estimated_outcomes([0.5, 0.5], one_q, one_sent)
        np.testing.assert_allclose(estimated_outcomes(np.full((5, 2), 0.5), q, sent)[i], guess)


def test_a_budget_larger_than_all_outcomes_caches_them_all():
    cached = best_outcomes([[0.5, 0.1], [0.0, 0.4]], 9)
    assert list(zip(*cached, strict=True))[:3] == [(0, 0), (1, 1), (0, 1)]
    assert hit_probability_of([[0.5, 0.1], [0.0, 0.4]], cached) == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: estimated_outcomes([0.5], [[0.5, 0.5], [0.5, 0.5]], [2]), r"sent=\[2\]"),
        (lambda: estimated_outcomes([50], [[0.5, 0.5], [0.5, 0.5]], [1]), r"acceptance=\[50\]"),
        (lambda: true_outcomes([[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0]], [1]), "no probability"),
        (lambda: true_outcomes([[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0]] * 2, [0]), "pass K and K[+]1"),
        (lambda: best_outcomes([0.5, 0.5], 1), r"\(2,\)"),
        (lambda: best_outcomes([[0.5, 0.5]], -1), "budget=-1"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
