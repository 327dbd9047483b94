"""`ssd simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.files import read_scenario
from sim.simulate import simulate
from ssd.cli import run
from ssd.simulation import _axis

TEXT = """
mode: sd
verify: {1: 0.01, 9: 0.02}
draft_step: 0.001
outcomes: {iid: {alpha: 0.8, curve: [0, 0.5]}}
num_speculative_tokens: 2
output_tokens: 30
num_requests: 3
noise: 0.1
"""


@pytest.fixture
def path(tmp_path) -> Path:
    (tmp_path / "s.yaml").write_text(TEXT)
    return tmp_path / "s.yaml"


def json_of(capsys, *words) -> dict:
    assert run(["simulate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_says_what_the_simulator_does(path, capsys):
    expected = simulate(read_scenario(path), 3)
    assert json_of(capsys, path, "--seed", 3)["output_tokens_per_second"] == {
        "mean": expected.metrics.output_tokens_per_second,
        "low": None,
        "high": None,
    }
    assert run(["simulate", str(path), "--seed", "3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{expected.metrics.output_tokens_per_second:.1f} tokens/s over ")
    assert f"busy: target {expected.busy_share('target'):.1%}, draft" in text
    assert "hit rate" not in text


def test_replications_come_with_intervals(path, capsys):
    found = json_of(capsys, path, "--replications", 3)["total_seconds"]
    assert found["low"] < found["mean"] < found["high"]
    assert run(["simulate", str(path), "--replications", "3"]) == 0
    assert " ±" in capsys.readouterr().out


def test_a_sweep_is_a_table(path, tmp_path, capsys):
    out = tmp_path / "t.csv"
    words = ["simulate", str(path), "--sweep", "num_speculative_tokens=2,4", "--sweep", "outcomes.iid.alpha=0.5,0.9", "--out", str(out)]
    assert run(words) == 0
    assert capsys.readouterr().out == f"4 rows written to {out}.\n"
    assert [line.split(",")[:2] for line in out.read_text().splitlines()] == [
        ["num_speculative_tokens", "outcomes.iid.alpha"],
        *[["2", "0.5"], ["2", "0.9"], ["4", "0.5"], ["4", "0.9"]],
    ]


def test_a_timeline_is_written_and_drawn(path, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert run(["simulate", str(path), "--timeline", str(tmp_path / "t.json"), "--plot", str(tmp_path / "p.svg")]) == 0
    assert {"verify", "answer"} <= {event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]}
    assert "<svg" in (tmp_path / "p.svg").read_text()


def test_an_axis_is_a_key_and_its_values():
    assert _axis("a.b=1,2.5,x") == ("a.b", [1, 2.5, "x"])
    assert _axis("lengths=[1, 2],[3]") == ("lengths", [[1, 2], [3]])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.yaml"], "'none.yaml' cannot be read (No such file or directory): give a scenario"),
        (["PATH", "--replications", "0"], "--replications=0: give 1 or more"),
        (["PATH", "--sweep", "noise=0,1"], "--sweep and --out: belong together: give both, or neither"),
        (["PATH", "--out", "t.csv"], "--sweep and --out: belong together"),
        (["PATH", "--sweep", "noise", "--out", "t.csv"], "--sweep='noise' is no sweep: write a key of the scenario and its values"),
        (["PATH", "--sweep", "noise=", "--out", "t.csv"], "--sweep='noise=' is no sweep"),
        (["PATH", "--sweep", "noise=0", "--out", "t.csv", "--plot", "p.svg"], "--sweep: has no one timeline to write or draw"),
        (["PATH", "--sweep", "nois=0", "--out", "t.csv"], "a scenario has no option 'nois': did you mean 'noise'?"),
        (["PATH", "--sweep", "noise=-1", "--out", "t.csv"], "noise=-1 must be finite and not negative"),
        (["PATH", "--sweep", "noise=0", "--out", "no/t.csv"], "'no/t.csv' cannot be written (No such file or directory)"),
    ],
)
def test_mistakes_are_named(words, message, path, capsys):
    assert run(["simulate", *(str(path) if word == "PATH" else word for word in words)]) == 2
    assert message in capsys.readouterr().err
