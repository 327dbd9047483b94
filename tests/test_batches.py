"""What any plan for a batch must obey: the laws of theory where they hold exactly, orders, and the choice of the backup."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ssd
from ssd.lookup import Recorded
from ssd.outcomes import outcome_model
from ssd.pace import pace
from ssd.placements import placements
from ssd.planner import _paces, _Task
from ssd.prediction import Played, play, reckon
from ssd.roofline import Forward, roofline_profile
from ssd.search import Search
from ssd.shapes import shape
from ssd.specs import Configuration, Hardware, Texts, Workload
from tests.profiles import PAIR, cores, lookups, synthetic, texts
from theory.acceptance import accepted_length_law, expected_tokens
from theory.batch import batched_seconds_per_token, per_row_seconds_per_token
from theory.fallback import critical_batch

TWO = cores(2)
APART = placements(TWO)[0]
MANY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2304, 8192)
VERIFY = 10e-3
SIZES = (1, 2, 3, 6, 16, 64, 256)


def planned(batch_size, mode=None, output_tokens=256, hardware=TWO, **profile):
    load = Workload(batch_size=batch_size, output_tokens=output_tokens)
    return ssd.plan(hardware, PAIR, load, profile=synthetic(hardware, tokens=MANY, **profile), mode=mode)


def speed(configuration) -> float:
    return configuration.predicted.tokens_per_second


def best(plan, mode):
    return max((c for c in (plan, *plan.alternatives) if c.mode == mode and len(c.placement.target) == 1), key=speed)


def best_with(plan, backup):
    return max(speed(c) for c in (plan, *plan.alternatives) if c.backup == backup and c.mode == "ssd")


# Laws, where nothing but hits is left to chance


@dataclass(frozen=True)
class Flat:
    """Every cached position hits with one chance, whatever the state, the draft and the number of candidates."""

    alpha: float
    h: float
    longest: int = 4

    def law(self, K):
        return accepted_length_law(self.alpha, K)

    def curves(self, K, after_hit):
        return ((0.0, self.h),) * (K + 1)


def constant(step: float, verify: float = VERIFY):
    return pace(synthetic(TWO, tokens=MANY, verify=verify, verify_more=0.0, step=step, step_more=0.0), APART, "ssd")


@given(st.floats(0.05, 0.95), st.floats(0.1, 0.99), st.integers(1, 4), st.floats(1e-5, 1.9e-3), st.sampled_from(SIZES))
def test_on_constant_latencies_a_batch_of_any_size_obeys_corollary_16(alpha, h, K, step, rows):
    search, its, lists = Search(Flat(alpha, h)), constant(step), ((1,) * (K + 1),) * 2
    E = expected_tokens(alpha, K)
    for backup, T_b, E_miss in (("jit", K * step, E), ("none", 0.0, 1.0)):
        law = batched_seconds_per_token(rows, VERIFY, 0, T_b, h, E, E_miss)
        assert search.ssd_seconds_per_token(its, K, *lists, backup, rows) == pytest.approx(law, rel=1e-6)


@settings(max_examples=20)
@given(st.floats(0.2, 0.95), st.floats(0.5, 0.98), st.integers(1, 4), st.floats(1e-4, 1.9e-3))
def test_the_critical_batch_size_is_that_of_the_closed_form(alpha, h, K, step):
    its, outcomes, E = constant(step), Flat(alpha, h), float(expected_tokens(alpha, K))
    b = float(critical_batch(h, E, E, 1, K * step / VERIFY, 0, 0))
    assume(math.isinf(b) or abs(b - round(b)) > 1e-3)
    first = next(c for c in Search(outcomes).ranked("ssd", its) if c.num_speculative_tokens == K)
    for rows in (1, 6, 64):
        found = Search(outcomes, rows).critical_batch_size(first, its)
        assert found == (None if b > 256 else max(1, math.ceil(b)))


@settings(max_examples=60)
@given(st.floats(0.2, 0.95), st.floats(0.5, 0.98), st.floats(1e-4, 1.9e-3), st.sampled_from(SIZES))
def test_below_the_critical_batch_size_the_slow_backup_is_ranked_first_and_above_it_the_fast_one(alpha, h, step, rows):
    its = constant(step)
    ranked = Search(Flat(alpha, h), rows).ranked("ssd", its)
    for K in range(1, 5):
        E = float(expected_tokens(alpha, K))
        b = float(critical_batch(h, E, E, 1, K * step / VERIFY, 0, 0))
        if abs(b - rows) > 1e-3:
            assert next(c for c in ranked if c.num_speculative_tokens == K).backup == ("jit" if rows < b else "none")


def test_a_longer_draft_for_more_missing_rows_is_waited_for_as_the_law_of_rows_says():
    its = pace(synthetic(TWO, tokens=MANY, verify_more=0.0, step=0.4e-3, step_more=0.01e-3), APART, "ssd")
    K, h, rows, E = 3, 0.8, 8, float(expected_tokens(0.7, 3))
    waits = [0.0, *(K * (0.4e-3 + 0.01e-3 * (missing - 1)) for missing in range(1, rows + 1))]
    law = per_row_seconds_per_token(rows, VERIFY, 0, waits, h, E, E)
    assert Search(Flat(0.7, h), rows).ssd_seconds_per_token(its, K, (1,) * 4, (1,) * 4, "jit") == pytest.approx(law)


def test_a_build_that_outgrows_the_verification_is_waited_for_by_the_rows_that_hit():
    its = pace(synthetic(TWO, tokens=MANY, verify_more=0.0, step=1e-3, step_more=0.1e-3), APART, "ssd")
    search, lists = Search(Flat(0.7, 0.9), 16), ((2, 2, 2, 2), (2, 2, 2, 2))
    build = its.build_seconds(3, 8, 16)
    assert build > 2 * VERIFY
    seconds = search.ssd_seconds_per_token(its, 3, *lists, "none")
    tokens = 0.9 * expected_tokens(0.7, 3) + 0.1
    assert VERIFY / tokens < seconds < build / tokens


def test_rows_are_verified_together_at_the_seconds_of_all_their_tokens():
    its = pace(synthetic(TWO, tokens=MANY), APART, "ssd")
    assert its.round_seconds(4, 8) == pytest.approx(10e-3 + (8 * 5 - 1) * 0.1e-3)
    assert its.backup_seconds(4, 3) == pytest.approx(4 * (1e-3 + 2 * 0.02e-3))
    assert its.build_seconds(4, 6, 8) == pytest.approx(1e-3 + 7 * 0.02e-3 + 4 * (1e-3 + 47 * 0.02e-3))


@pytest.mark.parametrize(("alpha", "step"), [(0.8, 1e-3), (0.8, 2.5e-3), (0.6, 0.5e-3)])
@pytest.mark.parametrize("rows", [2, 8])
def test_what_is_reckoned_for_a_batch_is_near_what_is_simulated_where_outputs_are_long(rows, alpha, step):
    profile = synthetic(TWO, tokens=MANY, traces=texts(alpha, length=1000), step=step, link=0.1e-3, overhead=0.5e-3)
    outcomes = outcome_model(profile)
    search, load = Search(outcomes, rows), Workload(output_tokens=2000, batch_size=rows)
    for mode, backup in (("sd", None), ("ssd", "jit"), ("ssd", "none")):
        its = next(its for found, its in _paces(profile, TWO, PAIR) if found == mode)
        way = next(c for c in search.ranked(mode, its) if backup in (None, c.backup))
        simulated, reckoned = play(way, its, outcomes.simulated(), load), reckon(way, its, search, load)
        assert simulated.tokens_per_second == pytest.approx(reckoned.tokens_per_second, rel=0.04)
        assert simulated.mean_acceptance_length == pytest.approx(reckoned.mean_acceptance_length, rel=0.04)
        assert simulated.hit_rate == (None if mode == "sd" else pytest.approx(reckoned.hit_rate, abs=0.03))


# Plans


def test_ar_and_sd_at_the_same_batch_size_are_what_speed_is_held_against():
    plan = planned(32, "ssd", traces=texts(0.8, length=2000), output_tokens=10**6)
    ar, sd = best(plan, "ar"), best(plan, "sd")
    assert speed(ar) == pytest.approx(32 / (10e-3 + 31 * 0.1e-3))
    law = outcome_model(synthetic(TWO, traces=texts(0.8, length=2000))).law
    seconds = [10e-3 + (32 * (1 + K) - 1) * 0.1e-3 + K * (1e-3 + 31 * 0.02e-3) for K in range(1, 9)]
    expected = max(32 * (1 + law(K) @ np.arange(K + 1)) / s for K, s in zip(range(1, 9), seconds, strict=True))
    assert speed(sd) == pytest.approx(expected, rel=1e-4)
    assert plan.predicted.speedup_vs_ar == pytest.approx(speed(plan) / speed(ar))
    assert plan.predicted.speedup_vs_sd == pytest.approx(speed(plan) / speed(sd))


OTHERS = [{"alpha": 0.5}, {"step": 0.2e-3, "verify_more": 0.0}, {"overhead": 2e-3, "link": 0.5e-3}]


@pytest.mark.parametrize("profile", [{}, *(pytest.param(other, marks=pytest.mark.slow) for other in OTHERS)])
def test_a_larger_batch_gives_more_tokens_in_all_and_fewer_to_each(profile):
    speeds = [speed(planned(size, **profile)) for size in SIZES]
    # One request alone is simulated, within a few percent of theory.
    for (few, slow), (many, fast) in itertools.pairwise(zip(SIZES, speeds, strict=True)):
        assert fast >= slow * 0.97
        assert fast / many <= slow / few * 1.03


@pytest.mark.slow
def test_speculation_gains_less_the_larger_the_batch_where_tokens_cost():
    gains = [planned(size, alpha=0.7).predicted.speedup_vs_ar for size in SIZES]
    assert gains[0] > 2
    for smaller, larger in itertools.pairwise(gains):
        assert larger <= smaller * 1.03
    assert planned(256, alpha=0.3, verify_more=1e-3).mode == "ar"


def test_one_request_and_small_batches_are_simulated_and_large_ones_reckoned_by_theory():
    for size, method in ((1, "simulation"), (2, "simulation"), (16, "simulation"), (17, "theory")):
        plan = planned(size, traces=texts(0.8))
        assert {c.predicted.method for c in (plan, *plan.alternatives)} == {method}


@pytest.mark.parametrize("backup", ["jit", "none"])
@pytest.mark.parametrize("output_tokens", [16, 64, 256])
def test_what_is_reckoned_for_one_request_is_near_what_is_simulated_for_short_outputs_too(backup, output_tokens):
    # Every request begins at the beginning of a text: many of them, so that beginnings are as any other place.
    profile = synthetic(TWO, traces=texts(0.7, count=300, length=60), link=0.1e-3, overhead=0.5e-3)
    outcomes, load = outcome_model(profile), Workload(output_tokens=output_tokens)
    search = Search(outcomes)
    its = next(its for mode, its in _paces(profile, TWO, PAIR) if mode == "ssd")
    first = next(c for c in search.ranked("ssd", its) if c.backup == backup)
    simulated, reckoned = play(first, its, outcomes.simulated(), load), reckon(first, its, search, load)
    assert reckoned.tokens_per_second == pytest.approx(simulated.tokens_per_second, rel=0.06)
    assert reckoned.hit_rate == pytest.approx(simulated.hit_rate, abs=0.06)
    if output_tokens == 256:  # Rates are reckoned without the ends of outputs.
        assert reckoned.mean_acceptance_length == pytest.approx(simulated.mean_acceptance_length, rel=0.06)
        assert reckoned.draft_acceptance_rate == pytest.approx(simulated.draft_acceptance_rate, abs=0.06)


def test_where_misses_are_frequent_a_large_batch_takes_the_fast_backup_and_one_request_the_slow_one():
    plans = {size: planned(size, "ssd", alpha=0.85, verify_more=0.0, step=0.8e-3, step_more=0.0) for size in (1, 64)}
    assert {size: plan.backup for size, plan in plans.items()} == {1: "jit", 64: "none"}


@pytest.mark.parametrize("size", SIZES)
def test_the_backup_of_a_plan_is_on_its_side_of_the_critical_batch_size(size):
    plan = planned(size, "ssd", alpha=0.9, verify_more=0.0, step=0.4e-3, step_more=0.0)
    critical = plan.predicted.critical_batch_size
    side = "jit" if critical is None or size < critical else "none"
    # Theory says where the two meet; there the simulator may find the other a little ahead.
    assert plan.backup == side or (size == critical and best_with(plan, side) > 0.97 * speed(plan))


def test_a_round_of_a_batch_is_told_in_seconds():
    plan = planned(8, "ssd", alpha=0.9, step_more=0.0, verify_more=0.01e-3)
    K = plan.num_speculative_tokens
    assert plan.predicted.verify_seconds == pytest.approx(10e-3 + (8 * (1 + K) - 1) * 0.01e-3)
    assert plan.predicted.build_seconds == pytest.approx((1 + K) * 1e-3)
    assert best(plan, "sd").predicted.backup_seconds == pytest.approx(best(plan, "sd").num_speculative_tokens * 1e-3)


# Prompt lookup


TEXTS = texts(0.8)


def test_prompt_lookup_is_a_choice_only_where_it_was_measured():
    for size in (1, 8):
        without = planned(size, "ssd", traces=TEXTS)
        assert "ngram" not in {c.backup for c in (without, *without.alternatives)}
        assert planned(size, "ssd", traces=TEXTS, step=2e-3, looked_up=lookups(TEXTS, 1.0)).backup == "ngram"


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("proposed", [0.0, 1.0])
def test_a_lookup_that_proposes_nothing_or_nothing_right_is_not_chosen(size, proposed):
    assert planned(size, "ssd", traces=TEXTS, looked_up=lookups(TEXTS, 0.0, proposed)).backup in ("jit", "none")


def test_of_backups_that_are_equally_fast_the_simplest_is_chosen():
    its, lists = constant(1e-3), {"fan_out_hit": (1, 1), "fan_out_miss": (1, 1)}
    ways = [Configuration(mode="ssd", num_speculative_tokens=1, placement=APART, backup=b, **lists) for b in ("ngram", "none", "jit")]
    alike = [Played(way, its, 100.0, 0.5, 0.5, 1.5, "theory") for way in ways]
    task = _Task(TWO, PAIR, Workload(), "latency", synthetic(TWO, traces=TEXTS), None)
    assert task._best(alike).configuration.backup == "jit"
    assert task._best(alike[:2]).configuration.backup == "none"


@pytest.mark.parametrize("size", [1, 8])
def test_beside_it_the_other_backups_are_expected_to_do_what_they_did(size):
    def others(plan):
        chosen = [c for c in (plan, *plan.alternatives) if c.mode == "ssd" and c.backup != "ngram"]
        return {(c.num_speculative_tokens, c.backup, c.fan_out_hit, c.fan_out_miss): speed(c) for c in chosen}

    without, beside = others(planned(size, "ssd", traces=TEXTS)), others(planned(size, "ssd", traces=TEXTS, looked_up=lookups(TEXTS, 0.5)))
    assert beside
    assert beside.items() <= without.items() if size == 1 else set(beside.values()) & set(without.values())


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_an_empty_lookup_is_no_backup_and_a_better_one_is_faster(rows):
    long = texts(0.7, length=2000)
    outcomes, its, lists = outcome_model(synthetic(TWO, traces=long)), constant(1e-3), ((1, 1, 1, 1, 2),) * 2

    def seconds(backup, looked_up=()):
        found = Recorded(long, looked_up) if looked_up else None
        return Search(outcomes, rows, found).ssd_seconds_per_token(its, 4, *lists, backup)

    none = seconds("none")
    assert seconds("ngram", lookups(long, 0.0, proposed=0.0)) == pytest.approx(none, rel=0.02)
    better = [seconds("ngram", lookups(long, alpha, proposed)) for alpha, proposed in ((0.5, 0.2), (0.5, 1.0), (0.9, 1.0), (1.0, 1.0))]
    assert none > better[0] > better[1] > better[2] > better[3]


def test_ngram_without_its_texts_is_refused():
    with pytest.raises(ValueError, match="backup='ngram' needs what prompt lookup is accepted for, which the profile lacks: profile again"):
        Search(Flat(0.5, 0.5)).ssd_seconds_per_token(constant(1e-3), 1, (1, 1), (1, 1), "ngram")


# Computed latencies


def test_every_row_reads_its_own_context_and_keeps_it_in_memory():
    devices = Hardware.named("5xH100-SXM").devices[:1]
    one, many = (Forward(shape("Qwen3-32B"), 2, 4096, rows) for rows in (1, 32))
    for tokens in (1, 8, 32, 64):
        read = min(tokens, 32) * 4096 * shape("Qwen3-32B").kv_values_per_token * 2
        assert many.footprint(4096) - many.weights() == 32 * (one.footprint(4096) - one.weights())
        extra = many.seconds(devices, tokens) - one.seconds(devices, tokens)
        assert extra == pytest.approx((read - read / min(tokens, 32)) / (devices[0].memory_bandwidth * 0.81), rel=1e-6)


def test_a_batch_whose_contexts_do_not_fit_is_refused_with_the_remedy():
    hardware, models = Hardware.named("2xH100-SXM"), ssd.Models(target="Qwen/Qwen3-32B", draft="Qwen/Qwen3-0.6B")
    load = Workload(prompt_tokens=8000, output_tokens=192)
    assert roofline_profile(hardware, models, load).forward("target", ("cuda:0", "cuda:1")) is not None
    with pytest.raises(ValueError, match=r"GiB are missing.*a shorter workload or a smaller batch needs less"):
        roofline_profile(hardware, models, load.model_copy(update={"batch_size": 256}))


def test_the_published_batch_sweep_is_met_within_a_fifth():
    # Fast backup, SD and AR, tokens a second of one request (arXiv 2603.03251); the sweep had F=1, the plan is free.
    models = ssd.Models(target="meta-llama/Llama-3.1-70B-Instruct", draft="meta-llama/Llama-3.2-1B-Instruct")
    published = {2: (244, 158, 56), 4: (237, 155, 57), 8: (208, 145, 55), 16: (170, 130, 53)}
    for size, (fast, sd, ar) in published.items():
        plan = ssd.plan(Hardware.named("5xH100-SXM"), models, Workload(batch_size=size, output_tokens=512), mode="ssd")
        assert plan.backup == "none"
        assert plan.predicted.critical_batch_size in range(1, size + 1)
        for mode, expected in (("ssd", fast), ("sd", sd), ("ar", ar)):
            speeds = [speed(c) for c in (plan, *plan.alternatives) if c.mode == mode and len(c.placement.target) == 4]
            assert max(speeds) / size == pytest.approx(expected, rel=0.2)


# Refusals


def test_a_profile_whose_forwards_are_too_small_for_the_batch_is_refused():
    with pytest.raises(
        ValueError, match=r"workload.batch_size=32 needs forwards of 64 tokens, but .* the target on cpu:0 end at 32: profile"
    ):
        ssd.plan(TWO, PAIR, Workload(batch_size=32), profile=synthetic(TWO))
    short = synthetic(TWO)
    tables = tuple(t if t.model == "target" else t.model_copy(update={"tokens": (1,), "seconds": (1e-3,)}) for t in short.forwards)
    with pytest.raises(ValueError, match="needs forwards of 4 tokens, but the profile's of the draft on cpu:1 end at 1"):
        ssd.plan(TWO, PAIR, Workload(batch_size=4), profile=short.model_copy(update={"forwards": tables}))


@pytest.mark.parametrize("size", [0, 257])
def test_a_batch_size_out_of_range_is_refused(size):
    with pytest.raises(ValueError, match="batch_size"):
        Workload(batch_size=size)


def test_lookups_of_other_texts_than_the_traces_are_refused():
    fields = synthetic(TWO, traces=((1, 2), (1, 1, 3))).texts[0].model_dump()
    for wrong in (((0, 0),), ((0, 0), (0, 0)), ((0, 0), (0, 0, 0), (0,))):
        with pytest.raises(ValueError, match=r"ngram_accepted has texts of \[.*\] tokens, traces of \[2, 3\]: give one entry for each, or"):
            Texts.model_validate({**fields, "ngram_accepted": wrong})
    with pytest.raises(ValueError, match="ngram_accepted"):
        Texts.model_validate({**fields, "ngram_accepted": ((0, -2), (0, 0, 0))})
