"""A target in shares: what torchrun starts on one machine, gloo in place of NCCL, says what one process says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from ssd.engine.shares import share_of, shares
from ssd.models import check_shares, locate

ROOT = Path(__file__).parents[2]
# To the programs of these tests, three cores whatever there are.
THREE_CORES = """
import os
mine, pin = sorted(os.sched_getaffinity(0)), os.sched_setaffinity
os.sched_getaffinity = lambda pid: {0, 1, 2}
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
    assert not any(Path(f"/proc/{pid}").exists() for pid in told["processes"])


def test_a_target_has_a_share_for_each_accelerator_or_process(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (shares(("cpu:0", "cpu:1")), shares(("cuda:0",))) == (1, 1)
    with pytest.raises(ValueError, match=r"placement.target=.*start with torchrun --nproc-per-node 2"):
        shares(("cuda:0", "cuda:1"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (shares(("cpu:0",)), shares(("cpu:0", "cpu:1")), shares(("cuda:0", "cuda:1"))) == (1, 2, 2)
    assert [share_of(("cpu:0", "cpu:1", "cpu:2", "cpu:3"), rank, 2) for rank in (0, 1)] == [("cpu:0", "cpu:1"), ("cpu:2", "cpu:3")]


def test_what_cannot_be_split_is_refused_by_name(tmp_path):
    for kind, count, told in (("gpt2", 2, "of architecture 'gpt2'"), ("llama", 4, "has 2 key-value heads, which 4 devices")):
        folder = tmp_path / kind
        AutoConfig.for_model(kind, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, n_head=4, n_embd=32).save_pretrained(
            folder
        )
        source = locate("target", str(folder))
        check_shares("target", source, 1)
        with pytest.raises(ValueError, match=f"target=.*{told}"):
            check_shares("target", source, count)
