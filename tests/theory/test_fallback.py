import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from theory.batch import batched_seconds_per_token, per_row_seconds_per_token
from theory.fallback import critical_batch, first_ahead

tokens = st.floats(1, 8)
time = st.floats(0, 3)


def difference(b, h, E_hit, E_slow, E_fast, T_slow, T_fast, T_p):
    """Seconds a token of the slow backup less those of the fast one."""
    slow, fast = (batched_seconds_per_token(b, 1, T_p, T_b, h, E_hit, E) for T_b, E in ((T_slow, E_slow), (T_fast, E_fast)))
    return float(slow - fast)


@given(st.floats(0.3, 0.99), tokens, tokens, tokens, time, time, time)
def test_the_closed_form_is_where_both_backups_are_equally_fast(h, E_hit, E1, E2, T1, T2, T_p):
    (E_fast, E_slow), (T_fast, T_slow) = sorted([E1, E2]), sorted([T1, T2])
    case = (h, E_hit, E_slow, E_fast, T_slow, T_fast, T_p)
    b = float(critical_batch(*case))
    if b == np.inf:
        assert all(difference(size, *case) <= 1e-9 for size in (1, 2, 8, 64, 1e4))
    elif b < 1:
        assert all(difference(size, *case) >= -1e-9 for size in (1, 2, 8, 64, 1e4))
    elif difference(1, *case) < -1e-9 and difference(1e4, *case) > 1e-9:
        numeric = brentq(lambda size: difference(size, *case), 1, 1e4, xtol=1e-9)
        assert abs(difference(b, *case)) <= 1e-9
        assert b == pytest.approx(numeric, abs=0.02)


def test_the_closed_form_of_a_free_fast_backup():
    h, N_s, N_f, T_s = 0.8, 0.8 * 5 + 0.2 * 5, 0.8 * 5 + 0.2 * 2, 0.5
    assert critical_batch(h, 5, 5, 2, T_s, 0, 1) == pytest.approx(np.log(1 - (N_s - N_f) / (N_f * T_s)) / np.log(h))


def test_the_domain_of_the_closed_form():
    assert critical_batch(0.8, 5, 5, 1, 0.01, 0, 1) == np.inf  # a backup that costs nothing
    assert critical_batch(1.0, 5, 5, 1, 3, 0, 1) == np.inf  # never a miss
    assert critical_batch(0.8, 5, 2, 2, 1, 0, 1) == 0  # slower and no better
    assert critical_batch(0.0, 5, 5, 4, 1, 0, 1) == 0  # always a miss, and not worth the wait
    assert critical_batch(0.0, 5, 5, 1, 1, 0, 1) == np.inf  # always a miss, and worth it
    assert 0 < critical_batch(0.5, 5, 5, 4, 3, 0, 1) < 1


@given(st.floats(0.3, 0.99), tokens, tokens, tokens, time, time, time)
def test_the_numeric_solution_is_the_closed_form_rounded_up(h, E_hit, E1, E2, T1, T2, T_p):
    (E_fast, E_slow), (T_fast, T_slow) = sorted([E1, E2]), sorted([T1, T2])
    sizes = np.arange(1, 65)
    slow, fast = (batched_seconds_per_token(sizes, 1, T_p, T_b, h, E_hit, E) for T_b, E in ((T_slow, E_slow), (T_fast, E_fast)))
    b = float(critical_batch(h, E_hit, E_slow, E_fast, T_slow, T_fast, T_p))
    if np.any(np.abs(slow - fast) < 1e-9) or abs(b - round(b)) < 1e-6 if b < 1e6 else b != np.inf:
        return  # a tie is left to rounding
    assert first_ahead(sizes, slow, fast) == (max(1, np.ceil(b)) if b < 64 else np.inf)


def test_with_per_row_backups_the_slow_one_stays_ahead_for_longer():
    h, sizes, T_slow, E = 0.8, np.arange(1, 65), 0.5, 5.0
    step = T_slow * (1 + np.arange(65) / 64)  # drafting for more rows costs a little more
    slow_row = [float(per_row_seconds_per_token(int(b), 1, 1, [0, *step[1 : b + 1]], h, E, E)) for b in sizes]
    whole = [float(batched_seconds_per_token(int(b), 1, 1, step[b], h, E, E)) for b in sizes]
    nobody_waits = [float(per_row_seconds_per_token(int(b), 1, 1, np.zeros(b + 1), h, E, 2)) for b in sizes]
    assert first_ahead(sizes, whole, nobody_waits) <= first_ahead(sizes, slow_row, nobody_waits) < np.inf


def test_the_last_crossing_counts():
    assert first_ahead([1, 2, 4, 8], [1, 3, 1, 3], [2, 2, 2, 2]) == 8
    assert first_ahead([1, 2], [3, 3], [2, 2]) == 1
    assert first_ahead([1, 2], [1, 1], [2, 2]) == np.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: critical_batch(0.8, 5, 2, 4, 1, 0, 1), "E_slow=2.*swap"),
        (lambda: critical_batch(0.8, 5, 4, 2, 0, 1, 1), "T_slow=0.*swap"),
        (lambda: first_ahead([2, 1], [1, 1], [1, 1]), "must rise"),
        (lambda: first_ahead([1, 2], [1], [1, 1]), "one entry"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
