"""A draft for any target: a student of the target's kind, distilled from it on the text that it writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ssd.devices import is_cpu, training_device
from ssd.models import DRAFT_VOCABULARY, Source, check_architecture, locate
from ssd.progress import Progress
from ssd.prompts import prompts as known_prompts
from ssd.specs import Spec
from ssd.training.corpus import text_files
from ssd.training.data import Tokens, cut, stream
from ssd.training.distiller import distil
from ssd.training.evaluation import DraftReport, report
from ssd.training.fit import Schedule, last_loss
from ssd.training.folder import begin, load, save
from ssd.training.samples import Job, jobs, sampled_stream
from ssd.training.student import StudentShape, make_student, student_config

FEWEST_PROMPTS = 8
# One prompt in so many is kept for the report.
HELD_OUT_SHARE = 4
HELD_OUT_WINDOWS = 16
LONGEST_PROMPT = 256


class DistillRecipe(Spec):
    """Everything that settles a distilled draft."""

    target: str = Field(min_length=1, description="the model to propose for: hub id, folder or .gguf file (no unit)")
    shape: StudentShape = Field(description="the student (shape)")
    prompts: tuple[str, ...] = Field(
        ("code", "chat"), min_length=1, description="`code`, `chat`, or files: a JSON list of texts, or one text a line (no unit)"
    )
    text: tuple[str, ...] = Field((), description="text files to learn from besides the target's own samples (paths)")
    samples: int = Field(512, ge=1, description="texts that the target writes (count)")
    sample_tokens: int = Field(192, ge=8, description="length of such a text, tokens")
    vocabulary: int | None = Field(None, ge=16, description="the commonest tokens, to which the draft's proposals are restricted (count)")
    schedule: Schedule = Field(
        Schedule(steps=500, window=256, batch_size=4, learning_rate=5e-4), description="the student's training (schedule)"
    )


def distill(out: Path, recipe: DistillRecipe, progress: Progress) -> DraftReport:
    """Make a draft for `recipe.target` in `out / "draft"`, an ordinary transformers folder, and report.json; go on from what is there.

    ValueError where the target cannot be served, shape, prompts or text do not do, or `out` holds something else.
    """
    source = locate("target", recipe.target)
    check_architecture("target", source, source.max_positions)
    student_config(source.config, recipe.shape)
    if (recipe.vocabulary or 0) > source.vocab_size:
        raise ValueError(f"vocabulary={recipe.vocabulary} is more than the {source.vocab_size} tokens of the target: give less, or none")
    schedule = recipe.schedule
    if schedule.window > source.max_positions:
        raise ValueError(f"window={schedule.window} is more than the {source.max_positions} tokens of the target's context: give less")
    room = source.max_positions - recipe.sample_tokens
    if room < 1:
        raise ValueError(
            f"sample_tokens={recipe.sample_tokens} leaves no room for a prompt in the target's {source.max_positions}: give less"
        )
    tokenizer = source.tokenizer()
    texts = text_files([Path(name) for name in recipe.text])
    seen, unseen = _prompts(recipe.prompts, tokenizer, min(room, LONGEST_PROMPT))
    end = _end(source, tokenizer)
    begin(out, recipe)

    target = _load(source)
    own = sampled_stream(target, jobs(seen, recipe.samples), recipe.sample_tokens, end, schedule.seed, out / "samples", progress)
    asked = [Job(tuple(prompt), 1.0) for prompt in unseen]
    held_out = sampled_stream(target, asked, recipe.sample_tokens, end, schedule.seed, out / "held-out", progress)
    streams = [own, stream(texts, tokenizer)] if texts else [own]
    vocabulary = None if recipe.vocabulary is None else commonest(streams, recipe.vocabulary, source.vocab_size)

    folder = out / "draft"
    if not folder.is_dir():
        set_seed(schedule.seed)
        student, _ = make_student(target, recipe.shape)
        distil(target, student, streams, cut(held_out, schedule.window, HELD_OUT_WINDOWS), schedule, out / "training", progress, vocabulary)
        if vocabulary is not None:
            setattr(student.config, DRAFT_VOCABULARY, vocabulary.tolist())
        save(student, tokenizer, folder)
    draft, divergence = _load(locate("draft", str(folder))), last_loss(out / "training")
    found = report(target, draft, unseen, recipe.sample_tokens, divergence, end, schedule.seed, progress, vocabulary)
    found.save(out / "report.json")
    return found


def _load(source: Source) -> PreTrainedModel:
    # On a CPU bf16 would only round: there is no memory to save for.
    dtype = torch.float32 if is_cpu(training_device()) else "auto"
    return load(source.folder, dtype, **source.arguments)


def _end(source: Source, tokenizer: PreTrainedTokenizerBase) -> int:
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError(f"target={source.name!r} has no end token: set eos_token in its tokenizer's configuration")
    return int(end)


def _prompts(names: Sequence[str], tokenizer: PreTrainedTokenizerBase, longest: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of the prompts to learn from and of those held out; of long ones the last `longest`."""
    texts = list(dict.fromkeys(text for name in names for text in _texts(name, tokenizer)))
    if len(texts) < FEWEST_PROMPTS:
        raise ValueError(f"prompts={','.join(names)} hold {len(texts)} distinct texts: give {FEWEST_PROMPTS} or more")
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"][-longest:] for text in texts]
    seen = [prompt for place, prompt in enumerate(ids) if place % HELD_OUT_SHARE]
    return seen, ids[::HELD_OUT_SHARE]


def _texts(name: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    if name in ("code", "chat"):
        return known_prompts("code" if name == "code" else "chat", None, tokenizer)
    try:
        content = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts={name!r} is neither code nor chat nor a readable text file: give one of these") from error
    if Path(name).suffix != ".json":
        return [line for line in content.splitlines() if line.strip()]
    try:
        found = json.loads(content)
    except json.JSONDecodeError as error:
        raise ValueError(f"prompts={name!r} is no JSON ({error}): give a list of texts") from error
    if not isinstance(found, list) or not all(isinstance(text, str) and text.strip() for text in found):
        raise ValueError(f"prompts={name!r} is not a JSON list of texts: give one")
    return found


def commonest(streams: Sequence[Tokens], count: int, vocab_size: int) -> torch.Tensor:
    """Return the ids of the `count` tokens that occur most often, rising, filled up with the lowest ids where fewer occur."""
    seen: Counter[int] = Counter()
    for tokens in streams:
        ids, counts = np.unique(tokens, return_counts=True)
        seen.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
    ranked = [token for token, _ in seen.most_common(count)]
    ranked += [token for token in range(vocab_size) if token not in seen][: count - len(ranked)]
    return torch.tensor(sorted(ranked))
