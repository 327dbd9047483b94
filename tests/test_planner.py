"""What any plan must obey: orders, limits, the published set-ups; and every refusal."""

import itertools
import subprocess
import sys
import types
from time import process_time

import pytest

import ssd
from benchmarks import datasheet
from ssd.planner import MAX_ALTERNATIVES
from ssd.specs import Hardware
from tests.profiles import PAIR, cores, synthetic, texts, with_texts

pytestmark = pytest.mark.usefixtures("_few_simulations")
TWO = cores(2)
LONG = ssd.Workload(output_tokens=256)
PUBLISHED = ssd.Models(target="meta-llama/Llama-3.1-70B-Instruct", draft="meta-llama/Llama-3.2-1B-Instruct")
QWEN = ssd.Models(target="Qwen/Qwen3-32B", draft="Qwen/Qwen3-0.6B")


def planned(hardware=TWO, mode=None, objective="latency", workload=LONG, **profile):
    return ssd.plan(hardware, PAIR, workload, objective, synthetic(hardware, **profile), mode)


def speed(configuration) -> float:
    assert configuration.predicted is not None
    return configuration.predicted.tokens_per_second


def best(plan, mode, devices=None):
    found = [c for c in (plan, *plan.alternatives) if c.mode == mode and devices in (None, len(c.placement.target))]
    return max(found, key=speed)


# Limits


def test_with_a_free_draft_and_perfect_hits_ssd_gives_nearly_k_plus_one_tokens_a_verification():
    free = {"step": 0.0, "step_more": 0.0, "verify_more": 0.0, "traces": ((1,) * 500,)}
    plan = planned(mode="ssd", **free)
    assert (plan.num_speculative_tokens, plan.predicted.hit_rate) == (8, 1)
    assert plan.predicted.speedup_vs_ar == pytest.approx(9, rel=0.05)
    # Not quite 1: the last draft of an output is cut.
    assert plan.predicted.draft_acceptance_rate == pytest.approx(1, abs=0.03)
    # A draft that takes no time makes SD as fast, and SD is the simpler one.
    assert planned(**free).mode == "sd"


def test_with_perfect_hits_a_draft_that_takes_time_is_hidden_by_ssd_and_not_by_sd():
    plan = planned(step=1e-3, step_more=0.0, verify=10e-3, verify_more=0.0, traces=((1,) * 500,))
    assert plan.mode == "ssd"
    assert plan.predicted.speedup_vs_ar == pytest.approx(9, rel=0.05)
    assert plan.predicted.speedup_vs_sd == pytest.approx((10 + 8) / 10, rel=0.05)


def test_a_gain_of_a_quarter_of_a_percent_is_not_worth_a_second_device():
    plan = planned(step=3e-6, step_more=0.0, verify_more=0.0, traces=((1,) * 500,))
    assert speed(best(plan, "ssd")) > speed(plan)
    assert plan.mode == "sd"


def test_an_outcome_that_comes_while_its_branch_grows_waits_for_the_end_of_the_step():
    plan = planned(mode="ssd", step=3e-3, step_more=0.0, verify_more=0.0, traces=((1,) * 500,))
    K = plan.num_speculative_tokens
    assert plan.predicted.build_seconds > 10e-3
    assert plan.predicted.tokens_per_second == pytest.approx((K + 1) / max(10e-3, 3e-3 * (1 + K)), rel=0.04)


def test_where_no_outcome_can_be_foreseen_the_plan_is_not_ssd():
    # Every text is misread everywhere, and the target's choice is none of the draft's candidates.
    plan = planned(traces=texts(0.0, hit=0.0))
    assert plan.mode == "ar"
    useless = planned(mode="ssd", traces=texts(0.0, hit=0.0))
    assert useless.predicted.hit_rate == 0
    assert speed(useless) < speed(plan)


def test_a_draft_slower_than_the_target_is_not_used():
    assert planned(step=20e-3, alpha=0.9).mode == "ar"


def test_ssd_is_never_slower_than_its_own_sd_while_the_build_fits_into_the_round():
    # Corollary 8: primary and backup are SD's draft, T_p <= 1 + T_sd.
    for alpha, step in ((0.3, 1e-3), (0.6, 1.5e-3), (0.9, 0.5e-3), (0.9, 1.5e-3)):
        plan = planned(mode="ssd", alpha=alpha, step=step, step_more=0.0)
        assert speed(plan) >= speed(best(plan, "sd", devices=1))


