"""Decoders that the engine plays itself say what transformers says, whatever is fed, wherever it lies and whoever is beside it."""

from __future__ import annotations

import functools
import os
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import lcm

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ssd import native
from ssd.engine import decoder as decoding
from ssd.engine import decoder_kernel, linear_kernel
from ssd.engine.decoder import Decoder
from ssd.engine.forward import SlotModel
from ssd.engine.kv import ATTENTION, Aborted
from ssd.engine.transformer import SlotTransformer
from ssd.models import LoadedModel
from ssd.sampling import noise_kernel
from tests.engine.slots import FAMILY, VOCABULARY, Forest, Reference, Row, chained, close, fill, loaded, tiny_decoder
from tests.strategies import several
from tests.tiny import EXTRA, GROUPED

pytestmark = pytest.mark.skipif(bool(native.why_unavailable()), reason=native.why_unavailable())
needs_two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and leave to run on two cores"
)
LANES = [4, 8, 16]
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 100.0},
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16},
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def known(kind: str = "llama", rope: str = "default", **changes) -> tuple[Reference, LoadedModel]:
    """A decoder that several tests look at, as transformers plays it and as the engine has it."""
    model = tiny_decoder(kind, rope_parameters=dict(ROPES[rope]), **changes)
    return Reference(model), loaded(model)


def text(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


def expected(reference: Reference, tokens: list[int]) -> torch.Tensor:
    reference(tuple(tokens))
    return torch.stack([reference(tuple(tokens[: i + 1])) for i in range(len(tokens))])


# --- the law ---


@st.composite
def decoders(draw):
    kind = draw(st.sampled_from(FAMILY))
    kv_heads, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 4))
    shape = {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        # transformers wants a multiple of both.
        "head_dim": draw(st.sampled_from([32, 64])),
        "hidden_size": lcm(heads, 32) * draw(st.integers(1, 2)),
        "intermediate_size": 32 * draw(st.integers(1, 5)),
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 0.1])),
    }
    if kind in ("llama", "qwen3"):
        shape["attention_bias"] = draw(st.booleans())
    if kind == "llama":
        shape["mlp_bias"] = draw(st.booleans())
    return kind, shape, draw(st.integers(0, 10_000)), draw(st.sampled_from([torch.bfloat16, torch.float32]))


@st.composite
def plays(draw):
    """Forwards: of each, what some rows do before it and what they feed."""
    rows = draw(st.integers(1, 4))
    act = st.sampled_from(["nothing", "nothing", "cut", "copy", "leave", "abort"])
    feed = st.tuples(act, st.integers(1, 12), st.sampled_from(["chain", "branches", "tree"]), st.integers(0, 12))
    each = st.dictionaries(st.integers(0, rows - 1), feed, min_size=1)
    return rows, draw(st.lists(each, min_size=1, max_size=6)), draw(st.integers(0, 10_000)), draw(st.sampled_from([20, 64, 77]))


def check(decoder: tuple, play: tuple) -> None:
    (kind, shape, seed, dtype), (rows, forwards, chance, slots) = decoder, play
    model = tiny_decoder(kind, seed, **shape)
    reference, engines = Reference(model), loaded(model, dtype)
    assert engines.decoder is not None
    forest = Forest(SlotModel(engines, rows, slots), rows, chance)
    for feeds in forwards:
        for index, (act, *_) in feeds.items():
            if act == "cut":
                forest.cut(index)
            elif act == "leave":
                forest.rows[index] = Row(forest.model.slots)
                fill(forest.model, 1e30, index)
            elif act == "copy":
                forest.copy(forest.rng.randrange(rows), index)
        grown = {index: forest.grow(index, count, how) for index, (_, count, how, _) in feeds.items()}
        fed = {index: nodes for index, nodes in grown.items() if nodes}
        wanted = {index: min(len(nodes), feeds[index][3]) for index, nodes in fed.items()}
        if not fed:
            continue
        queries = {index: forest.rows[index].queries(nodes, wanted[index]) for index, nodes in fed.items()}
        if any(feeds[index][0] == "abort" for index in fed):
            give_up(forest.model, queries, chance)
        logits = forest.model.forward(queries)
        assert logits.keys() == fed.keys()
        for index, nodes in fed.items():
            last = nodes[len(nodes) - wanted[index] :]
            paths = [forest.rows[index].path(node) for node in last]
            close(logits[index], torch.stack([reference(path) for path in paths]) if last else torch.empty(0, VOCABULARY))


