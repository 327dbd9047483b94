"""Recorded and assumed outcomes as theory reads them, beside the simulator's."""

import numpy as np
import pytest

from ssd.outcomes import LARGEST_BUDGET, Assumed, Traced, outcome_model
from tests.profiles import cores, synthetic, texts


def test_a_texts_rounds_are_counted_by_position():
    # The third of every three tokens is the draft's second choice.
    model = Traced(((1, 1, 2) * 40,))
    law, (rejected, _, end) = model.law(2), model.curves(2, after_hit=True)
    assert law[2] > 0.9
    # After two accepted tokens the bonus is second; where it was rejected the first is no candidate, so it is the best.
    assert (end[0], end[1], end[2]) == (0, 0, 1)
    assert (rejected[0], rejected[1]) == (0, 1)


def test_the_longest_draft_is_what_a_text_can_answer():
    assert Traced(((1, 1, 1), (1, 1))).longest == 2
    assert Traced(((1,) * 100,)).longest == 8
    assert outcome_model(synthetic(cores(2), traces=((1,),))) == Assumed(0.8)


@pytest.mark.parametrize("model", [Assumed(0.8), Traced(texts(0.8, length=2000))])
@pytest.mark.parametrize("K", [0, 1, 4, 8])
def test_theory_and_simulator_read_the_same_outcomes(model, K):
    draw = model.simulated().start(np.random.default_rng(0))
    drawn = [draw(K, True) for _ in range(20_000)]
    lengths = np.bincount([k for k, _ in drawn], minlength=K + 1) / len(drawn)
    assert lengths == pytest.approx(model.law(K), abs=0.015)
    for F in (1, 3, LARGEST_BUDGET):
        hits = np.mean([rank <= F for _, rank in drawn])
        assert hits == pytest.approx(sum(P * curve[F] for P, curve in zip(model.law(K), model.curves(K, True), strict=True)), abs=0.015)


def test_assumed_misses_are_more_after_a_miss():
    after_hit, after_miss = (Assumed(0.8).curves(2, state)[0] for state in (True, False))
    assert np.all(after_hit[1:] > after_miss[1:])
    assert 1 - after_hit[8] == pytest.approx(0.28 * 8**-0.54)
