import json
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.metrics import Metrics, Round


def a_round(drafted: int, accepted: int, committed: int, hit: bool | None, backup: bool = False) -> Round:
    return Round("a", drafted, accepted, committed, hit, backup, verify_seconds=2.0, wait_seconds=0.5)


def test_rounds_of_ssd_add_up():
    rounds = [
        a_round(4, 4, 5, True),
        a_round(4, 2, 3, True),
        a_round(4, 0, 1, False, backup=True),
        a_round(0, 0, 1, False, backup=True),
        a_round(4, 4, 2, True),  # cropped at a stop after two tokens
    ]
    m = Metrics.from_rounds(rounds, num_output_tokens=13, total_seconds=14.0, time_to_first_token=2.0)
    assert (m.num_rounds, m.num_drafts, m.num_draft_tokens, m.num_accepted_tokens) == (5, 4, 16, 8)
    assert m.draft_acceptance_rate == 0.5
    assert m.mean_acceptance_length == 3
    assert m.acceptance_histogram == (1, 0, 2, 0, 1)
    assert (m.num_cache_hits, m.num_cache_misses, m.cache_hit_rate, m.num_backups) == (3, 2, 0.6, 2)
    assert m.mean_acceptance_length_on_hit == pytest.approx(11 / 3)
    assert m.mean_acceptance_length_on_miss == 1
    assert (m.verify_seconds, m.wait_seconds) == (10, 2.5)
    assert (m.num_output_tokens, m.total_seconds, m.time_to_first_token) == (13, 14, 2)
    assert m.output_tokens_per_second == pytest.approx(13 / 14)
    assert m.time_per_output_token == 1


def test_ratios_without_a_denominator_are_none():
    m = Metrics.from_rounds([a_round(0, 0, 1, None)], num_output_tokens=1, total_seconds=0.0, time_to_first_token=None)
    assert m.draft_acceptance_rate is None
    assert m.mean_acceptance_length is None
    assert m.cache_hit_rate is None
    assert m.mean_acceptance_length_on_hit is None
    assert m.mean_acceptance_length_on_miss is None
    assert m.output_tokens_per_second is None
    assert m.time_per_output_token is None
    assert m.acceptance_histogram == ()
    assert (m.num_drafts, m.num_cache_hits, m.num_cache_misses) == (0, 0, 0)


def test_time_per_token_leaves_out_the_first_token_of_each_request():
    m = Metrics.from_rounds([], num_output_tokens=22, total_seconds=26.0, time_to_first_token=3.0, num_requests=2)
    assert m.time_per_output_token == 1
    alone = Metrics.from_rounds([], num_output_tokens=1, total_seconds=3.0, time_to_first_token=3.0)
    assert alone.time_per_output_token is None


counts = st.integers(0, 4).flatmap(lambda drafted: st.tuples(st.just(drafted), st.integers(0, drafted)))
several_rounds = st.lists(
    st.builds(lambda k, hit, backup: a_round(*k, k[1] + 1, hit, backup), counts, st.booleans(), st.booleans()), max_size=6
)
requests = st.tuples(several_rounds, st.integers(1, 30), st.floats(0.1, 3.0), st.floats(0.1, 30.0))


def of(request) -> Metrics:
    rounds, tokens, first, after = request
    return Metrics.from_rounds(rounds, num_output_tokens=tokens, total_seconds=first + after, time_to_first_token=first)


@given(st.lists(requests, min_size=1, max_size=5))
def test_requests_added_up_are_their_rounds_summed_up(asked):
    total = reduce(Metrics.plus, map(of, asked))
    whole = Metrics.from_rounds(
        [entry for rounds, *_ in asked for entry in rounds],
        num_output_tokens=sum(tokens for _, tokens, _, _ in asked),
        total_seconds=sum(first + after for *_, first, after in asked),
        time_to_first_token=sum(first for _, _, first, _ in asked) / len(asked),
        num_requests=len(asked),
    )
    # Alone, a request of one token has no time after its first; in a sum its seconds have no tokens to be divided by.
    skipped = {"time_per_output_token"} if any(tokens == 1 for _, tokens, _, _ in asked) else set()
    for name, value in whole.to_dict().items():
        if name not in skipped:
            assert total.to_dict()[name] == (pytest.approx(value) if value is not None else None), name
    assert total.over(2.0).output_tokens_per_second == pytest.approx(total.num_output_tokens / 2)
    assert total.over(2.0).num_rounds == total.num_rounds


def test_the_dictionary_survives_json():
    m = Metrics.from_rounds([a_round(2, 1, 2, True)], num_output_tokens=3, total_seconds=3.0, time_to_first_token=0.5)
    values = json.loads(json.dumps(m.to_dict()))
    assert values == m.to_dict()
    assert Metrics(**{**values, "acceptance_histogram": tuple(values["acceptance_histogram"])}) == m


@pytest.mark.parametrize(("counts", "message"), [((2, 3, 1), "accepted=3.*drafted=2"), ((2, 1, 3), r"committed=3.*accepted \+ 1 = 2")])
def test_impossible_counts_are_refused(counts, message):
    with pytest.raises(ValueError, match=message):
        a_round(*counts, hit=True)
