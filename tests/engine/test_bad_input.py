"""Every mistake of the caller is a ValueError that names option, value and remedy, before a model is loaded."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

import ssd
from ssd.specs import Configuration, Hardware, Models, Placement, Plan, SamplingParams, Workload
from tests.plans import CORES, hand_typed, two_cores
from tests.tiny import VOCAB, make_pair, tokenizer


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch, request):
    if "engine" not in request.fixturenames:
        monkeypatch.setattr("ssd.engine.engine.load", lambda *_: pytest.fail("weights were loaded"))
        monkeypatch.setattr("ssd.engine.engine.spawn", lambda *_: pytest.fail("a process was started"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_speculative_tokens": 0}, r"num_speculative_tokens=0: mode='ssd' needs at least 1"),
        ({"fan_out_hit": (1, 1)}, r"fan_out_hit=\(1, 1\) has 2 entries: with num_speculative_tokens=3 give 4"),
        ({"fan_out_miss": (1, 1, 1, 1, 1)}, r"fan_out_miss=.* has 5 entries"),
        ({"fan_out_hit": (0, 0, 0, 0)}, r"fan_out_hit=\(0, 0, 0, 0\) caches nothing .* use mode='sd'"),
        ({"fan_out_hit": (1, -1, 0, 0)}, r"negative"),
        ({"placement": Placement(target=CORES[:1], draft=CORES[:1])}, r"needs a device for the draft alone; use mode='sd'"),
        ({"placement": Placement(target=CORES[:1])}, r"placement.draft is empty"),
        ({"placement": Placement(target=("cpu:777",), draft=CORES[1:])}, r"device 'cpu:777', but hardware 'two cores' has"),
        ({"mode": "ar"}, r"mode='ar' drafts nothing"),
        ({"mode": "sd"}, r"mode='sd' has no cache"),
        ({"mode": "sd", "fan_out_hit": (), "fan_out_miss": (), "budget": 2}, r"mode='sd' has no cache"),
        ({"mode": "sd", "fan_out_hit": (), "fan_out_miss": (), "building": "anytime"}, r"mode='sd' has no cache"),
        ({"backup": "guess"}, r"backup"),
        ({"budget": 4}, r"budget=4 chooses the outcomes anew each round: leave fan_out_hit and fan_out_miss out"),
        ({"budget": -1}, r"budget"),
        ({"building": "slow"}, r"building"),
        ({"verification": "argmax"}, r"verification"),
        ({"saguaro": (0.5,)}, r"saguaro=\(0.5,\) has 1 factors: give one, or 3"),
        ({"saguaro": 1.5}, r"saguaro"),
        ({"saguaro": 0.5, "verification": "coupled"}, r"leave it out unless mode='ssd' with verification='rejection'"),
        ({"num_speculative_token": 3}, r"Plan has no option 'num_speculative_token': did you mean 'num_speculative_tokens'"),
    ],
)
def test_a_configuration_that_cannot_run_is_refused(tiny_pair, changes, message):
    with pytest.raises(ValueError, match=message):
        hand_typed(*tiny_pair, **changes)


def test_ssd_without_a_draft_model_is_refused(tiny_pair):
    with pytest.raises(ValueError, match=r"models.draft is missing: mode='ssd' needs a draft model"):
        hand_typed(tiny_pair[0], None)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("./no/such/folder", r"target='./no/such/folder': no such folder"),
        ("nowhere.gguf", r"target='nowhere.gguf': no such GGUF file"),
    ],
)
def test_a_model_that_does_not_exist_is_refused(tiny_pair, target, message):
    with pytest.raises(ValueError, match=message):
        ssd.Engine.from_plan(hand_typed(target, tiny_pair[1]))


def test_an_unknown_hub_model_is_refused_with_a_remedy(tiny_pair, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"target='nobody/nothing' cannot be read: check the name and the network, or give a local folder"):
        ssd.Engine.from_plan(hand_typed("nobody/nothing", tiny_pair[1]))


def test_a_folder_without_a_model_is_refused(tiny_pair, tmp_path):
    with pytest.raises(ValueError, match=r"draft=.* cannot be read: it needs a config.json"):
        ssd.Engine.from_plan(hand_typed(tiny_pair[0], str(tmp_path)))


def test_a_draft_with_another_vocabulary_is_refused_and_the_first_difference_named(tiny_pair, tmp_path):
    _, draft = make_pair(tmp_path)
    swapped = {**VOCAB, "a": VOCAB["b"], "b": VOCAB["a"]}
    tokenizer(swapped).save_pretrained(draft)
    first = min(VOCAB["a"], VOCAB["b"])
    with pytest.raises(ValueError, match=rf"vocabularies differ in 2 ids, first at id {first}: 'a' against 'b'"):
        ssd.Engine.from_plan(hand_typed(tiny_pair[0], draft))


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("t5", {}, r"encoder-decoder \(t5\): give a decoder-only"),
        ("mamba", {}, r"architecture 'mamba', whose cache is not known to roll back"),
        ("mistral", {"sliding_window": 64, "max_position_embeddings": 512}, r"last 64 tokens only: set max_model_len to 64 or less"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2},
            r"linear_attention, which cannot be rolled back",
        ),
    ],
)
def test_a_model_that_cannot_be_rolled_back_is_refused(tiny_pair, tmp_path, model_type, settings, message):
    AutoConfig.for_model(model_type, **settings).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        ssd.Engine.from_plan(hand_typed(str(tmp_path), tiny_pair[1]))


def test_models_that_do_not_fit_in_memory_are_refused(tiny_pair):
    with pytest.raises(ValueError, match=r"need .* GiB on memory, which has .*: lower max_model_len \(now 96\)"):
        ssd.Engine.from_plan(hand_typed(*tiny_pair, hardware=two_cores(memory_bytes=1 << 17)))


def test_a_context_longer_than_the_models_is_refused(tiny_pair):
    models = Models(target=tiny_pair[0], draft=tiny_pair[1], max_model_len=4096)
    with pytest.raises(ValueError, match=r"max_model_len=4096 is more than the 96 tokens of target"):
        ssd.Engine.from_plan(hand_typed(*tiny_pair, models=models))


def test_one_device_cannot_do_ssd(tiny_pair):
    one = Hardware(name="one core", devices=two_cores().devices[:1])
    with pytest.raises(ValueError, match=r"hardware 'one core' has cpu:"):
        hand_typed(*tiny_pair, hardware=one)


def test_a_missing_plan_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"path=.*nothing.json' cannot be read"):
        Plan.load(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingParams(max_tokens=0), "max_tokens"),
        (lambda: SamplingParams(max_tokens=3, max_new_tokens=3), "are one option"),
        (lambda: SamplingParams(temprature=1), "did you mean 'temperature'"),
        (lambda: SamplingParams(temperature=-1), "temperature"),
        (lambda: SamplingParams(temperature=float("inf")), "temperature"),
        (lambda: SamplingParams(top_p=0), "top_p"),
        (lambda: SamplingParams(top_k=-1), "top_k"),
        (lambda: SamplingParams(min_p=1.5), "min_p"),
        (lambda: SamplingParams(repetition_penalty=0), "repetition_penalty"),
        (lambda: SamplingParams(presence_penalty=3), "presence_penalty"),
        (lambda: SamplingParams(logit_bias={1: 1000}), "logit_bias"),
        (lambda: SamplingParams(seed=-1), "seed"),
        (lambda: SamplingParams(seed=1 << 63), "seed"),
        (lambda: SamplingParams(stop=("a", "")), r"stop=\('a', ''\) holds an empty one: leave it out"),
        (lambda: SamplingParams(bad_words_token_ids=((),)), r"bad_words_token_ids=.* holds an empty one"),
        (lambda: SamplingParams(min_tokens=9, max_tokens=8), r"min_tokens=9 is more than max_tokens=8: lower it"),
        (lambda: SamplingParams(n=2), r"n=2 with temperature=0 gives the same output 2 times: raise the temperature or ask for one"),
        (lambda: SamplingParams(logprobs=100), "logprobs"),
        (lambda: SamplingParams(verification="greedy"), "verification"),
        (lambda: Workload(batch_size=257), "batch_size"),
        (lambda: Workload(temperature=-0.7), "temperature"),
        (lambda: Models(target=""), "target"),
        (lambda: Configuration(mode="beam", placement=Placement(target=("cpu:0",))), "mode"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_max_new_tokens_is_max_tokens():
    assert SamplingParams(max_new_tokens=7) == SamplingParams(max_tokens=7)


@pytest.fixture(scope="module")
def engine(tiny_pair):
    with ssd.Engine.from_plan(hand_typed(*tiny_pair, mode="ar", num_speculative_tokens=0, fan_out_hit=(), fan_out_miss=())) as running:
        yield running


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", None, r"prompt 0 is empty"),
        (["fine", ""], None, r"prompt 1 is empty"),
        ("x" * 96, None, r"prompt 0 has 96 tokens, but max_model_len=96 leaves no room"),
        ([[1, 2, 100_000]], None, r"prompt 0 has a token id outside 0..263"),
        ("fine", SamplingParams(stop_token_ids=(9999,)), r"stop_token_ids=\(9999,\) has a token id outside 0..263: it could never come"),
        ("fine", SamplingParams(logit_bias={264: 1.0}), r"logit_bias=.* has a token id outside 0..263"),
        ("fine", SamplingParams(bad_words_token_ids=((1, 999),)), r"bad_words_token_ids=.* has a token id outside"),
        ("fine", SamplingParams(bad_words_token_ids=[(t,) for t in range(264)]), r"leave no token of 264 to draw: allow some"),
    ],
)
def test_a_prompt_that_cannot_be_decoded_is_refused_before_any_other_is(engine, prompts, params, message):
    before = engine.metrics().num_rounds
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, params)
    assert engine.metrics().num_rounds == before


def test_an_engine_without_a_draft_refuses_to_speculate(engine, tiny_pair):
    with pytest.raises(ValueError, match=r"started in mode 'ar', without a draft"):
        engine.configure(hand_typed(*tiny_pair))


@pytest.mark.parametrize("name", ["max_num_seqs", "max_waiting"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_a_number_of_requests_that_is_no_count_is_refused(tiny_pair, name, value):
    with pytest.raises(ValueError, match=rf"{name}={value!r}: give a whole number of at least 1"):
        ssd.Engine.from_plan(hand_typed(*tiny_pair), **{name: value})


def test_a_deadline_of_nothing_is_refused(tiny_pair):
    with pytest.raises(ValueError, match=r"deadline=0: give the seconds"):
        ssd.Engine.from_plan(hand_typed(*tiny_pair), deadline=0)
