"""Text in a model's own words: what a draft meets when it proposes to that model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, set_seed

from ssd.progress import Progress
from ssd.training.data import Tokens
from ssd.training.folder import whole

# A draft serves requests of every temperature: greedy text repeats itself, sampled text wanders.
TEMPERATURES = (0.0, 0.7, 1.0)
BATCH = 64


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt to go on from (token ids), and the temperature."""

    prompt: tuple[int, ...]
    temperature: float


def jobs(prompts: Sequence[Sequence[int]], count: int) -> list[Job]:
    """Return `count` jobs: every prompt at each temperature in turn, greedily only once, since that gives the same text again."""
    again = TEMPERATURES[1:]
    passes = -(-count // len(prompts))
    temperatures = [TEMPERATURES[turn] if turn < len(TEMPERATURES) else again[turn % len(again)] for turn in range(passes)]
    return [Job(tuple(prompt), temperature) for temperature in temperatures for prompt in prompts][:count]


def sampled_stream(
    model: PreTrainedModel, wanted: Sequence[Job], max_tokens: int, end: int, seed: int, folder: Path, progress: Progress
) -> Tokens:
    """Let `model` go on from each prompt and return prompts and continuations as one stream, an end token after each, [tokens].

    Batches are kept in `folder` as they are made, and not made again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    batches = _batches(wanted)
    parts = []
    for index, batch in enumerate(batches):
        progress("samples of the target", index / len(batches))
        path = folder / f"{index:05}.npy"
        if not path.is_file():
            prompts = [job.prompt for job in batch]
            rows = continuations(model, prompts, max_tokens, batch[0].temperature, end, seed + index)
            texts = [np.asarray([*prompt, *row, end], dtype=np.int32) for prompt, row in zip(prompts, rows, strict=True)]
            with whole(path) as part, part.open("wb") as file:
                np.save(file, np.concatenate(texts))
        parts.append(np.load(path))
    return np.concatenate(parts)


def _batches(wanted: Sequence[Job]) -> list[list[Job]]:
    """Put jobs of one temperature and of like length together."""
    ordered = sorted(wanted, key=lambda job: (job.temperature, len(job.prompt)))
    alike = [list(group) for _, group in groupby(ordered, key=lambda job: job.temperature)]
    return [group[first : first + BATCH] for group in alike for first in range(0, len(group), BATCH)]


@torch.no_grad()
def continuations(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float, end: int, seed: int
) -> list[list[int]]:
    """Return what `model` says after each prompt, at most `max_tokens` tokens, without the end token."""
    set_seed(seed)
    widest = max(map(len, prompts))
    tokens = torch.tensor([[end] * (widest - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    made: torch.Tensor = model.generate(  # type: ignore[operator]
        tokens, attention_mask=mask, max_new_tokens=max_tokens, eos_token_id=end, pad_token_id=end, repetition_penalty=1.0, **sampling
    )
    return [row[: row.index(end)] if end in row else row for row in made[:, widest:].tolist()]
