"""Other programs decode the same prompts in processes of their own; who cannot is refused before anything is loaded."""

import os
import shutil
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from ssd.bench import bench
from ssd.devices import available_cores
from ssd.rivals import process
from ssd.rivals import start as starting
from ssd.rivals.child import Child, RefusedError
from ssd.rivals.messages import Decode, Load
from ssd.rivals.start import check, rivals, stored
from ssd.specs import Models
from tests import handmade

CORE = f"cpu:{available_cores()[0]}"
PROMPTS = ((5, 9, 30), (7, 8))


def load(pair, **changes) -> Load:
    place = {"target": (pair[0], None), "draft": (pair[1], None)}
    return Load(**{"program": "transformers", "dtype": "float32", "devices": (CORE,), "rows": 2, "length": 40, **place, **changes})


@pytest.fixture(scope="module")
def child(tiny_pair, tmp_path_factory):
    """With a target whose own generation config would end its text after a few tokens, and penalise what it has said."""
    target = tmp_path_factory.mktemp("rival") / "target"
    shutil.copytree(tiny_pair[0], target)
    end = greedy(tiny_pair[0], PROMPTS[0], 4)[-1]
    GenerationConfig(eos_token_id=end, repetition_penalty=1.5).save_pretrained(target)
    with Child(load((str(target), tiny_pair[1]))) as started:
        yield started


