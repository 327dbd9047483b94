"""A target in shares: what torchrun starts on one machine, gloo in place of NCCL, says what one process says."""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

import ssd
from ssd.devices import cpu
from ssd.engine.forward import SlotModel, chain
from ssd.engine.kv import Trunk
from ssd.engine.shares import Drop, Follower, Team, share_of, shares
from ssd.engine.transformer import SlotTransformer
from ssd.models import LoadedModel, check_shares, locate
from ssd.specs import EMBEDDED_TARGET, Placement, Plan, SamplingParams
from tests.engine.inprocess import loaded, tiny_model
from tests.engine.test_processes import alive, wait_for
from tests.plans import CORES, hand_typed

PROMPT = "def mean(numbers):\n"
NO_CACHE = {"fan_out_hit": (), "fan_out_miss": ()}
ROOT = Path(__file__).parents[2]
# To the programs of these tests, three cores whatever there are.
THREE_CORES = """
import os
mine, pin = sorted(os.sched_getaffinity(0)), os.sched_setaffinity
os.sched_getaffinity = lambda pid: set(range(int(os.environ.get("CORES", "3"))))
os.sched_setaffinity = lambda pid, cores: pin(pid, {mine[core % len(mine)] for core in cores})
"""


def torchrun(folder: Path, *words: str, seconds: float = 280, **environment: str) -> tuple[int, str]:
    """Run in two processes; return the exit code and what they said."""
    (folder / "sitecustomize.py").write_text(THREE_CORES)
    paths = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except BaseException:
            # torchrun's processes end when it is told to.
            process.terminate()
            raise
    return process.returncode, said


def in_shares(folder: Path, *words: str, **environment: str) -> dict:
    code, said = torchrun(folder, "--module", "tests.engine.in_shares", words[0], str(folder), *words[1:], **environment)
    assert code == 0, said
    return json.loads((folder / "out.json").read_text())


class Wire(Team):
    """A team of two in one process: what the first says, the follower does at once, from the very bytes that would be broadcast."""

    def __init__(self, model: LoadedModel) -> None:
        self.rank, self.size, self.dropped, self.sent = 0, 2, [], []
        self._lock, self._numbers, self._broken = threading.RLock(), itertools.count(), False
        self.follower, self.frames = Follower(self), deque()
        self.follower._loaded = model
        # The most broadcasts that an order took.
        self.most = 0

    def _broadcast(self, tensor: torch.Tensor) -> None:
        if self.frames:
            tensor.copy_(self.frames.popleft())
            return
        self.sent.append(tensor.clone())

    def order(self, order: object) -> None:
        super().order(order)
        self.frames, self.sent = deque(self.sent), []
        while self.frames:
            before = len(self.frames)
            self.follower.obey(self.next_order())
            self.most = max(self.most, before - len(self.frames))


def keys(model: SlotTransformer) -> list[torch.Tensor]:
    return [*model.cache._keys, *model.cache._values]


def test_what_the_first_process_does_with_its_slots_the_others_do_too():
    """Several rows, more than a frame holds, copies, and models that are dropped."""
    model = loaded(tiny_model("llama", 1))
    wire = Wire(model)
    first, plain = SlotModel(replace(model, team=wire), 3, 3000), SlotModel(model, 3, 3000)
    assert list(wire.follower._models) == [0]
    trunks = [Trunk(first.slots) for _ in range(3)]
    for counts in ({0: 1}, {0: 3, 2: 9}, {1: 300}, {0: 2, 1: 1, 2: 64}):
        fed = {row: chain(trunks[row], [(5 * row + place) % 250 for place in range(count)], 1, cpu()) for row, count in counts.items()}
        for row, logits in plain.forward(fed).items():
            torch.testing.assert_close(first.forward(fed)[row], logits)
        for row, queries in fed.items():
            trunks[row].add(queries.slots)
    assert wire.most == 2
    for one in (first, plain):
        one.cache.copy(1, np.array([3, 4, 5]), 2, np.array([9, 7, 8]))
    there = wire.follower._models[0]
    for ours, theirs, alone in zip(keys(first.cache), keys(there), keys(plain.cache), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, alone)
    del first, there
    gc.collect()
    second = SlotModel(replace(model, team=wire), 1, 64)
    assert list(wire.follower._models) == [1]
    assert second.cache.number == 1


def test_a_team_that_lost_a_process_says_so_and_asks_nothing_more():
    wire = Wire(loaded(tiny_model("llama", 1)))
    with pytest.raises(RuntimeError, match="out of memory"), wire.together():
        raise RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="a process with a share of the target is gone, or silent for 60 s"), wire.together():
        raise RuntimeError("[/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer\nand more")
    with pytest.raises(RuntimeError, match="start torchrun again"):
        wire.order(Drop((1,)))


