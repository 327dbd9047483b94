"""Prompt lookup: what followed the last tokens when they stood there before."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.engine.ngram import Lookup

texts = st.lists(st.integers(0, 2), max_size=25) | st.lists(st.integers(0, 6), max_size=40)
sizes = st.tuples(st.integers(1, 3), st.integers(0, 4)).map(lambda sizes: (sizes[0] + sizes[1], sizes[0]))


def searched(text: list[int], count: int, longest: int, shortest: int) -> tuple[int, ...]:
    """The definition, tried place by place: longest suffix first, most recent occurrence first, token after token."""
    for length in range(min(longest, len(text)), shortest - 1, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                continued = list(text)
                for i in range(count):
                    continued.append(continued[end + i])
                return tuple(continued[len(text) :])
    return ()


def lookup(text: list[int], longest: int = 4, shortest: int = 1) -> Lookup:
    made = Lookup(longest, shortest)
    made.add(text)
    return made


@given(texts, st.integers(0, 12), sizes)
def test_a_proposal_is_what_a_search_of_the_whole_text_finds(text, count, sizes):
    assert lookup(text, *sizes).propose(count) == searched(text, count, *sizes)


@given(texts, st.lists(st.integers(0, 25), max_size=4), sizes)
def test_it_does_not_matter_in_what_portions_the_text_comes(text, cuts, sizes):
    grown, begin = Lookup(*sizes), 0
    for end in [*sorted(cuts), len(text)]:
        grown.add(text[begin:end])
        begin = max(begin, end)
        assert grown.propose(5) == searched(text[:begin], 5, *sizes)


@pytest.mark.parametrize(
    ("text", "proposal"),
    [
        ([], ()),
        ([1], ()),
        ([1, 2, 3], ()),
        ([7, 7], (7, 7, 7, 7)),
        ([1, 2, 3, 9, 1, 2], (3, 9, 1, 2)),
        # The longest suffix counts before the most recent place, the most recent place before the first.
        ([1, 2, 3, 4, 5, 3, 6, 2, 3], (4, 5, 3, 6)),
        ([2, 3, 4, 2, 3, 5, 9, 2, 3], (5, 9, 2, 3)),
        # A text that has begun to repeat itself goes on as it began.
        ([8, 1, 2, 3, 1, 2], (3, 1, 2, 3)),
        ([5, 6, 5, 6, 5], (6, 5, 6, 5)),
    ],
)
def test_examples(text, proposal):
    assert lookup(text).propose(4) == proposal


def test_a_match_shorter_than_the_shortest_is_none():
    text = [1, 2, 9, 3, 2]
    assert lookup(text, 4, 1).propose(2) == (9, 3)
    assert lookup(text, 4, 2).propose(2) == ()


def test_a_match_longer_than_the_longest_is_not_looked_for():
    text = [1, 2, 3, 8, 4, 2, 3, 9, 1, 2, 3]
    assert lookup(text, 3).propose(1) == (8,)
    assert lookup(text, 2).propose(1) == (9,)


def bytes_of(tokens: int) -> int:
    """Memory of the index of a text without any repetition, its worst case."""
    text = list(range(tokens))
    tracemalloc.start()
    made = lookup(text)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(made._children) <= made.longest * tokens
    return held


def test_memory_grows_with_the_text_and_no_faster():
    small, large = bytes_of(3_000), bytes_of(24_000)
    assert large < 12 * small
    assert large < 1_000 * 24_000


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Lookup(shortest=0), "shortest=0"),
        (lambda: Lookup(longest=1, shortest=2), "longest=1 .* at least 2"),
        (lambda: Lookup().propose(-1), "count=-1"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
