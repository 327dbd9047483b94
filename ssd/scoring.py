"""What would have been accepted and cached along a text that the target has sampled: ranks, as sim.outcomes.Trace has them of greedy texts.

The text fixes what the target drew; what the draft would have drawn, the verdict on it and the noise behind the draw are drawn anew, given
the text. Hence no second run of the engine, and as many replays of a text as are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ssd.engine.rehearsal import logits_along
from ssd.models import LoadedModel
from theory.acceptance import residual
from theory.check import FloatArray

Ranks = tuple[tuple[int, ...], tuple[int, ...]]


def replay(target: LoadedModel, draft: LoadedModel, tokens: tuple[int, ...], start: int, temperature: float, replays: int) -> list[Ranks]:
    """Return, for each replay, of each of `tokens[start:]` its rank in a draft verified by rejection and its rank where all was accepted.

    The first is 1 if the draft token there was accepted, else one more than the rank of the text's token among the candidates for the
    bonus, which are ranked by log q and the noise that the bonus is drawn with, without the token sent. The second ranks all tokens; it is
    also what coupling sees: the draft's own choice has rank 1.
    """
    rngs = [np.random.default_rng(replay) for replay in range(replays)]
    found: list[tuple[list[int], list[int]]] = [([], []) for _ in rngs]
    places = zip(tokens[start:], _laws(target, tokens, start, temperature), _laws(draft, tokens, start, temperature), strict=True)
    for token, p, short in places:
        q = np.zeros_like(p)
        q[: min(len(p), len(short))] = short[: len(p)]
        for rng, (ranks, ends) in zip(rngs, found, strict=True):
            rank, end = _place(token, p, q, rng)
            ranks.append(rank)
            ends.append(end)
    return [(tuple(ranks), tuple(ends)) for ranks, ends in found]


def _place(token: int, p: FloatArray, q: FloatArray, rng: np.random.Generator) -> tuple[int, int]:
    """The two ranks of one token that the target drew from p, the draft's law being q, both [vocabulary]."""
    end = _rank(token, q, noise_given(token, p, rng))
    # Of a token that came, the chance that it was the draft's and accepted: q(x) min(1, p/q) / p.
    if rng.random() < min(1.0, q[token] / p[token] if p[token] > 0 else 1.0):
        return 1, end
    sent = int(rng.choice(len(q), p=residual(q, p)))
    noise = noise_given(token, residual(p, q), rng)
    return 1 + _rank(token, q, noise, without=sent), end


def noise_given(token: int, law: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Draw Gumbel noise, [vocabulary], given that log law + noise is greatest at `token`: top down, the greatest value first."""
    with np.errstate(divide="ignore"):
        logs = np.log(law)
    noise = rng.gumbel(size=law.size)
    greatest = rng.gumbel()
    # Where the law is 0 the noise is free.
    possible = law > 0
    below = -np.logaddexp(-greatest, -(logs[possible] + noise[possible]))
    noise[possible] = below - logs[possible]
    noise[token] = greatest - logs[token]
    return noise


def _rank(token: int, q: FloatArray, noise: FloatArray, without: int | None = None) -> int:
    with np.errstate(divide="ignore"):
        scores = np.log(q) + noise
    better = scores > scores[token]
    return 1 + int(better.sum()) - int(without is not None and better[without])


def _laws(loaded: LoadedModel, tokens: tuple[int, ...], start: int, temperature: float) -> Iterator[FloatArray]:
    """Yield the law of each of `tokens[start:]`, [vocabulary], given what precedes it."""
    known = [min(token, loaded.vocab_size - 1) for token in tokens]
    for row in logits_along(loaded, known, start):
        law: FloatArray = torch.softmax(row.double() / temperature, -1).cpu().numpy()
        yield law / law.sum()
