"""Keyed noise: every random number is a pure function of seed, purpose, position and the tokens before it, the same on every device.

A counter-based hash: the finaliser of SplitMix64 (Steele, Lea, Flood, Fast splittable pseudorandom number generators, 2014), on 64-bit
integers that wrap. Why the tokens before a position belong to its key: whether a branch is cached, and so who drafts next, may hang on
draws at all positions of the draft; had the positions after the accepted ones the same noise again, the next tokens would depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch

from ssd.sampling import noise_kernel

Ints = TypeVar("Ints", np.ndarray, torch.Tensor)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


MASK = (1 << 64) - 1
GOLDEN = _signed(0x9E3779B97F4A7C15)
FIRST, SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
EMPTY = _signed(0xD1B54A32D192ED03)


class Purpose(IntEnum):
    """What a random number decides; numbers for different purposes are independent."""

    DRAFT = 1
    ACCEPT = 2
    TARGET = 3
    SAMPLE = 4


def _shifted(words: Ints, places: int) -> Ints:
    """Shift right, zeros in from the left: `>>` copies the sign."""
    shifted: Ints = words >> places
    shifted &= (1 << (64 - places)) - 1
    return shifted


def mix(words: Ints) -> Ints:
    """Return 64-bit integers that look independent of one another, whatever pattern `words` have; one to one."""
    mixed: Ints = words ^ _shifted(words, 30)
    mixed *= FIRST
    mixed ^= _shifted(mixed, 27)
    mixed *= SECOND
    mixed ^= _shifted(mixed, 31)
    return mixed


def _on_host(function: Callable[..., np.ndarray]) -> Callable[..., Any]:
    """Let what is a function of arrays and tensors alike take tensors on the CPU as arrays: of a few numbers, those cost a fifth."""

    @wraps(function)
    def call(*given: Any) -> Any:
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        if not tensors or not all(one.is_cpu for one in tensors):
            return function(*given)
        return torch.from_numpy(function(*(one.numpy() if isinstance(one, torch.Tensor) else one for one in given)))

    return call


@_on_host
def extend(prefix: Ints, tokens: Ints) -> Ints:
    """Return the hashes of prefixes with one more token each; both [n] int64, arrays or tensors alike."""
    return mix(prefix + mix((tokens + 1) * GOLDEN))


def prefix_hash(tokens: Iterable[int], before: int = EMPTY) -> int:
    """Return the hash of a sequence of tokens after a text with hash `before`: what `extend` gives, faster for one text."""
    found = before & MASK
    for token in tokens:
        found = _mix((found + _mix((token + 1) * GOLDEN & MASK)) & MASK)
    return _signed(found)


def _mix(word: int) -> int:
    """`mix` of one unsigned word."""
    word = (word ^ word >> 30) * FIRST & MASK
    word = (word ^ word >> 27) * SECOND & MASK
    return word ^ word >> 31


@_on_host
def noise_key(seed: Ints, purpose: Purpose, position: Ints, prefix: Ints) -> Ints:
    """Return what a random number hangs on: the request's seed, what it is for, where, and the hash of the tokens before it; all [n]."""
    offset = _signed(int(purpose) * GOLDEN % (1 << 64))
    return mix(mix(seed + offset) + position * GOLDEN + prefix)


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of sample `index` of a request; the first has the request's own."""
    if index == 0:
        return seed
    found = noise_key(np.array([seed]), Purpose.SAMPLE, np.array([index]), np.array([EMPTY]))
    return int(found[0]) & ((1 << 63) - 1)


def uniform(keys: torch.Tensor) -> torch.Tensor:
    """Return a number from [0, 1) for each key, fp64, of the keys' shape."""
    return _shifted(mix(keys), 11).double() * 2.0**-53


def gumbel(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return Gumbel noise for each token under each key, fp32, [n] -> [n, vocab_size].

    The bits are the same on every device; the two logarithms agree to their last digits. Small exponentials, which decide, keep all of
    fp32's relative precision: the noise reaches 43, the most that 63 bits can tell apart.
    """
    if keys.is_cpu and noise_kernel.available(vocab_size):
        return noise_kernel.gumbel(keys, vocab_size, (GOLDEN, FIRST, SECOND))
    words = _shifted(mix(keys[:, None] + _steps(vocab_size, keys.device)), 1)
    words |= 1
    parts = words.float().mul_(-(2.0**-63)).clamp_(min=2.0**-24 - 1)
    return parts.log1p_().neg_().log_().neg_()


def _steps(vocab_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, vocab_size + 1, device=device) * GOLDEN
