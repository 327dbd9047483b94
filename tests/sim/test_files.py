"""Scenarios in files: what they say, and what is said to nonsense in them."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from sim.files import read_document, read_scenario, scenario_of, with_values
from sim.latency import Latency, LatencyByContext
from sim.outcomes import IID, Positional, Replay, Trace, TwoState
from sim.scenario import Scenario
from sim.simulate import simulate
from theory.hits import PowerLaw

EXAMPLE = Path(__file__).parents[2] / "examples" / "scenario.yaml"
AR = {"mode": "ar", "verify": 0.02, "output_tokens": 5}
IID_8 = {"iid": {"alpha": 0.8, "curve": [0, 0.5]}}
SSD = {"mode": "ssd", "verify": 0.02, "draft_step": 0.001, "output_tokens": 5, "num_speculative_tokens": 2, "outcomes": IID_8}


def test_the_example_is_a_scenario_and_names_no_field_that_there_is_not():
    scenario = read_scenario(EXAMPLE)
    assert scenario.fan_out_hit == (2,) * 5
    assert isinstance(scenario.verify, LatencyByContext)
    assert simulate(scenario, record=False).metrics.num_requests == 200


def test_yaml_and_json_say_the_same(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(read_document(EXAMPLE)))
    assert read_scenario(tmp_path / "a.json") == read_scenario(EXAMPLE)


def test_tables_are_a_number_or_points_or_points_by_context():
    tables = (0.5, {1: 0.5, 8: 0.75}, {0: {1: 0.5}, 100: {1: 0.75}}, {"1": "5e-1", "8": 0.75})
    found = [scenario_of({**AR, "verify": table}).verify for table in tables]
    points = Latency.of({1: 0.5, 8: 0.75})
    assert found == [Latency.constant(0.5), points, LatencyByContext.of({0: {1: 0.5}, 100: {1: 0.75}}), points]


def test_every_law_of_outcomes_can_be_written_down(tmp_path):
    (tmp_path / "profile.json").write_text(json.dumps({"texts": [{"traces": [[1, 2], [1, 1]]}]}))
    (tmp_path / "older.json").write_text(json.dumps({"traces": [[1, 2], [1, 1]]}))
    (tmp_path / "rounds.json").write_text("[[0, 3], [2, 1]]")
    curve = tuple(PowerLaw(r=0.5, c=0.3).curve(128).tolist())
    for written, law in (
        ({"iid": {"alpha": 0.8, "curve": {"r": 0.5, "c": 0.3}}}, IID(0.8, curve)),
        ({"positional": {"alphas": [0.8], "curves": [[0, 0.5], {"r": 0.5, "c": 0.3}]}}, Positional((0.8,), ((0, 0.5), curve))),
        ({"two_state": {"after_hit": IID_8, "after_miss": IID_8}}, TwoState(IID(0.8, (0, 0.5)), IID(0.8, (0, 0.5)))),
        ({"replay": {"rounds": [[0, 3], [2, 1]], "lookahead": 2}}, Replay(((0, 3), (2, 1)), 2)),
        ({"replay": {"file": "rounds.json", "lookahead": 2, "block": 4}}, Replay(((0, 3), (2, 1)), 2, 4)),
        ({"trace": {"file": "profile.json"}}, Trace(((1, 2), (1, 1)))),
        ({"trace": {"file": "older.json"}}, Trace(((1, 2), (1, 1)))),
    ):
        assert scenario_of({**AR, "outcomes": written}, tmp_path).outcomes == law


def test_a_profile_of_several_loads_is_no_trace_of_one(tmp_path):
    (tmp_path / "profile.json").write_text(json.dumps({"texts": [{"traces": [[1, 2]]}, {"traces": [[1, 1]]}]}))
    with pytest.raises(ValueError, match=r"outcomes.trace.file='profile.json' is a profile of 2 loads: profile one prompt set at one"):
        scenario_of({**AR, "outcomes": {"trace": {"file": "profile.json"}}}, tmp_path)


def test_a_trace_of_requests_is_a_list_or_a_file(tmp_path):
    (tmp_path / "requests.csv").write_text("prompt_tokens,arrival_seconds,output_tokens\n5,0.5,7\n6,1.5,8\n")
    listed = {"mode": "ar", "verify": 1, "trace": [[0.5, 5, 7], [1.5, 6, 8]]}
    assert scenario_of(listed).trace == scenario_of({**listed, "trace": "requests.csv"}, tmp_path).trace == ((0.5, 5, 7), (1.5, 6, 8))


def test_one_fan_out_is_that_of_every_position():
    assert scenario_of({**SSD, "fan_out_hit": 3, "fan_out_miss": [1, 1, 2]}).fan_out_hit == (3, 3, 3)


def test_values_are_changed_at_the_top_and_inside_and_the_document_stays():
    document = {**SSD, "fan_out_hit": 1, "fan_out_miss": 1}
    changed = scenario_of(with_values(document, {"num_speculative_tokens": 3, "outcomes.iid.alpha": 0.5}))
    assert (changed.num_speculative_tokens, changed.fan_out_hit, changed.outcomes) == (3, (1,) * 4, IID(0.5, (0, 0.5)))
    assert document["outcomes"]["iid"]["alpha"] == 0.8
    for key, message in (
        ("outcomes.idd.alpha", "outcomes.idd.alpha: the scenario has no option 'idd': did you mean 'iid'"),
        ("outcomes.iid.alpa", "did you mean 'alpha'"),
        ("mode.x", "has no option 'mode'"),
    ):
        with pytest.raises(ValueError, match=message):
            with_values(document, {key: 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bach_size": 2}, "a scenario has no option 'bach_size': did you mean 'batch_size'"),
        ({"zzz": 2}, "a scenario has no option 'zzz': it knows mode, verify"),
        ({"mode": 3}, "mode=3 must be a word"),
        ({"mode": "fast"}, "mode='fast' is unknown: use one of"),
        ({"one_device": "yes"}, "one_device='yes' must be true or false"),
        ({"link_seconds": "soon"}, "link_seconds='soon' must be a number"),
        ({"link_seconds": [1]}, r"link_seconds=\[1\] must be a number"),
        ({"link_seconds": True}, "link_seconds=True must be a number"),
        ({"link_seconds": -1}, "link_seconds=-1 must be finite and not negative"),
        ({"output_tokens": ["a"]}, "output_tokens='a' must be a number or a list"),
        ({"verify": {"many": 1}}, "verify: 'many' is no number of tokens: write `tokens: seconds`"),
        ({"verify": {1: "x"}}, "verify='x' must be a number"),
        ({"verify": {1: -2}}, "verify: seconds=.* must be finite and not negative"),
        ({"outcomes": 3}, "outcomes=3 must be one of iid, positional, two_state, replay, trace with its options"),
        ({"outcomes": {"idd": {}}}, "outcomes has no option 'idd': did you mean 'iid'"),
        ({"outcomes": {"iid": 3}}, r"outcomes\.iid=3 must have options"),
        ({"outcomes": {"iid": {"alpha": 0.5}}}, r"outcomes\.iid lacks curve"),
        ({"outcomes": {"iid": {"alpa": 0.5}}}, r"outcomes\.iid has no option 'alpa': did you mean 'alpha'"),
        ({"outcomes": {"iid": {"alpha": 1.5, "curve": [0]}}}, r"outcomes\.iid: alpha=1\.5 must lie between 0 and 1"),
        ({"outcomes": {"iid": {"alpha": 0.5, "curve": {"c": 1}}}}, r"outcomes\.iid: outcomes\.iid\.curve=.* lacks r|lacks r"),
        ({"outcomes": {"iid": {"alpha": 0.5, "curve": {"r": 1, "d": 1}}}}, "has no option 'd'"),
        ({"outcomes": {"replay": {"file": "none.json", "lookahead": 1}}}, r"outcomes\.replay\.file=.*none\.json.* cannot be read"),
        ({"trace": "none.csv", "output_tokens": 0}, r"trace='none\.csv' cannot be read"),
        ({"trace": [[1, 2]]}, r"trace has \[1, 2\]: give arrival seconds, prompt tokens and output tokens"),
        ({"verify": None}, "verify is missing: a scenario needs it"),
    ],
)
def test_nonsense_in_a_file_is_refused_by_its_key(changes, message, tmp_path):
    document = {key: value for key, value in {**AR, **changes}.items() if value is not None}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(ValueError, match=message):
        read_scenario(tmp_path / "s.yaml")


def test_what_is_no_scenario_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none\.yaml' cannot be read \(No such file or directory\): give a scenario"):
        read_scenario(tmp_path / "none.yaml")
    for text, message in (
        ("a: [", "is neither YAML nor JSON"),
        ("- 1", "holds no scenario: write `key: value`"),
        ("", "holds no scenario"),
    ):
        (tmp_path / "s.yaml").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_scenario(tmp_path / "s.yaml")


def test_every_field_of_a_scenario_can_be_written_in_a_file():
    given = {
        **SSD,
        "fan_out_hit": 1,
        "fan_out_miss": [1, 1, 1],
        "budget": 0,
        "building": "fixed",
        "num_requests": 2,
        "batch_size": 2,
        "arrival_seconds": [0, 1.5],
        "request_rate": None,
        "trace": None,
        "prompt_tokens": [3, 4],
        "prompt_chunk": 2,
        "target_prefill_seconds": 0,
        "overhead_seconds": "1e-3",
        "noise": 0,
        "target_residuals": [1, 1.5],
        "draft_residuals": [1],
        "target_slots": 99,
        "draft_slots": 99,
        "draft_alone": 0.001,
        "draft_prefill_seconds": 0,
        "draft_plan_seconds": 0.25,
        "link_seconds": 0,
        "link_bandwidth": 10,
        "draft_token_bytes": 8,
        "draft_outages": [[1, 2]],
        "draft_mtbf": None,
        "draft_repair_seconds": 0,
        "lost_after_seconds": 1,
        "one_device": False,
        "draft_devices": 2,
        "backup": "ngram",
        "ngram_outcomes": IID_8,
        "ngram_found": 0.5,
        "interrupt": "moot",
        "draft_layers": 3,
    }
    assert set(given) == {field.name for field in fields(Scenario)}
    scenario = scenario_of(given)
    assert (scenario.overhead_seconds, scenario.draft_outages, scenario.ngram_found) == (1e-3, ((1, 2),), 0.5)
    assert simulate(scenario).metrics.num_requests == 2
