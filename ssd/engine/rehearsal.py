"""Time a model's forwards as the engine runs them."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import numpy as np
import torch

from ssd.engine.forward import Queries, SlotModel
from ssd.models import LoadedModel


def rehearse(loaded: LoadedModel, rows: int, tokens: int, context: int, again: Callable[[int], bool]) -> list[float]:
    """Return the seconds of forwards of `tokens` queries that see `context` tokens, one after another while `again(done)` holds."""
    model = SlotModel(loaded, rows, 1 + context + tokens)
    visible = np.zeros((tokens, model.slots), dtype=bool)
    visible[:, 1 : context + 1] = True
    visible[:, context + 1 :] = np.tri(tokens, dtype=bool)
    ids = torch.arange(tokens, device=model.device) % loaded.vocab_size
    queries = Queries(ids, np.arange(context, context + tokens), np.arange(context + 1, context + 1 + tokens), visible)
    seconds: list[float] = []
    model.forward([queries] * rows)
    while again(len(seconds)):
        begin = monotonic()
        model.forward([queries] * rows).argmax(-1).tolist()
        seconds.append(monotonic() - begin)
    return seconds