def test_ssd_beats_sd_more_the_more_candidates_hit():
    gains = [planned(mode="ssd", traces=texts(0.8, hit=hit)).predicted.speedup_vs_sd for hit in (0.05, 0.3, 0.95)]
    assert gains == sorted(gains)
    assert gains[-1] > gains[0] + 0.1


def test_overhead_and_link_slow_every_mode():
    fast, slow = planned(), planned(overhead=2e-3, link=1e-3)
    for mode in ("ar", "sd", "ssd"):
        assert speed(best(slow, mode)) < speed(best(fast, mode))


def test_a_slow_build_asks_for_a_smaller_cache():
    budgets = [sum(planned(mode="ssd", step_more=more).fan_out_hit) for more in (0.0, 0.5e-3)]
    assert budgets[1] < budgets[0]


@pytest.mark.slow
def test_more_devices_never_make_the_plan_slower():
    for models in (PUBLISHED, QWEN):
        plans = [ssd.plan(Hardware.named(f"{count}xH100-SXM"), models, LONG) for count in (2, 3, 5, 7, 8)]
        for fewer, more in itertools.pairwise(map(speed, plans)):
            assert more >= 0.99 * fewer


def test_short_outputs_gain_less():
    assert planned(workload=ssd.Workload(output_tokens=3)).predicted.speedup_vs_ar < planned().predicted.speedup_vs_ar


# What is compared with what


def test_speedups_are_against_the_targets_devices_and_against_all_devices():
    hardware = Hardware.named("5xH100-SXM")
    plan = ssd.plan(hardware, PUBLISHED, LONG, mode="ssd")
    ar, ar_all = best(plan, "ar", 4), best(plan, "ar", 5)
    sd, sd_all = best(plan, "sd", 4), best(plan, "sd", 5)
    assert plan.predicted.speedup_vs_ar == pytest.approx(speed(plan) / speed(ar))
    assert plan.predicted.speedup_vs_ar_equal_devices == pytest.approx(speed(plan) / speed(ar_all))
    assert plan.predicted.speedup_vs_sd == pytest.approx(speed(plan) / speed(sd))
    assert plan.predicted.speedup_vs_sd_equal_devices == pytest.approx(speed(plan) / speed(sd_all))
    assert plan.predicted.speedup_vs_ar_equal_devices < plan.predicted.speedup_vs_ar


def test_ar_is_itself_times_one():
    plan = planned(mode="ar")
    assert plan.predicted.speedup_vs_ar == plan.predicted.speedup_vs_ar_equal_devices == 1
    assert plan.predicted.tokens_per_second == pytest.approx(100)
    assert (plan.predicted.hit_rate, plan.predicted.draft_acceptance_rate, plan.predicted.mean_acceptance_length) == (None, None, 1)


def test_a_round_is_told_in_seconds():
    plan = planned(mode="ssd")
    K, budget = plan.num_speculative_tokens, sum(plan.fan_out_hit)
    assert plan.predicted.verify_seconds == pytest.approx(10e-3 + 0.1e-3 * K)
    assert plan.predicted.build_seconds == pytest.approx(1e-3 + K * (1e-3 + 0.02e-3 * (budget - 1)))
    assert plan.predicted.backup_seconds == pytest.approx(K * 1e-3 if plan.backup == "jit" else 0)


def test_a_placement_without_tables_is_left_out():
    hardware = cores(8)
    profile = synthetic(hardware)
    kept = tuple(table for table in profile.forwards if len(table.devices) != 2)
    plan = ssd.plan(hardware, PAIR, LONG, profile=profile.model_copy(update={"forwards": kept}), mode="ssd")
    assert {len(c.placement.draft) for c in (plan, *plan.alternatives) if c.mode == "ssd"} == {1}


def test_the_verification_is_taken_beside_a_working_draft_for_ssd_and_alone_otherwise():
    profile = synthetic(TWO)
    busy = tuple(
        table.model_copy(update={"contended": True, "seconds": tuple(2 * s for s in table.seconds)})
        for table in profile.forwards
        if table.model == "target" and table.devices == ("cpu:0",)
    )
    plan = ssd.plan(TWO, PAIR, LONG, profile=profile.model_copy(update={"forwards": profile.forwards + busy}), mode="ssd")
    assert plan.predicted.verify_seconds > 20e-3
    assert best(plan, "sd", 1).predicted.verify_seconds < 11e-3


