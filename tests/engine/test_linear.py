"""Bf16 weights with fp32 sums give what fp32 linear layers give on the same numbers."""

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import linear as torch_linear
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.pytorch_utils import Conv1D

from ssd import native
from ssd.engine import linear, linear_kernel
from ssd.engine.linear import Bf16Embedding, FastLinear, fp32_compute_from_bf16, replace_linears

needs_kernel = pytest.mark.skipif(bool(native.why_unavailable()), reason=native.why_unavailable())
needs_two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and leave to run on two cores"
)
SIZES = {"hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    linear._say_once.cache_clear()
    yield
    torch.set_num_threads(before)


def bf16_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_same(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1e-3)


def tiny(architecture: str, tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    common = {"vocab_size": 101, "tie_word_embeddings": tied}
    if architecture == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_embd=40, n_layer=2, n_head=4, n_positions=64, **{**common, "tie_word_embeddings": True}))
    elif architecture == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, **common))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **common))
    for parameter in model.parameters():
        parameter.data = (parameter.data + 0.05 * torch.randn_like(parameter)).bfloat16().float()
    return model.eval()


@torch.inference_mode()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.arange(34).reshape(2, 17)).logits


# --- one layer ---


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 40),
    inputs=st.integers(1, 150),
    outputs=st.integers(1, 300),
    bias=st.booleans(),
    threads=st.sampled_from([1, 2]),
)
def test_any_shape_gives_what_torch_gives(tokens: int, inputs: int, outputs: int, bias: bool, threads: int) -> None:
    torch.set_num_threads(threads)
    weight, x = bf16_numbers(outputs, inputs), torch.randn(tokens, inputs)
    offset = torch.randn(outputs) if bias else None
    assert_same(FastLinear(weight, offset)(x), torch_linear(x, weight.float(), offset))


@needs_kernel
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("tokens", [*range(1, 17), 28, 29, 41])
def test_each_vector_width_and_tile_is_right(lanes: int, tokens: int) -> None:
    weight, x, bias = bf16_numbers(11 * 2 * lanes, 33), torch.randn(tokens, 33), torch.randn(11 * 2 * lanes)
    assert_same(linear_kernel.matmul(x, linear_kernel.pack(weight, lanes), bias), torch_linear(x, weight.float(), bias))


@needs_kernel
@pytest.mark.parametrize(("tokens", "blocks"), [(1, 6), (2, 6), (3, 4), (4, 3), (5, 2), (6, 1), (7, 1), (14, 1), (15, 0)])
def test_sums_never_exceed_the_registers(tokens: int, blocks: int) -> None:
    assert native.VECTORS[16].blocks_at_once(tokens) == blocks


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("tokens", [1, 3, 6, 7, 15, 29])
def test_sums_are_added_and_gates_are_applied_as_torch_does(lanes: int, tokens: int, threads: int) -> None:
    """Five blocks: on a chunk's edge for several tiles, unequal shares of two threads, and pairs with one left over."""
    inputs, outputs = (33 if tokens < 29 else 20_000), 5 * 2 * lanes
    weight, x, onto = bf16_numbers(outputs, inputs), torch.randn(tokens, inputs), torch.randn(tokens, outputs)
    weight, bias = (weight.float() / inputs**0.5).bfloat16(), torch.randn(outputs)
    words, sums = linear_kernel.pack(weight, lanes), torch_linear(x, weight.float(), bias)
    gate, up = sums.unflatten(1, (-1, 2, lanes)).unbind(2)
    gated = (torch.nn.functional.silu(gate) * up).flatten(1)
    for finish, expected in (("plain", sums), ("onto", sums + onto), ("gated", gated)):
        out = torch.full(expected.shape, torch.nan)
        kernel, arguments, _ = linear_kernel.product(words, bias, x.data_ptr(), out.data_ptr(), tokens, finish=finish, onto=onto.data_ptr())
        kernel.run(arguments, threads)
        assert_same(out, expected)


@needs_kernel
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_gates_are_right_however_large_they_are(lanes: int) -> None:
    gates = torch.tensor(
        [0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4, 3e38, -3e38, 88.5, -88.5, *torch.linspace(-100, 100, 2 * 16 * 20 - 10).tolist()]
    )
    ups = torch.linspace(-1, 1, len(gates))
    bias = torch.stack([gates.view(-1, lanes), ups.view(-1, lanes)], 1).flatten()
    words, x, out = (
        torch.zeros(len(bias) // (2 * lanes), 1, lanes, dtype=torch.int32),
        torch.zeros(1, 1),
        torch.full((1, len(gates)), torch.nan),
    )
    kernel, arguments, _ = linear_kernel.product(words, bias, x.data_ptr(), out.data_ptr(), 1, finish="gated")
    kernel.run(arguments)
    right = gates.double() / (1 + torch.exp(-gates.double())) * ups.double()
    # Past e^88 what is left of a gate is next to nothing.
    assert ((out[0] - right).abs() <= 4 * 2.0**-23 * right.abs() + 1e-33).masked_fill(gates == -3e38, True).all()
    assert out[0][gates == -3e38].abs() < 10


# --- a byte a weight ---


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """What a weight is once its outputs' numbers are multiples of a 127th of their largest."""
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scale.clamp_min(1e-30)).round() * scale