def give_up(model: SlotModel, queries: dict, chance: int) -> None:
    """Feed the queries and give the forward up before one of its layers."""
    layers = len(model.cache.decoder.layers)
    asked = iter([False] * (chance % layers) + [True])
    with pytest.raises(Aborted):
        model.forward(queries, lambda: next(asked))


@several(25)
@given(decoders(), plays())
def test_whatever_is_fed_gives_the_logits_of_transformers(decoder, play):
    check(decoder, play)


@pytest.mark.slow
@several(250)
@given(decoders(), plays(), st.sampled_from(LANES), st.sampled_from([1, 2]))
def test_whatever_is_fed_gives_the_logits_of_transformers_with_vectors_of_any_width(decoder, play, lanes, threads):
    torch.set_num_threads(threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "host_vectors", lambda: native.VECTORS[lanes])
        check(decoder, play)


@pytest.mark.parametrize("lanes", LANES)
def test_vectors_of_each_width_give_the_logits_of_transformers(monkeypatch, lanes):
    monkeypatch.setattr(native, "host_vectors", lambda: native.VECTORS[lanes])
    model = tiny_decoder("qwen3", num_attention_heads=6, head_dim=64, attention_bias=True)
    tokens = text(40)
    close(chained(SlotModel(loaded(model), 1, 50), tokens, [1, 9, 30]), expected(Reference(model), tokens))


# --- who is beside a token ---


@several(6)
@given(st.integers(0, 10_000), st.sampled_from(FAMILY))
def test_a_token_has_the_same_logits_to_the_last_bit_whoever_is_beside_it(seed, kind):
    """Alone with what it sees, or among others of its row, other rows and larger buffers, on more threads, called many times or once."""
    rng, (_, model) = random.Random(seed), known(kind)
    small, large = SlotModel(model, 1, 32), SlotModel(model, 3, 500)
    forest = Forest(small, 1, seed)
    nodes = forest.grow(0, rng.randint(2, 30), "tree")
    row, wide = forest.rows[0], Row(large.slots)
    alone = torch.cat([small.forward({0: row.queries([node])})[0] for node in nodes])
    fill(large, 1e30)
    for node in nodes:
        wide.add(row.tokens[node], row.parents[node], row.places[node])
    others = {index: Row(large.slots) for index in (0, 2)}
    torch.set_num_threads(2)
    fed, found = 0, []
    while fed < len(nodes):
        some = nodes[fed : fed + rng.randint(1, len(nodes))]
        queries = {1: wide.queries(some)}
        for index, other in others.items():
            if rng.random() < 0.7:
                new = [
                    other.add(rng.randrange(VOCABULARY), len(other.tokens) - 1, len(other.tokens) + 1) for _ in range(rng.randint(1, 40))
                ]
                queries[index] = other.queries(new)
        found.append(large.forward(queries)[1])
        fed += len(some)
    assert torch.equal(torch.cat(found), alone)


def test_an_idle_row_is_neither_read_nor_written():
    _, model = known()
    slots = SlotModel(model, 3, 40)
    fill(slots, float("nan"), 1)
    row = Row(slots.slots)
    nodes = [row.add(token, k - 1, k + 1) for k, token in enumerate(text(9))]
    logits = slots.forward({0: row.queries(nodes), 2: row.queries(nodes)})
    assert torch.equal(logits[0], logits[2])
    assert logits[0].isfinite().all()
    assert slots.cache.keys[:, 1].isnan().all()
    assert slots.cache.values[:, 1].isnan().all()


