"""A draft learns the target's distribution over the next token, on the target's own text and on real text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from ssd.progress import Progress
from ssd.training.data import Alternating, Rows, Tokens, Windows
from ssd.training.fit import Schedule, fit


class Distiller(Trainer):
    """Minimises KL(p || q), p the teacher's and q the student's law of the next token at temperature 1, nats a token.

    With `vocabulary` (ids) both laws are restricted to it: the student proposes nothing else.
    """

    def __init__(self, *args: Any, teacher: PreTrainedModel, vocabulary: torch.Tensor | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher, self.vocabulary = teacher.eval(), vocabulary  # type: ignore[no-untyped-call]

    def compute_loss(
        self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the mean divergence over all positions."""
        ids = inputs["input_ids"]
        with torch.no_grad():
            theirs = self.teacher(input_ids=ids, use_cache=False).logits
        outputs = model(input_ids=ids, use_cache=False)
        loss = divergence(theirs, outputs.logits, self.vocabulary)
        return (loss, outputs) if return_outputs else loss


def divergence(theirs: torch.Tensor, ours: torch.Tensor, vocabulary: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean of KL(p || q) over positions, from logits [..., vocabulary]."""
    shared = min(theirs.shape[-1], ours.shape[-1])
    theirs, ours = theirs[..., :shared], ours[..., :shared]
    if vocabulary is not None:
        theirs, ours = theirs[..., vocabulary], ours[..., vocabulary]
    log_p, log_q = theirs.float().log_softmax(-1), ours.float().log_softmax(-1)
    return torch.nn.functional.kl_div(log_q.flatten(0, -2), log_p.flatten(0, -2), reduction="batchmean", log_target=True)


def distil(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    streams: Sequence[Tokens],
    held_out: Tokens,
    schedule: Schedule,
    folder: Path,
    progress: Progress,
    vocabulary: torch.Tensor | None = None,
) -> float:
    """Train `student` in place on windows of the streams in turn; return its divergence on the held-out rows, nats a token."""
    windows = [Windows(tokens, schedule.window, schedule.items, schedule.seed + place) for place, tokens in enumerate(streams)]
    trainer = partial(Distiller, teacher=teacher, vocabulary=vocabulary)
    return fit(student, Alternating(windows, schedule.items), Rows(held_out), schedule, folder, progress, trainer=trainer)