@settings(max_examples=25)
@given(st.integers(1, 130), st.integers(1, 90), st.integers(1, 20), st.booleans(), st.sampled_from([torch.bfloat16, torch.float32]))
def test_int8_weights_are_the_nearest_multiples_of_each_outputs_scale(
    outputs: int, inputs: int, tokens: int, bias: bool, dtype: torch.dtype
) -> None:
    weight, x = (3 * torch.randn(outputs, inputs)).to(dtype), torch.randn(tokens, inputs)
    weight[outputs // 2] = 0
    offset = torch.randn(outputs) if bias else None
    assert_same(FastLinear(weight, offset, int8=True)(x), torch_linear(x, rounded(weight), offset))


@needs_kernel
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 7, 16])
def test_int8_weights_are_right_for_each_vector_width_and_finish(lanes: int, tokens: int) -> None:
    outputs, inputs = 7 * 2 * lanes, 33
    numbers, scales = linear_kernel.quantised(torch.randn(outputs, inputs))
    weight, x, onto, bias = numbers * scales[:, None], torch.randn(tokens, inputs), torch.randn(tokens, outputs), torch.randn(outputs)
    sums = torch_linear(x, weight, bias)
    gate, up = sums.unflatten(1, (-1, 2, lanes)).unbind(2)
    gated = (torch.nn.functional.silu(gate) * up).flatten(1)
    words = linear_kernel.pack_bytes(numbers, lanes)
    for finish, expected in (("plain", sums), ("onto", sums + onto), ("gated", gated)):
        out = torch.full(expected.shape, torch.nan)
        pointers = x.data_ptr(), out.data_ptr(), tokens
        kernel, arguments, _ = linear_kernel.product(words, bias, *pointers, scales=scales, finish=finish, onto=onto.data_ptr())
        kernel.run(arguments)
        assert_same(out, expected)


def test_int8_weights_without_the_kernel_are_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(37, 21), torch.randn(5, 21)
    layer = FastLinear(weight, int8=True)
    expected = layer(x)
    monkeypatch.setattr(native, "why_unavailable", lambda: "no reason")
    assert_same(layer(x), expected)


def test_a_model_of_int8_weights_is_the_model_of_the_rounded_ones() -> None:
    for architecture in ("llama", "gpt2"):
        model, ids = tiny(architecture, tied=False), torch.arange(20)[None]
        twin = tiny(architecture, tied=False)
        with torch.no_grad():
            for layer in twin.modules():
                if isinstance(layer, nn.Linear):
                    # A head that is tied is rounded; the embedding is not.
                    layer.weight = nn.Parameter(rounded(layer.weight))
                elif isinstance(layer, Conv1D):
                    layer.weight = nn.Parameter(rounded(layer.weight.T).T)
        assert fp32_compute_from_bf16(model, int8=True)
        with torch.inference_mode():
            assert_same(model(ids).logits, twin(ids).logits)


def test_more_tokens_than_a_chunk_of_weights_and_a_tile_hold() -> None:
    weight, x = bf16_numbers(700, 1000), torch.randn(131, 1000)
    assert_same(FastLinear(weight)(x), torch_linear(x, weight.float()))


@pytest.mark.parametrize("lead", [(), (3,), (2, 5), (2, 0, 3), (0,)])
def test_leading_shapes_are_kept(lead: tuple[int, ...]) -> None:
    weight, x = bf16_numbers(24, 16), torch.randn(*lead, 16)
    assert torch.allclose(FastLinear(weight)(x), torch_linear(x, weight.float()), atol=1e-5)


def test_strided_and_expanded_inputs() -> None:
    weight = bf16_numbers(50, 20)
    wide = torch.randn(6, 40)
    for x in (
        wide[:, ::2],
        wide[:, 20:],
        wide[::2, :20],
        torch.randn(20, 7).T,
        torch.randn(1, 20).expand(5, 20),
        torch.randn(1, 1).expand(5, 20),
    ):
        assert_same(FastLinear(weight)(x), torch_linear(x, weight.float()))


