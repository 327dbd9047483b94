"""Configurations run in turn on the same prompts and are compared prompt by prompt; the speed against AR comes first."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from sim.metrics import Metrics, Round
from sim.timeline import Span, Timeline
from ssd.bench import BenchResult, bench
from ssd.bench.candidates import candidates, grid
from ssd.bench.compare import compare, comparison, set_up_differences
from ssd.bench.identity import differences, gap_by
from ssd.bench.result import Latencies, SetUp, Skipped
from ssd.bench.run import Run
from ssd.bench.setting import Setting
from ssd.bench.summary import summarise
from ssd.bench.tables import label, report, serving_block, table, verdict
from ssd.engine.engine import Engine
from ssd.rivals.messages import Decoded, Rival
from ssd.specs import Models, Placement, Prediction, RequestOutput
from tests import handmade, tiny

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
    """One request of three tokens whose first took a second; a round waits for a quarter, verifies for a half and rests for a quarter."""
    begin, step = 1.0, 1 / tokens_per_second
    rounds = [Round("r", drafted, min(1, drafted), 1, hit, False, step / 2, step / 4, begin + i * step) for i in range(2)]
    metrics = Metrics.from_rounds(rounds, num_output_tokens=3, total_seconds=begin + 2 * step, time_to_first_token=begin)
    output = RequestOutput(
        request_id="r",
        prompt="p",
        prompt_token_ids=(1,),
        text="",
        token_ids=tokens,
        finish_reason="length",
        metrics=metrics,
        rounds=tuple(rounds),
    )
    spans = [Span("target", "prefill", 0.0, begin, 0, "r")]
    spans += [Span("target", "verify", begin, begin + step, 1, "r"), Span("target", "verify", begin + step, begin + 2 * step, 2, "r")]
    return Run((output,), Timeline(spans), begin + 2 * step, (100, 50))


def summary(columns, skipped=(), gap=0.5):
    return summarise(Setting(), columns, skipped, differences=differences(columns, lambda ids: gap))


def whole(*cells):
    """A result with these cells."""
    set_up = SetUp(
        hardware="two cores",
        devices={"cpu:0": "core"},
        models=Models(target="t", draft="d"),
        weights="float32",
        versions={"torch": "1"},
        prompt_set="code",
        prompts=("p", "q"),
        output_tokens=3,
        warmup=1,
        load_seconds={"ssd": 1.0},
        date="today",
    )
    return BenchResult(set_up=set_up, cells=cells)


def for_load(plan, **load):
    return plan.model_copy(update={"workload": plan.workload.model_copy(update=load)})


@pytest.fixture(scope="module")
def gridded(pair):
    """AR on the axes of batch size, temperature and context; without a draft, which is quick to start."""
    plan = handmade.plan((pair[0], None), handmade.AR)
    plans = [for_load(plan, batch_size=size, prompt_tokens=5) for size in (1, 2)]
    return bench(plans, prompts=["abcdefg", "hello", "z", "the end"], output_tokens=6, warmup=0, temperatures=(0.0, 1.0), fit_prompts=True)


def test_axes_make_a_cell_for_each_point(gridded):
    points = [(cell.setting.batch_size, cell.setting.temperature) for cell in gridded.cells]
    assert points == [(1, 0), (2, 0), (1, 1), (2, 1)]


def test_a_batch_is_decoded_together_and_every_prompt_once(gridded):
    for cell in gridded.cells:
        groups = 4 // cell.setting.batch_size
        for row in cell.rows:
            assert len(row.speeds) == groups
            assert row.serving.successful_requests == 4
            assert row.serving.total_input_tokens == 4 * 5
            assert row.serving.total_generated_tokens == 4 * 6


def test_only_greedy_outputs_must_be_the_same(gridded):
    for cell in gridded.cells:
        for row in cell.rows:
            assert row.differences == (() if cell.setting.temperature == 0 else None)


def test_the_speed_of_a_batch_is_all_its_tokens_over_wall_clock_and_of_one_request_decoding_alone():
    one, both = run(10), Run(run(10).outputs * 2, run(10).timeline, 4.0)
    assert one.tokens_per_second == pytest.approx(10)
    assert both.tokens_per_second == pytest.approx(2 * 3 / 4)


def test_more_prompts_together_than_there_are_is_refused(pair):
    with pytest.raises(ValueError, match=r"prompts has 3 for workload.batch_size=4: give at least as many"):
        bench(for_load(handmade.plan(pair), batch_size=4), prompts=PROMPTS, output_tokens=12)


def test_every_configuration_decodes_the_same_tokens(result):
    assert all(row.differences == () for row in result.rows)
    assert result.serving.total_generated_tokens == 12 * len(PROMPTS)


def test_where_the_time_of_a_round_goes_is_told(result):
    for row in result.rows:
        assert row.round.verify.median > 0
        assert row.round.rest.median >= 0
    found = summary({handmade.SSD: [run(10, drafted=2)]}).rows[0].round
    assert (found.verify.median, found.wait.median, found.rest.median) == (pytest.approx(0.05), pytest.approx(0.025), pytest.approx(0.025))


def test_memory_stands_beside_what_the_plan_reckons_with(result):
    ssd, ar = result.rows[0].memory, result.rows[1].memory
    assert ssd.target_planned > 0
    assert ssd.draft_planned > 0
    assert ar.draft_planned is None
    assert ar.draft_peak is None
    if ssd.target_peak is not None:
        # torch alone is more than a megabyte, and no tiny pair needs a terabyte.
        assert 1 << 20 < ssd.draft_peak < 1 << 40
        assert 1 << 20 < ssd.target_peak < 1 << 40


def test_the_peak_of_several_runs_is_the_highest():
    column = [replace(run(10), peaks=peaks) for peaks in ((3, 7), (9, None))]
    found = summary({handmade.SSD: column}).rows[0].memory
    assert (found.target_peak, found.draft_peak) == (9, 7)


def test_a_result_says_on_what_and_with_what_it_was_measured(result):
    set_up = result.set_up
    assert set_up.prompts == tuple(PROMPTS)
    assert set_up.versions["torch"]
    assert set_up.load_seconds["ssd"] > 0
    assert set_up.weights == "float32"


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
        Engine, "generate", lambda self, prompts, params: seen.append((*prompts[0], self.plan.mode)) or original(self, prompts, params)
    )
    plan = handmade.plan(pair, handmade.sd(), (handmade.AR,))
    bench(plan, prompts=["a", "b"], output_tokens=2, warmup=0)
    a, b = (tiny.tokenizer()(text)["input_ids"][0] for text in "ab")
    assert seen == [(a, "sd"), (a, "ar"), (b, "ar"), (b, "sd")]


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
    ratio = found.rows[0].speedup_vs_ar
    assert (ratio.lower, ratio.median, ratio.upper) == (pytest.approx(1.5), pytest.approx(2), pytest.approx(3))
    assert found.rows[0].tokens_per_second.median == pytest.approx(30)
    assert found.rows[0].tokens_per_second.lower == pytest.approx(25)


def test_the_rival_is_the_fastest_sd_on_those_devices_and_no_other():
    slow, fast, both = handmade.sd(1), handmade.sd(2), handmade.sd(2, handmade.BOTH)
    found = summary({handmade.SSD: [run(40)], slow: [run(10)], fast: [run(20)], both: [run(80)]})
    assert found.rows[0].speedup_vs_sd.median == pytest.approx(2)
    assert found.rows[0].speedup_vs_sd_equal_devices.median == pytest.approx(0.5)
    assert found.rows[0].speedup_vs_ar is None


def test_with_equal_devices_a_rival_may_leave_some_idle_where_that_is_faster():
    both = handmade.AR_BOTH
    elsewhere = both.model_copy(update={"placement": Placement(target=("cpu:8", "cpu:9"))})
    columns = {handmade.SSD: [run(40)], handmade.AR: [run(20)], both: [run(10)], elsewhere: [run(80)]}
    ssd, ar, both_row, _ = summary(columns).rows
    assert ssd.speedup_vs_ar_equal_devices.median == pytest.approx(2)
    assert ar.speedup_vs_ar_equal_devices.median == pytest.approx(1)
    assert (both_row.speedup_vs_ar.median, both_row.speedup_vs_ar_equal_devices.median) == (pytest.approx(1), pytest.approx(0.5))


def test_outputs_that_differ_are_counted_and_named():
    found = summary({handmade.SSD: [run(1), run(1)], handmade.AR: [run(1), run(1, tokens=(1, 2, 4))]})
    assert [row.differing_prompts for row in found.rows] == [(1,), ()]
    assert found.rows[0].differences[0].place == 2
    assert "Other tokens than AR's: SSD K=3 F=1,1,1,2 on cpu:" in text(report(whole(found)))
    assert "1 of 2 prompts (1, from 0)" in text(report(whole(found)))


def test_a_near_tie_of_the_two_best_logits_excuses_another_token():
    columns = {handmade.SSD: [run(1, tokens=(1, 2, 4))], handmade.AR: [run(1)]}
    row = summary(columns, gap=1e-5).rows[0]
    assert (row.differing_prompts, row.near_ties) == ((), 1)


def test_how_far_apart_the_best_logits_are_is_asked_at_the_first_token_that_differs():
    asked = []
    columns = {handmade.SSD: [run(1, tokens=(1, 5, 6))], handmade.AR: [run(1)]}
    differences(columns, lambda ids: asked.append(ids) or 1.0)
    assert asked == [(1, 1)]


def test_the_engines_target_tells_how_far_apart_its_best_logits_are(pair):
    module = AutoModelForCausalLM.from_pretrained(pair[0]).eval()
    with Engine.from_plan(handmade.plan(pair, handmade.AR)) as engine, torch.inference_mode():
        for ids in ((5, 9, 30), (7,)):
            best = module(torch.tensor([ids])).logits[0, -1].topk(2).values
            assert gap_by(engine, handmade.AR)(ids) == pytest.approx(float(best[0] - best[1]), abs=1e-4)


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


def text(what, width: int = 220) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(what)
    return console.export_text()


def test_the_table_leads_with_the_speed_against_ar(result):
    columns = [column.header for column in table(result.cells[0]).columns]
    assert columns[2] == "vs AR"
    assert columns.index("acc.") == columns.index("hit") + 1
    assert text(table(result.cells[0])).count("SSD K=3 F=1,1,1,2") == 1


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
    assert "Left out: SD K=3 on cpu:" in text(report(whole(found)))


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
    block = serving_block("SSD", whole(found).serving)
    places = [block.index(title) for title in TITLES]
    assert places == sorted(places)
    assert "Position 1:" in block


def test_a_label_tells_configurations_apart():
    assert label(handmade.SSD) == "SSD K=3 F=1,1,1,2"
    assert (
        label(handmade.SSD.model_copy(update={"fan_out_miss": (1, 0, 0, 0), "backup": "none"})) == "SSD K=3 F=1,1,1,2/1,0,0,0 backup=none"
    )
    budget = handmade.SSD.model_copy(update={"fan_out_hit": (), "fan_out_miss": (), "budget": 10})
    assert label(budget) == "SSD K=3 B=10"
    assert label(budget.model_copy(update={"building": "anytime"})) == "SSD K=3 B=10 anytime"


def test_configurations_of_several_plans_for_one_setting_stand_once_in_one_cell(pair):
    plans = [handmade.plan(pair, handmade.SSD), handmade.plan(pair, handmade.SSD.model_copy(update={"backup": "none"}))]
    (column,) = grid(plans, [0.0], fit_prompts=False).values()
    assert column[:2] == [handmade.SSD, handmade.SSD.model_copy(update={"backup": "none"})]
    assert sorted(one.mode for one in column) == ["ar", "ar", "sd", "sd", "ssd", "ssd"]


HF = Rival(mode="transformers", weights="float32", placement=Placement(target=handmade.BOTH))
ASSISTED = HF.model_copy(update={"mode": "transformers assisted"})
LLAMA = HF.model_copy(update={"mode": "llama.cpp", "weights": "Q4_K_M"})


def burst(*bursts: tuple[float, int]) -> Run:
    """A rival's run with tokens that came in these bursts."""
    tokens = tuple(range(sum(count for _, count in bursts)))
    return Run.of_rival(((1,),), Decoded(tokens=(tokens,), bursts=bursts), 1000)


