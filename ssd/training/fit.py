"""One training run: transformers' Trainer with checkpoints, taken up where the last one ended."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ssd.devices import has_fast_bf16, is_cpu, training_device
from ssd.progress import Progress
from ssd.specs import Spec

CHECKPOINTS = "checkpoints"
LOG = "log.jsonl"


class Schedule(Spec):
    """How long, how fast and in what portions a model is trained: warm-up, a plateau, and a decay over the last quarter."""

    steps: int = Field(ge=1, description="optimizer steps (count)")
    batch_size: int = Field(4, ge=1, description="windows in a step (count)")
    window: int = Field(1024, ge=8, description="length of a window, tokens")
    learning_rate: float = Field(1e-3, gt=0, description="on the plateau (no unit)")
    seed: int = Field(0, ge=0, description="of weights and of the choice of windows (no unit)")

    @property
    def items(self) -> int:
        """Windows seen in all."""
        return self.steps * self.batch_size


def fit(
    model: PreTrainedModel,
    data: Dataset[dict[str, torch.Tensor]],
    held_out: Dataset[dict[str, torch.Tensor]],
    schedule: Schedule,
    folder: Path,
    progress: Progress,
    *,
    trainer: Callable[..., Trainer] = Trainer,
    checkpoint_every: int = 200,
) -> float:
    """Train `model` in place and return its loss on the held-out data, nats a token.

    Checkpoints and the log of losses are kept in `folder`; a run that was broken off goes on from the last one. progress is called with
    the latest loss and the share done, 0..1. RuntimeError where the loss is no number.
    """
    checkpoints = folder / CHECKPOINTS
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=schedule.steps,
        per_device_train_batch_size=schedule.batch_size,
        per_device_eval_batch_size=schedule.batch_size,
        learning_rate=schedule.learning_rate,
        weight_decay=0.1,
        adam_beta2=0.99,
        warmup_steps=max(1, schedule.steps // 20),
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": max(1, schedule.steps // 4), "decay_type": "linear"},
        bf16=has_fast_bf16(training_device()),
        use_cpu=is_cpu(training_device()),
        seed=schedule.seed,
        train_sampling_strategy="sequential",
        save_steps=checkpoint_every,
        save_total_limit=2,
        logging_steps=min(20, schedule.steps),
        eval_strategy="steps",
        eval_steps=checkpoint_every,
        prediction_loss_only=True,
        remove_unused_columns=False,
        report_to="none",
        dataloader_pin_memory=False,
    )
    run = trainer(model=model, args=arguments, train_dataset=data, eval_dataset=held_out, callbacks=[_Report(folder, progress)])
    for callback in (PrinterCallback, ProgressCallback):
        run.remove_callback(callback)
    run.train(resume_from_checkpoint=_last_complete(checkpoints))
    loss = float(run.evaluate()["eval_loss"])
    if not math.isfinite(loss):
        raise RuntimeError(f"the loss is {loss} after training: lower the learning rate, now {schedule.learning_rate}")
    return loss


def _last_complete(checkpoints: Path) -> str | None:
    """Return the last checkpoint that was written to its end: its state comes last."""
    complete = [state.parent for state in checkpoints.glob("checkpoint-*/trainer_state.json")]
    return str(max(complete, key=lambda path: int(path.name.removeprefix("checkpoint-")))) if complete else None


def last_loss(folder: Path) -> float:
    """Return the last loss on held-out data that the training in `folder` noted, nats a token."""
    entries = [json.loads(line) for line in (folder / LOG).read_text(encoding="utf-8").splitlines()]
    return float(next(entry["eval_loss"] for entry in reversed(entries) if "eval_loss" in entry))


class _Report(TrainerCallback):
    """Tells how training comes along, and keeps the losses in a file of one JSON object a line."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.folder, self.progress = folder, progress

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Note a loss."""
        entry = {key: value for key, value in (logs or {}).items() if key in ("loss", "eval_loss", "learning_rate", "grad_norm")}
        if not entry:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **entry}) + "\n")
        if "loss" in entry:
            self.progress(f"{self.folder.name}, loss {entry['loss']:.2f}", state.global_step / state.max_steps)
