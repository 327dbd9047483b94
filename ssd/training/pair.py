"""The embedded pair from nothing: a tokenizer, a small target and a smaller draft, trained on the Python standard library."""

from __future__ import annotations

import platform
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from ssd.progress import Progress
from ssd.specs import Spec
from ssd.training.corpus import HELD_OUT, Document, function_heads, standard_library
from ssd.training.data import Rows, Tokens, Windows, cut, shuffled, spread, stream
from ssd.training.distiller import distil
from ssd.training.evaluation import DraftReport, held_out_loss, report
from ssd.training.fit import Schedule, fit, last_loss
from ssd.training.folder import begin, load, save, whole
from ssd.training.samples import TEMPERATURES, Job, sampled_stream
from ssd.training.tokenizer import train_tokenizer

HELD_OUT_WINDOWS = 32
HELD_OUT_PROMPTS = 64
SAMPLE_PROMPT = 48
SAMPLE_TOKENS = 208
REPORT_TOKENS = 96


class LlamaShape(Spec):
    """The size of a Llama with tied embeddings."""

    layers: int = Field(ge=1, description="decoder layers (count)")
    hidden: int = Field(ge=8, description="width (count)")
    intermediate: int = Field(ge=8, description="width inside the feed-forward part (count)")
    heads: int = Field(ge=1, description="query heads (count)")
    kv_heads: int = Field(ge=1, description="key-value heads (count)")

    def config(self, tokenizer: PreTrainedTokenizerBase, context: int) -> LlamaConfig:
        """Return the transformers configuration."""
        return LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )


class PairRecipe(Spec):
    """Everything that settles the pair, given the text."""

    vocab_size: int = Field(4096, ge=300, description="tokens of the tokenizer (count)")
    target: LlamaShape = Field(
        LlamaShape(layers=12, hidden=256, intermediate=704, heads=4, kv_heads=2),
        description="deep and narrow: slow to verify with, cheap to train (shape)",
    )
    target_schedule: Schedule = Field(Schedule(steps=2400), description="the target's training (schedule)")
    draft: LlamaShape = Field(LlamaShape(layers=2, hidden=192, intermediate=384, heads=3, kv_heads=3), description="the draft (shape)")
    draft_schedule: Schedule = Field(Schedule(steps=2600, learning_rate=2e-3), description="the distillation (schedule)")
    samples: int = Field(2304, ge=1, description="texts that the target writes for the distillation (count)")


def recipe_for(target_steps: int | None, draft_steps: int | None, samples: int | None, seed: int) -> PairRecipe:
    """Return the recipe with what was asked for changed."""
    recipe = PairRecipe()
    target = recipe.target_schedule.model_dump() | {"seed": seed} | ({"steps": target_steps} if target_steps is not None else {})
    draft = recipe.draft_schedule.model_dump() | {"seed": seed} | ({"steps": draft_steps} if draft_steps is not None else {})
    return PairRecipe(
        target_schedule=Schedule(**target), draft_schedule=Schedule(**draft), samples=recipe.samples if samples is None else samples
    )


def train_pair(out: Path, recipe: PairRecipe, progress: Progress, *, library: Path | None = None) -> DraftReport:
    """Make tokenizer, target and draft in `out`, each an ordinary transformers folder, and a model card; go on from what is there.

    library: the folder of sources to train on, by default this interpreter's standard library. ValueError where `out` holds something
    else, or a training begun with another recipe.
    """
    train, held_out = standard_library(library)
    begin(out, recipe)
    return _PairTraining(out, recipe, progress, train, held_out).run()


