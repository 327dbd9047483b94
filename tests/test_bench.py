"""Configurations run in turn on the same prompts and are compared prompt by prompt; the speed against AR comes first."""

import io

import pytest
from rich.console import Console

from sim.metrics import Metrics, Round
from sim.timeline import Span, Timeline
from ssd.bench import BenchResult, bench
from ssd.bench.candidates import candidates
from ssd.bench.result import Latencies, Skipped
from ssd.bench.run import Run
from ssd.bench.summary import summarise
from ssd.bench.tables import label, report, serving_block, table, verdict
from ssd.engine.engine import Engine
from ssd.specs import Placement, Prediction, RequestOutput
from tests import handmade

PROMPTS = ["a", "hello", "zz top"]


@pytest.fixture(scope="module")
def pair(tiny_pair):
    return tiny_pair


@pytest.fixture(scope="module")
def result(pair):
    return bench(handmade.plan(pair), prompts=PROMPTS, output_tokens=12)


def predicted(speed: float) -> Prediction:
    ratios = {"speedup_vs_ar": 1.0, "speedup_vs_ar_equal_devices": 1.0}
    return Prediction(tokens_per_second=speed, mean_acceptance_length=1.0, verify_seconds=0.1, method="theory", **ratios)


def run(tokens_per_second: float, tokens: tuple[int, ...] = (1, 2, 3), hit: bool | None = None, drafted: int = 0) -> Run:
    """One request of three tokens whose first took a second."""
    begin, step = 1.0, 1 / tokens_per_second
    rounds = [Round("r", drafted, min(1, drafted), 1, hit, False, step / 2, step / 4) for _ in range(2)]
    metrics = Metrics.from_rounds(rounds, num_output_tokens=3, total_seconds=begin + 2 * step, time_to_first_token=begin)
    output = RequestOutput(
        request_id="r", prompt="p", prompt_token_ids=(1,), text="", token_ids=tokens, finish_reason="length", metrics=metrics
    )
    spans = [Span("target", "prefill", 0.0, begin, 0, "r")]
    spans += [Span("target", "verify", begin, begin + step, 1, "r"), Span("target", "verify", begin + step, begin + 2 * step, 2, "r")]
    return Run(output, Timeline(spans))


def summary(columns, skipped=()):
    count = len(next(iter(columns.values())))
    return summarise(handmade.plan(("target", "draft"), next(iter(columns))), count, 3, columns, skipped)


def test_a_plan_for_a_batch_is_refused(pair):
    plan = handmade.plan(pair)
    plan = plan.model_copy(update={"workload": plan.workload.model_copy(update={"batch_size": 4})})
    with pytest.raises(ValueError, match=r"workload.batch_size=4: a benchmark decodes one request at a time.* plan with batch_size=1"):
        bench(plan, prompts=PROMPTS, output_tokens=12)


def test_every_configuration_decodes_the_same_tokens(result):
    assert result.identical_prompts == len(PROMPTS)
    assert result.differing_prompts == ()
    assert result.serving.total_generated_tokens == 12 * len(PROMPTS)


def test_the_plan_comes_first_and_both_senses_have_their_baselines(result):
    found = [(row.configuration.mode, row.configuration.placement.devices) for row in result.rows]
    alone, both = handmade.ALONE, handmade.BOTH
    assert found == [("ssd", both), ("ar", alone), ("sd", alone), ("ar", both), ("sd", both)]
    plan = result.rows[0]
    assert None not in (plan.speedup_vs_ar, plan.speedup_vs_sd, plan.speedup_vs_ar_equal_devices, plan.speedup_vs_sd_equal_devices)


def test_shares_and_rates_are_of_what_happened(result):
    ssd, ar = result.rows[:2]
    assert 0 < ssd.verify_share < 1
    assert 0 < ssd.wait_share < 1
    assert 0 < ssd.draft_acceptance_rate <= 1
    assert ssd.hit_rate is not None
    assert (ar.hit_rate, ar.draft_acceptance_rate, ar.overlap) == (None, None, 0)
    assert ar.wait_share < 0.05


