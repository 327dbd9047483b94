"""What torchrun starts for the tests of a target in shares: `shapes`, `modes` or `blow SIGNAL`, each with a folder for what is found.
`command WORDS` is the command line there, `real TARGET DRAFT PROMPTS` a pair that is given.

Each process is told that it may use three cores, whatever there are: two for the shares, one for the draft.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import count
from pathlib import Path
from time import monotonic

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

import ssd
from ssd import forwards
from ssd.cli import run
from ssd.engine import shares
from ssd.models import ARCHITECTURES
from ssd.specs import Configuration, Device, Hardware, Models, Placement, Plan, SamplingParams
from tests.engine.inprocess import differs
from tests.engine.patience import patient
from tests.strategies import several
from tests.tiny import EXTRA, GROUPED, make_pair, tokenizer, vary

CORES = ("cpu:0", "cpu:1", "cpu:2")
SHARES, DRAFT, ALONE = CORES[:2], CORES[2:], CORES[:1]
PROMPTS = ["a text", "x = 3"]
# Those whose heads need not be as wide as the width over their number.
EXPERTS = ("mixtral", "qwen3_moe")
HEADED = ("llama", "mistral", "mixtral", "qwen3", "qwen3_moe")
NUMBERS = count()
SILENT, PATIENT = 3.0, 3600.0


def plan(target: str, draft: str | None, configuration: Configuration) -> Plan:
    devices = [Device(id=name, name="core", memory_bytes=8 << 30, memory_bandwidth=1e10, flops=5e10) for name in CORES]
    hardware = Hardware(name="three cores", devices=devices, shared_memory=True, is_local=True)
    return Plan.of(configuration, hardware=hardware, models=Models(target=target, draft=draft))


def ar(target: tuple[str, ...]) -> Configuration:
    return Configuration(mode="ar", placement=Placement(target=target))


def kinds() -> list[str]:
    """Architectures that transformers has a plan for."""
    return [kind for kind in ARCHITECTURES if AutoConfig.for_model(kind).base_model_tp_plan]


@st.composite
def configs(draw: st.DrawFn, kind: str):
    """A decoder of this kind in any small shape whose key-value heads come out even."""
    kv_heads = draw(st.sampled_from([2, 4]))
    heads = kv_heads * (1 if kind == "gpt_neox" else draw(st.integers(1, 3)))
    size = 2 * draw(st.integers(2, 8))
    shape = {
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * size,
        "intermediate_size": draw(st.integers(2, 60)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if kind in EXPERTS:
        # torch multiplies experts' weights only where rows are whole pieces of 16 bytes, in every share.
        shape["intermediate_size"] = shape["moe_intermediate_size"] = 8 * draw(st.integers(1, 6))
    if kind in HEADED:
        shape["head_dim"] = 2 * draw(st.integers(2, 8))
    return AutoConfig.for_model(kind, **{**EXTRA.get(kind, GROUPED), **shape})


def shapes(folder: Path, *only: str) -> None:
    """Whatever the shape, two shares say what one process says; write how many shapes of each kind, or of these alone, were tried."""
    tried = {}
    for kind in only or kinds():

        @settings(several(int(os.environ.get("SHAPES", "4"))), deadline=None)
        @given(configs(kind), st.integers(0, 1 << 16))
        def law(config, seed):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config).eval()
            vary(model)
            path = folder / f"model{next(NUMBERS)}"
            model.save_pretrained(path)
            tokenizer().save_pretrained(path)
            texts = []
            for where in (ALONE, SHARES):
                with ssd.Engine.from_plan(plan(str(path), None, ar(where)), max_num_seqs=2) as engine:
                    assert (engine.loaded.team is None) == (where == ALONE)
                    texts.append(engine.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True)))
            for alone, shared in zip(*texts, strict=True):
                said = differs(model, list(alone.prompt_token_ids), list(shared.token_ids), list(alone.token_ids))
                assert said is None, said
            tried[config.model_type] = tried.get(config.model_type, 0) + 1

        law()
        print(kind, tried, flush=True)
    (folder / "out.json").write_text(json.dumps(tried))


def configurations(target: tuple[str, ...]) -> list[Configuration]:
    caches = {"mode": "ssd", "num_speculative_tokens": 3, "placement": Placement(target=target, draft=DRAFT)}
    return [
        Configuration(fan_out_hit=(2, 1, 1, 2), fan_out_miss=(2, 1, 1, 2), **caches),
        Configuration(budget=6, building="anytime", **caches),
        Configuration(mode="sd", num_speculative_tokens=3, placement=Placement(target=target, draft=target)),
        ar(target),
    ]


def modes(folder: Path) -> None:
    """Write the texts of every mode, greedy and drawn, in two shares and in one process, and the heads that one share has."""
    pair = make_pair(folder, noise=0.05)
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=5, verification="coupled"),
    ]
    found = {}
    for name, where in (("shares", SHARES), ("alone", ALONE)):
        listed = configurations(where)
        with ssd.Engine.from_plan(plan(*pair, listed[0]), max_num_seqs=2, deadline=PATIENT) as engine:
            texts, hits = [], 0
            for configuration in listed:
                engine.configure(configuration)
                if configuration.mode == "ssd":
                    patient(engine)
                outputs = [output for each in params for output in engine.generate(PROMPTS, each)]
                texts.append([output.token_ids for output in outputs])
                hits += sum(output.metrics.num_cache_hits for output in outputs)
            cache = engine._worker.scheduler.target.model.cache
            heads = {buffer.shape[1] for buffer in cache.cache._keys} if where == SHARES else set()
            found[name] = {"texts": texts, "hits": hits, "heads": sorted(heads), "draft": engine.health().draft}
    (folder / "out.json").write_text(json.dumps(found))


def blow(folder: Path, name: str) -> None:
    """Send the other share a signal in the midst of a text; write what is then said, after how many seconds, and who was there."""
    with ssd.Engine.from_plan(plan(*make_pair(folder, noise=0.05), configurations(SHARES)[0])) as engine:
        chunks = engine.stream(PROMPTS[0], SamplingParams(max_tokens=80, ignore_eos=True))
        next(chunks)
        other = int((folder / "pid").read_text())
        # torchrun ends this process when it sees the other gone, be that before this one does: not until what is said is written.
        default = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(other, getattr(signal, name))
        begin = monotonic()
        try:
            for _ in chunks:
                pass
        except RuntimeError as error:
            processes = [os.getpid(), other, engine.peer.process.pid]
            told = {"said": str(error), "seconds": monotonic() - begin, "failed": engine.health().failed, "processes": processes}
            (folder / "out.json").write_text(json.dumps(told))
            signal.signal(signal.SIGTERM, default)
            raise


def command(folder: Path, *words: str) -> None:
    """Do what the command line does, after short profiles, in every process alike."""
    forwards.LEAST_SECONDS = 0.01
    sys.exit(run(words))


def real(folder: Path, target: str, draft: str, *prompts: str) -> None:
    """Write the greedy tokens of a real pair in two shares, with a draft of its own."""
    asked = plan(target, draft, configurations(SHARES)[0])
    asked = asked.model_copy(update={"models": Models(target=target, draft=draft, max_model_len=256)})
    with ssd.Engine.from_plan(asked, deadline=PATIENT) as engine:
        outputs = [engine.generate(prompt, SamplingParams(max_tokens=16, ignore_eos=True))[0] for prompt in prompts]
        found = [(output.prompt_token_ids, output.token_ids, output.metrics.num_cache_hits) for output in outputs]
    (folder / "out.json").write_text(json.dumps(found))


def main() -> None:
    """Do what the command line says in the first process; in the other, follow."""
    what, folder = sys.argv[1], Path(sys.argv[2])
    # A machine that stands still meanwhile, as one under test may, is no process that is lost.
    shares.COLLECTIVE_SECONDS = SILENT if what == "blow" else PATIENT
    if os.environ["RANK"] != "0" and what != "command":
        (folder / "pid").write_text(str(os.getpid()))
        ssd.Engine.from_plan(plan("any", None, ar(SHARES)))
    {"shapes": shapes, "modes": modes, "blow": blow, "command": command, "real": real}[what](folder, *sys.argv[3:])


if __name__ == "__main__":
    main()