def test_only_the_slots_that_are_given_are_written():
    _, model = known()
    slots = SlotModel(model, 2, 40)
    fill(slots, 7.0)
    row = Row(slots.slots)
    for parent, slot in enumerate([31, 3, 16]):
        row.add(5, parent - 1, slot)
    slots.forward({1: row.queries([0, 1, 2])})
    keys, values = slots.cache.keys != 7.0, slots.cache.values != 7.0
    for touched in (keys.any(4).flatten(3), values.any(5).any(3)):
        assert touched.shape == (2, 2, 2, slots.slots)
        assert not touched[:, 0].any()
        assert {tuple(np.flatnonzero(one)) for one in touched[:, 1].flatten(0, 1)} == {(3, 16, 31)}


def test_masks_may_lie_in_memory_as_they_like():
    _, model = known()
    slots = SlotModel(model, 1, 40)
    row = Row(slots.slots)
    nodes = [row.add(token, k // 2 - 1, k + 1) for k, token in enumerate(text(9))]
    queries = row.queries(nodes)
    right = slots.forward({0: queries})[0]
    wide = np.repeat(queries.visible, 2, axis=1)
    wide[:, 1::2] = True
    for visible in (np.asfortranarray(queries.visible), wide[:, ::2], np.repeat(queries.visible, 3, axis=0)[::3]):
        assert torch.equal(slots.forward({0: replace(queries, visible=visible)})[0], right)


@pytest.mark.parametrize("change", [(0, -16), (0, -8), (0, 16), (-1, 0), (0,)])
def test_a_mask_of_other_queries_or_slots_than_there_are_is_refused(change):
    slots = SlotModel(known()[1], 2, 48)
    row = Row(slots.slots)
    queries = row.queries([row.add(token, k - 1, k + 1) for k, token in enumerate(text(9))])
    right = 9, slots.slots
    wrong = tuple(size + more for size, more in zip(right, change, strict=False))
    with pytest.raises(ValueError, match=re.escape(f"visible of row 1 has shape {wrong}: give {right}")):
        slots.forward({0: queries, 1: replace(queries, visible=np.ones(wrong, dtype=bool))})


# --- what is taken and what is left ---


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize("rope", ROPES)
def test_rotary_positions_are_those_of_transformers_to_the_last_slot(kind, rope):
    reference, model = known(kind, rope)
    slots = SlotModel(model, 1, 96)
    tokens = text(slots.slots - 1)
    close(chained(slots, tokens, [len(tokens) - 3, 1, 2]), expected(reference, tokens))


LEFT = {
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "longrope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 16,
                "long_factor": [2.0] * 16,
            }
        },
    ),
    "partial": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "gelu": ("qwen2", {"hidden_act": "gelu"}),
    "hidden size": ("mistral", {"hidden_size": 60}),
    "intermediate size": ("qwen3", {"intermediate_size": 100}),
    "head size": ("llama", {"head_dim": 20}),
}


@pytest.mark.parametrize("why", LEFT)
def test_what_the_kernels_cannot_play_is_left_to_transformers(why):
    kind, changes = LEFT[why]
    left_alone(tiny_decoder(kind, **changes))


@pytest.mark.parametrize("layer", ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_weights_that_bf16_cannot_hold_are_left_to_transformers(layer):
    model = tiny_decoder("llama")
    with torch.no_grad():
        model.get_submodule(f"model.layers.1.{layer}").weight[0, 0] = 1 / 3
    left_alone(model)


@pytest.mark.parametrize("kind", ["gpt2", "olmo2", "granite"])
def test_other_architectures_are_left_to_transformers(kind):
    torch.manual_seed(0)
    shape = EXTRA.get(kind, {**GROUPED, "head_dim": 32, "intermediate_size": 96, "hidden_size": 128})
    left_alone(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape), attn_implementation="sdpa").eval())


