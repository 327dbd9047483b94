from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theory.acceptance import accepted_length_law, expected_tokens
from theory.hits import PowerLaw, hit_probability
from theory.lookahead import lookaheads

REJECTED, ACCEPTED = PowerLaw(0.5, 0.3).curve(40), PowerLaw(0.5, 0.2).curve(40)


@given(
    st.floats(0.2, 6),
    st.floats(0, 1),
    st.lists(st.floats(0.05, 2), min_size=4, max_size=4),
    st.lists(st.floats(0, 1), min_size=2, max_size=2),
)
@settings(max_examples=30)
def test_each_lookahead_is_the_fastest_of_all_fan_outs(T_v, catch_up, increments, acceptance):
    step = np.concatenate([[0], np.cumsum(increments)])
    for found in lookaheads(T_v, catch_up, step, acceptance, REJECTED, ACCEPTED):
        law, E, speeds = accepted_length_law(acceptance[: found.K], found.K), 1 + np.cumprod(acceptance[: found.K]).sum(), []
        for fan_out in product(range(5), repeat=found.K + 1):
            if sum(fan_out) <= 4:
                h = hit_probability(law, fan_out, [REJECTED] * found.K + [ACCEPTED])
                round_seconds = max(T_v, catch_up + found.K * step[sum(fan_out)])
                speeds.append((round_seconds + (1 - h) * found.K * step[1]) / E)
        assert found.seconds_per_token == pytest.approx(min(speeds))
        assert found.seconds_per_token == pytest.approx((max(T_v, found.T_p) + (1 - found.h) * found.K * step[1]) / E)


def test_the_fastest_comes_first_and_a_further_device_never_slows():
    step = 0.4 + 0.05 * np.arange(13)
    step[0] = 0
    one, two = (lookaheads(5.0, 0.4, step, [0.8] * 8, REJECTED, ACCEPTED, devices) for devices in (1, 2))
    assert [found.seconds_per_token for found in one] == sorted(found.seconds_per_token for found in one)
    assert two[0].seconds_per_token < one[0].seconds_per_token
    assert all(sum(found.fan_out) <= 24 and len(found.fan_out) == found.K + 1 for found in two)


def test_steps_that_grow_with_the_branches_shorten_the_lookahead():
    flat, growing = np.full(25, 0.8), 0.4 + 0.1 * np.arange(25)
    flat[0] = growing[0] = 0
    best = [lookaheads(5.0, 0.4, step, [0.8] * 8, REJECTED, ACCEPTED)[0] for step in (flat, growing)]
    assert best[0].K > best[1].K
    assert sum(best[0].fan_out) == 24 > sum(best[1].fan_out)


def test_the_replicated_pair_should_draft_no_more_than_fits():
    """Qwen3-32B with 0.6B: verification 11.45 ms, step 2.54 ms, 2.83 ms before it; 7 tokens were far slower than 4."""
    speed = {found.K: 1e3 / found.seconds_per_token for found in lookaheads(11.45, 2.83, [0] + [2.54] * 24, [0.75] * 7, REJECTED, ACCEPTED)}
    assert max(speed, key=speed.get) in (3, 4)
    assert speed[4] > 1.15 * speed[7]


def test_a_draft_that_is_never_right_is_one_token_a_round():
    found = lookaheads(2.0, 0.0, [0, 1, 1], [0.0, 0.0], [0, 1.0], [0, 1.0])[0]
    assert found.seconds_per_token == pytest.approx(2.0 / expected_tokens(0.0, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lookaheads(1, 0, [0, 1], [], REJECTED, ACCEPTED), "acceptance="),
        (lambda: lookaheads(1, 0, [1, 1], [0.5], REJECTED, ACCEPTED), "step="),
        (lambda: lookaheads(1, 0, [0, 1], [0.5], REJECTED, ACCEPTED, 0), "devices=0"),
        (lambda: lookaheads(0, 0, [0, 1], [0.5], REJECTED, ACCEPTED), "T_v=0"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