def test_a_token_gives_the_same_numbers_whoever_is_beside_it() -> None:
    layer, x = FastLinear(bf16_numbers(96, 64)), torch.randn(33, 64)
    together = layer(x)
    assert torch.equal(together, torch.cat([layer(x[k : k + 1]) for k in range(33)]))


def test_packing_loses_nothing() -> None:
    weight = bf16_numbers(77, 13)
    for lanes in (4, 8, 16):
        assert torch.equal(linear_kernel.unpack(linear_kernel.pack(weight, lanes), 77), weight)


@needs_kernel
@settings(max_examples=30, deadline=None)
@given(
    blocks=st.integers(1, 5),
    inputs=st.integers(1, 40),
    lanes=st.sampled_from([4, 8, 16]),
    apart=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 99),
)
def test_halves_are_packed_as_torch_would_wherever_they_lie(
    blocks: int, inputs: int, lanes: int, apart: tuple[int, int], seed: int
) -> None:
    low, high = (bf16_numbers(blocks, of, lanes, inputs, seed=seed + of)[:, seed % of] for of in apart)
    words = torch.full((blocks + 1, inputs, lanes), 7, dtype=torch.int32)
    linear_kernel.pack_halves(low, high, words[:blocks])
    bits = [half.contiguous().view(torch.int16).mT.to(torch.int32) for half in (low, high)]
    assert torch.equal(words[:blocks], bits[0] & 0xFFFF | bits[1] << 16)
    assert (words[blocks:] == 7).all()


@needs_kernel
@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 320])
def test_packing_is_the_same_on_any_number_of_threads_and_without_the_kernel(monkeypatch: pytest.MonkeyPatch, outputs: int) -> None:
    weight = bf16_numbers(outputs, 1000)
    alone = linear_kernel.pack(weight, 8)
    assert (linear_kernel.unpack(alone, alone.shape[0] * 16)[outputs:] == 0).all()
    monkeypatch.setattr(native, "team_size", lambda: 3)
    assert torch.equal(linear_kernel.pack(weight, 8), alone)
    monkeypatch.setattr(native, "why_unavailable", lambda: "no reason")
    assert torch.equal(linear_kernel.pack(weight, 8), alone)


def test_extreme_weights_survive() -> None:
    weight = torch.tensor([[3e38, 1e-38, -0.0, 1e-40, float("inf")]]).bfloat16()
    for k in range(5):
        x = torch.zeros(1, 5)
        x[0, k] = 1.0
        assert torch.equal(FastLinear(weight[:, : k + 1])(x[:, : k + 1]), torch_linear(x[:, : k + 1], weight[:, : k + 1].float()))


def test_user_mistakes_are_named() -> None:
    layer = FastLinear(bf16_numbers(8, 4))
    with pytest.raises(ValueError, match="fp32_compute_from_bf16"):
        layer(torch.zeros(1, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="4"):
        layer(torch.zeros(1, 5))
    with pytest.raises(ValueError, match="bf16 cannot"):
        FastLinear(torch.full((2, 2), 1 / 3))
    with pytest.raises(ValueError, match=r"\[out, in\]"):
        FastLinear(bf16_numbers(4))


# --- threads and cores ---


@needs_kernel
def test_one_thread_touches_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = FastLinear(bf16_numbers(1024, 512)), torch.randn(4, 512)
    layer(x)
    monkeypatch.setattr(native, "openmp", lambda: pytest.fail("asked for a team"))
    layer(x)


@needs_kernel
@needs_two_cores
def test_cores_may_change_between_calls() -> None:
    weight, x = bf16_numbers(1024, 512), torch.randn(8, 512)
    layer, expected, cores = FastLinear(weight), torch_linear(x, weight.float()), os.sched_getaffinity(0)
    torch.set_num_threads(2)
    try:
        for mask in ({min(cores)}, cores, {max(cores)}, cores):
            os.sched_setaffinity(0, mask)
            assert_same(layer(x), expected)
            assert native.team_size() == min(2, len(mask))
    finally:
        os.sched_setaffinity(0, cores)


@needs_kernel
@needs_two_cores
def test_a_team_born_on_one_core_is_spread_over_both() -> None:
    cores = os.sched_getaffinity(0)
    torch.set_num_threads(2)
    try:
        native.spread({min(cores)}, 2)
        os.sched_setaffinity(0, cores)
        native.team_size()
        assert [os.sched_getaffinity(task) for task in team()] == [cores, cores]
    finally:
        os.sched_setaffinity(0, cores)


@needs_kernel
@needs_two_cores
def test_each_thread_that_calls_has_a_team_spread_over_both_cores() -> None:
    """Also one whose team torch has made while it was held to one core."""
    cores, found = os.sched_getaffinity(0), []

    def born_on(core: int) -> None:
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(2)
        torch.ones(1 << 20).add_(1)
        os.sched_setaffinity(0, cores)
        assert native.team_size() == 2
        found.append([os.sched_getaffinity(task) for task in team()])

    for core in sorted(cores)[:2]:
        thread = threading.Thread(target=born_on, args=(core,))
        thread.start()
        thread.join()
    assert found == [[cores, cores]] * 2


def team() -> list[int]:
    """The two threads that share a product."""
    seen: list[int] = []
    task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(threading.get_native_id()))
    native.openmp().GOMP_parallel(ctypes.cast(task, ctypes.c_void_p), None, 2, 0)
    return seen


