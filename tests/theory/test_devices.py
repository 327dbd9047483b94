import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from theory.devices import (
    build_seconds,
    cost_per_token,
    largest_budget,
    least_hit_rate,
    ssd_over_sd_equal_devices,
    tokens_per_second_per_device,
)
from theory.speed import sd_seconds_per_token, ssd_over_own_sd, ssd_seconds_per_token

rate = st.floats(0, 1)
time = st.floats(0, 3)
tokens = st.floats(1, 8)
STEP = [0, 1.0, 1.0, 1.5, 2.0, 4.0]


def test_branches_are_shared_out_among_the_devices():
    np.testing.assert_allclose(build_seconds(3, [1, 4, 5, 8, 10], 0.5, STEP, [1, 1, 2, 2, 2]), 0.5 + 3 * np.array([1, 2, 1.5, 2, 4]))


@given(st.floats(0, 40), st.integers(1, 6), st.floats(0, 3), st.integers(1, 4))
def test_the_largest_budget_is_found_by_trying_all(T_v, K, catch_up, devices):
    fitting = [B for B in range(1, 5 * devices + 1) if build_seconds(K, B, catch_up, STEP, devices) <= T_v * (1 + 1e-12)]
    assert largest_budget(T_v, K, catch_up, STEP, devices) == max(fitting, default=0)


@given(st.floats(1, 40), st.integers(1, 6), st.integers(1, 6))
def test_the_budget_is_linear_in_the_devices(T_v, K, devices):
    assert largest_budget(T_v, K, 0.5, STEP, devices) == devices * largest_budget(T_v, K, 0.5, STEP)


@given(rate, time, st.floats(0.1, 3), st.floats(1, 4), st.floats(1, 4), time, time, tokens, tokens, tokens)
def test_the_ratio_is_that_of_the_two_speeds(h, T_sd, T_v, s_v, s_d, T_p, T_b, E_hit, E_miss, E_sd):
    ratio = ssd_over_sd_equal_devices(T_v, T_sd, s_v, s_d, h, T_p, T_b, E_hit, E_miss, E_sd)
    sd, ssd = sd_seconds_per_token(T_v / s_v, T_sd / s_d, E_sd), ssd_seconds_per_token(T_v, T_p, T_b, h, E_hit, E_miss)
    np.testing.assert_allclose(ratio, sd / ssd)


@given(rate, st.integers(1, 8), st.integers(1, 8), time, st.floats(1, 3), time, tokens, rate, rate)
def test_work_is_conserved_ssd_cannot_beat_sd_that_scales_perfectly(h, n, m, T_sd, slower, T_b, E_sd, of_hit, of_miss):
    scaling = (n + m) / n
    ratio = ssd_over_sd_equal_devices(
        1, T_sd, scaling, scaling, h, slower * T_sd * n / m, T_b, E_sd * of_hit + 1e-3, 1e-3 + E_sd * of_miss, E_sd + 1e-3
    )
    # A miss alone could be faster than SD only with a backup that drafts as much in less than its share of the work.
    assume(1 + T_b >= (1 + T_sd) / scaling)
    assert ratio <= 1 + 1e-9


@given(rate, time, time)
def test_without_scaling_the_ratio_is_corollary_8(h, T_p, T_sd):
    np.testing.assert_allclose(ssd_over_sd_equal_devices(1, T_sd, 1, 1, h, T_p, T_sd, 4, 4, 4), ssd_over_own_sd(h, T_p, T_sd))


@given(time, st.floats(0.1, 3), st.floats(1, 4), st.floats(1, 4), time, time, tokens, tokens, tokens)
def test_ssd_is_ahead_above_the_least_hit_rate_and_behind_below(T_sd, T_v, s_v, s_d, T_p, T_b, E_hit, E_miss, E_sd):
    least = float(least_hit_rate(T_v, T_sd, s_v, s_d, T_p, T_b, E_hit, E_miss, E_sd))
    grid = np.linspace(0, 1, 101)
    ahead = ssd_over_sd_equal_devices(T_v, T_sd, s_v, s_d, grid, T_p, T_b, E_hit, E_miss, E_sd)
    assert np.all(ahead[grid < least - 1e-6] <= 1 + 1e-9)
    if least <= 1:
        assert ssd_over_sd_equal_devices(T_v, T_sd, s_v, s_d, least, T_p, T_b, E_hit, E_miss, E_sd) >= 1 - 1e-9
    if 0 < least <= 1:
        assert np.all(ahead[grid > least] >= 1 - 1e-9)


def test_the_least_hit_rate_in_words():
    # SD on more devices: 1/1.25 + .5 = 1.3 a round. SSD: 1 + (1-h) .5, so a miss rate up to .6.
    assert least_hit_rate(1, 0.5, 1.25, 1, 1, 0.5, 4, 4, 4) == pytest.approx(0.4)
    assert least_hit_rate(1, 0.5, 2, 2, 1, 0.5, 4, 4, 4) == np.inf
    assert least_hit_rate(1, 0.5, 1, 1, 1, 0.5, 4, 4, 4) == 0


def test_speed_and_cost_are_shared_among_the_devices():
    # The published figures: 250 tokens/s a sequence on 5 devices, 162 on 4.
    per_device = tokens_per_second_per_device([1 / 256, 1 / 162], [5, 4])
    assert per_device[0] / per_device[1] == pytest.approx(1.26, abs=0.005)
    assert tokens_per_second_per_device(1 / 170, 5, 16) == pytest.approx(544)
    assert cost_per_token(0.01, 36, batch=4) == pytest.approx(0.01 * 36 / 3600 / 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_seconds(3, 6, 0, STEP), "branches=6 .*ends at 5 branches"),
        (lambda: build_seconds(3, 1, 0, [1, 2]), "step=.*0 first"),
        (lambda: largest_budget(1, 1, 0, [0, 2, 1]), "step=.*never falling"),
        (lambda: largest_budget(1, 0, 0, STEP), "K=0"),
        (lambda: least_hit_rate(1, 1, 0, 1, 1, 1, 4, 4, 4), "verify_scaling=0"),
        (lambda: cost_per_token(1, -1), "price_per_hour=-1"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