def left_alone(model: PreTrainedModel) -> None:
    """The model is not taken, nor changed, and plays in slots as it did."""
    tokens = text(20)
    outcome, before = expected(Reference(model), tokens), {name: held.clone() for name, held in model.state_dict().items()}
    assert Decoder.of(model) is None
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(held, model.state_dict()[name]) for name, held in before.items())
    close(expected(Reference(model), tokens), outcome, 1e-6)
    model.set_attn_implementation(ATTENTION)
    groups = model.config.num_attention_heads // (getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads)
    slots = SlotModel(LoadedModel(model, torch.device("cpu"), torch.float32, VOCABULARY, 96, groups), 1, 32)
    assert isinstance(slots.cache, SlotTransformer)
    close(chained(slots, tokens, [9, 1, 10]), outcome)


def test_without_vector_registers_a_model_is_left_to_transformers(monkeypatch):
    monkeypatch.setattr(native, "host_vectors", lambda: None)
    left_alone(tiny_decoder("qwen3"))


def test_norms_biases_embeddings_and_heads_that_bf16_cannot_hold_are_kept_in_fp32():
    model = tiny_decoder("llama", attention_bias=True)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1 or "embed" in name or "head" in name:
                weight.mul_(1.1)
    engines, tokens = loaded(model, torch.float32), text(20)
    assert engines.decoder is not None
    close(chained(SlotModel(engines, 1, 32), tokens, [20]), expected(Reference(model), tokens), 1e-5)


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_of_int8_weights_is_that_of_the_rounded_ones(kind, tied):
    model = tiny_decoder(kind, 3, tie_word_embeddings=tied)
    engines = loaded(model, int8=True)
    assert engines.decoder is not None
    with torch.no_grad():
        if tied:
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                scale = layer.weight.abs().amax(1, keepdim=True) / 127
                layer.weight.copy_((layer.weight / scale).round() * scale)
    tokens = text(40)
    close(chained(SlotModel(engines, 1, 64), tokens, [17, 1, 1, 8, 13]), expected(Reference(model), tokens))


def test_weights_of_any_type_may_be_rounded_to_a_byte():
    model = tiny_decoder("llama", 5)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1 / 3)
    assert loaded(model, torch.float32).decoder is None
    assert loaded(model, torch.float32, int8=True).decoder is not None


def test_a_head_that_is_tied_to_the_embedding_leaves_it_whole():
    reference, model = known("qwen2", tie_word_embeddings=True)
    tokens = text(20)
    close(chained(SlotModel(model, 1, 32), tokens, [20]), expected(reference, tokens))


# --- what lies between two forwards ---


def test_room_grows_for_many_tokens_and_few_come_after():
    reference, model = known()
    sizes = [1, 300, 1, *range(2, 40), 5]
    tokens = text(sum(sizes))
    slots = SlotModel(model, 2, len(tokens) + 1)
    close(chained(slots, tokens, sizes, row=1), expected(reference, tokens))


def test_more_threads_than_before_have_room_of_their_own(monkeypatch):
    reference, model = known()
    slots, tokens = SlotModel(model, 2, 400), text(300)
    wanted = expected(reference, tokens)
    for threads in (1, 3, 2):
        monkeypatch.setattr(native, "team_size", lambda threads=threads: threads)
        close(chained(slots, tokens, [250, 1, 49]), wanted)


def test_few_programs_are_kept(monkeypatch):
    monkeypatch.setattr(decoding, "MAX_PROGRAMS", 3)
    reference, model = known()
    slots, sizes = SlotModel(model, 1, 100), [1, 2, 3, 4, 5, 1, 2, 6, 3, 4, 7, 1]
    tokens = text(sum(sizes))
    close(chained(slots, tokens, sizes), expected(reference, tokens))
    assert len(slots.cache._programs) <= 3
    assert len(slots.cache._layouts) <= 3


def test_a_forward_that_is_given_up_at_any_layer_leaves_everything_as_it_was():
    _, model = known(num_hidden_layers=3)
    slots, tokens = SlotModel(model, 2, 40), text(30)
    row, other = Row(slots.slots), Row(slots.slots)
    for k, token in enumerate(tokens):
        row.add(token, k - 1, k + 1)
        other.add(tokens[-1 - k], k - 1, k + 1)
    before = slots.forward({0: row.queries(list(range(20))), 1: other.queries(list(range(30)))})[0]
    for layer in range(3):
        asked = iter([False] * layer + [True])
        with pytest.raises(Aborted):
            slots.forward({0: row.queries(list(range(20, 30)))}, lambda asked=asked: next(asked))
        assert next(asked, None) is None
    after = slots.forward({0: row.queries(list(range(20, 30)))}, lambda: False)[0]
    untouched = SlotModel(model, 1, 40)
    assert torch.equal(torch.cat([before, after]), untouched.forward({0: row.queries(list(range(30)))})[0])