# --- models ---


@needs_kernel
@pytest.mark.parametrize(
    ("architecture", "tied", "layers"), [("llama", False, 15), ("llama", True, 15), ("qwen2", True, 15), ("gpt2", True, 9)]
)
def test_a_model_loaded_in_bf16_computes_what_it_computes_in_fp32(tmp_path: Path, architecture: str, tied: bool, layers: int) -> None:
    reference = tiny(architecture, tied)
    reference.save_pretrained(tmp_path)
    model = type(reference).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert fp32_compute_from_bf16(model) == layers
    assert not [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding | Conv1D)]
    assert isinstance(model.get_input_embeddings(), Bf16Embedding)
    assert model.dtype == torch.float32
    assert_same(logits(model), logits(reference), 1e-5)


def test_a_model_cast_to_bf16_gets_its_rotary_frequencies_back() -> None:
    reference, model = tiny("llama"), tiny("llama").to(torch.bfloat16)
    fp32_compute_from_bf16(model)
    assert_same(logits(model), logits(reference), 1e-5)


@needs_kernel
def test_weights_that_bf16_cannot_hold_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight.data = bf16_numbers(8, 8).float()
    expected, before, x = model[0].weight.clone(), model(torch.ones(3, 8)), torch.ones(3, 8)
    with caplog.at_level(logging.WARNING):
        assert replace_linears(model) == 1
    assert [type(layer) for layer in model] == [nn.Linear, FastLinear]
    assert torch.equal(model[0].weight, expected)
    assert_same(model(x), before, 1e-5)
    assert [r.getMessage() for r in caplog.records] == [
        "1 linear layers stay torch's (first: 0): their weights are not bf16 numbers on a CPU"
    ]


@needs_kernel
def test_a_layer_in_two_places_stays_one_layer() -> None:
    shared = nn.Linear(8, 8).bfloat16()
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    assert replace_linears(model) == 1
    assert model["a"] is model["b"][0]
    assert shared.weight is None


@needs_kernel
def test_conv1d_is_a_transposed_linear() -> None:
    conv = Conv1D(30, 20)
    conv.weight.data, conv.bias.data = bf16_numbers(20, 30).float(), torch.randn(30)
    x = torch.randn(2, 3, 20)
    expected = conv(x)
    model = nn.Sequential(conv)
    assert replace_linears(model) == 1
    assert_same(model(x), expected)


def test_without_the_kernel_a_model_computes_in_fp32_with_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(native, "why_unavailable", lambda: "no reason")
    reference, model = tiny("qwen2"), tiny("qwen2").to(torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        assert fp32_compute_from_bf16(model) == 0
        assert fp32_compute_from_bf16(model) == 0
    assert isinstance(model.lm_head, nn.Linear)
    assert_same(logits(model), logits(reference), 1e-5)
    assert [r.getMessage() for r in caplog.records] == ["linear layers stay torch's: no reason"]


def test_without_the_kernel_a_fast_linear_uses_torch_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "why_unavailable", lambda: "no reason")
    weight, bias, x = bf16_numbers(30, 20), torch.randn(30), torch.randn(3, 20)
    layer = FastLinear(weight, bias)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_same(layer(x), torch_linear(x, weight.float(), bias))
    assert len(caplog.records) == 1


@needs_kernel
@pytest.mark.models
def test_the_real_model_gives_its_fp32_logits() -> None:
    from transformers import AutoModelForCausalLM

    root = Path(os.environ.get("SSD_MODELS", "~/.cache/ssd-models")).expanduser()
    path = root / "qwen2.5-coder-0.5b-instruct"
    if not path.exists():
        pytest.skip(f"{path.name} is not in {root}: fetch the models first")
    ids = torch.arange(1000, 1040)[None]
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(ids).logits
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        assert fp32_compute_from_bf16(model) == 169
        got = model(ids).logits
    assert (got - expected).abs().max() < 1e-3
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
