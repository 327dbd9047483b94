"""Tokens as trainers want them: windows of a stream, pure functions of seed and index, so that a run can be taken up anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ssd.training.corpus import Document

Tokens = NDArray[np.int32]
T = TypeVar("T")


def stream(documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Return the documents' tokens one after the other, an end token after each, [tokens]."""
    encoded = tokenizer([document.text for document in documents], add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    tail = [] if end is None else [end]
    return np.concatenate([np.asarray(ids + tail, dtype=np.int32) for ids in encoded])


def shuffled(documents: Sequence[Document], seed: int) -> list[Document]:
    """Return the documents in an order that the seed settles."""
    return [documents[place] for place in np.random.default_rng(seed).permutation(len(documents))]


class Windows(Dataset[dict[str, torch.Tensor]]):
    """`count` windows of `length` tokens at random places of a stream; item i depends on the seed and i alone."""

    def __init__(self, tokens: Tokens, length: int, count: int, seed: int) -> None:
        if len(tokens) < length:
            raise ValueError(f"window={length} is longer than the text of {len(tokens)} tokens: give more text or a shorter window")
        self.tokens, self.length, self.count, self.seed = tokens, length, count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = int(np.random.default_rng((self.seed, index)).integers(len(self.tokens) - self.length + 1))
        return as_item(self.tokens[begin : begin + self.length])


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The rows of a table of tokens, [rows, length]."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return as_item(self.tokens[index])


class Alternating(Dataset[dict[str, torch.Tensor]]):
    """`count` items, taken in turn from several datasets, each begun again at its end."""

    def __init__(self, parts: Sequence[Dataset[dict[str, torch.Tensor]]], count: int) -> None:
        self.parts: Sequence[Any] = parts
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        part = self.parts[index % len(self.parts)]
        item: dict[str, torch.Tensor] = part[index // len(self.parts) % len(part)]
        return item


def as_item(tokens: Tokens) -> dict[str, torch.Tensor]:
    """Return what a causal language model is trained on: the tokens, which are their own labels, [length]."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    return {"input_ids": ids, "labels": ids}


def cut(tokens: Tokens, length: int, count: int) -> Tokens:
    """Return up to `count` windows that do not overlap, spread over the stream, [windows, length]."""
    if len(tokens) < length:
        raise ValueError(f"window={length} is longer than the held-out text of {len(tokens)} tokens: give more or a shorter window")
    rows = tokens[: len(tokens) // length * length].reshape(-1, length)
    return rows[spread(range(len(rows)), count)]


def spread(items: Sequence[T], count: int) -> list[T]:
    """Return `count` of the items, or all where there are fewer, from first to last and evenly spread."""
    places = np.linspace(0, len(items) - 1, min(count, len(items))).round().astype(int)
    return [items[place] for place in places]
