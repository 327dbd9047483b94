"""How well a draft serves a target: acceptance and rank-of-bonus curves on text in the target's own words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from pydantic import Field
from transformers import PreTrainedModel

from ssd.progress import Progress
from ssd.specs import Spec
from ssd.training.data import Tokens
from ssd.training.samples import BATCH, continuations
from theory.hits import bonus_curves
from theory.sampling import sampling_law

TEMPERATURES = (0.0, 0.7, 1.0)
LARGEST = 8


class Agreement(Spec):
    """A draft against a target at one temperature, expectations over positions of text that the target wrote at it."""

    temperature: float = Field(ge=0, description="of both (no unit); 0 is greedy")
    positions: int = Field(ge=1, description="positions in the mean (count)")
    acceptance: float = Field(ge=0, le=1, description="chance alpha that a draft token is accepted (ratio)")
    hit_if_rejected: tuple[float, ...] = Field(
        description="chance that the bonus after a rejection is among the F best candidates, F = 1.. (ratios)"
    )
    hit_if_accepted: tuple[float, ...] = Field(
        description="chance that the bonus after full acceptance is among the F best candidates, F = 1.. (ratios)"
    )


class DraftReport(Spec):
    """What a distillation came to."""

    divergence: float = Field(ge=0, description="KL(p || q) on held-out text at temperature 1, nats a token")
    agreements: tuple[Agreement, ...] = Field(description="by temperature (list)")

    def table(self) -> str:
        """Return the agreements as a Markdown table."""
        sizes = (1, 2, 4, LARGEST)
        head = ["T", "acceptance", *(f"rejected, F={F}" for F in sizes), *(f"all accepted, F={F}" for F in sizes)]
        rows = [
            [f"{one.temperature:g}", f"{one.acceptance:.3f}"]
            + [f"{curve[F - 1]:.3f}" for curve in (one.hit_if_rejected, one.hit_if_accepted) for F in sizes]
            for one in self.agreements
        ]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def agreement(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    temperature: float,
    end: int,
    seed: int,
    vocabulary: torch.Tensor | None = None,
) -> Agreement:
    """Compare both on what the target goes on with after each prompt, at most `max_tokens`; the draft proposes `vocabulary` or all."""
    alpha, rejected, accepted = [], [], []
    for first in range(0, len(prompts), BATCH):
        batch = prompts[first : first + BATCH]
        for prompt, output in zip(batch, continuations(target, batch, max_tokens, temperature, end, seed + first), strict=True):
            ids = torch.tensor([[*prompt, *output]], device=target.device)
            # An end token was a choice too.
            chosen = slice(len(prompt) - 1, len(prompt) - 1 + min(len(output) + 1, max_tokens))
            p, _ = _laws(target, ids, chosen, temperature, None)
            q, scores = _laws(draft, ids, chosen, temperature, vocabulary)
            width = min(p.shape[1], q.shape[1])
            found = bonus_curves(p[:, :width], q[:, :width], scores[:, :width], LARGEST)
            alpha.append(found.acceptance)
            rejected.append(found.rejected_hit)
            accepted.append(found.accepted_hit)
    rates = np.concatenate(alpha)
    misses = max(float((1 - rates).sum()), 1e-12)
    return Agreement(
        temperature=temperature,
        positions=len(rates),
        acceptance=float(rates.mean()),
        hit_if_rejected=_ratios(np.concatenate(rejected).sum(0)[1:] / misses),
        hit_if_accepted=_ratios(np.concatenate(accepted).mean(0)[1:]),
    )


def _ratios(values: np.ndarray) -> tuple[float, ...]:
    return tuple(np.clip(values, 0, 1).tolist())


@torch.no_grad()
def _laws(
    model: PreTrainedModel, ids: torch.Tensor, chosen: slice, temperature: float, vocabulary: torch.Tensor | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the laws of the tokens at the places `chosen` and the logits, [positions, vocabulary], fp64."""
    logits = model(input_ids=ids, use_cache=False).logits[0, chosen].double().cpu().numpy()
    if vocabulary is not None:
        kept = np.full_like(logits, -np.inf)
        listed = vocabulary.cpu().numpy()
        kept[:, listed] = logits[:, listed]
        logits = kept
    return sampling_law(logits, temperature), logits


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, rows: Tokens) -> float:
    """Return the mean loss of the next token over rows of text `[rows, length]`, nats a token."""
    ids = torch.from_numpy(rows.astype(np.int64)).to(model.device)
    return float(np.mean([float(model(input_ids=row[None], labels=row[None]).loss) for row in ids]))


def report(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    divergence: float,
    end: int,
    seed: int,
    progress: Progress,
    vocabulary: torch.Tensor | None = None,
) -> DraftReport:
    """Compare a draft with its target at T = 0, .7 and 1 after held-out prompts; `divergence` is passed on."""
    agreements = []
    for place, temperature in enumerate(TEMPERATURES):
        progress("report", place / len(TEMPERATURES))
        agreements.append(agreement(target, draft, prompts, max_tokens, temperature, end, seed, vocabulary))
    return DraftReport(divergence=divergence, agreements=tuple(agreements))
