from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theory.batch import batched_seconds_per_token, batched_ssd_speedup, per_row_seconds_per_token, sitting_out_seconds_per_token
from theory.speed import ssd_seconds_per_token, ssd_speedup

rate = st.floats(0, 1)
time = st.floats(0, 3)
tokens = st.floats(1, 8)


def played(batch: int, h: float, seconds_of_misses: list[float], E_hit: float, E_miss: float) -> float:
    """Mean seconds over mean tokens of one row, by going through every pattern of hits and misses."""
    seconds, committed = 0.0, 0.0
    for hits in product([True, False], repeat=batch):
        chance = np.prod([h if hit else 1 - h for hit in hits])
        seconds += chance * seconds_of_misses[batch - sum(hits)]
        committed += chance * sum(E_hit if hit else E_miss for hit in hits) / batch
    return seconds / committed


@given(st.integers(1, 5), rate, time, time, tokens, tokens)
def test_corollary_16_equals_the_enumeration_of_hits(batch, h, T_p, T_b, E_hit, E_miss):
    brute = played(batch, h, [max(1, T_p)] + [1 + T_b] * batch, E_hit, E_miss)
    np.testing.assert_allclose(batched_seconds_per_token(batch, 1, T_p, T_b, h, E_hit, E_miss), brute, rtol=1e-9)
    np.testing.assert_allclose(batched_ssd_speedup(batch, h, E_hit, E_miss, T_p, T_b), 1 / brute, rtol=1e-9)


@given(st.integers(1, 5), rate, time, st.lists(time, min_size=5, max_size=5), tokens, tokens)
def test_per_row_backups_equal_the_enumeration_of_hits(batch, h, T_p, backup, E_hit, E_miss):
    T_b = [0.0, *backup][: batch + 1]
    brute = played(batch, h, [(max(1, T_p) if m < batch else 1) + T_b[m] for m in range(batch + 1)], E_hit, E_miss)
    np.testing.assert_allclose(per_row_seconds_per_token(batch, 1, T_p, T_b, h, E_hit, E_miss), brute, rtol=1e-9)


@given(st.integers(1, 40), rate, rate, time, tokens, tokens)
def test_per_row_is_corollary_16_where_the_build_fits_and_any_miss_costs_the_same(batch, h, T_p, T_b, E_hit, E_miss):
    per_row = per_row_seconds_per_token(batch, 1, T_p, [0] + [T_b] * batch, h, E_hit, E_miss)
    np.testing.assert_allclose(per_row, batched_seconds_per_token(batch, 1, T_p, T_b, h, E_hit, E_miss), rtol=1e-9)


@given(rate, time, time, tokens, tokens)
def test_a_batch_of_one_is_theorem_7(h, T_p, T_b, E_hit, E_miss):
    np.testing.assert_allclose(batched_ssd_speedup(1, h, E_hit, E_miss, T_p, T_b), ssd_speedup(h, E_hit, E_miss, T_p, T_b))
    one = per_row_seconds_per_token(1, 1.0, T_p, [0, T_b], h, E_hit, E_miss)
    np.testing.assert_allclose(one, ssd_seconds_per_token(1.0, T_p, T_b, h, E_hit, E_miss))


@given(st.floats(0, 0.99), rate, time, tokens, tokens)
def test_speed_falls_with_the_batch_to_that_of_waiting_every_round(h, T_p, T_b, E_hit, E_miss):
    speed = batched_ssd_speedup([1, 2, 8, 64, 1e5], h, E_hit, E_miss, T_p, T_b)
    assert np.all(np.diff(speed) <= 1e-12)
    np.testing.assert_allclose(speed[-1], (h * E_hit + (1 - h) * E_miss) / (1 + T_b))


def test_a_batch_of_sixteen_waits_in_92_percent_of_its_rounds_at_a_hit_rate_of_85():
    extra = batched_seconds_per_token(16, 1, 1, 1, 0.08 ** (1 / 16), 1, 1) - 1
    assert extra == pytest.approx(0.92)


def test_a_row_that_sits_out_pays_whole_rounds():
    h, T_round, T_b, rng = 0.7, 2.0, 4.5, np.random.default_rng(0)
    rounds = tokens = 0
    for hit in rng.random(40_000) < h:
        rounds += 1 if hit else 1 + 3
        tokens += 5 if hit else 2
    assert sitting_out_seconds_per_token(T_round, T_b, h, 5, 2) == pytest.approx(T_round * rounds / tokens, rel=0.02)
    assert sitting_out_seconds_per_token(T_round, 0, h, 5, 5) == pytest.approx(T_round / 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: batched_ssd_speedup(0, 0.5, 4, 4, 1, 1), "batch=0"),
        (lambda: per_row_seconds_per_token(2, 1, 1, [0, 1], 0.5, 4, 4), "batch=2: pass 3 numbers"),
        (lambda: per_row_seconds_per_token(1, 1, 1, [1, 1], 0.5, 4, 4), "the first of them 0"),
        (lambda: sitting_out_seconds_per_token(0, 1, 0.5, 4, 4), "T_round=0"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
