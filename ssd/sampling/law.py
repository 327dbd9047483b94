"""From logits to the law that a token is drawn from: a pure function of the logits, the row's parameters and the tokens before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ssd.sampling.parameters import Parameters

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Before:
    """What stands before each of n places: how many tokens, int64 [n], and where a law reads them the tokens, [n, L], -1 in front."""

    length: torch.Tensor
    ids: torch.Tensor | None = None


def padded(texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return token ids side by side as `Before.ids`: -1 in front of a shorter text, [n, longest]."""
    longest = max(map(len, texts))
    return torch.tensor([[-1] * (longest - len(text)) + list(text) for text in texts])


def processed(logits: torch.Tensor, parameters: Parameters, before: Before) -> torch.Tensor:
    """Return logits `[n, vocabulary]` after bias, bad words, min_tokens and the penalties, in this order, before the temperature.

    Repetition looks at prompt and output, as transformers does; presence and frequency at the output alone, as vLLM does.
    """
    scores = logits
    if parameters.bare:
        return scores
    if parameters.bias is not None:
        scores = scores + parameters.bias
    if parameters.words is not None:
        scores = scores.masked_fill(_ends_a_word(parameters.words, _ids(before), scores.shape[-1]), NEVER)
    output = before.length - parameters.prompt
    if parameters.min_tokens is not None and parameters.ends is not None:
        scores = scores.masked_fill(parameters.ends & (output < parameters.min_tokens)[:, None], NEVER)
    if parameters.repetition is not None:
        seen, factor = _counts(_ids(before), scores.shape[-1]) > 0, parameters.repetition[:, None].to(scores.dtype)
        scores = torch.where(seen, torch.where(scores > 0, scores / factor, scores * factor), scores)
    if parameters.presence is not None or parameters.frequency is not None:
        counts = _counts(_last(_ids(before), output), scores.shape[-1]).to(scores.dtype)
        if parameters.frequency is not None:
            scores = scores - parameters.frequency[:, None].to(scores.dtype) * counts
        if parameters.presence is not None:
            scores = scores - parameters.presence[:, None].to(scores.dtype) * (counts > 0)
    return scores


def log_law(scores: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """Return log-probabilities `[n, vocabulary]` of processed logits under temperature, then top-k, top-p and min-p.

    Temperature 0 is the limit: all mass on the largest logit, the first among equals. Order and ties are those of theory.sampling_law.
    """
    if parameters.greedy:
        return _likeliest(scores)
    logits, temperature = scores, parameters.temperature[:, None].to(scores.dtype)
    cold = temperature == 0
    if parameters.top_k is not None:
        best = scores.topk(parameters.largest_k, -1).values
        scores = scores.masked_fill(scores < best.gather(-1, (parameters.top_k[:, None] - 1).expand(len(scores), 1)), NEVER)
    # The largest is taken off before the division: a tiny temperature would send it to infinity.
    law = torch.log_softmax((scores - scores.amax(-1, keepdim=True)) / torch.where(cold, 1.0, temperature), -1)
    if parameters.top_p is not None:
        law = _nucleus(law, parameters.top_p[:, None].to(law.dtype))
    if parameters.min_p is not None:
        least = parameters.min_p[:, None].to(law.dtype).log() + law.amax(-1, keepdim=True)
        law = torch.log_softmax(law.masked_fill(law < least, NEVER), -1)
    return torch.where(cold, _likeliest(logits), law) if parameters.some_greedy else law


def _likeliest(scores: torch.Tensor) -> torch.Tensor:
    return torch.full_like(scores, NEVER).scatter_(-1, scores.argmax(-1, keepdim=True), 0.0)


def _nucleus(law: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Keep tokens while those before them, best first, have less than this mass; all where it is 1."""
    ranked, order = law.exp().sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked
    dropped = torch.zeros_like(law, dtype=torch.bool).scatter_(-1, order, (before >= mass) & (mass < 1) & (before > 0))
    return torch.log_softmax(law.masked_fill(dropped, NEVER), -1)


def _ids(before: Before) -> torch.Tensor:
    if before.ids is None:
        raise ValueError("before.ids is missing: penalties and bad words read the tokens that came before")
    return before.ids


def _last(ids: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Return `ids` `[n, L]` with all but the last `count` `[n]` of each row made -1."""
    places = torch.arange(ids.shape[1], 0, -1, device=ids.device)
    return torch.where(places <= count[:, None], ids, -1)


def _counts(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return how often each token occurs, [n, L] -> [n, vocabulary]; ids past the vocabulary and -1 count nowhere."""
    known = torch.where((ids >= 0) & (ids < vocab_size), ids, vocab_size)
    counts = torch.zeros(ids.shape[0], vocab_size + 1, dtype=torch.float32, device=ids.device)
    return counts.scatter_add_(1, known, torch.ones_like(known, dtype=torch.float32))[:, :vocab_size]


def _ends_a_word(words: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return whether a token would complete one of the row's words, [n, W, L] and [n, length] -> bool [n, vocabulary]."""
    start = words[..., :-1]
    tail = torch.nn.functional.pad(ids, (start.shape[-1], 0), value=-1)[:, ids.shape[1] :]
    fits = ((start == tail[:, None]) | (start == -1)).all(-1) & (words[..., -1] >= 0)
    last = torch.where(fits, words[..., -1], vocab_size)
    return torch.zeros(len(ids), vocab_size + 1, dtype=torch.bool, device=ids.device).scatter_(1, last, value=True)[:, :vocab_size]
