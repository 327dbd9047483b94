"""What the profiler asks of a loaded model: the seconds of its forwards, and how it would have ranked a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np
import torch

from ssd.engine.cache import CANDIDATES, Candidates
from ssd.engine.confidence import GREEDY, Confidence
from ssd.engine.forward import SlotModel
from ssd.engine.queries import Queries
from ssd.models import LoadedModel

SCORE_CHUNK = 128


def rehearse(loaded: LoadedModel, tokens: int, context: int, again: Callable[[int], bool]) -> list[float]:
    """Return the seconds of forwards of `tokens` queries that see `context` tokens, one after another while `again(done)` holds."""
    model = SlotModel(loaded, 1, 1 + context + tokens)
    visible = np.zeros((tokens, model.slots), dtype=bool)
    visible[:, 1 : context + 1] = True
    visible[:, context + 1 : context + 1 + tokens] = np.tri(tokens, dtype=bool)
    ids = torch.arange(tokens, device=model.device) % loaded.vocab_size
    queries = Queries(ids, np.arange(context, context + tokens), np.arange(context + 1, context + 1 + tokens), visible)
    seconds: list[float] = []
    model.forward({0: queries})
    while again(len(seconds)):
        begin = monotonic()
        model.forward({0: queries})[0].argmax(-1).tolist()
        seconds.append(monotonic() - begin)
    return seconds


def rank_tokens(loaded: LoadedModel, tokens: tuple[int, ...], start: int, confidence: Confidence | None = None) -> list[int]:
    """Return, for each of `tokens[start:]`, its rank among the model's choices after what precedes it; 1 is the likeliest.

    A token that the model does not have is ranked past all that it has. confidence: learns of every place as of a greedy draft of one
    token, the model's own choice there, whose outcome the text tells.
    """
    ranks: list[int] = []
    before: Place | None = None
    for token, row in zip(tokens[start:], logits_along(loaded, tokens, start), strict=True):
        ranks.append(1 + int((row > row[token]).sum()) if token < loaded.vocab_size else loaded.vocab_size + 1)
        if confidence is not None:
            after = Place.of(row, token)
            if before is not None:
                before.teach(confidence, after)
            before = after
    return ranks


def logits_along(loaded: LoadedModel, tokens: Sequence[int], start: int) -> Iterator[torch.Tensor]:
    """Yield what the model says, `[vocabulary]`, before each of `tokens[start:]`, given what precedes it; start is at least 1."""
    model = SlotModel(loaded, 1, 1 + len(tokens))
    for begin in range(0, len(tokens) - 1, SCORE_CHUNK):
        end = min(begin + SCORE_CHUNK, len(tokens) - 1)
        visible = np.zeros((end - begin, model.slots), dtype=bool)
        visible[:, 1 : end + 1] = np.tri(end - begin, end, begin, dtype=bool)
        ids = torch.tensor(tokens[begin:end], device=model.device)
        logits = model.forward({0: Queries(ids, np.arange(begin, end), np.arange(begin + 1, end + 1), visible)})[0]
        yield from logits[max(0, start - 1 - begin) :]


@dataclass(frozen=True, slots=True)
class Place:
    """What the model says at one place of a text, and the token that stands there: its best choices with their logits, and its chance of
    the first."""

    token: int
    best: torch.Tensor
    logits: torch.Tensor
    chance: float

    @classmethod
    def of(cls, row: torch.Tensor, token: int) -> Place:
        """Look at logits `[vocabulary]`."""
        best = row.topk(min(CANDIDATES + 1, len(row)))
        return cls(token, best.indices, best.values, float((best.values[0] - row.logsumexp(0)).exp()))

    def teach(self, confidence: Confidence, after: Place) -> None:
        """Let the model's own choice here have been a draft of one token."""
        # As after a draft: here without the token that was sent, behind it with all.
        bonus = torch.stack([self.best[1:], after.best[:-1]])
        chances = torch.softmax(torch.stack([self.logits[1:], after.logits[:-1]]), -1)
        accepted = int(self.best[0]) == self.token
        seen = Candidates(bonus.cpu().numpy(), bonus, chances.double().cpu().numpy(), np.array([self.chance]))
        confidence.learn(GREEDY, seen, int(accepted), after.token if accepted else self.token)
