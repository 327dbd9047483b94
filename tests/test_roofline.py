"""Computed latencies against the published ones, and the laws that any latency obeys."""

import pytest

import ssd
from benchmarks.roofline import ANCHORS
from ssd.acceptance import assumed_acceptance
from ssd.roofline import COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY, TOKEN_SECONDS, TOKENS, Forward, roofline_profile
from ssd.shapes import shape

H100 = ssd.Hardware.named("5xH100-SXM")
LLAMA = ssd.Models(target="meta-llama/Llama-3.1-70B-Instruct", draft="meta-llama/Llama-3.2-1B-Instruct")
QWEN = ssd.Models(target="Qwen/Qwen3-32B", draft="Qwen/Qwen3-0.6B")
LOAD = ssd.Workload(prompt_tokens=128, output_tokens=512)


@pytest.mark.parametrize("anchor", ANCHORS, ids=lambda a: f"{a.model} {a.devices} {a.tokens}")
def test_latency_against_published_figures(anchor):
    assert abs(anchor.error) < (0.07 if anchor.calibrates else 0.105)


def test_a_slower_joint_makes_splitting_dearer():
    fast, slow = (Forward(shape("Qwen3-32B"), 2, 100) for _ in range(2))
    nvlink = H100.devices[:4]
    pcie = tuple(d.model_copy(update={"interconnect": "PCIe", "interconnect_bandwidth": 64e9}) for d in nvlink)
    for tokens in (1, 64, 4096):
        assert slow.seconds(pcie, tokens) > fast.seconds(nvlink, tokens)
    # With many tokens the activations weigh, not the latency alone.
    assert slow.seconds(pcie, 4096) - fast.seconds(nvlink, 4096) > 5 * (slow.seconds(pcie, 1) - fast.seconds(nvlink, 1))
    assert slow.seconds(pcie[:1], 64) == fast.seconds(nvlink[:1], 64)


def test_a_mixture_reads_more_for_more_tokens_and_a_dense_model_does_not():
    (device,) = H100.devices[:1]

    def growth(name):
        forward = Forward(shape(name), 2, 0)
        return forward.seconds((device,), 8) - forward.seconds((device,), 1) - 7 * TOKEN_SECONDS

    assert growth("Qwen3-14B") == pytest.approx(0, abs=1e-9)
    assert growth("Qwen3-30B-A3B") > 2e-3


def test_half_a_millisecond_for_a_billion_weights_is_less_than_reading_them_takes():
    read = shape("Llama-3.2-1B-Instruct").read() * 2 / H100.devices[0].memory_bandwidth
    assert read > 0.7e-3


def test_latency_never_falls_with_tokens_and_context():
    forward, longer = Forward(shape("Qwen3-32B"), 2, 100), Forward(shape("Qwen3-32B"), 2, 10_000)
    for devices in (H100.devices[:1], H100.devices):
        seconds = [forward.seconds(devices, tokens) for tokens in (*TOKENS, 512, 4096)]
        assert seconds == sorted(seconds)
        assert longer.seconds(devices, 1) > forward.seconds(devices, 1)


def test_few_tokens_are_bound_by_memory_and_many_by_arithmetic():
    (device,) = H100.devices[:1]
    plain = shape("Qwen3-32B")
    forward = Forward(plain, 2, 0)
    launch = forward.seconds((device,), 1) - 2 * plain.shared / (device.memory_bandwidth * MEMORY_EFFICIENCY)
    assert launch == pytest.approx(plain.layers * 50e-6)
    assert forward.seconds((device,), 8192) > 2 * plain.active * 8192 / (device.flops * COMPUTE_EFFICIENCY)


