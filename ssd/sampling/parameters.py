"""The sampling parameters of several rows, side by side in tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ssd.devices import upload
from ssd.specs import SamplingParams


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of n rows. What no row uses is None, and costs nothing.

    temperature, top_p, min_p, the penalties: fp64 [n]; top_k, min_tokens, prompt: int64 [n], `prompt` being the length of the prompt;
    bias: fp32 [n, vocabulary]; ends: bool [n, vocabulary], tokens that may not come before min_tokens;
    words: int64 [n, W, L], sequences that may not come, padded with -1 in front, a row of -2 where there is no word.
    """

    temperature: torch.Tensor
    prompt: torch.Tensor
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    repetition: torch.Tensor | None = None
    presence: torch.Tensor | None = None
    frequency: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    min_tokens: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    words: torch.Tensor | None = None
    largest_k: int = 0
    greedy: bool = True
    some_greedy: bool = True

    @classmethod
    def of(
        cls,
        rows: Sequence[SamplingParams],
        prompts: Sequence[int],
        ends: Sequence[Sequence[int]],
        vocab_size: int,
        device: torch.device | str,
    ) -> Parameters:
        """Stack the parameters of `rows`, whose prompts have `prompts` tokens and whose outputs end at `ends`; ids past the vocabulary
        are left out: such a token cannot come."""

        def column(name: str, neutral: float, dtype: torch.dtype = torch.float64) -> torch.Tensor | None:
            values = [getattr(row, name) for row in rows]
            return None if all(value == neutral for value in values) else torch.tensor(values, dtype=dtype)

        top_k, min_tokens = column("top_k", 0, torch.long), column("min_tokens", 0, torch.long)
        if top_k is not None:
            top_k = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
        on_host = cls(
            temperature=torch.tensor([row.temperature for row in rows], dtype=torch.float64),
            prompt=torch.tensor(list(prompts)),
            top_k=top_k,
            top_p=column("top_p", 1.0),
            min_p=column("min_p", 0.0),
            repetition=column("repetition_penalty", 1.0),
            presence=column("presence_penalty", 0.0),
            frequency=column("frequency_penalty", 0.0),
            bias=_bias(rows, vocab_size),
            min_tokens=min_tokens,
            ends=None if min_tokens is None else _marked(ends, vocab_size),
            words=_words(rows, vocab_size),
            largest_k=0 if top_k is None else int(max(row.top_k if 0 < row.top_k < vocab_size else vocab_size for row in rows)),
            greedy=all(row.temperature == 0 for row in rows),
            some_greedy=any(row.temperature == 0 for row in rows),
        )
        return on_host.mapped(lambda part: upload(part.numpy(), torch.device(device)))

    @property
    def reads_prefix(self) -> bool:
        """Whether a law hangs on which tokens came before, not only on how many."""
        return any(part is not None for part in (self.repetition, self.presence, self.frequency, self.words))

    @property
    def bare(self) -> bool:
        """Whether logits are taken as they are: no bias, no words or ends that may not come, no penalties."""
        return self.bias is None and self.min_tokens is None and not self.reads_prefix

    def repeated(self, times: int) -> Parameters:
        """Return every row `times` times over, for the places of a draft: [n] -> [n * times]."""
        if times == 1:
            return self
        return self.mapped(lambda part: part.repeat_interleave(times, 0))

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Parameters:
        """Return them with `function` of each tensor in its place."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        found: Any = {name: function(part) for name, part in parts.items() if isinstance(part, torch.Tensor)}
        return replace(self, **found)


def _bias(rows: Sequence[SamplingParams], vocab_size: int) -> torch.Tensor | None:
    if not any(row.logit_bias for row in rows):
        return None
    bias = torch.zeros(len(rows), vocab_size)
    for place, row in enumerate(rows):
        for token, value in row.logit_bias.items():
            if token < vocab_size:
                bias[place, token] = value
    return bias


def _marked(ids: Sequence[Sequence[int]], vocab_size: int) -> torch.Tensor:
    marked = torch.zeros(len(ids), vocab_size, dtype=torch.bool)
    for place, row in enumerate(ids):
        marked[place, [token for token in row if token < vocab_size]] = True
    return marked


def _words(rows: Sequence[SamplingParams], vocab_size: int) -> torch.Tensor | None:
    lists = [[word for word in row.bad_words_token_ids if max(word) < vocab_size] for row in rows]
    count = max(map(len, lists))
    if not count:
        return None
    longest = max(len(word) for words in lists for word in words)
    padded = [[[-1] * (longest - len(word)) + list(word) for word in words] + [[-2] * longest] * (count - len(words)) for words in lists]
    return torch.tensor(padded)