def test_what_is_copied_says_what_the_original_says():
    reference, model = known("qwen3")
    forest = Forest(SlotModel(model, 3, 60), 3, 4)
    first = forest.grow(0, 25, "tree")
    forest.model.forward({0: forest.rows[0].queries(first)})
    forest.copy(0, 2)
    forest.copy(2, 2)
    forest.copy(2, 1)
    for index in (0, 1, 2):
        nodes = forest.grow(index, 10, "tree")
        logits = forest.model.forward({index: forest.rows[index].queries(nodes)})[index]
        close(logits, torch.stack([reference(forest.rows[index].path(node)) for node in nodes]))


@pytest.mark.parametrize("slots", [1, 15, 16, 17, 31, 32, 33])
def test_a_context_may_end_wherever_a_block_ends(slots):
    """Any number of slots is enough for as many tokens, and none is lost by rounding up."""
    reference, model = known(num_hidden_layers=1, num_key_value_heads=4)
    played = SlotModel(model, 1, slots + 1)
    assert slots + 1 <= played.slots < slots + 1 + 2 * native.host_vectors().lanes
    tokens = text(played.slots - 1)
    close(
        chained(played, tokens, [1] * min(len(tokens), 33) + ([len(tokens) - 33] if len(tokens) > 33 else [])), expected(reference, tokens)
    )


# --- several models, several threads ---


def test_two_slot_models_of_one_model_know_nothing_of_each_other():
    reference, model = known("mistral")
    both, texts = [SlotModel(model, 1, 40), SlotModel(model, 2, 70)], [text(30, 1), text(30, 2)]
    rows, found = [Row(one.slots) for one in both], [[], []]
    for k, tokens in enumerate(zip(*texts, strict=True)):
        for row, token, one, logits in zip(rows, tokens, both, found, strict=True):
            row.add(token, k - 1, k + 1)
            logits.append(one.forward({0: row.queries([k])})[0])
    for tokens, logits in zip(texts, found, strict=True):
        close(torch.cat(logits), expected(reference, tokens))


@pytest.mark.parametrize("threads", [1, 2])
def test_two_threads_may_play_a_model_at_once(threads):
    reference, model = known("qwen2", num_hidden_layers=1)
    start = threading.Barrier(2)

    def play(number: int) -> None:
        torch.set_num_threads(threads)
        tokens, sizes = text(60, number), [20, 1, 1, 5, 33]
        start.wait()
        for _ in range(10):
            close(chained(SlotModel(model, 1, 64), tokens, sizes), wanted[number])

    wanted = [expected(reference, text(60, number)) for number in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(play, (0, 1)))


def test_threads_that_ask_for_the_same_kernel_at_once_get_the_same():
    """An address of what another thread's answer has replaced would point to code that is gone."""
    start = threading.Barrier(4)

    def ask(make: functools.partial) -> object:
        start.wait()
        return make()

    for make in (
        # None that any other test has asked for.
        functools.partial(decoder_kernel.attend_tile, 4, 17),
        functools.partial(decoder_kernel.norm_kernel, 32),
        functools.partial(decoder_kernel.turn_kernel, 32, True),
        functools.partial(linear_kernel._kernel, 17, 4, "bf16", "gated"),
        functools.partial(noise_kernel.kernel, 4, (1, 2, 3)),
    ):
        with ThreadPoolExecutor(4) as pool:
            found = [one[1] if isinstance(one, tuple) else one for one in pool.map(ask, [make] * 4)]
        assert all(one is found[0] for one in found), make


