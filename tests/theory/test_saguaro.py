from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from theory.acceptance import acceptance_rate, accepted_length_law, expected_tokens_of
from theory.hits import bonus_curves, hit_probability
from theory.saguaro import best_factors, best_single_factor, saguaro_curves, saguaro_law, saguaro_round
from theory.speed import ssd_speedup

seeds = st.integers(0, 2**32 - 1)
factor = st.floats(0, 1)
FACTORS = np.array([1, 0.7, 0.4, 0.2, 0.1, 0.03, 0])


def pair(seed: int, vocabulary: int, n: int | None = None) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(vocabulary), 2 if n is None else (2, n))


def table(seed: int, n: int, K: int) -> tuple[np.ndarray, np.ndarray, float]:
    rng = np.random.default_rng(seed)
    a = rng.random((n, K))
    return a, (1 - a) * rng.random((n, K)), float(rng.random())


@given(seeds, factor, st.integers(0, 6))
def test_the_law_is_the_softmax_of_the_definition(seed, C, F):
    z = np.random.default_rng(seed).normal(size=5)
    best = np.argsort(-z)[:F]
    weights = np.exp(z)
    weights[best] *= C
    assume(weights.sum() > 1e-300)
    np.testing.assert_allclose(saguaro_law(np.exp(z) / np.exp(z).sum(), C, F), weights / weights.sum(), atol=1e-12)


def test_a_law_that_lies_on_the_cached_tokens_is_left_as_it_is():
    np.testing.assert_allclose(saguaro_law([[0.5, 0.5, 0.0]], [[0.0], [0.3]], 2), [[[0.5, 0.5, 0.0]]] * 2)


@given(seeds, factor, factor, st.integers(1, 5))
def test_the_share_of_the_residual_on_the_cached_tokens_rises_as_the_factor_falls(seed, C1, C2, F):
    """Of the fixed set of the definition; leaving the token sent out of it, as real candidates do, can break this."""
    p, q = pair(seed, 6)
    best, shares = np.argsort(-q)[:F], []
    for C in sorted([C1, C2], reverse=True):
        excess = np.maximum(p - saguaro_law(q, C, F), 0)
        assume(excess.sum() > 1e-9)
        shares.append(excess[best].sum() / excess.sum())
    assert shares[1] >= shares[0] - 1e-9


@given(seeds, factor, factor, st.integers(1, 5))
def test_acceptance_falls_with_the_factor_where_the_draft_is_not_too_sure_of_the_cached_tokens(seed, C1, C2, F):
    rest, q = pair(seed, 6)
    best = np.argsort(-q)[:F]
    rest[best] = 0
    p = np.where(np.isin(range(6), best), q + (1 - q[best].sum()) * np.random.default_rng(seed).random() / F, 0)
    p += rest * (1 - p.sum()) / rest.sum()
    high, low = (acceptance_rate(p, saguaro_law(q, C, F)) for C in sorted([C1, C2], reverse=True))
    assert low <= high + 1e-12


def test_acceptance_rises_as_the_factor_falls_where_the_draft_is_too_sure():
    p, q = [0.5, 0.5], [0.9, 0.1]
    assert acceptance_rate(p, q) == pytest.approx(0.6)
    assert acceptance_rate(p, saguaro_law(q, 1 / 9, 1)) == pytest.approx(1)


@given(seeds, st.integers(1, 4))
@settings(max_examples=10)
def test_the_curves_are_means_over_the_pairs_of_exact_chances(seed, n):
    p, q = pair(seed, 5, n)
    curves = saguaro_curves(p, q, FACTORS, [1, 3])
    for (i, C), (j, F) in product(enumerate(FACTORS), enumerate([1, 3])):
        each = [bonus_curves(a, saguaro_law(b, C, F), b, F) for a, b in zip(p, q, strict=True)]
        assert curves.acceptance[i, j] == pytest.approx(np.mean([one.acceptance for one in each]))
        assert curves.rejected_hit[i, j] == pytest.approx(np.mean([one.rejected_hit[F] for one in each]))
        assert curves.accepted_hit[j] == pytest.approx(np.mean([one.accepted_hit[F] for one in each]))