def test_a_rivals_tokens_that_came_with_the_first_took_no_time_after_it():
    found = burst((1.0, 3), (1.5, 2), (2.0, 2))
    assert found.tokens_per_second == pytest.approx(4)
    assert found.gaps() == pytest.approx([0.5, 0.5])
    assert found.metrics.time_to_first_token == 1


def test_ratios_against_rivals_stand_in_every_row_but_no_rival_is_a_baseline_of_ours():
    cell = summary({handmade.SSD: [run(40)], handmade.AR: [run(20)], HF: [burst((1.0, 1), (1.1, 1), (1.2, 1))]})
    ssd, _, hf = cell.rows
    assert ssd.speedup_vs_rivals["transformers"].median == pytest.approx(4)
    assert hf.speedup_vs_ar.median == pytest.approx(0.5) if handmade.ALONE == handmade.BOTH else hf.speedup_vs_ar is None
    assert hf.speedup_vs_ar_equal_devices.median == pytest.approx(0.5)
    assert (hf.round, hf.verify_share, hf.memory.target_peak) == (None, None, 1000)
    assert cell.fastest is ssd


def test_the_tables_fit_a_page_of_120_columns_with_all_rivals():
    hf = burst((1.0, 1), (1.1, 1), (1.2, 1))
    columns = {handmade.SSD: [run(123.4, hit=True, drafted=2)], handmade.AR: [run(100)], handmade.sd(): [run(110, drafted=2)]}
    cell = summary({**columns, HF: [hf], ASSISTED: [hf], LLAMA: [hf]})
    shown = text(table(cell), width=120)
    assert all(f" {name} " in shown for name in ("vs HF", "vs HF+", "vs L", "TTFT"))
    assert "…" not in shown
    assert "llama.cpp Q4_K_M" in shown


