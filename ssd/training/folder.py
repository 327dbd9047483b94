"""The folder that a training works in: what it was begun with, and models written whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ssd.devices import training_device
from ssd.specs import Spec

RECIPE = "recipe.json"


def begin(folder: Path, recipe: Spec) -> None:
    """Note what the folder's training is made of; ValueError where it was begun with something else, or holds other things."""
    noted = folder / RECIPE
    if noted.is_file():
        before = type(recipe).load(noted)
        for name in type(recipe).model_fields:
            old, new = getattr(before, name), getattr(recipe, name)
            if old != new:
                raise ValueError(
                    f"out={str(folder)!r} was begun with {name}={_short(old)}, now it is {_short(new)}: give the same, or another folder"
                )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out={str(folder)!r} exists and is not a training that was broken off: give another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        recipe.save(noted)
    except OSError as error:
        raise ValueError(f"out={str(folder)!r} cannot be written ({error.strerror}): give another folder") from error


def _short(value: object) -> str:
    text = str(value)
    return repr(text if len(text) <= 80 else text[:77] + "...")


def load(folder: str | Path, dtype: torch.dtype | str, **arguments: Any) -> PreTrainedModel:
    """Load a transformers model for training or as a teacher, onto the device that training uses."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **arguments)
    return model.to(training_device()).eval()  # type: ignore[no-any-return]


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the model in bfloat16, with its tokenizer, as an ordinary transformers folder; it appears when it is complete."""
    with whole(folder) as part:
        model.to(torch.bfloat16).save_pretrained(part)  # type: ignore[arg-type]
        tokenizer.save_pretrained(part)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield where to write a file or folder that appears at `path` when it is complete, or not at all: a run may be broken off."""
    part = path.with_name(path.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    yield part
    part.rename(path)
