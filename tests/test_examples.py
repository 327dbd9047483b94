"""Each example runs as its first line says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str, *words: str) -> str:
    paths = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    words = (sys.executable, str(EXAMPLES / name), *words)
    answer = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=1200, env=environment)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return example("tiny_pair.py", str(tmp_path_factory.mktemp("pair"))).split()


def test_the_demonstration_pair_agrees_on_about_four_tokens_in_five(pair):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, draft = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in pair)
    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    agreed = []
    for prompt in ("def fib(n):", "Write a poem about rain", "hello world"):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        text = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            choices = draft(text).logits.argmax(-1)[0]
        start = ids.shape[1]
        agreed.append((choices[start - 1 : -1] == text[0, start:]).float().mean().item())
        assert len(set(text[0, start:].tolist())) > 20
    assert 0.7 < sum(agreed) / len(agreed) < 0.9


def test_a_step_of_the_demonstration_target_reads_three_times_as_many_weights(pair):
    sizes = [(Path(path) / "model.safetensors").stat().st_size for path in pair]
    assert sizes[0] > 3 * sizes[1]


def test_quickstart_plans_and_decodes(pair):
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) < 15
    text = example("quickstart.py", *pair)
    assert text.startswith("Plan for")
    assert len(text.splitlines()[-1]) > 0


def test_plan_elsewhere_compares_machines():
    text = example("plan_elsewhere.py")
    assert text.startswith("Plan for meta-llama/Llama-3.1-70B")
    assert text.count(" ssd ") >= 4


def test_timeline_shows_the_overlap_and_saves_a_trace(pair, tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    trace = tmp_path / "trace.json"
    text = example("timeline.py", *pair, str(trace))
    assert "of the draft's work was done while the target verified" in text
    target, draft = (next(line for line in text.splitlines() if line.startswith(f"{name:>6} |")) for name in ("target", "draft"))
    assert target[8] == "V"
    assert "B" in draft
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"verify", "build"} <= names


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_first_run_goes_the_whole_way(tmp_path):
    text = example("first_run.py", str(tmp_path))
    for part in ("Plan for", "tokens/s in mode", "vs AR", "Same tokens in every configuration: 6 of 6 prompts"):
        assert part in text