def test_a_round_drawn_token_by_token_hits_and_commits_as_often_as_it_says():
    p, q = pair(4, 6)
    K, F, n, rng = 3, 2, 30_000, np.random.default_rng(0)
    factors, choice = [1.0, 0.3], [1, 0, 1]
    curves = saguaro_curves(p[None], q[None], factors, [F])
    expected = saguaro_round(
        choice, np.repeat(curves.acceptance, K, 1), np.repeat(curves.rejected_hit, K, 1), float(curves.accepted_hit[0]), 1, 0.5
    )
    order, hits, tokens = np.argsort(-q), 0, 0
    laws = [saguaro_law(q, factors[i], F) for i in choice]
    sent = np.array([rng.choice(6, size=n, p=law) for law in laws])
    coin, bonus_coin = rng.random((K, n)), rng.random(n)
    for i in range(n):
        k = next((k for k in range(K) if coin[k, i] >= p[sent[k, i]] / laws[k][sent[k, i]]), K)
        law = p if k == K else np.maximum(p - laws[k], 0)
        bonus = int(np.searchsorted(np.cumsum(law / law.sum()), bonus_coin[i]))
        hits += bonus in [t for t in order if k == K or t != sent[k, i]][:F]
        tokens += k + 1
    assert hits / n == pytest.approx(expected.h, abs=0.015)
    assert tokens / n == pytest.approx(expected.E, abs=0.04)


@given(seeds, st.integers(1, 4), st.floats(0, 2), st.floats(0, 2))
def test_the_round_is_theorem_7_on_the_law_of_accepted_lengths(seed, K, T_p, T_b):
    a, hit, H = table(seed, 3, K)
    choice = np.random.default_rng(seed).integers(3, size=K)
    E, h = saguaro_round(choice, a, hit, H, T_p, T_b)[1:3]
    rates = a[choice, range(K)]
    law = accepted_length_law(rates, K)
    curves = [[0, min(1.0, R / (1 - alpha))] for R, alpha in zip(hit[choice, range(K)], rates, strict=True)] + [[0, H]]
    np.testing.assert_allclose(E, expected_tokens_of(law))
    assert h == pytest.approx(hit_probability(law, [1] * (K + 1), curves))
    assert saguaro_round(choice, a, hit, H, T_p, T_b).speedup == pytest.approx(float(ssd_speedup(h, E, E, T_p, T_b)))


@given(seeds, st.integers(1, 4), st.floats(0, 2), st.floats(0, 2))
@settings(max_examples=40)
def test_the_best_factors_are_the_best_of_all_combinations(seed, K, T_p, T_b):
    a, hit, H = table(seed, 3, K)
    each = [saguaro_round(choice, a, hit, H, T_p, T_b).speedup for choice in product(range(3), repeat=K)]
    assert best_factors(a, hit, H, T_p, T_b).speedup == pytest.approx(max(each))
    single = best_single_factor(a, hit, H, T_p, T_b)
    assert single.speedup == pytest.approx(max(saguaro_round([i] * K, a, hit, H, T_p, T_b).speedup for i in range(3)))
    assert best_factors(a, hit, H, T_p, T_b).speedup >= single.speedup


def test_pressing_never_pays_when_a_miss_costs_nothing():
    p, q = pair(1, 8, 50)
    p = np.maximum(p, q)  # a draft that is not too sure
    p = q + 0.3 * (p / p.sum(-1, keepdims=True) - q)
    curves = saguaro_curves(p, q, FACTORS, [2] * 4)
    found = best_factors(curves.acceptance, curves.rejected_hit, float(curves.accepted_hit[0]), 1, 0)
    singles = [saguaro_round([i] * 4, *curves[:2], float(curves.accepted_hit[0]), 1, 0).E for i in range(7)]
    np.testing.assert_allclose(found.E, max(singles))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: saguaro_law([0.5, 0.5], 1.5, 1), r"C=1\.5"),
        (lambda: saguaro_law([0.5, 0.5], 0.5, -1), "F=-1"),
        (lambda: saguaro_curves([[0.5, 0.5]], [[0.5, 0.5]], 0.5, [1.5]), r"fan_out=1\.5"),
        (lambda: best_factors([[0.5]], [[0.5, 0.5]], 0.5, 1, 1), r"\(1, 1\) and rejected_hit \(1, 2\)"),
        (lambda: best_factors([[0.5]], [[0.5]], 2, 1, 1), "accepted_hit=2"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