class _PairTraining:
    """The stages, each done once: what it leaves in the folder is taken from there."""

    def __init__(self, out: Path, recipe: PairRecipe, progress: Progress, train: list[Document], held_out: list[Document]) -> None:
        self.out, self.recipe, self.progress, self.train, self.held_out = out, recipe, progress, train, held_out
        self.tokenizer = self._tokenizer()
        self.end: int = self.tokenizer.eos_token_id

    def run(self) -> DraftReport:
        """Go through all of them."""
        target = self._target()
        draft = self._draft(target)
        prompts = [self.tokenizer(text)["input_ids"] for text in spread(function_heads(self.held_out), HELD_OUT_PROMPTS)]
        divergence, seed = last_loss(self.out / "draft-training"), self.recipe.target_schedule.seed
        found = report(target, draft, prompts, REPORT_TOKENS, divergence, self.end, seed, self.progress)
        sizes = target.num_parameters(), draft.num_parameters()
        unseen = self._unseen(self.recipe.target_schedule)
        text = card(self.recipe, found, sizes, (held_out_loss(target, unseen), held_out_loss(draft, unseen)))
        (self.out / "README.md").write_text(text, encoding="utf-8")
        return found

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        self.progress("tokenizer", 0.0)
        folder = self.out / "tokenizer"
        if not folder.is_dir():
            with whole(folder) as part:
                train_tokenizer(self.train, self.recipe.vocab_size, self.recipe.target_schedule.window).save_pretrained(part)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        return tokenizer

    def _target(self) -> PreTrainedModel:
        folder, schedule = self.out / "target", self.recipe.target_schedule
        if not folder.is_dir():
            set_seed(schedule.seed)
            model = LlamaForCausalLM(self.recipe.target.config(self.tokenizer, schedule.window))
            windows = Windows(self.text, schedule.window, schedule.items, schedule.seed)
            fit(model, windows, Rows(self._unseen(schedule)), schedule, self.out / "target-training", self.progress)
            save(model, self.tokenizer, folder)
        return load(folder, torch.float32)

    def _draft(self, target: PreTrainedModel) -> PreTrainedModel:
        folder, schedule = self.out / "draft", self.recipe.draft_schedule
        if not folder.is_dir():
            own = self._samples(target)
            set_seed(schedule.seed)
            draft = LlamaForCausalLM(self.recipe.draft.config(self.tokenizer, self.recipe.target_schedule.window))
            streams = [own, self.text]
            distil(target, draft, streams, self._unseen(schedule), schedule, self.out / "draft-training", self.progress)
            save(draft, self.tokenizer, folder)
        return load(folder, torch.float32)

    def _samples(self, target: PreTrainedModel) -> Tokens:
        count, seed = self.recipe.samples, self.recipe.draft_schedule.seed
        begins = np.random.default_rng(seed).integers(len(self.text) - SAMPLE_PROMPT, size=count)
        wanted = [
            Job(tuple(self.text[begin : begin + SAMPLE_PROMPT].tolist()), TEMPERATURES[place % len(TEMPERATURES)])
            for place, begin in enumerate(begins)
        ]
        return sampled_stream(target, wanted, SAMPLE_TOKENS, self.end, seed, self.out / "samples", self.progress)

    @cached_property
    def text(self) -> Tokens:
        """The stream to train on: seconds of work, which a finished pair needs no more."""
        return training_stream(self.train, self.tokenizer, self.recipe.target_schedule.seed)

    @cached_property
    def held_out_text(self) -> Tokens:
        """The stream that no training sees."""
        return stream(self.held_out, self.tokenizer)

    def _unseen(self, schedule: Schedule) -> Tokens:
        return cut(self.held_out_text, schedule.window, HELD_OUT_WINDOWS)


def training_stream(documents: list[Document], tokenizer: PreTrainedTokenizerBase, seed: int) -> Tokens:
    """Return the documents as one stream, the library's own modules twice and its tests once."""
    library = [document for document in documents if not document.is_test]
    return stream(shuffled([*documents, *library], seed), tokenizer)


def card(recipe: PairRecipe, found: DraftReport, sizes: tuple[int, int], losses: tuple[float, float]) -> str:
    """Return the model card; sizes are the weights of target and draft (counts), losses theirs on held-out text (nats a token)."""
    return f"""---
license: apache-2.0
language: code
---
# The embedded pair

A small target and a smaller draft for speculative decoding: one byte-level BPE of {recipe.vocab_size} tokens, two Llamas in bfloat16.
They continue Python code, and are made to measure and to test with, not to be relied on.

- **Target**: {_shape(recipe.target, sizes[0])}; {_schedule(recipe.target_schedule)}.
  Loss on held-out text {losses[0]:.3f} nats a token.
- **Draft**: {_shape(recipe.draft, sizes[1])}; {_schedule(recipe.draft_schedule)}.
  Distilled: KL(p || q) of the target's law p from the draft's q, alternately on {recipe.samples} texts that the target wrote (at
  temperatures 0, .7 and 1) and on the training text. On held-out text KL {found.divergence:.3f}, loss {losses[1]:.3f} nats a token.
- **Data**: the Python {platform.python_version()} standard library's sources and their tests, under the PSF licence; the library's
  own modules twice. Held out whole, with their tests: {", ".join(HELD_OUT)}.
- **Made by** `ssd train-pair --out DIR`, which goes on where it was broken off.

## Acceptance on held-out prompts

Expectations over the target's own continuations of {HELD_OUT_PROMPTS} function heads from the held-out modules: the chance that a draft
token is accepted, and that the bonus token is among the draft's F best candidates, after a rejection (the rejected token left out) and
after full acceptance.

{found.table()}
"""


def _shape(shape: LlamaShape, weights: int) -> str:
    return f"{shape.layers} layers of {shape.hidden}, {weights / 1e6:.1f} million weights"


def _schedule(schedule: Schedule) -> str:
    return f"{schedule.steps} steps of {schedule.batch_size} x {schedule.window} tokens"
