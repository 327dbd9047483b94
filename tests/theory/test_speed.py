import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theory.acceptance import expected_tokens
from theory.speed import (
    blocking_round_seconds,
    round_seconds,
    sd_seconds_per_token,
    sd_speedup,
    ssd_over_own_sd,
    ssd_over_sd_bounds,
    ssd_seconds_per_token,
    ssd_speedup,
    two_state_seconds_per_token,
)

rate = st.floats(0, 1)
time = st.floats(0, 3)
tokens = st.floats(1, 8)


def test_speedups_are_the_printed_formulas():
    assert sd_speedup(4.0, 0.25) == pytest.approx(3.2)
    # h=.8: (.8*5 + .2*3) / (.8*1 + .2*1.5) and, with a slow primary, (.8*5 + .2*3) / (.8*2 + .2*1.5)
    assert ssd_speedup(0.8, 5, 3, 0.9, 0.5) == pytest.approx(4.6 / 1.1)
    assert ssd_speedup(0.8, 5, 3, 2.0, 0.5) == pytest.approx(4.6 / 1.9)


@given(rate, tokens, tokens, time, time, st.floats(0.001, 10))
def test_seconds_per_token_are_the_speedup_in_another_unit(h, E_hit, E_miss, T_p, T_b, T_v):
    seconds = ssd_seconds_per_token(T_v, T_p * T_v, T_b * T_v, h, E_hit, E_miss)
    np.testing.assert_allclose(T_v / seconds, ssd_speedup(h, E_hit, E_miss, T_p, T_b), rtol=1e-9)
    np.testing.assert_allclose(T_v / sd_seconds_per_token(T_v, T_b * T_v, E_hit), sd_speedup(E_hit, T_b), rtol=1e-9)


@given(rate, rate, tokens, tokens, st.floats(0, 1), time)
def test_speed_rises_with_the_hit_rate(h1, h2, E1, E2, T_p, T_b):
    low, high = sorted([h1, h2])
    E_miss, E_hit = sorted([E1, E2])
    slow, fast = ssd_speedup(np.array([low, high]), E_hit, E_miss, T_p, T_b)
    assert fast >= slow * (1 - 1e-12)


@given(rate, st.floats(0, 1), time)
def test_corollary_8_ssd_is_never_slower_than_its_own_sd(h, share, T_sd):
    T_p = share * (1 + T_sd)
    gain = ssd_over_own_sd(h, T_p, T_sd)
    assert gain >= 1 - 1e-12
    if h > 0.01 and T_sd > 0.01 and T_p <= 1:
        assert gain > 1


@given(rate, tokens, tokens, tokens, st.floats(0, 1), time, time)
def test_corollary_9_bounds_hold(h, E1, E2, E_sd, T_p, T_b, T_sd):
    E_miss, E_hit = sorted([E1, E2])
    lower, upper = ssd_over_sd_bounds(h, E_hit, E_sd, T_sd)
    gain = ssd_speedup(h, E_hit, E_miss, T_p, T_b) / sd_speedup(E_sd, T_sd)
    assert gain <= upper * (1 + 1e-12)
    assert ssd_speedup(h, E_hit, E_miss, T_p, 0) / sd_speedup(E_sd, T_sd) >= lower * (1 - 1e-12)


def test_a_miss_waits_half_a_step_only_for_a_busy_draft():
    hit, miss = round_seconds(T_v=np.array([10.0, 10.0]), T_p=np.array([9.0, 12.0]), T_b=2.0, step=1.0)
    np.testing.assert_allclose(hit, [10, 12])
    np.testing.assert_allclose(miss, [12, 12.5])


def test_a_draft_that_completes_its_build_makes_a_miss_wait_too():
    hit, miss = blocking_round_seconds(T_v=10.0, T_p=np.array([9.0, 12.0]), T_b=2.0)
    np.testing.assert_allclose([hit, miss], [[10, 12], [12, 14]])


@given(rate, tokens, tokens, st.floats(0, 1), time)
def test_blocking_rounds_are_theorem_7_where_the_build_fits(h, E_hit, E_miss, T_p, T_b):
    rows = blocking_round_seconds(1.0, T_p, T_b)
    if 0 < h < 1:
        two = two_state_seconds_per_token(h, h, rows, rows, E_hit, E_miss)
        np.testing.assert_allclose(1 / two, ssd_speedup(h, E_hit, E_miss, T_p, T_b), rtol=1e-9)


@pytest.mark.parametrize(("h", "speed"), [(0.0, 3 / 1.5), (1.0, 5 / 1.2)])
def test_the_limits_of_theorem_7(h, speed):
    assert ssd_speedup(h, 5, 3, 1.2, 0.5) == pytest.approx(speed)


@given(rate, rate, tokens, tokens, time)
def test_two_states_of_equal_rounds_are_theorem_7(h, m, E_hit, E_miss, T_b):
    if h == 1 and m == 0:
        return
    rows = round_seconds(1.0, 0.5, T_b)
    pi = m / (1 - h + m)
    two = two_state_seconds_per_token(h, m, rows, rows, E_hit, E_miss)
    mixed = (pi * h + (1 - pi) * m) * rows[0] + (1 - pi * h - (1 - pi) * m) * rows[1]
    np.testing.assert_allclose(two, mixed / (pi * E_hit + (1 - pi) * E_miss), rtol=1e-9)
    np.testing.assert_allclose(two, ssd_seconds_per_token(1.0, 0.5, T_b, pi, E_hit, E_miss), rtol=1e-9)


def test_two_states_equal_a_played_chain():
    rng, state, seconds, committed = np.random.default_rng(0), 1, 0.0, 0.0
    table = {1: (0.9, (10.0, 12.0), 4.0), 0: (0.4, (5.0, 6.0), 1.0)}
    for _ in range(40_000):
        h, (if_hit, if_miss), E = table[state]
        committed += E
        state = int(rng.random() < h)
        seconds += if_hit if state else if_miss
    assert two_state_seconds_per_token(0.9, 0.4, (10, 12), (5, 6), 4, 1) == pytest.approx(seconds / committed, rel=0.01)


def test_everything_broadcasts_over_a_grid():
    K, h = np.arange(1, 6), np.array([[0.5], [0.9]])
    E = expected_tokens(0.8, K)
    grid = ssd_seconds_per_token(0.02, 0.002 * K, 0.001 * K, h, E, E)
    assert grid.shape == (2, 5)
    assert grid[1, 2] == pytest.approx(float(ssd_seconds_per_token(0.02, 0.006, 0.003, 0.9, E[2], E[2])))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ssd_speedup(1.2, 4, 4, 1, 1), r"h=1\.2"),
        (lambda: ssd_seconds_per_token(0.0, 1, 1, 0.5, 4, 4), r"T_v=0\.0 must be greater than 0"),
        (lambda: ssd_seconds_per_token(1.0, -1, 1, 0.5, 4, 4), "T_p=-1"),
        (lambda: sd_speedup(4, float("nan")), "T_sd=nan"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