def test_wider_values_take_longer():
    models = QWEN.model_copy(update={"dtype": "float32"})
    # Of the wide target one device is too small.
    known = {(table.model, table.devices): table for table in roofline_profile(H100, QWEN, LOAD).forwards}
    for wide in roofline_profile(H100, models, LOAD).forwards:
        narrow = known[wide.model, wide.devices]
        # Where arithmetic binds, what is read does not matter.
        for tokens, w, n in zip(wide.tokens, wide.seconds, narrow.seconds, strict=True):
            assert w > n if tokens <= max(TOKENS) else w >= n


def test_a_target_is_not_split_where_that_is_slower():
    small = ssd.Models(target="Qwen/Qwen3-0.6B")
    one, many = (roofline_profile(ssd.Hardware.named(f"{n}xH100-SXM"), small, LOAD).forwards[-1] for n in (1, 8))
    assert many.seconds[0] <= one.seconds[0]


def test_everything_assumed_is_said():
    profile = roofline_profile(H100, LLAMA, LOAD)
    assert [its.acceptance_source for its in profile.texts] == ["assumed"]
    assert {table.source for table in profile.forwards} == {"roofline"}
    words = "\n".join(profile.notes)
    for part in ("81%", "50 us a layer", "8 us over NVLink", "acceptance: 0.903", "0.28 F^-0.54", "0.57 F^-0.47", "config.json"):
        assert part in words


def test_acceptance_depends_on_pair_and_prompts():
    code, chat = (ssd.Workload(prompt_set=name) for name in ("code", "chat"))
    known = assumed_acceptance("meta-llama/llama-3.1-70b-instruct", "meta-llama/Llama-3.2-1B-Instruct", code)
    assert (known.rate, "another pair" in known.note) == (0.903, False)
    assert assumed_acceptance(QWEN.target, str(QWEN.draft), code).rate < known.rate
    assert assumed_acceptance(LLAMA.target, str(LLAMA.draft), chat).rate < known.rate
    # Another draft of a known target is taken to be as good as the known one, until it is measured.
    other = assumed_acceptance(QWEN.target, "Qwen/Qwen3-1.7B", code)
    assert (other.rate, other.lent) == (assumed_acceptance(QWEN.target, str(QWEN.draft), code).rate, True)
    warm = [assumed_acceptance(LLAMA.target, str(LLAMA.draft), ssd.Workload(temperature=T)).rate for T in (0, 0.5, 1)]
    assert warm == sorted(warm, reverse=True)
    lent = assumed_acceptance("a/b", "c/d", code)
    assert (lent.rate, "another pair" in lent.note) == (known.rate, True)


def test_without_a_draft_nothing_is_said_of_one():
    profile = roofline_profile(H100, ssd.Models(target=LLAMA.target), LOAD)
    assert {table.model for table in profile.forwards} == {"target"}
    assert not any(note.startswith(("draft:", "hits:", "acceptance:")) for note in profile.notes)


def test_a_target_that_fits_nowhere_is_refused_with_both_sizes():
    with pytest.raises(ValueError, match=r"target 'meta-llama/Llama-3.1-70B-Instruct' needs 131.6 GiB and hardware '1xH100-SXM' has 74.5"):
        roofline_profile(ssd.Hardware.named("1xH100-SXM"), LLAMA, LOAD)


def test_a_draft_is_left_out_where_it_does_not_fit_beside_the_target():
    # 70B in bf16 takes 141 of the 160 GB of two devices: the 8B draft does not fit beside it.
    models = ssd.Models(target=LLAMA.target, draft="meta-llama/Llama-3.1-8B-Instruct")
    profile = roofline_profile(ssd.Hardware.named("2xH100-SXM"), models, ssd.Workload(output_tokens=8192))
    assert profile.forward("target", ("cuda:0", "cuda:1")) is not None
    assert profile.forward("target", ("cuda:0",)) is None
    assert profile.forward("draft", ("cuda:1",)) is not None
    assert profile.forward("draft", ("cuda:0", "cuda:1")) is None
    both = roofline_profile(ssd.Hardware.named("2xH100-SXM"), LLAMA, LOAD)
    assert both.forward("draft", ("cuda:0", "cuda:1")) is not None
