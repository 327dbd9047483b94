"""A plan in words: nothing that matters is left out, and hit rates never stand alone."""

import pytest

import ssd
from ssd.specs import Placement, Plan
from tests.profiles import PAIR, cores, synthetic, texts

pytestmark = pytest.mark.usefixtures("_few_simulations")
TWO = cores(2)


def explained(mode=None, **profile):
    plan = ssd.plan(TWO, PAIR, profile=synthetic(TWO, **profile), mode=mode)
    return plan, plan.explain()


def test_an_ssd_plan_tells_choice_speed_in_both_senses_and_where_time_goes():
    plan, text = explained("ssd", traces=texts(0.8))
    predicted = plan.predicted
    for part in (
        f"K={plan.num_speculative_tokens}, {sum(plan.fan_out_hit)} cached outcomes",
        f"{predicted.tokens_per_second:.1f} tokens/s",
        f"one device more than the target's: {predicted.speedup_vs_ar:.2f} x AR, {predicted.speedup_vs_sd:.2f} x SD",
        "speed at equal devices, the others free to use all 2: "
        f"{predicted.speedup_vs_ar_equal_devices:.2f} x AR, {predicted.speedup_vs_sd_equal_devices:.2f} x SD",
        f"hit rate {predicted.hit_rate:.0%} with acceptance {predicted.draft_acceptance_rate:.0%}",
        "T_v",
        "T_p",
        "T_b",
        "Alternatives",
        "tokens/s: ar",
        "tokens/s: sd",
    ):
        assert part in text


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_a_hit_rate_stands_beside_acceptance_and_speed(mode):
    for line in explained(mode, traces=texts(0.8))[1].splitlines():
        if "hit rate" in line:
            assert "acceptance" in line
            assert "x AR" in line


def test_only_ssd_has_a_cache_to_speak_of():
    for mode in ("ar", "sd"):
        text = explained(mode, traces=texts(0.8))[1]
        assert "hit rate" not in text
        assert "the cache" not in text
        assert "with the same devices" in text


def test_it_is_about_twenty_lines_before_the_inputs():
    lines = explained("ssd", traces=texts(0.8))[1].splitlines()
    assert 8 <= lines.index("measured:") <= 20
    assert max(map(len, lines)) < 180


def test_measured_and_assumed_inputs_stand_apart():
    measured, assumed = explained(traces=texts(0.8))[1].split("measured:")[1].split("assumed:")
    assert "latency tables" in measured
    assert "ranks of 1600 tokens in 8 texts" in measured
    assert assumed.strip() == "nothing"


def test_hit_curves_that_were_not_measured_are_called_assumed():
    measured, assumed = explained()[1].split("measured:")[1].split("assumed:")
    assert "ranks" not in measured
    assert "hits: published curves" in assumed


def test_offline_everything_is_assumed():
    plan = ssd.plan(ssd.Hardware.named("2xH100-SXM"), ssd.Models(target="Qwen/Qwen3-8B", draft="Qwen/Qwen3-0.6B"))
    sheets, assumed = plan.explain().split("data sheet:")[1].split("assumed:")
    assert plan.explain().split("measured:")[1].split("data sheet:")[0].strip() == "nothing"
    assert sheets.strip().startswith("H100-SXM: NVIDIA H100 Tensor Core GPU datasheet")
    for note in plan.profile.notes:
        assert (note in sheets) == note.startswith(("target: shape", "draft: shape", "memory:"))
        assert (note in assumed) != (note in sheets)
    assert "from the hardware's description" in assumed


def test_a_plan_typed_by_hand_is_explained_too():
    plan = Plan(mode="ar", placement=Placement(target=("cpu:0",)), hardware=TWO, models=ssd.Models(target="target"))
    text = plan.explain()
    assert "ar, target on cpu:0" in text
    assert "typed by hand" in text
    assert text.count("nothing") == 3


def test_the_cost_is_told_where_every_device_used_has_a_price():
    devices = tuple(device.model_copy(update={"price_per_hour": 3.6}) for device in TWO.devices)
    hardware = TWO.model_copy(update={"devices": devices})
    plan = ssd.plan(hardware, PAIR, profile=synthetic(hardware), mode="ar", objective="cost")
    # A tenth of a cent a second, at 100 tokens a second.
    assert "$10.00 a million tokens" in plan.explain()
    assert "$" not in explained()[1]


def test_a_plan_for_a_batch_says_so_and_from_which_size_on_another_backup_is_ahead():
    traces = texts(0.8, count=2, length=10)
    profile = synthetic(TWO, traces=traces, looked_up=((8, 2, -1, -1, -1, -1, -1, -1, -1, -1), (-1,) * 10))
    plan = ssd.plan(TWO, PAIR, ssd.Workload(batch_size=4), profile=profile, mode="ssd")
    text = plan.explain()
    found = plan.predicted
    assert f"predicted by {found.method}: {found.tokens_per_second:.1f} tokens/s of decoding for 4 requests together" in text
    first = found.critical_batch_size
    assert f"critical batch size b* = {first}: from so many requests on, backup ngram is faster than jit" in text
    assert "prompt lookup: proposals at 2 of 20 tokens, 5.0 accepted of each" in text.split("measured:")[1].split("assumed:")[0]
    for mode in ("ar", "sd"):
        assert "critical" not in ssd.plan(TWO, PAIR, ssd.Workload(batch_size=4), profile=profile, mode=mode).explain()
    assert "requests together" not in explained("ssd")[1]


def test_a_backup_that_was_not_measured_is_said_not_to_be_offered():
    plan = ssd.plan(ssd.Hardware.named("2xH100-SXM"), ssd.Models(target="Qwen/Qwen3-8B", draft="Qwen/Qwen3-0.6B"))
    assert "prompt lookup: not measured, so backup ngram is not offered" in plan.explain()


def test_the_lookahead_is_explained_by_what_one_token_more_would_take():
    # Steps of 1 ms: 8 + 1 of them fit in 10 ms, and the longest draft known is 8; of 2 ms, 4 + 1 do and 5 + 1 do not.
    plan, text = explained("ssd", traces=texts(0.9), step=2e-3, step_more=0.0, verify_more=0.0)
    assert plan.num_speculative_tokens == 4
    assert (
        "why K=4: the cache is built in 4 + 1 draft steps, 10.0 ms of the 10.0 ms that a round lasts; K=5 would take 12.0 ms, more" in text
    )


def test_the_choice_is_told_what_would_change_it():
    _, text = explained(traces=texts(0.8))
    lines = text.split("What would change the choice")[1].split("measured:")[0].strip().splitlines()
    assert [line.split(",")[0].strip() for line in lines] == ["acceptance", "a draft step", "link"]
    assert "above" in lines[1]
    assert lines[1].endswith("ar")