@pytest.mark.slow
def test_every_mode_says_with_a_target_in_two_shares_what_it_says_in_one(tmp_path):
    """Greedy, and drawn by coupling at temperature 1; in AR, SD and SSD, whose draft is a third process."""
    found = in_shares(tmp_path, "modes")
    shares, alone = found["shares"], found["alone"]
    assert shares["texts"] == alone["texts"]
    assert len({json.dumps(texts) for texts in shares["texts"]}) == 1
    assert min(shares["hits"], alone["hits"]) > 0
    assert shares["draft"] == alone["draft"] == "none"
    # Of two key-value heads each process keeps the slots of one.
    assert shares["heads"] == [1]


@pytest.mark.slow
def test_whatever_the_shape_of_a_target_two_shares_say_what_one_process_says(tmp_path):
    tried = in_shares(tmp_path, "shapes")
    assert {"llama", "qwen2", "qwen3", "mistral", "phi3", "granite", "olmo2", "mixtral", "gpt_neox"} <= set(tried)
    assert min(tried.values()) > 1


@pytest.mark.slow
@pytest.mark.parametrize("blow", ["SIGKILL", "SIGSTOP"])
def test_a_share_that_dies_or_hangs_is_an_error_that_says_so_and_no_process_is_left(tmp_path, blow):
    code, said = torchrun(tmp_path, "--module", "tests.engine.in_shares", "blow", str(tmp_path), blow)
    assert code != 0
    told = json.loads((tmp_path / "out.json").read_text())
    assert "a process with a share of the target is gone, or silent for 3 s" in told["said"], said
    assert told["failed"] is not None
    # The deadline, and what a busy machine adds.
    assert told["seconds"] < 3 + 15
    # A draft whose engine torchrun ended first leaves by itself.
    assert wait_for(lambda: not any(map(alive, told["processes"])))


@pytest.mark.slow
@pytest.mark.parametrize("cores", [2, 3])
def test_the_command_line_profiles_plans_and_decodes_with_a_target_in_two_shares(tmp_path, cores):
    """As docs/deployment.md has it. With two cores there is none left for a draft of its own."""
    saved = str(tmp_path / "plan.json")

    def command(*words: str) -> str:
        code, said = torchrun(
            tmp_path, "--module", "tests.engine.in_shares", "command", str(tmp_path), *words, seconds=900, CORES=str(cores)
        )
        assert code == 0, said
        return said

    command("plan", "--output-tokens", "16", "--prompt-tokens", "16", "--save", saved)
    plan = Plan.load(saved)
    ids = tuple(f"cpu:{core}" for core in range(cores))
    assert {table.devices for table in plan.profile.forwards if table.model == "target"} == {ids[:2], ids}
    assert plan.profile.texts[0].draft_acceptance_rate > 0
    alone = hand_typed(EMBEDDED_TARGET, None, mode="ar", num_speculative_tokens=0, **NO_CACHE, placement=Placement(target=CORES[:1]))
    with ssd.Engine.from_plan(alone) as engine:
        text = engine.generate(PROMPT, SamplingParams(max_tokens=16))[0].text
    assert text in command("generate", PROMPT, "--plan", saved)


def test_a_target_has_a_share_for_each_accelerator_or_process(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (shares(("cpu:0", "cpu:1")), shares(("cuda:0",))) == (1, 1)
    with pytest.raises(ValueError, match=r"placement.target=.*start with torchrun --nproc-per-node 2"):
        shares(("cuda:0", "cuda:1"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"needs a process for each device, and there are 2"):
        shares(("cuda:0", "cuda:1", "cuda:2"))
    for ids in (("cuda:1", "cuda:2"), ("cuda:1", "cuda:0")):
        with pytest.raises(ValueError, match=r"torchrun's process i has device i; give the first 2 in order"):
            shares(ids)
    assert (shares(("cpu:0",)), shares(("cpu:0", "cpu:1")), shares(("cuda:0", "cuda:1"))) == (1, 2, 2)
    assert [share_of(("cpu:0", "cpu:1", "cpu:2", "cpu:3"), rank, 2) for rank in (0, 1)] == [("cpu:0", "cpu:1"), ("cpu:2", "cpu:3")]


def test_what_cannot_be_split_is_refused_by_name(tmp_path):
    drawn = {"random_weights": True}
    for kind, more, count, told in (
        ("gpt2", {}, 2, "of architecture 'gpt2'"),
        ("llama", {}, 4, "has 2 key-value heads, which 4 devices"),
        ("llama", drawn, 2, "of random weights"),
    ):
        folder, sizes = tmp_path / kind, {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "n_head": 4, "n_embd": 32}
        AutoConfig.for_model(kind, **sizes, **more).save_pretrained(folder)
        source = locate("target", str(folder))
        check_shares("target", source, 1)
        with pytest.raises(ValueError, match=f"target=.*{told}"):
            check_shares("target", source, count)
