import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.latency import Latency
from sim.outcomes import IID, NEVER, Positional, Replay, Trace, TwoState, outcome_at, rounds_of
from sim.scenario import Scenario
from sim.simulate import simulate
from theory.acceptance import accepted_length_law

CURVE = (0.0, 0.5, 0.7, 0.9)
ROUNDS = 20_000


def played(model, drafted, hit=True, rounds=ROUNDS):
    draw = model.start(np.random.default_rng(1))
    return np.array([draw(drafted, hit) for _ in range(rounds)])


def shares(values, size):
    return np.bincount(values, minlength=size) / len(values)


def test_iid_outcomes_follow_the_length_law_and_the_curve():
    k, rank = played(IID(0.7, CURVE), drafted=3).T
    np.testing.assert_allclose(shares(k, 4), accepted_length_law(0.7, 3), atol=0.015)
    np.testing.assert_allclose([np.mean(rank <= F) for F in (0, 1, 2, 3, 1000)], [0, 0.5, 0.7, 0.9, 0.9], atol=0.015)


def test_iid_ranks_follow_their_own_curve_after_full_acceptance():
    k, rank = played(IID(0.7, CURVE, curve_at_end=(0.0, 1.0)), drafted=2).T
    assert set(rank[k == 2]) == {1}
    assert set(rank[k < 2]) == {1, 2, 3, NEVER}


def test_positional_outcomes_follow_each_position():
    alphas = (0.9, 0.3)
    k, rank = played(Positional(alphas, ((0.0, 1.0), (0.0, 0.0, 1.0), (0.0, 0.0, 0.0, 1.0))), drafted=2).T
    np.testing.assert_allclose(shares(k, 3), accepted_length_law(alphas, 2), atol=0.015)
    assert np.all(rank == k + 1)


def test_a_short_draft_uses_the_last_curve_at_its_end():
    model = Positional((1.0, 1.0), ((0.0, 1.0), (0.0, 1.0), (0.0, 0.0, 1.0)))
    assert set(map(tuple, played(model, drafted=1, rounds=10))) == {(1, 2)}


def test_two_state_outcomes_depend_on_the_draft_before():
    model = TwoState(after_hit=IID(1.0, CURVE), after_miss=IID(0.0, CURVE))
    assert set(played(model, 3, hit=True, rounds=10)[:, 0]) == {3}
    assert set(played(model, 3, hit=False, rounds=10)[:, 0]) == {0}


def test_replay_keeps_the_order_inside_a_block():
    record = tuple((0, rank) for rank in range(1, 101))
    ranks = played(Replay(record, lookahead=4, block=5), drafted=4, rounds=100)[:, 1].reshape(20, 5)
    assert np.all((np.diff(ranks) == 1) | (np.diff(ranks) == -99))
    assert np.mean(ranks[1:, 0] - ranks[:-1, -1] == 1) < 0.5


def test_replay_of_whole_drafts_keeps_the_law_of_the_record():
    record = ((0, 3), (2, 1), (2, 1), (1, 9))
    k, rank = played(Replay(record, lookahead=2, block=1), drafted=2).T
    np.testing.assert_allclose(shares(k, 3), [0.25, 0.25, 0.5], atol=0.015)
    assert set(zip(k.tolist(), rank.tolist(), strict=True)) == set(record)


@pytest.mark.parametrize(("recorded", "expected"), [((3, 5), (2, 1)), ((2, 5), (2, 6)), ((1, 5), (1, 5))])
def test_replay_answers_a_shorter_draft_from_the_same_record(recorded, expected):
    draw = Replay((recorded,), lookahead=3).start(np.random.default_rng(0))
    assert draw(2, True) == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: IID(70, CURVE), "alpha=70"),
        (lambda: IID(0.7, (0.5, 0.2)), "curve=.*cumulative"),
        (lambda: IID(0.7, CURVE, (0.0, 2.0)), "curve_at_end=.*at most 1"),
        (lambda: Positional((0.5,), (CURVE,)), "1 curves for 1 alphas"),
        (lambda: Positional((0.5,), (CURVE, (1.0,))), r"curves\[1\]"),
        (lambda: Positional((0.5,), (CURVE, CURVE)).start(np.random.default_rng(0))(2, True), "drafted=2 tokens but only 1 alphas"),
        (lambda: Replay((), 3), "nothing to replay"),
        (lambda: Replay(((4, 1),), 3), r"\(4, 1\).*lookahead=3"),
        (lambda: Replay(((1, 0),), 3), "rank start at 1"),
        (lambda: Replay(((1, 1),), 3, block=0), "block=0"),
        (lambda: Replay(((1, 1),), 3).start(np.random.default_rng(0))(4, True), "drafted=4 exceeds lookahead=3"),
    ],
)
def test_a_bad_model_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


