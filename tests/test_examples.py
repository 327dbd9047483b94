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


@pytest.mark.slow
def test_quickstart_plans_and_decodes():
    assert len((EXAMPLES / "quickstart.py").read_text().splitlines()) < 15
    text = example("quickstart.py")
    assert text.startswith("Plan for")
    assert len(text.splitlines()[-1]) > 0


@pytest.mark.slow
def test_plan_elsewhere_compares_machines():
    text = example("plan_elsewhere.py")
    assert text.startswith("Plan for meta-llama/Llama-3.1-70B")
    assert text.count(" ssd ") >= 4


@pytest.mark.slow
def test_timeline_shows_the_overlap_and_saves_a_trace(tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    trace = tmp_path / "trace.json"
    text = example("timeline.py", str(trace))
    assert "of the draft's work was done while the target verified" in text
    target, draft = (next(line for line in text.splitlines() if line.startswith(f"{name:>6} |")) for name in ("target", "draft"))
    assert target[8] == "V"
    assert "B" in draft
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"verify", "build"} <= names


def test_serving_answers_every_caller_and_saves_a_trace(tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    trace = tmp_path / "trace.json"
    text = example("serving.py", str(trace))
    assert {f"caller {name}:" in text for name in range(6)} == {True}
    assert "draft ok" in text
    events = json.loads(trace.read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"target", "draft"} < tracks
    assert len(tracks) == 8


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_first_run_goes_the_whole_way():
    text = example("first_run.py")
    for part in ("Plan for", "tokens/s in mode", "vs AR", "Same tokens in every row: "):
        assert part in text


@pytest.mark.slow
def test_gpu_check_runs_every_part_on_a_cpu(tmp_path):
    result = tmp_path / "result.json"
    text = example("gpu_check.py", "--device", "cpu", "--small", "--json", str(result))
    found = json.loads(result.read_text())
    assert (found["device"], found["kind"], found["small"]) == ("the CPU", "cpu", True)
    assert {line["part"] for line in found["lines"]} == {
        "all",
        "correctness",
        "sampling",
        "graphs",
        "latency",
        "bandwidth",
        "memory",
        "modes",
    }
    assert all(line["right"] in (True, None) for line in found["lines"])
    assert all(line["what"].split(":")[0] in text for line in found["lines"])
