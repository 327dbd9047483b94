"""What is drawn again given a text has the law of what was drawn with it."""

import numpy as np
import pytest

from ssd.scoring import _place, noise_given
from theory.acceptance import acceptance_rate, residual

P = np.array([0.45, 0.25, 0.15, 0.1, 0.05, 0.0])
Q = np.array([0.2, 0.4, 0.05, 0.05, 0.1, 0.2])
DRAWS = 20_000


def ranks(scores, token, without=None):
    better = scores > scores[token]
    return 1 + int(better.sum()) - int(without is not None and better[without])


def forwards(rng):
    """Acceptance and ranks as a round makes them: first the noise, then the tokens."""
    sent = int(rng.choice(6, p=Q))
    noise = rng.gumbel(size=6)
    with np.errstate(divide="ignore"):
        scores, whole = np.log(Q) + noise, int(np.argmax(np.log(P) + noise))
        if rng.random() < min(1, P[sent] / Q[sent]):
            return 1, ranks(scores, whole)
        bonus = int(np.argmax(np.log(residual(P, Q)) + noise))
    return 1 + ranks(scores, bonus, sent), ranks(scores, whole)


@pytest.mark.parametrize("part", [0, 1])
def test_ranks_drawn_given_the_text_have_the_law_of_rounds(part):
    rng = np.random.default_rng(0)
    backwards = [_place(int(rng.choice(6, p=P)), P, Q, rng)[part] for _ in range(DRAWS)]
    ahead = [forwards(rng)[part] for _ in range(DRAWS)]
    for rank in range(1, 7):
        ours, theirs = backwards.count(rank) / DRAWS, ahead.count(rank) / DRAWS
        assert abs(ours - theirs) < 5 * np.sqrt(2 * max(theirs, 1e-3) / DRAWS)
    if part == 0:
        assert backwards.count(1) / DRAWS == pytest.approx(float(acceptance_rate(P, Q)), abs=0.015)


def test_noise_given_a_token_makes_it_the_greatest_and_is_gumbel_over_all_tokens():
    rng = np.random.default_rng(1)
    drawn = []
    with np.errstate(divide="ignore"):
        for _ in range(4000):
            token = int(rng.choice(6, p=P))
            noise = noise_given(token, P, rng)
            assert int(np.argmax(np.log(P) + noise)) == token
            drawn.append(noise)
    # Mean and spread of a Gumbel, at every token, also the impossible one.
    assert np.mean(drawn, axis=0) == pytest.approx(np.full(6, np.euler_gamma), abs=0.1)
    assert np.std(drawn, axis=0) == pytest.approx(np.full(6, np.pi / np.sqrt(6)), abs=0.1)