def steps(count: int, width: int) -> tuple[native.Steps, list[torch.Tensor], list]:
    """Products one after another, each of which reads all that the one before has written."""
    lanes = native.host_vectors().lanes
    buffers = [torch.randn(1, width), *(torch.zeros(1, width) for _ in range(count))]
    held = [linear_kernel.pack((torch.randn(width, width) / width**0.5).bfloat16(), lanes) for _ in range(count)]
    bias = torch.randn(width)
    calls = []
    for k, words in enumerate(held):
        kernel, arguments, _ = linear_kernel.product(words, bias, buffers[k].data_ptr(), buffers[k + 1].data_ptr(), 1)
        calls.append((kernel, arguments, k % 5 != 3))
    return native.Steps(calls), buffers, [held, bias]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_each_step_sees_all_of_the_one_before(count, threads):
    played, buffers, _held = steps(count, 96)
    played.run(1)
    alone = [buffer.clone() for buffer in buffers]
    for _ in range(20 if threads == 3 else 100):
        for buffer in buffers[1:]:
            buffer.zero_()
        played.run(threads)
        assert all(torch.equal(*pair) for pair in zip(buffers, alone, strict=True))


def test_threads_that_share_one_core_do_not_wait_for_ever():
    """Barriers let go of the core: a forward of two threads on one core is slower, but not by the length of time slices."""
    _, model = known()
    slots = SlotModel(model, 1, 400)
    row = Row(slots.slots)
    nodes = [row.add(token, k - 1, k + 1) for k, token in enumerate(text(300))]
    queries = row.queries(nodes)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None

    def fastest(threads: int) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "team_size", lambda: threads)
            spent = []
            for _ in range(4):
                begin = time.perf_counter()
                slots.forward({0: queries})
                spent.append(time.perf_counter() - begin)
        return min(spent)

    def measure() -> None:
        if cores is not None:
            os.sched_setaffinity(0, {min(cores)})
        assert fastest(2) < 50 * fastest(1)

    with ThreadPoolExecutor(1) as pool:  # A thread of its own, whose team is born on that core.
        pool.submit(measure).result()


@needs_two_cores
def test_both_cores_give_what_one_gives_from_any_thread_that_calls():
    reference, model = known("qwen3", num_hidden_layers=1)
    tokens = text(200)
    wanted, cores = expected(reference, tokens), os.sched_getaffinity(0)
    slots = SlotModel(model, 1, 256)

    def play(mask: set[int]) -> torch.Tensor:
        os.sched_setaffinity(0, mask)
        torch.set_num_threads(2)
        torch.ones(1 << 20).add_(1)  # torch's own team is born here
        os.sched_setaffinity(0, cores)
        return chained(slots, tokens, [150, 1, 49])

    found = []
    for mask in ({min(cores)}, {max(cores)}, cores):
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(play, mask).result())
    close(found[0], wanted)
    assert all(torch.equal(one, found[0]) for one in found)


# --- attention alone ---


def attend(lanes: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: np.ndarray) -> torch.Tensor:
    """Attention `[n, heads, size]` of queries `[n, heads, size]`, keys and values `[kv_heads, slots, size]`, by the kernel."""
    (count, heads, size), (kv_heads, slots, _), block = queries.shape, keys.shape, 2 * lanes
    group = heads // kv_heads
    number, read = group * count, slots
    packed = queries.unflatten(1, (kv_heads, group)).transpose(0, 1).contiguous()
    laid_keys = keys.unflatten(1, (-1, block)).transpose(2, 3).contiguous()
    laid_values = values.unflatten(2, (-1, block)).transpose(1, 2).contiguous()
    tile = native.VECTORS[lanes].tile(number)
    address, _owner = decoder_kernel.attend_tile(lanes, tile)
    mask = visible.__array_interface__["data"][0]
    units = np.array(
        [
            [k * number * size, number, tile, address, k * slots * size, read, mask, visible.strides[0], k * group * size]
            for k in range(kv_heads)
        ]
    )
    out, scratch = torch.full((count, heads, size), torch.nan), torch.full((tile * (slots + size),), torch.nan)
    given = (
        *(one.data_ptr() for one in (packed, laid_keys, laid_values, out)),
        *(units.ctypes.data, scratch.data_ptr(), len(scratch), size, slots, heads * size, group, kv_heads),
    )
    decoder_kernel.attend_kernel(lanes).run(native.integers(given))
    return out