ranks_of_a_text = st.lists(st.integers(1, 4), min_size=1, max_size=40).map(tuple)


@given(ranks_of_a_text, st.integers(0, 6))
def test_the_rounds_of_a_trace_read_the_text_once_and_in_order(text, K):
    """Played from the beginning, k accepted tokens are the draft's own choices and the next is not, unless all K were accepted."""
    place = 0
    while place + K < len(text):
        accepted, rank = outcome_at(text, place, K)
        assert all(r == 1 for r in text[place : place + accepted])
        if accepted < K:
            assert text[place + accepted] == rank + 1 > 1
        else:
            assert text[place + K] == rank
        place += accepted + 1


def test_a_trace_answers_any_lookahead_from_the_same_text():
    text = (1, 1, 3, 1, 2, 1, 1, 1)
    assert outcome_at(text, 0, 1) == (1, 1)
    assert outcome_at(text, 0, 2) == (2, 3)
    assert outcome_at(text, 0, 4) == (2, 2)
    assert outcome_at(text, 3, 4) == (1, 1)
    draw = Trace((text,)).start(np.random.default_rng(0))
    assert [draw(3, False), draw(3, False)] == [(2, 2), (1, 1)]


def test_the_rounds_of_a_text_begin_at_each_of_its_first_places():
    assert rounds_of(((1, 1, 2, 1, 1),), 1) == [(1, 1), (0, 1), (1, 1), (1, 2), (1, 1)]


@given(ranks_of_a_text, st.lists(st.integers(0, 3), min_size=2, max_size=6).filter(any).map(tuple), st.integers(1, 3))
def test_every_request_as_long_as_a_text_reads_it_from_its_first_token_to_its_last(text, fan_out, rows):
    K, free = len(fan_out) - 1, Latency.constant(0.0)
    expected, place, hit = [], 1, text[0] <= sum(fan_out)
    while place < len(text):
        k, rank = outcome_at(text, place, K)
        expected.append((hit, min(k + 1, len(text) - place)))
        hit, place = rank <= fan_out[k], place + k + 1
    result = simulate(
        Scenario(
            mode="ssd",
            verify=Latency.constant(1.0),
            target_prefill_seconds=1.0,
            draft_step=free,
            draft_alone=free,
            num_speculative_tokens=K,
            fan_out_hit=fan_out,
            fan_out_miss=fan_out,
            outcomes=Trace((text,)),
            output_tokens=len(text),
            num_requests=3 * rows,
            batch_size=rows,
        )
    )
    for served in result.requests:
        assert [(r.hit, r.committed) for r in result.rounds if r.request == served.request] == expected


@given(st.lists(ranks_of_a_text, min_size=1, max_size=3).map(tuple), st.integers(0, 5), st.integers(0, 100))
def test_a_trace_never_runs_out(texts, K, seed):
    draw = Trace(texts).start(np.random.default_rng(seed))
    for _ in range(100):
        accepted, rank = draw(K, True)
        assert 0 <= accepted <= K
        assert rank >= 1


@pytest.mark.parametrize("ranks", [(), ((),), ((1, 0),)])
def test_a_trace_of_nothing_is_refused(ranks):
    with pytest.raises(ValueError, match="ranks="):
        Trace(ranks)


def test_ranks_after_whole_drafts_are_read_there_and_nowhere_else():
    text, ends = (1, 1, 3, 1), (9, 8, 7, 6)
    assert outcome_at(text, 0, 2, ends) == (2, 7)
    assert outcome_at(text, 0, 3, ends) == (2, 2)
    assert outcome_at(text, 3, 4, ends) == (4, 1)
    assert rounds_of((text,), 1, (ends,))[:2] == [(1, 8), (0, 2)]
    with pytest.raises(ValueError, match="differ in length"):
        Trace((text,), ((1,),))
