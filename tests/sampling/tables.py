"""Laws of made-up models: a law after every text, drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from hypothesis import strategies as st

Tokens = tuple[int, ...]
KINDS = ("dense", "zeros", "one-hot")


def table(seed: int, kind: str, vocab_size: int) -> Callable[[Tokens], np.ndarray]:
    """A law after each text: dense, with zeros, or all on one token."""

    @lru_cache(None)
    def law(text: Tokens) -> np.ndarray:
        rng = np.random.default_rng([seed, *text])
        weights = rng.dirichlet(np.ones(vocab_size))
        if kind == "one-hot":
            return np.eye(vocab_size)[rng.integers(vocab_size)]
        if kind == "zeros":
            weights = weights * (rng.random(vocab_size) < 0.6)
            if not weights.any():
                weights[rng.integers(vocab_size)] = 1
        return weights / weights.sum()

    return law


def apart(seed: int, vocab_size: int) -> tuple[Callable[[Tokens], np.ndarray], Callable[[Tokens], np.ndarray]]:
    """Two tables whose laws share no token."""
    whole = table(seed, "dense", vocab_size)

    def half(parity: int) -> Callable[[Tokens], np.ndarray]:
        def law(text: Tokens) -> np.ndarray:
            weights = whole(text) * (np.arange(vocab_size) % 2 == (parity + len(text)) % 2)
            return weights / weights.sum()

        return law

    return half(0), half(1)


@st.composite
def pairs(draw, vocab_size: int):
    """Laws of a target and a draft: anything, the same, or apart."""
    seed = draw(st.integers(0, 10_000))
    relation = draw(st.sampled_from(["free", "free", "free", "equal", "apart"]))
    if relation == "apart":
        return apart(seed, vocab_size)
    p = table(seed, draw(st.sampled_from(KINDS)), vocab_size)
    return p, p if relation == "equal" else table(seed + 1, draw(st.sampled_from(KINDS)), vocab_size)
