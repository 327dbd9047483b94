"""Prompt lookup as a backup: what it proposes is replayed on texts, and texts are read in the rounds that SSD would take."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.engine.ngram import Lookup
from ssd.lookup import NOTHING, Recorded, accepted_lengths, recorded
from ssd.outcomes import Traced
from tests.profiles import cores, lookups, synthetic, texts, with_texts


class Says:
    """Proposes a fixed text, whatever was added."""

    def __init__(self, *text: int) -> None:
        self.text, self.added = text, []

    def add(self, tokens) -> None:
        self.added += tokens

    def propose(self, count: int) -> tuple[int, ...]:
        return self.text[:count]


def test_a_proposal_is_worth_the_tokens_before_the_first_that_is_wrong():
    assert accepted_lengths((9, 9), (2, 3, 1, 2, 2, 3), 2, Says(2, 3)) == (2, 0, 0, 1, 2, 0)
    assert accepted_lengths((9, 9), (2, 3, 1), 3, Says()) == (NOTHING,) * 3


def test_the_lookup_has_read_prompt_and_output_before_the_place_and_no_more():
    says, seen = Says(1), []
    says.propose = lambda count: seen.append(tuple(says.added)) or ()
    accepted_lengths((7, 8), (1, 2, 3), 2, says)
    assert seen == [(7, 8), (7, 8, 1), (7, 8, 1, 2)]


def test_a_text_that_repeats_is_foreseen_and_one_that_never_does_is_not():
    assert accepted_lengths((1, 2, 3, 1), (2, 3, 1) * 4, 4, Lookup()) == (4,) * 9 + (3, 2, 1)
    assert set(accepted_lengths((), tuple(range(20)), 4, Lookup())) == {NOTHING}


def test_rounds_read_on_from_where_they_end_the_lookups_after_a_miss_and_the_drafts_after_a_hit():
    # K=2 from place 0: the lookup's 1 accepted, rank 2 at place 1 hits F_1=2; the draft's 2 accepted, rank 9 at place 4 misses;
    # nothing proposed at place 5, where rank 3 hits F_0+F_1+F_2=4; the draft's 0 accepted, rank 4 less the sent at place 6 misses F_0=1.
    ranks, accepted = (5, 2, 1, 1, 9, 3, 4, 7, 7), (1, 0, 0, 0, 0, NOTHING, 0, 0, 0)
    rounds = Recorded((ranks,), (accepted,)).rounds(2, (1, 1, 3), (1, 2, 1))
    assert rounds.hits == (0, 1)
    np.testing.assert_allclose(rounds.laws, [[0.5, 0, 0.5], [0.5, 0.5, 0]])
    assert rounds.drafted == (2, 1)


def test_easy_stretches_are_passed_in_few_rounds():
    """Where half of the tokens are sure and half hopeless, most rounds are hopeless."""
    sure, hopeless = (1,) * 100, (99,) * 100
    rounds = Recorded(((*hopeless, *sure),), ((0,) * 100 + (8,) * 100,)).rounds(4, (1,) * 5, (0, 0, 0, 0, 0))
    assert rounds.hits[1] == 0
    # 100 rounds of one token, then some 19 of five.
    assert 1 + rounds.laws[1] @ range(5) == pytest.approx(199 / 119, rel=0.02)


@pytest.mark.slow
@given(st.floats(0.1, 0.9), st.integers(1, 6), st.integers(0, 5))
def test_a_lookup_as_good_as_the_draft_has_the_drafts_law(alpha, K, seed):
    ranks = texts(alpha, seed=seed, length=2000)
    worth = tuple(
        tuple(next((k for k in range(8) if i + k >= len(text) or text[i + k] > 1), 8) for i in range(len(text))) for text in ranks
    )
    rounds = Recorded(ranks, worth).rounds(K, (1,) * (K + 1), (1,) * (K + 1))
    law = Traced(ranks).law(K)
    np.testing.assert_allclose(rounds.laws[1], law, atol=0.04)


def test_a_lookup_that_proposes_nothing_hits_as_an_empty_draft_does():
    ranks = texts(0.6, length=4000)
    rounds = Recorded(ranks, lookups(ranks, 0.0, proposed=0.0)).rounds(3, (1, 1, 1, 1), (1, 0, 0, 2))
    assert rounds.hits[1] == pytest.approx(Traced(ranks).curves(0, False)[0][3], abs=0.02)
    np.testing.assert_allclose(rounds.laws[1], [1, 0, 0, 0])
    assert rounds.drafted[1] == 0


def test_texts_too_short_are_refused_by_rounds_and_left_out_of_a_profile():
    with pytest.raises(ValueError, match="K=3 is more than the recorded texts can answer: the longest has 2 tokens"):
        Recorded(((1, 1),), ((0, 0),)).rounds(3, (1,) * 4, (1,) * 4)
    profile = synthetic(cores(2), traces=((1,), ()), looked_up=((0,), ()))
    assert recorded(profile) is None
    assert recorded(synthetic(cores(2))) is None
    assert recorded(with_texts(profile, traces=((1, 1), ()), ngram_accepted=((0, 3), ()))) == Recorded(((1, 1),), ((0, 3),))
