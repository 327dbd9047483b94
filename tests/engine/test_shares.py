"""A target in shares: what torchrun starts on one machine, gloo in place of NCCL, says what one process says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoConfig

import ssd
from ssd.engine.shares import share_of, shares
from ssd.models import check_shares, locate
from ssd.specs import Configuration, Placement, SamplingParams
from tests.plans import CORES, hand_typed
from tests.tiny import make_pair

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
PROMPTS = ["a text", "x = 3"]
needs_two = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")

PROGRAM = """
import json, os, sys, time
from pathlib import Path
import ssd
from ssd.specs import Plan, Configuration, SamplingParams
plans, out = [Plan.load(path) for path in sys.argv[2:]], Path(sys.argv[1])
found = []
with ssd.Engine.from_plan(plans[0], max_num_seqs=2) as engine:
    for plan in plans:
        engine.configure(Configuration(**{name: getattr(plan, name) for name in Configuration.model_fields}))
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        found.append([output.token_ids for output in engine.generate(["a text", "x = 3"], params)])
        heads = {buffer.shape[1] for buffer in engine._worker.scheduler.target.model.cache.cache._keys}
out.write_text(json.dumps({"texts": found, "heads": sorted(heads)}))
"""


def torchrun(processes: int, *words: str, **environment: str) -> subprocess.Popen:
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *words]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def plans(pair: tuple[str, str]) -> list[ssd.Plan]:
    both, alone = Placement(target=CORES), Placement(target=CORES, draft=CORES)
    return [
        hand_typed(*pair, mode="sd", num_speculative_tokens=3, fan_out_hit=(), fan_out_miss=(), placement=alone),
        hand_typed(*pair, mode="ar", num_speculative_tokens=0, fan_out_hit=(), fan_out_miss=(), placement=both),
    ]


def in_one_process(pair: tuple[str, str]) -> list[list[list[int]]]:
    asked = plans(pair)
    found = []
    with ssd.Engine.from_plan(asked[0], max_num_seqs=2) as engine:
        for plan in asked:
            engine.configure(Configuration(**{name: getattr(plan, name) for name in Configuration.model_fields}))
            found.append([list(output.token_ids) for output in engine.generate(PROMPTS, PARAMS)])
    return found


def in_shares(folder: Path, pair: tuple[str, str]) -> dict:
    (folder / "program.py").write_text(PROGRAM)
    paths = []
    for place, plan in enumerate(plans(pair)):
        paths.append(str(folder / f"plan{place}.json"))
        plan.save(paths[-1])
    process = torchrun(2, str(folder / "program.py"), str(folder / "out.json"), *paths)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return json.loads((folder / "out.json").read_text())


@needs_two
def test_a_target_in_two_shares_says_what_it_says_in_one(tmp_path, tiny_pair):
    found = in_shares(tmp_path, tiny_pair)
    assert found["texts"] == in_one_process(tiny_pair)
    # Of two key-value heads each process keeps the slots of one.
    assert found["heads"] == [1]


@needs_two
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "phi3", "granite", "olmo2", "mixtral", "gpt_neox"])
def test_every_architecture_with_a_plan_can_be_split(tmp_path, kind):
    pair = make_pair(tmp_path, kind)
    assert in_shares(tmp_path, pair)["texts"] == in_one_process(pair)


@needs_two
def test_a_share_that_dies_is_an_error_that_says_so_and_no_process_is_left(tmp_path, tiny_pair):
    note = 'found = []\nif os.environ["RANK"] == "1":\n    out.write_text(str(os.getpid()))\n'
    blow = "    engine.generate(['a'], SamplingParams(max_tokens=2))\n    os.kill(int(out.read_text()), 9)\n    for plan in plans:"
    program = PROGRAM.replace("found = []\n", note, 1).replace("    for plan in plans:", blow, 1)
    (tmp_path / "program.py").write_text(program)
    plan = plans(tiny_pair)[1]
    plan.save(tmp_path / "plan.json")
    begin = time.monotonic()
    process = torchrun(2, str(tmp_path / "program.py"), str(tmp_path / "out"), str(tmp_path / "plan.json"))
    said, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    assert time.monotonic() - begin < 90
    assert "share of the target" in said or "exitcode  : -9" in said


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