def test_this_machine_is_profiled_and_another_computed(monkeypatch):
    measured = synthetic(TWO)
    fake = types.ModuleType("ssd.profiler")
    fake.profile = lambda hardware, models, workload: measured
    monkeypatch.setitem(sys.modules, "ssd.profiler", fake)
    assert ssd.plan(TWO, PAIR, LONG).profile == measured
    elsewhere = ssd.plan(Hardware.named("2xH100-SXM"), QWEN, LONG)
    assert {table.source for table in elsewhere.profile.forwards} == {"roofline"}


def test_planning_offline_imports_no_torch():
    code = """import sys, ssd
plan = ssd.plan(ssd.Hardware.named("2xH100-SXM"), ssd.Models(target="Qwen/Qwen3-8B", draft="Qwen/Qwen3-0.6B"))
plan.explain()
assert not {"torch", "transformers"} & set(sys.modules)"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Choice


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_a_forced_mode_is_kept_and_the_others_are_alternatives(mode):
    plan = planned(mode=mode)
    assert plan.mode == mode
    assert {c.mode for c in plan.alternatives} >= {"ar", "sd", "ssd"} - {mode}


def test_alternatives_are_ranked_and_few():
    plan = planned(hardware=cores(16))
    speeds = [speed(c) for c in plan.alternatives]
    assert speeds == sorted(speeds, reverse=True)
    assert len(speeds) <= MAX_ALTERNATIVES
    assert speed(plan) >= 0.99 * speeds[0]
    assert all(c.predicted.method == "simulation" for c in plan.alternatives)


def test_without_a_draft_the_plan_is_ar():
    models = ssd.Models(target="target")
    plan = ssd.plan(TWO, models, profile=synthetic(TWO, models))
    assert plan.mode == "ar"
    assert all(c.mode == "ar" for c in plan.alternatives)
    assert plan.predicted.speedup_vs_sd is None


def test_throughput_ranks_as_latency_does_at_batch_size_1():
    latency, throughput = planned(), planned(objective="throughput")
    assert throughput.with_configuration(latency) == throughput


def test_cost_counts_every_device_used():
    def priced(prices):
        devices = tuple(d.model_copy(update={"price_per_hour": p}) for d, p in zip(TWO.devices, prices, strict=True))
        return TWO.model_copy(update={"devices": devices})

    # SSD is less than twice as fast as SD, so two equally dear devices do not pay; a nearly free second one does.
    assert planned(priced((2.0, 2.0)), objective="cost").mode == "sd"
    assert planned(priced((2.0, 0.01)), objective="cost").mode == "ssd"


def test_a_plan_survives_its_file(tmp_path):
    plan = planned(traces=texts(0.8))
    plan.save(tmp_path / "plan.json")
    assert ssd.Plan.load(tmp_path / "plan.json") == plan


def test_the_same_inputs_give_the_same_plan():
    assert planned(traces=texts(0.8)) == planned(traces=texts(0.8))


@pytest.mark.parametrize("hardware", [TWO, cores(16)])
def test_planning_from_a_profile_is_quick(hardware, monkeypatch):
    monkeypatch.undo()
    profile = synthetic(hardware, traces=texts(0.8))
    start = process_time()
    ssd.plan(hardware, PAIR, LONG, profile=profile)
    assert process_time() - start < 5


def test_planning_from_a_data_sheet_is_quick(monkeypatch):
    monkeypatch.undo()
    start = process_time()
    ssd.plan(Hardware.named("8xH100-SXM"), PUBLISHED, ssd.Workload(output_tokens=512))
    assert process_time() - start < 10


# The published set-ups, tokens a second (arXiv 2603.03251)


@pytest.mark.parametrize(
    ("models", "prompts", "ar", "sd", "ssd_"),
    [
        # HumanEval; UltraFeedback and Alpaca. Acceptance was set by the published SD rates: AR and SSD are what is predicted.
        (PUBLISHED, "code", 54.7, 176, 283),
        (PUBLISHED, "chat", 54.7, 141.5, 219.5),
        (QWEN, "code", 88.8, 146, 222),
        (QWEN, "chat", 88.8, 124.5, 179.5),
    ],
)
def test_the_published_speeds_are_met_within_a_fifth(models, prompts, ar, sd, ssd_):
    plan = ssd.plan(Hardware.named("5xH100-SXM"), models, ssd.Workload(output_tokens=512, prompt_set=prompts))
    assert plan.mode == "ssd"
    assert speed(best(plan, "ar", 4)) == pytest.approx(ar, rel=0.2)
    assert speed(best(plan, "sd", 4)) == pytest.approx(sd, rel=0.2)
    assert speed(plan) == pytest.approx(ssd_, rel=0.2)


@pytest.mark.parametrize("pair", datasheet.PAIRS, ids=lambda pair: pair.models.target)
def test_published_means_are_met_from_data_sheets_within_15_percent(pair):
    plan = datasheet.planned(pair)
    for mode, published in zip(("ar", "sd", "ssd"), pair.published, strict=True):
        assert speed(datasheet.best(plan, mode)) == pytest.approx(published, rel=0.15)


def test_the_lookahead_is_what_fits_behind_the_verification():
    """K of about T_v over a step: 6 to 8 for Llama-3.1-70B, 4 for Qwen3-32B, as its replication found, and not the README's 7."""
    chosen = [ssd.plan(Hardware.named("5xH100-SXM"), models, LONG).num_speculative_tokens for models in (PUBLISHED, QWEN)]
    assert chosen[0] in (6, 7, 8)
    assert chosen[1] == 4


