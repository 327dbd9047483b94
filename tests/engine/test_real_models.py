"""Real models where they are at hand: in SSD_MODELS or ~/.cache/ssd-models, folders and GGUF files by their usual names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import ssd
from ssd.specs import Configuration, Models, Placement, SamplingParams
from tests.engine.inprocess import differs
from tests.engine.test_hosts import elsewhere, two_hosts
from tests.engine.test_shares import in_shares
from tests.plans import CORES, hand_typed

HOME = Path(os.environ.get("SSD_MODELS", "~/.cache/ssd-models")).expanduser()
TARGET, DRAFT = HOME / "qwen2.5-coder-1.5b-instruct", HOME / "qwen2.5-coder-0.5b-instruct"
GGUF = HOME / "smollm2-135m-instruct.gguf"
PROMPT = "def is_prime(n: int) -> bool:\n"
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)

pytestmark = [pytest.mark.models, pytest.mark.slow, pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")]


def reference(prompt: tuple[int, ...], path: Path, **where) -> tuple[AutoModelForCausalLM, list[int]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **where).eval()
    ids = torch.tensor([prompt])
    plain = {"max_new_tokens": PARAMS.max_tokens, "min_new_tokens": PARAMS.max_tokens, "do_sample": False, "repetition_penalty": 1.0}
    return model, model.generate(ids, attention_mask=torch.ones_like(ids), **plain)[0, len(prompt) :].tolist()


@pytest.mark.skipif(not (TARGET.is_dir() and DRAFT.is_dir()), reason=f"no Qwen2.5-Coder pair in {HOME.name}")
def test_a_real_pair_gives_the_greedy_tokens_of_transformers_in_every_mode():
    plan = hand_typed(str(TARGET), str(DRAFT), models=Models(target=str(TARGET), draft=str(DRAFT), max_model_len=256))
    shared = Placement(target=CORES[:1], draft=CORES[:1])
    modes = [
        plan,
        Configuration(mode="sd", num_speculative_tokens=4, placement=shared),
        Configuration(mode="ar", placement=Placement(target=CORES)),
    ]
    outputs = []
    with ssd.Engine.from_plan(plan) as engine:
        for configuration in modes:
            engine.configure(configuration)
            outputs.append(engine.generate(PROMPT, PARAMS)[0])
    prompt = outputs[0].prompt_token_ids
    model, expected = reference(prompt, TARGET)
    assert outputs[0].metrics.num_cache_hits > 0
    for output in outputs:
        assert differs(model, list(prompt), list(output.token_ids), expected) is None


PROMPTS = [PROMPT, "# Sort a list of words by their length\n"]
PAIR = pytest.mark.skipif(not (TARGET.is_dir() and DRAFT.is_dir()), reason=f"no Qwen2.5-Coder pair in {HOME.name}")


def check_greedy(found: list[tuple[list[int], list[int], int]]) -> None:
    """Prompt, tokens and hits of each request: the tokens are those of transformers."""
    for prompt, tokens, hits in found:
        model, expected = reference(tuple(prompt), TARGET)
        assert differs(model, list(prompt), list(tokens), expected) is None
        assert hits > 0


@PAIR
def test_a_real_target_in_two_shares_gives_the_greedy_tokens_of_transformers(tmp_path):
    check_greedy(in_shares(tmp_path, "real", str(TARGET), str(DRAFT), *PROMPTS))


@PAIR
@elsewhere
def test_a_real_pair_on_two_hosts_gives_the_greedy_tokens_of_transformers(tmp_path, monkeypatch):
    monkeypatch.setenv("SSD_SECRET", "a secret")
    plan = hand_typed(str(TARGET), str(DRAFT), models=Models(target=str(TARGET), draft=str(DRAFT), max_model_len=256))
    with two_hosts(plan, tmp_path, deadline=300.0) as (_, engine):
        outputs = [engine.generate(prompt, PARAMS)[0] for prompt in PROMPTS]
        assert engine.health().draft == "ok"
    check_greedy([(output.prompt_token_ids, output.token_ids, output.metrics.num_cache_hits) for output in outputs])


@pytest.mark.skipif(not GGUF.is_file(), reason=f"no SmolLM2 GGUF file in {HOME.name}")
def test_a_gguf_file_is_target_and_draft():
    with ssd.Engine.from_plan(hand_typed(str(GGUF), str(GGUF))) as engine:
        output = engine.generate("The capital of France is", PARAMS)[0]
    model, expected = reference(output.prompt_token_ids, GGUF.parent, gguf_file=GGUF.name)
    assert differs(model, list(output.prompt_token_ids), list(output.token_ids), expected) is None
    assert output.metrics.draft_acceptance_rate == 1