def test_a_result_survives_json(result, tmp_path):
    result.save(tmp_path / "bench.json")
    assert BenchResult.load(tmp_path / "bench.json") == result


def test_configurations_take_turns_in_an_order_that_rotates(pair, monkeypatch):
    seen = []
    original = Engine.generate
    monkeypatch.setattr(
        Engine, "generate", lambda self, prompt, params: seen.append((prompt, self.plan.mode)) or original(self, prompt, params)
    )
    plan = handmade.plan(pair, handmade.sd(), (handmade.AR,))
    bench(plan, prompts=["a", "b"], output_tokens=2, warmup=0)
    assert seen == [("a", "sd"), ("a", "ar"), ("b", "ar"), ("b", "sd")]


def test_warm_up_runs_do_not_count(pair, monkeypatch):
    seen = []
    original = Engine.generate
    monkeypatch.setattr(Engine, "generate", lambda self, prompt, params: seen.append(prompt) or original(self, prompt, params))
    found = bench(handmade.plan(pair, handmade.sd(), (handmade.AR,)), prompts=["a"], output_tokens=2, warmup=2)
    assert len(seen) == 2 * 2 + 2
    assert found.serving.successful_requests == 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": ["a", "b", "a"]}, "2 of 3 are distinct"),
        ({"output_tokens": 1}, "output_tokens=1"),
        ({"warmup": -1}, "warmup=-1"),
        ({"prompts": ["x" * 90]}, "prompt 0 has 90 tokens.*leaves 86"),
    ],
)
def test_what_would_measure_nothing_is_refused(pair, asked, message):
    with pytest.raises(ValueError, match=message):
        bench(handmade.plan(pair), **{"prompts": ["a"], "output_tokens": 10, **asked})


def test_a_draft_lost_on_the_way_ends_the_measurement(pair, monkeypatch):
    original = Engine.generate

    def killing(self, prompt, params):
        self.peer.process.kill()
        return original(self, prompt, params)

    monkeypatch.setattr(Engine, "generate", killing)
    with pytest.raises(RuntimeError, match="draft was lost"):
        bench(handmade.plan(pair), prompts=["a"], output_tokens=8)


def test_ratios_are_medians_of_ratios_prompt_by_prompt():
    found = summary({handmade.SSD: [run(20), run(30), run(40)], handmade.AR: [run(10), run(30), run(10)]})
    assert found.rows[0].speedup_vs_ar == pytest.approx(2)
    assert found.rows[0].tokens_per_second.median == pytest.approx(30)
    assert found.rows[0].tokens_per_second.lower == pytest.approx(25)


def test_the_rival_is_the_fastest_sd_on_those_devices_and_no_other():
    slow, fast, both = handmade.sd(1), handmade.sd(2), handmade.sd(2, handmade.BOTH)
    found = summary({handmade.SSD: [run(40)], slow: [run(10)], fast: [run(20)], both: [run(80)]})
    assert found.rows[0].speedup_vs_sd == pytest.approx(2)
    assert found.rows[0].speedup_vs_sd_equal_devices == pytest.approx(0.5)
    assert found.rows[0].speedup_vs_ar is None


def test_with_equal_devices_a_rival_may_leave_some_idle_where_that_is_faster():
    both = handmade.AR_BOTH
    elsewhere = both.model_copy(update={"placement": Placement(target=("cpu:8", "cpu:9"))})
    columns = {handmade.SSD: [run(40)], handmade.AR: [run(20)], both: [run(10)], elsewhere: [run(80)]}
    ssd, ar, both_row, _ = summary(columns).rows
    assert ssd.speedup_vs_ar_equal_devices == pytest.approx(2)
    assert ar.speedup_vs_ar_equal_devices == pytest.approx(1)
    assert (both_row.speedup_vs_ar, both_row.speedup_vs_ar_equal_devices) == (pytest.approx(1), pytest.approx(0.5))


def test_outputs_that_differ_are_counted_and_named():
    found = summary({handmade.SSD: [run(1), run(1)], handmade.AR: [run(1), run(1, tokens=(1, 2, 4))]})
    assert found.differing_prompts == (1,)
    assert "1 of 2 prompts; not prompts 1" in text(report(found))