def test_two_results_are_compared_prompt_by_prompt_where_prompts_are_the_same():
    first = whole(summary({handmade.SSD: [run(10), run(20)], handmade.AR: [run(5), run(5)]}))
    second = whole(summary({handmade.SSD: [run(10), run(40)], handmade.sd(): [run(5), run(5)]}))
    (row,) = compare(first, second)
    assert (row.configuration, row.first, row.second) == ("SSD K=3 F=1,1,1,2", pytest.approx(15), pytest.approx(25))
    assert row.ratio.median == pytest.approx(1.5)
    assert (row.paired, row.ratio.upper) == (True, pytest.approx(1.75))
    told = list(set_up_differences(first, second))
    assert [line.split(":")[0] for line in told] == ["only in the first", "only in the second"]


def test_a_comparison_says_what_else_differs_and_pairs_no_prompts_that_are_not_the_same():
    first = whole(summary({handmade.SSD: [run(10), run(20)]}))
    changed = first.set_up.model_copy(update={"versions": {"torch": "2"}, "prompts": ("other", "texts")})
    second = first.model_copy(update={"set_up": changed})
    assert [row.paired for row in compare(first, second)] == [False]
    shown = text(comparison(first, second))
    assert "versions.torch: 1 -> 2" in shown
    assert "prompts: 2 texts -> 2 texts" in shown
    assert "of medians" in shown


def test_results_with_nothing_in_common_are_refused():
    first, second = (whole(summary({one: [run(1)]})) for one in (handmade.SSD, handmade.AR))
    with pytest.raises(ValueError, match=r"nothing ran in both: the first has SSD K=3 .* the second AR on"):
        compare(first, second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data | {"format": 99}, "format=99 is of another version, and this one reads 2: measure again"),
        (lambda data: {"hardware": "x", "rows": []}, "format=None is of another version"),
        (lambda data: data | {"cell": []}, "BenchResult has no option 'cell': did you mean 'cells'?"),
    ],
)
def test_a_result_of_another_version_or_with_unknown_fields_is_refused(change, message):
    data = whole(summary({handmade.SSD: [run(1)]})).model_dump(mode="json")
    assert BenchResult.model_validate(data)
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        BenchResult.model_validate(change(data))
