"""What a request's parameters come to: checked against the pair, with the seed drawn, the verification chosen and texts made tokens."""

from __future__ import annotations

import secrets
from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from ssd.models import Pair
from ssd.sampling import sample_seed
from ssd.specs import SamplingParams, Verification


def resolved(params: SamplingParams, pair: Pair, ends: Collection[int], planned: Verification) -> list[SamplingParams]:
    """Return the parameters of each of the n outputs; ValueError for tokens that the target does not have or that leave none to draw."""
    vocab = pair.target.vocab_size
    named = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias,
        "bad_words_token_ids": [token for word in params.bad_words_token_ids for token in word],
    }
    for name, tokens in named.items():
        if not all(token < vocab for token in tokens):
            raise ValueError(f"{name}={getattr(params, name)} has a token id outside 0..{vocab - 1}: it could never come")
    words = (*params.bad_words_token_ids, *_token_ids(params.bad_words, pair.tokenizer))
    barred = {word[0] for word in words if len(word) == 1} | (set(ends) if params.min_tokens else set())
    if len(barred) >= vocab:
        raise ValueError(f"bad_words and min_tokens={params.min_tokens} together leave no token of {vocab} to draw: allow some")
    scheme = params.verification
    if scheme == "auto":
        scheme = "coupled" if params.seed is not None else planned
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return [
        params.model_copy(update={"seed": sample_seed(seed, index), "verification": scheme, "bad_words_token_ids": words, "bad_words": ()})
        for index in range(params.n)
    ]


def _token_ids(words: Collection[str], tokenizer: PreTrainedTokenizerBase) -> list[tuple[int, ...]]:
    """Return the tokens of each text alone and, unless it begins with a space of some kind, after a space; each once."""
    spellings = [spelling for word in words for spelling in ([word] if word[0].isspace() else [word, " " + word])]
    found = [tuple(tokenizer(spelling, add_special_tokens=False)["input_ids"]) for spelling in spellings]
    return [ids for ids in dict.fromkeys(found) if ids]
