"""Windows, rows and streams of tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.training.corpus import Document
from ssd.training.data import Alternating, Rows, Windows, cut, shuffled, spread, stream
from ssd.training.tokenizer import END, train_tokenizer
from tests import tiny

TOKENS = np.arange(100, dtype=np.int32)


@given(st.integers(0, 2**31), st.integers(1, 100), st.integers(0, 10**6))
def test_a_window_depends_on_seed_and_index_alone_and_is_a_piece_of_the_stream(seed, length, index):
    first = Windows(TOKENS, length, 10, seed)[index]["input_ids"].numpy()
    again = Windows(TOKENS, length, 99, seed)[index]["input_ids"].numpy()
    assert np.array_equal(first, again)
    assert np.array_equal(first, np.arange(first[0], first[0] + length))
    assert first[-1] < 100


def test_windows_reach_both_ends_of_the_stream_and_differ_between_seeds():
    firsts = [int(Windows(TOKENS, 98, 1, 0)[index]["input_ids"][0]) for index in range(50)]
    assert set(firsts) == {0, 1, 2}
    assert firsts != [int(Windows(TOKENS, 98, 1, 1)[index]["input_ids"][0]) for index in range(50)]


def test_labels_are_the_tokens_themselves():
    item = Rows(TOKENS.reshape(4, 25))[2]
    assert item["input_ids"].tolist() == item["labels"].tolist() == list(range(50, 75))


def test_a_window_longer_than_the_text_is_refused():
    with pytest.raises(ValueError, match="window=101 is longer than the text of 100 tokens"):
        Windows(TOKENS, 101, 1, 0)
    with pytest.raises(ValueError, match="window=101 is longer than the held-out text"):
        cut(TOKENS, 101, 1)


def test_datasets_take_turns_and_begin_again():
    parts = Rows(TOKENS[:2].reshape(2, 1)), Rows(TOKENS[50:53].reshape(3, 1))
    both = Alternating(parts, 8)
    assert [int(both[index]["input_ids"][0]) for index in range(len(both))] == [0, 50, 1, 51, 0, 52, 1, 50]


@given(st.integers(1, 120), st.integers(1, 200))
def test_cut_gives_windows_that_do_not_overlap(length, count):
    if length > 100:
        return
    rows = cut(TOKENS, length, count)
    assert len(rows) == min(count, 100 // length)
    assert len(set(rows.ravel().tolist())) == rows.size


@given(st.integers(1, 50), st.integers(1, 60))
def test_spread_keeps_the_order_and_both_ends(available, count):
    found = spread(range(available), count)
    assert len(found) == min(available, count)
    assert found == sorted(set(found))
    assert found[0] == 0
    assert count == 1 or found[-1] == available - 1


def test_a_stream_has_an_end_token_after_each_document_and_gives_the_text_back():
    documents = [Document("a.py", "def f():\n    return 'é'\n"), Document("b.py", "x = 1")]
    tokenizer = train_tokenizer(documents * 20, 300, 64)
    tokens = stream(documents, tokenizer)
    assert tokenizer.decode(tokens) == f"{documents[0].text}{END}{documents[1].text}{END}"
    assert tokens.tolist().count(tokenizer.eos_token_id) == 2


def test_the_order_of_documents_hangs_on_the_seed():
    documents = [Document(f"{index}.py", "x") for index in range(20)]
    assert shuffled(documents, 1) == shuffled(documents, 1) != shuffled(documents, 2)
    assert sorted(document.name for document in shuffled(documents, 1)) == sorted(document.name for document in documents)


@given(st.text(max_size=200))
def test_any_text_survives_a_trained_tokenizer(text):
    assert TRAINED.decode(TRAINED(text)["input_ids"]) == text


TRAINED = train_tokenizer([Document("a.py", "def f(n):\n    return n + 1\n" * 10)], 300, 64)


def test_a_tokenizer_without_an_end_token_makes_a_stream_without_ends():
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = None
    assert len(stream([Document("a", "ab"), Document("b", "c")], tokenizer)) == 3
