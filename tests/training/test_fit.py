"""A training that was broken off ends where it would have ended."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ssd.training.data import Rows, Windows
from ssd.training.fit import LOG, Schedule, fit, last_loss
from tests import tiny

TEXT = np.tile(np.arange(60, dtype=np.int32), 20)
SCHEDULE = Schedule(steps=6, batch_size=2, window=16, learning_rate=1e-2)


def model():
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **tiny.GROUPED))


def run(folder, net, schedule=SCHEDULE, progress=lambda *_: None):
    text = Windows(TEXT, schedule.window, schedule.items, schedule.seed)
    return fit(net, text, Rows(TEXT[:64].reshape(4, 16)), schedule, folder, progress, checkpoint_every=2)


class BrokenOffError(Exception):
    pass


def test_a_run_that_was_broken_off_gives_the_weights_of_one_that_was_not(tmp_path):
    whole, halves = model(), model()
    loss = run(tmp_path / "whole", whole)

    def give_up(_, share):
        if share > 0.6:
            raise BrokenOffError

    with pytest.raises(BrokenOffError):
        run(tmp_path / "halves", halves, progress=give_up)
    with torch.no_grad():
        for weight in halves.parameters():
            weight.zero_()  # all that counts is in the checkpoint
    again = model()
    assert run(tmp_path / "halves", again) == loss
    for ours, theirs in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_that_was_not_written_to_its_end_does_not_count(tmp_path):
    net = model()
    loss = run(tmp_path, net)
    torn = tmp_path / "checkpoints" / "checkpoint-99"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    assert run(tmp_path, model()) == loss


def test_training_learns_notes_its_losses_and_tells_how_it_comes_along(tmp_path):
    heard = []
    net = model()
    loss = run(
        tmp_path, net, Schedule(steps=40, batch_size=4, window=16, learning_rate=1e-2), lambda what, share: heard.append((what, share))
    )
    notes = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    losses = [note["loss"] for note in notes if "loss" in note]
    assert loss < 0.8 * losses[0]
    assert last_loss(tmp_path) == loss
    assert heard[-1][1] == 1.0
    assert "loss" in heard[-1][0]


def test_a_loss_that_is_no_number_is_an_error(tmp_path):
    net = model()
    with torch.no_grad():
        next(iter(net.parameters())).fill_(float("nan"))
    with pytest.raises(RuntimeError, match=r"the loss is nan after training: lower the learning rate, now 0\.01"):
        run(tmp_path, net)


def test_it_ends_where_it_ended_when_it_is_run_again(tmp_path):
    net = model()
    loss = run(tmp_path, net)
    again = model()
    assert run(tmp_path, again) == loss
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again.parameters(), net.parameters(), strict=True))