# Refusals


def refused(match, *args, **options):
    with pytest.raises(ValueError, match=match):
        ssd.plan(*args, **options)


def test_ssd_on_one_device_is_refused():
    refused("mode='ssd' needs two devices, hardware '1 cores' has one", cores(1), PAIR, profile=synthetic(cores(1)), mode="ssd")


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_speculation_without_a_draft_is_refused(mode):
    refused(f"models.draft is missing: mode='{mode}'", TWO, ssd.Models(target="target"), mode=mode)


def test_an_unknown_objective_or_mode_is_refused():
    refused("objective='speed' is unknown: use one of latency, throughput, cost", TWO, PAIR, objective="speed")
    refused("mode='tree' is unknown: use one of ar, sd, ssd", TWO, PAIR, mode="tree")


def test_cost_without_a_price_is_refused():
    refused("device 'cpu:0' of '2 cores' has none; set its price_per_hour", TWO, PAIR, objective="cost")


@pytest.mark.parametrize(
    ("option", "change"),
    [
        ("hardware", {"hardware": "another"}),
        ("models.target", {"models": ssd.Models(target="another", draft="draft")}),
        ("models.draft", {"models": ssd.Models(target="target", draft="another")}),
    ],
)
def test_a_profile_of_something_else_is_refused(option, change):
    refused(f"{option}='.*' does not fit the profile", TWO, PAIR, profile=synthetic(TWO).model_copy(update=change))


def test_a_profile_of_given_prompts_fits_every_workload():
    assert ssd.plan(TWO, PAIR, profile=with_texts(synthetic(TWO), prompt_set="given")).predicted is not None


def test_a_mode_without_a_table_is_refused():
    profile = synthetic(TWO)
    alone = tuple(table for table in profile.forwards if table.devices == ("cpu:0",))
    refused("mode='ssd' has no placement on '2 cores'", TWO, PAIR, profile=profile.model_copy(update={"forwards": alone}), mode="ssd")
    refused("mode='ar' has no placement", TWO, PAIR, profile=profile.model_copy(update={"forwards": ()}))


def test_models_that_do_not_fit_are_refused():
    refused(
        "needs 131.* GiB and hardware '1xH100-SXM' has 74.5: 57.* GiB are missing; 2x H100-SXM would hold it.* up to 40 billion",
        Hardware.named("1xH100-SXM"),
        PUBLISHED,
    )
    refused("mode='ssd' has no placement on '2xH100-SXM'", Hardware.named("2xH100-SXM"), PUBLISHED, mode="ssd")


def test_a_limit_of_latency_contradicts_the_least_latency():
    refused("contradicts objective='latency'", TWO, PAIR, ssd.Workload(max_seconds_per_token=0.1))


def test_a_limit_that_nothing_keeps_is_refused_with_what_comes_nearest():
    load = ssd.Workload(max_seconds_per_token=1e-4)
    refused(r"max_seconds_per_token=0.0001 is less than 0.00\d+, the nearest", TWO, PAIR, load, "throughput", profile=synthetic(TWO))


def test_a_profile_of_other_cores_is_refused():
    profile = synthetic(TWO)
    moved = tuple(table.model_copy(update={"devices": ("cpu:7",)}) for table in profile.forwards)
    other = profile.model_copy(update={"forwards": moved})
    refused("forwards on cpu:7, which '2 cores' does not have .*profile again", TWO, PAIR, profile=other)
    refused("workload.temperature=1.0 does not fit the profile, made with 0.0", TWO, PAIR, ssd.Workload(temperature=1), profile=profile)


# Under a limit of latency; several drafts; how sure it is


