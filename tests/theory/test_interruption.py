import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from theory.interruption import interrupted_round_seconds, notice_seconds, tokens_built


def played(T_v: float, K: int, catch_up: float, step: float) -> tuple[int, float]:
    """Tokens built and the moment of noticing, step by step."""
    now = catch_up
    built = 0
    while now < T_v and built < K:
        now += step
        built += 1
    return built, max(now, T_v)


@given(st.floats(0.1, 30), st.integers(0, 8), st.floats(0, 3), st.floats(0.1, 3), st.floats(0, 1), st.floats(0, 5))
def test_closed_form_equals_the_build_played_step_by_step(T_v, K, catch_up, step, share, T_b):
    built, noticed = played(T_v, K, catch_up, step)
    if abs((T_v - catch_up) / step - round((T_v - catch_up) / step)) < 1e-9:
        return  # the outcome falls on the end of a step: which of both comes first is left to rounding
    assert tokens_built(T_v, K, catch_up, step) == built
    np.testing.assert_allclose(notice_seconds(T_v, K, catch_up, step), noticed - T_v, atol=1e-9)
    hit, miss = interrupted_round_seconds(T_v, K, catch_up, step, share * step, T_b)
    np.testing.assert_allclose([hit, miss], [noticed + (K - built) * share * step, noticed + T_b], atol=1e-9)


@given(st.floats(0.1, 30), st.integers(0, 8), st.floats(0, 3), st.floats(0.1, 3), st.floats(0, 1))
def test_a_hit_lasts_at_most_the_longer_of_verification_and_build(T_v, K, catch_up, step, share):
    hit, _ = interrupted_round_seconds(T_v, K, catch_up, step, share * step, 0.0)
    assert hit <= max(T_v, catch_up + K * step) * (1 + 1e-12)


def test_the_average_wait_of_a_miss_is_half_a_step():
    T_v = np.linspace(2, 5, 30_001)
    assert notice_seconds(T_v, 10, 1.0, 1.0).mean() == pytest.approx(0.5, abs=1e-3)
