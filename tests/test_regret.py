"""The race between the plan and a grid, on a tiny pair; what the numbers are is no matter here."""

import json
import random

import pytest

from benchmarks import regret
from ssd.specs import Configuration, Hardware
from tests.plans import CORES, two_cores

GRID = ("--lookaheads", "1", "--ways", "budget", "--backups", "none", "--output-tokens", "8", "--final-batches", "1")


def asked(path, *more):
    return regret.options(["--out", str(path), *more])


def test_the_grid_has_every_mode_and_no_configuration_twice(tmp_path):
    found = regret.grid(asked(tmp_path / "x"), two_cores())
    assert len(found) == len(set(found)) >= 40
    assert {each.mode for each in found} == {"ar", "sd", "ssd"}
    assert {each.backup for each in found if each.mode == "ssd"} == {"jit", "none", "ngram"}
    assert {each.building for each in found if each.budget} == {"fixed", "anytime"}


def test_halving_keeps_the_plan_and_finds_the_best(monkeypatch, tmp_path):
    rivals = regret.grid(asked(tmp_path / "x"), two_cores())
    plan, best = rivals[0], rivals[17]
    true = {each: 1.0 + random.Random(place).random() for place, each in enumerate(rivals)}
    true[plan], true[best] = 0.5, 9.0
    measured: list[Configuration] = []

    def speed(self, configuration, number):
        measured.append(configuration)
        return true[configuration]

    monkeypatch.setattr(regret.Race, "speed", speed)
    race = regret.Race(None, regret.Case("code", 0, 1), ["a", "b"], 8)
    left, rounds = race.finalists(plan, rivals[1:])
    assert left[:2] == [plan, best]
    assert len(left) == regret.FINALISTS
    # Half as many in each round.
    assert len(measured) < 2.2 * len(rivals)
    assert measured.count(plan) == rounds


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_case_is_measured_once_and_a_broken_off_run_goes_on(tmp_path, tiny_pair, monkeypatch, capsys):
    out = tmp_path / "regret.json"
    monkeypatch.setattr(Hardware, "local", classmethod(lambda _: two_cores()))
    command = ["--target", tiny_pair[0], "--draft", tiny_pair[1], "--max-model-len", "96", "--out", str(out), *GRID]
    regret.main([*command, "--prompt-sets", "chat", "--temperatures", "1", "--batch-sizes", "2"])
    first = json.loads(out.read_text())["cases"]
    (case,) = first.values()
    assert 0 < case["plan_over_best"] <= 1
    assert case["configurations"] >= 5
    assert "chat, T=1, batch 2" in capsys.readouterr().out
    regret.main([*command, "--prompt-sets", "chat", "--temperatures", "0,1", "--batch-sizes", "2"])
    both = json.loads(out.read_text())["cases"]
    assert both["chat, T=1, batch 2"] == case
    assert len(both) == 2