@pytest.mark.slow
def test_throughput_under_a_limit_takes_as_many_requests_together_as_keep_it():
    tokens = (1, 2, 4, 8, 16, 32, 64, 128, 512)
    profile = synthetic(TWO, verify=10e-3, verify_more=1e-3, tokens=tokens)
    rows = []
    for limit in (8e-3, 30e-3, 1.0):
        load = ssd.Workload(batch_size=16, output_tokens=64, max_seconds_per_token=limit)
        plan = ssd.plan(TWO, PAIR, load, "throughput", profile)
        rows.append(plan.workload.batch_size)
        assert plan.workload.batch_size / speed(plan) <= limit
    assert rows == sorted(rows)
    assert rows[0] < rows[-1] == 16


@pytest.mark.slow
def test_the_better_draft_is_chosen_and_the_others_are_told_of():
    plan = ssd.plan(Hardware.named("5xH100-SXM"), QWEN, LONG, drafts=("Qwen/Qwen3-4B", "Qwen/Qwen3-32B"))
    # At the same assumed acceptance the smallest is best.
    assert plan.models.draft == QWEN.draft
    assert [each.draft for each in plan.considered] == [QWEN.draft, "Qwen/Qwen3-4B", "Qwen/Qwen3-32B"]
    speeds = [each.tokens_per_second for each in plan.considered]
    assert speeds[0] == speed(plan) == max(speeds)
    assert "Drafts considered" in plan.explain()


def test_an_interval_holds_the_prediction_and_widens_with_what_is_not_known():
    def width(plan):
        low, high = plan.predicted.tokens_per_second_between
        assert low < speed(plan) < high
        return high / low

    many, few = (planned(mode="ssd", traces=texts(0.8, count=count, length=60)) for count in (40, 4))
    assert width(many) < width(few)
    assert width(planned(mode="ar")) < width(few)
    known, lent = (
        ssd.plan(Hardware.named("2xH100-SXM"), ssd.Models(target="Qwen/Qwen3-32B", draft=draft), LONG, mode="ssd")
        for draft in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B")
    )
    assert width(known) < width(lent)


@pytest.mark.slow
def test_beyond_a_threshold_the_plan_is_what_was_said():
    plan = planned(alpha=0.8, step=2e-3)
    by_name = {each.name: each for each in plan.sensitivity}
    draft = by_name["a draft step"]
    assert draft.becomes_above == "ar"
    assert planned(alpha=0.8, step=1.25 * draft.above).mode == "ar"
    assert planned(alpha=0.8, step=0.75 * draft.above).mode != "ar"
    acceptance = by_name["acceptance"]
    assert (acceptance.value, acceptance.becomes_below) == (0.8, "ar")
    # Almost no token is accepted there, and speed hardly hangs on it.
    there = planned(alpha=acceptance.below, step=2e-3)
    assert speed(best(there, "ssd")) == pytest.approx(speed(best(there, "ar")), rel=0.05)


def test_two_devices_hold_two_copies_of_a_draft_that_share_the_branches():
    profile = ssd.plan(Hardware.named("6xH100-SXM"), PUBLISHED, LONG).profile
    one, two = (profile.forward("draft", ids) for ids in (("cuda:5",), ("cuda:4", "cuda:5")))
    for tokens, alone, shared in zip(one.tokens, one.seconds, two.seconds, strict=True):
        assert shared <= alone
        if tokens > 1 and tokens % 2 == 0 and tokens // 2 in one.tokens:
            assert shared == one.seconds[one.tokens.index(tokens // 2)]


def test_where_confidence_is_calibrated_outcomes_are_chosen_anew_each_round_unless_rounds_are_short():
    counts = (5.0,) * 18
    calibration = (ssd.specs.Calibrated(kind="greedy sent", trials=counts, successes=counts),)
    quick, slow = (
        ssd.plan(TWO, PAIR, LONG, profile=with_texts(found, calibration=calibration), mode="ssd")
        for found in (synthetic(TWO, traces=texts(0.8), verify=verify, step=verify / 10) for verify in (19e-3, 20e-3))
    )
    assert (quick.budget, sum(quick.fan_out_hit) > 0) == (0, True)
    assert (slow.fan_out_hit, slow.budget) == ((), sum(quick.fan_out_hit))
    assert {c.budget > 0 for c in slow.alternatives if c.mode == "ssd"} == {True}
    # On average, as the simulator and theory know them, the likeliest outcomes are those of the best lists.
    assert slow.predicted.hit_rate == pytest.approx(quick.predicted.hit_rate, abs=0.01)
    assert slow.predicted.critical_batch_size == quick.predicted.critical_batch_size
    assert f"{slow.budget} cached outcomes chosen anew" in slow.explain()