def attended(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: np.ndarray) -> torch.Tensor:
    """The same in fp64."""
    groups = queries.shape[1] // keys.shape[0]
    q, (k, v) = queries.double(), (one.double().repeat_interleave(groups, 0) for one in (keys, values))
    scores = torch.einsum("nhd,hsd->hns", q, k).masked_fill(~torch.from_numpy(visible), -torch.inf)
    return torch.einsum("hns,hsd->nhd", scores.softmax(-1), v)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("scale", [1, 40])
def test_attention_is_exact_for_scores_of_any_size(lanes, scale):
    """Whole numbers, so that scores up to 1e5 are exact and softmax alone is at fault."""
    generator = np.random.default_rng(lanes * scale)
    for count, group in ((1, 1), (3, 2), (5, 4), (23, 1)):
        slots, size = 4 * 2 * lanes, 4 * lanes
        queries, keys = (
            torch.from_numpy(generator.integers(-scale, scale + 1, shape)).float() for shape in ((count, 2 * group, size), (2, slots, size))
        )
        values = torch.randn(2, slots, size)
        visible = generator.random((count, slots)) < generator.random((count, 1))
        visible[np.arange(count), generator.integers(0, slots, count)] = True
        if count > 1:
            visible[1] = False
            visible[1, slots - 1] = True
        hidden = torch.from_numpy(~visible.any(0))
        keys[:, hidden], values[:, hidden] = float("nan"), 1e30
        got = attend(lanes, queries, keys, values, visible)
        right = attended(queries, keys.nan_to_num(0.0), values, visible)
        assert (got - right).abs().max() < 2e-5


# --- elementary functions ---


def applied(name: str, lanes: int, x: np.ndarray) -> np.ndarray:
    """A function of `Code` applied to fp32 numbers, a multiple of lanes of them."""
    module = native.ir.Module()
    code = native.Code(module, "apply", [native.LONGS, *[native.I64] * 3], lanes)
    source, to, _ = code.longs(code.args[0], 3)
    with code.loop(*code.args[1:3]) as i:
        at = code.product(i, lanes)
        code.store(getattr(code, name)(code.load(code.at(code.pointer(source), at))), code.at(code.pointer(to), at))
    code.b.ret_void()
    found = np.full_like(x, np.nan)
    kernel = native.kernel(module, code.function, 2)
    kernel.run(native.integers((x.ctypes.data, found.ctypes.data, len(x) // lanes)))
    return found


@pytest.mark.parametrize("lanes", LANES)
def test_exponentials_and_logarithms_are_right_to_two_units_in_the_last_place(lanes):
    x = np.concatenate([np.linspace(-87, 88, 1 << 18), np.geomspace(1e-40, 1, 1 << 10), [0.0, -0.0]]).astype(np.float32)
    x = x[: len(x) // lanes * lanes]
    right = np.exp(x.astype(np.float64))
    assert (np.abs(applied("exp", lanes, x) - right) / right).max() < 2 * 2.0**-23
    ends = applied("exp", lanes, np.array([-1e4, -3e38, -np.inf, -88, 1e4, 3e38, np.inf, 89] * 2, dtype=np.float32))
    assert np.isfinite(ends).all()
    assert (ends.reshape(-1, 8)[:, :4] < 2e-38).all()
    assert (ends.reshape(-1, 8)[:, 4:] > 1e38).all()
    bits = np.arange(0x00800000, 0x7F800000, 8111, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), np.linspace(0.5, 2, 1 << 17, dtype=np.float32), np.ones(1, dtype=np.float32)])
    x = x[len(x) % lanes :]
    right = np.log(x.astype(np.float64))
    assert (np.abs(applied("log", lanes, x) - right) <= 2 * 2.0**-23 * np.abs(right)).all()
    assert applied("log", lanes, x)[-1] == 0