@torch.inference_mode()
def greedy(folder: str, prompt: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The likeliest tokens one after another, whatever ends a text."""
    model, ids = AutoModelForCausalLM.from_pretrained(folder).eval(), list(prompt)
    for _ in range(length):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


@pytest.mark.parametrize("way", ["transformers", "transformers assisted"])
def test_transformers_decodes_the_targets_own_greedy_tokens_past_any_end(child, tiny_pair, way):
    found = child.decode(Decode(way=way, prompts=PROMPTS[:1], output_tokens=20))
    assert found.tokens == (greedy(tiny_pair[0], PROMPTS[0], 20),)
    times = [seconds for seconds, _ in found.bursts]
    assert times == sorted(times)
    assert sum(count for _, count in found.bursts) == 20


def test_assisted_generation_brings_several_tokens_at_once(child):
    found = child.decode(Decode(way="transformers assisted", prompts=PROMPTS[:1], output_tokens=20))
    assert max(count for _, count in found.bursts) > 1


def test_prompts_of_unequal_length_are_decoded_together_as_alone(child, tiny_pair):
    found = child.decode(Decode(way="transformers", prompts=PROMPTS, output_tokens=8))
    assert found.tokens == tuple(greedy(tiny_pair[0], prompt, 8) for prompt in PROMPTS)


def test_drawn_tokens_hang_on_the_seed(child):
    drawn = [
        child.decode(Decode(way="transformers", prompts=PROMPTS[:1], output_tokens=12, temperature=1.0, seed=seed)).tokens
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_a_program_cannot_is_told_and_it_goes_on(child):
    with pytest.raises(RefusedError, match="batch_size = 1"):
        child.decode(Decode(way="transformers assisted", prompts=PROMPTS, output_tokens=4))
    assert child.decode(Decode(way="transformers", prompts=PROMPTS, output_tokens=4)).tokens


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="looks where a process may run")
def test_a_rival_has_its_own_cores_and_threads(child):
    for thread in os.listdir(f"/proc/{child.process.pid}/task"):
        assert os.sched_getaffinity(int(thread)) == {int(CORE.removeprefix("cpu:"))}


def test_models_that_do_not_load_are_an_answer_that_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "keep_to", lambda cores: None)
    (answer,) = process.serve(load((str(tmp_path), str(tmp_path))), lambda: iter(()))
    assert "ValueError: Unrecognized model" in answer.reason


@pytest.mark.slow
def test_a_process_that_is_gone_is_an_error(tiny_pair):
    with Child(load(tiny_pair, draft=None)) as started:
        started.process.kill()
        with pytest.raises(RuntimeError, match=r"the process of transformers is gone \(exit code -9\)"):
            started.decode(Decode(way="transformers", prompts=PROMPTS, output_tokens=4))


@pytest.mark.slow
def test_a_rival_leaves_when_it_is_no_longer_spoken_to_even_while_it_decodes(tiny_pair):
    with Child(load(tiny_pair, draft=None, length=100_000)) as started:
        print(Decode(way="transformers", prompts=PROMPTS, output_tokens=100_000).model_dump_json(), file=started.process.stdin, flush=True)
        time.sleep(0.2)
        started.process.stdin.close()
        assert started.process.wait(timeout=60) == 0


def test_a_benchmark_sets_transformers_beside_the_engine_and_says_what_it_leaves_out(tiny_pair):
    plan = handmade.plan(tiny_pair, handmade.AR)
    plans = [plan.model_copy(update={"workload": plan.workload.model_copy(update={"batch_size": size})}) for size in (1, 2)]
    found = bench(plans, prompts=["a", "hello"], output_tokens=8, warmup=0, against=["transformers"])
    alone, together = found.cells
    assert [row.configuration.mode for row in alone.rows] == ["ar", "sd", "transformers", "transformers assisted"]
    assert [row.configuration.mode for row in together.rows] == ["ar", "sd", "transformers"]
    assert [(left.configuration.mode, left.reason) for left in together.skipped] == [
        ("transformers assisted", "assisted generation decodes one prompt at a time")
    ]
    assert alone.rows[1].speedup_vs_rivals.keys() == {"transformers", "transformers assisted"}
    assert all(row.differences == () for row in found.rows)
    assert all(row.serving.total_generated_tokens == 16 for row in found.rows)
    assert found.set_up.load_seconds.keys() == {"ssd", "transformers"}


def test_llama_cpp_wants_a_gguf_file_cpu_cores_and_its_wheel(monkeypatch, tmp_path):
    file = Models(target=str(tmp_path / "model.gguf"))
    with pytest.raises(ValueError, match=r"against='llama.cpp': target='embedded/target' is no .gguf file"):
        check(["llama.cpp"], Models(), ["cpu:0"])
    with pytest.raises(ValueError, match="measured on CPU cores, not on cuda:0"):
        check(["llama.cpp"], file, ["cuda:0"])
    monkeypatch.setattr(starting, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="the wheel that carries it is not installed: pip install cyllama"):
        check(["llama.cpp"], file, ["cpu:0"])


def test_an_unknown_program_and_one_named_twice_are_refused_before_anything_is_loaded(tiny_pair):
    for against, message in (
        (["vllm"], "against='vllm' is unknown: use transformers or llama.cpp"),
        (["transformers"] * 2, "names one twice"),
    ):
        with pytest.raises(ValueError, match=message):
            bench(handmade.plan(tiny_pair), prompts=["a"], output_tokens=4, against=against)


def test_accelerators_are_not_joined_for_a_rival():
    found = rivals(["transformers"], Models(), ("cuda:0", "cuda:1"))
    assert {rival.placement.target for rival in found} == {("cuda:0",)}
    assert {rival.weights for rival in found} == {"bfloat16"}
    assert [rival.mode for rival in rivals(["transformers"], Models(draft=None), ("cpu:0", "cpu:1"))] == ["transformers"]


def llama_file(folder, tiny_pair) -> str:
    """The tiny target as a GGUF file of fp32, its tokenizer left out."""
    import gguf
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tiny_pair[0])
    weights = AutoModelForCausalLM.from_pretrained(tiny_pair[0]).state_dict()
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    heads = config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in weights.items():
        for kind, count in (("q_proj", heads), ("k_proj", config.num_key_value_heads)):
            if kind in name:
                # GGUF's rotary turns neighbours, transformers' halves.
                weight = weight.reshape(count, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(folder / "tiny.gguf")


def test_llama_cpp_decodes_the_same_file(tiny_pair, tmp_path):
    pytest.importorskip("cyllama")
    llama_file(tmp_path, tiny_pair)
    with Child(load(tiny_pair, program="llama.cpp", target=(str(tmp_path), "tiny.gguf"), draft=None)) as started:
        found = started.decode(Decode(way="llama.cpp", prompts=PROMPTS, output_tokens=8))
        assert found.tokens == tuple(greedy(tiny_pair[0], prompt, 8) for prompt in PROMPTS)
        drawn = [
            started.decode(Decode(way="llama.cpp", prompts=PROMPTS, output_tokens=8, temperature=1.0, seed=seed)).tokens for seed in (1, 2)
        ]
        assert drawn[0] != drawn[1]


def test_the_quantisation_of_a_file_is_read_from_it(tiny_pair, tmp_path):
    from ssd.models import Source

    llama_file(tmp_path, tiny_pair)
    assert stored(Source("tiny", str(tmp_path), "tiny.gguf", None)) == "ALL_F32"
