"""Replications, grids and tables."""

import csv
import sys

import numpy as np
import pytest

from sim.latency import Latency
from sim.picture import draw
from sim.scenario import Scenario
from sim.simulate import SHARES, simulate
from sim.summary import Interval, replicate, summary
from sim.sweep import grid, save, sweep
from tests.sim.test_batch import BY_HAND, STAGGERED

NOISY = Scenario("ar", Latency.constant(2.0), output_tokens=40, noise=0.3)


def test_a_summary_has_the_result_by_name():
    result = simulate(STAGGERED)
    found = summary(result)
    assert found["output_tokens_per_second"] == 14 / 79
    assert (found["ttft_p50"], found["itl_p99"]) == (result.percentile("ttft", 50), result.percentile("itl", 99))
    assert found["target_busy"] == result.busy_share("target")
    assert sum(found[f"share_{name}"] for name in SHARES) == pytest.approx(1)
    assert summary(simulate(NOISY))["cache_hit_rate"] is None


def test_an_interval_is_students():
    assert Interval.of([1.0, 2.0, 3.0]) == Interval(2.0, pytest.approx(2 - 4.302653 / 3**0.5), pytest.approx(2 + 4.302653 / 3**0.5))
    assert Interval.of([5.0]) == Interval(5.0, None, None)


def test_replications_have_the_seeds_one_after_another():
    found = replicate(NOISY, 4, seed=10)["output_tokens_per_second"]
    assert found.mean == pytest.approx(np.mean([simulate(NOISY, seed).metrics.output_tokens_per_second for seed in (10, 11, 12, 13)]))
    assert replicate(NOISY, 4, seed=10)["output_tokens_per_second"] == found
    assert replicate(NOISY, 2)["cache_hit_rate"] is None


def test_of_twenty_intervals_nineteen_hold_the_mean():
    outside = 0
    for start in range(0, 800, 20):
        interval = replicate(NOISY, 20, seed=start)["total_seconds"]
        # A prompt of no time and 39 forwards of 2 s on average.
        outside += not interval.low <= 78 <= interval.high
    assert 0 <= outside <= 6


def test_processes_of_any_number_give_the_same():
    rows = [sweep(NOISY, {"noise": [0.1, 0.2], "output_tokens": [5, 9]}, replications=2, jobs=jobs) for jobs in (1, 2)]
    assert rows[0] == rows[1]
    assert [(row["noise"], row["output_tokens"]) for row in rows[0]] == [(0.1, 5), (0.1, 9), (0.2, 5), (0.2, 9)]
    assert all(row["total_seconds_low"] <= row["total_seconds"] <= row["total_seconds_high"] for row in rows[0])


def test_a_sweep_tells_how_it_comes_along():
    heard = []
    sweep(NOISY, {"output_tokens": [5, 9]}, replications=3, jobs=1, tell=lambda what, share: heard.append((what, share)))
    assert heard[0] == ("run 1 of 6", 1 / 6)
    assert heard[-1] == ("run 6 of 6", 1.0)


def test_a_row_is_what_its_scenario_does():
    rows = sweep(BY_HAND, {"batch_size": [1, 2]}, jobs=1)
    assert rows[1]["output_tokens_per_second"] == 14 / 70
    assert rows[1]["mean_acceptance_length"] == simulate(BY_HAND).metrics.mean_acceptance_length


def test_tables_are_written_as_csv_and_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = sweep(NOISY, {"output_tokens": [5, (5, 9)]}, jobs=1)
    save(rows, tmp_path / "t.csv")
    save(rows, tmp_path / "t.parquet")
    assert parquet.read_table(tmp_path / "t.parquet").column("output_tokens").to_pylist() == ["5", "(5, 9)"]
    with (tmp_path / "t.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["output_tokens"] for row in found] == ["5", "(5, 9)"]
    assert float(found[0]["total_seconds"]) == rows[0]["total_seconds"]
    assert found[0]["cache_hit_rate"] == ""
    save(sweep(NOISY, {"output_tokens": [5, 9]}, jobs=1), tmp_path / "u.parquet")
    assert parquet.read_table(tmp_path / "u.parquet").column("output_tokens").to_pylist() == [5, 9]


def test_other_endings_and_a_missing_library_are_refused_with_the_remedy(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"path='t.xls': a table is written as \.csv or \.parquet"):
        save([{"a": 1}], "t.xls")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"Parquet needs pyarrow; pip install 'ssd-decoding\[tables\]', or write \.csv"):
        save([{"a": 1}], tmp_path / "t.parquet")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"a picture needs matplotlib; pip install 'ssd-decoding\[plots\]'"):
        draw(simulate(BY_HAND).timeline, tmp_path / "p.svg")


def test_an_unknown_axis_and_an_empty_one_are_refused():
    with pytest.raises(ValueError, match="a scenario has no option 'bach_size': did you mean 'batch_size'"):
        sweep(NOISY, {"bach_size": [1]})
    with pytest.raises(ValueError, match=r"noise=\(\) leaves nothing to sweep over"):
        grid({"noise": []})
    with pytest.raises(ValueError, match="replications=0"):
        replicate(NOISY, 0)


def test_a_picture_has_a_lane_for_every_device_and_request(tmp_path):
    pytest.importorskip("matplotlib")
    draw(simulate(BY_HAND).timeline, tmp_path / "p.svg")
    text = (tmp_path / "p.svg").read_text()
    for lane in ("target", "draft", "request-0", "request-1"):
        assert f"<!-- {lane} -->" in text
    draw(simulate(BY_HAND).timeline, tmp_path / "p.png", seconds=30.0)
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match=r"p\.xyz"):
        draw(simulate(BY_HAND).timeline, tmp_path / "p.xyz")