def test_inter_token_latency_is_the_time_between_bursts():
    assert run(10).gaps() == pytest.approx([0.1, 0.1])


def test_percentiles_are_interpolated():
    found = Latencies.of([float(x) for x in range(101)])
    assert (found.mean, found.median, found.p99) == (50, 50, pytest.approx(99))


def test_the_best_of_each_mode_and_placement_runs_once(pair):
    speeds = {(1, handmade.ALONE): 5, (2, handmade.ALONE): 9, (3, handmade.ALONE): 7, (4, handmade.BOTH): 1}
    alternatives = tuple(handmade.sd(*key, predicted=predicted(speed)) for key, speed in speeds.items())
    found = candidates(handmade.plan(pair, handmade.SSD, (*alternatives, handmade.AR)))
    assert [(c.mode, c.num_speculative_tokens) for c in found] == [("ssd", 3), ("sd", 2), ("sd", 4), ("ar", 0), ("ar", 0)]
    assert found[-1].placement.target == handmade.BOTH


def test_accelerators_are_not_joined_for_one_model():
    place = Placement(target=("cuda:0",), draft=("cuda:1",))
    hardware = handmade.HERE.model_copy(
        update={"devices": tuple(device.model_copy(update={"id": f"cuda:{i}"}) for i, device in enumerate(handmade.HERE.devices))}
    )
    plan = handmade.plan(("t", "d")).model_copy(update={"placement": place, "hardware": hardware})
    assert all(len(c.placement.target) == 1 for c in candidates(plan))


def text(what) -> str:
    console = Console(width=220, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


def test_the_table_leads_with_the_speed_against_ar(result):
    columns = [column.header for column in table(result).columns]
    assert columns[2] == "vs AR"
    assert columns.index("acceptance") == columns.index("hit rate") + 1
    assert text(table(result)).count("SSD K=3 F=1,1,1,2") == 1


def test_slow_speculation_is_said_plainly_and_first():
    assert verdict(summary({handmade.SSD: [run(5)], handmade.AR: [run(10)]})).startswith(
        "Speculation is slower than AR here: 0.50 times the speed of AR on the target's devices alone."
    )
    assert verdict(summary({handmade.SSD: [run(20)], handmade.AR: [run(10)]})).startswith("The plan is SSD")


def test_losing_on_equal_devices_alone_is_said_too():
    said = verdict(summary({handmade.SSD: [run(20)], handmade.AR: [run(10)], handmade.AR_BOTH: [run(40)]}))
    assert said.startswith("Speculation is slower than AR here: 0.50 times the speed of AR on the same devices.")


def test_what_could_not_run_is_named_with_the_reason():
    found = summary({handmade.SSD: [run(5)]}, [Skipped(configuration=handmade.sd(), reason="it rains")])
    assert "Left out: SD K=3 on cpu:" in text(report(found))


TITLES = """Serving Benchmark Result
Successful requests:
Benchmark duration (s):
Total input tokens:
Total generated tokens:
Request throughput
Output token throughput
Total token throughput
Time to First Token
Mean TTFT (ms)
Median TTFT (ms)
P99 TTFT (ms)
Time per Output Token (excl. 1st token)
Inter-token Latency
End-to-end Latency
Speculative Decoding
Acceptance rate (%)
Acceptance length
Drafts:
Draft tokens:
Accepted tokens:
Per-position""".splitlines()


def test_the_fields_block_has_its_titles_in_order():
    found = summary({handmade.SSD: [run(50, hit=True, drafted=2)], handmade.AR: [run(10)]})
    block = serving_block(found.serving)
    places = [block.index(title) for title in TITLES]
    assert places == sorted(places)
    assert "Position 1:" in block


def test_a_label_tells_configurations_apart():
    assert label(handmade.SSD) == "SSD K=3 F=1,1,1,2"
    assert (
        label(handmade.SSD.model_copy(update={"fan_out_miss": (1, 0, 0, 0), "backup": "none"})) == "SSD K=3 F=1,1,1,2/1,0,0,0 backup=none"
    )
