"""Device names, in one place; and this machine as it would be with accelerators, which here are made up."""

from __future__ import annotations

import ast
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

import ssd
from ssd import devices
from ssd.catalog import check_here, local_hardware
from ssd.devices import check_present, core_ids, torch_device, training_device
from ssd.engine.graph_memory import Size, graph_bytes
from ssd.models import Source, check_memory, load, memory_bytes
from ssd.placements import placements
from ssd.specs import Configuration, Device, Hardware, Models, Placement, SamplingParams
from tests.plans import CORES, hand_typed

PACKAGE = Path(ssd.__file__).parent
NAMES = {"cpu", "cuda", "mps", "xpu", "hip", "npu", "nccl", "gloo"}


@pytest.fixture
def accelerators(monkeypatch):
    """Let torch find so many accelerators of a kind."""

    def found(count: int, kind: str = "xpu") -> None:
        current = torch.device(kind) if count else None
        named = SimpleNamespace(
            get_device_name=lambda device: f"Card {device.index}", get_device_properties=lambda _: SimpleNamespace(total_memory=8 << 30)
        )
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: current)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch, "get_device_module", lambda _: named)
        monkeypatch.setattr("ssd.catalog._rates", lambda *_: (1e12, 1e14))

    return found


def test_device_names_stand_in_one_module():
    for path in sorted(PACKAGE.rglob("*.py")):
        constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        used = {value for value in constants if isinstance(value, str) and value.split(":")[0] in NAMES}
        assert not used or path.name == "devices.py", f"{path.relative_to(PACKAGE)} names {used}"


def test_a_model_is_on_cores_or_on_accelerators_of_one_kind():
    assert torch_device(("cpu:3", "cpu:1")) == torch.device("cpu")
    assert torch_device(("cuda:2",)) == torch.device("cuda", 2)
    assert [torch_device(("xpu:0", "xpu:3"), rank) for rank in (0, 1)] == [torch.device("xpu", 0), torch.device("xpu", 3)]
    with pytest.raises(ValueError, match="on CPU cores or on accelerators of one kind"):
        torch_device(("cpu:0", "cuda:0"))
    with pytest.raises(ValueError, match="torch knows no device 'tpu:0'"):
        torch_device(("tpu:0",))


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_this_machine_is_its_accelerators_whatever_they_are(accelerators, kind):
    accelerators(2, kind)
    here = local_hardware()
    assert [(device.id, device.name, device.memory_bytes) for device in here.devices] == [
        (f"{kind}:{place}", f"Card {place}", 8 << 30) for place in (0, 1)
    ]
    assert (here.name, here.is_local, here.shared_memory) == ("2xCard 0", True, False)
    assert [(place.target, place.draft) for place in placements(here)] == [
        ((f"{kind}:0",), (f"{kind}:1",)),
        ((f"{kind}:0",), (f"{kind}:0",)),
    ]
    check_here(here)
    assert training_device() == torch.device(kind, 0)


def test_a_single_accelerator_has_the_cores_beside_it_for_the_draft(accelerators):
    accelerators(1)
    here, cores = local_hardware(), core_ids()
    assert [device.id for device in here.devices] == ["xpu:0", *cores]
    assert not here.shared_memory
    assert [(place.target, place.draft) for place in placements(here)] == [
        (("xpu:0",), cores[1:] or cores),
        (("xpu:0",), ("xpu:0",)),
    ]
    check_here(here)


def test_a_device_that_torch_does_not_find_is_refused(accelerators):
    accelerators(2)
    check_present("placement.target", ("xpu:0", "xpu:1"))
    for ids in (("xpu:2",), ("xpu:1", "xpu:2"), ("cuda:0",)):
        with pytest.raises(ValueError, match=r"placement.target=.*torch finds no"):
            check_present("placement.target", ids)


def test_an_accelerator_becomes_the_current_one_of_the_thread_that_uses_it(accelerators, monkeypatch):
    accelerators(4)
    current = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    everything = core_ids()
    with devices.pinned(everything):
        devices.pin(("xpu:2", "xpu:3"), rank=1)
        devices.pin(everything[:1])
        devices.pin(everything)
    assert current == [3]


def ssd_at(target: tuple[str, ...], draft: tuple[str, ...]) -> Configuration:
    return Configuration(mode="ssd", num_speculative_tokens=1, budget=2, placement=Placement(target=target, draft=draft))


def test_two_processes_may_share_an_accelerator_but_not_a_core():
    ssd_at(("cuda:0",), ("cuda:0",))
    ssd_at(("cuda:0",), ("cpu:0", "cpu:1"))
    ssd_at(("cpu:0", "cpu:1"), ("cuda:0",))
    with pytest.raises(ValueError, match="mode='ssd' needs a device for the draft alone"):
        ssd_at(("cpu:0", "cpu:1"), ("cpu:1",))


def test_each_memory_must_hold_what_is_placed_on_it(monkeypatch):
    """A target is split over its accelerators, a draft whole on each, and what is on cores shares their memory."""
    sizes = {"cuda:0": 10, "cpu:0": 100, "cuda:1": 10, "cpu:1": 100}
    known = {"name": "it", "memory_bandwidth": 1e9, "flops": 1e9}
    found = tuple(Device(id=name, memory_bytes=size, **known) for name, size in sizes.items())
    hardware = Hardware(name="mixed", devices=found, is_local=True)
    pair, models = SimpleNamespace(target=12, draft=5, max_model_len=16), Models(target="a", draft="b")

    def check(target: tuple[str, ...], draft: tuple[str, ...], scale: int = 1) -> None:
        monkeypatch.setattr("ssd.models.memory_bytes", lambda models, source, *_, drafts, shares: -(-scale * source // shares))
        check_memory(pair, models, hardware, Placement(target=target, draft=draft), (Size(1, 0, 1),) * 2)

    check(("cuda:0", "cuda:1"), ("cpu:1",))
    check(("cpu:0",), ("cpu:1",), scale=5)
    check(("cpu:0",), ("cuda:1",), scale=2)
    for where, scale, target, draft in (
        ("cuda:0", 1, ("cuda:0",), ("cpu:0",)),
        ("cuda:1", 1, ("cuda:0", "cuda:1"), ("cuda:1",)),
        ("cuda:0", 3, ("cpu:0",), ("cuda:0", "cuda:1")),
        ("memory", 7, ("cpu:0",), ("cpu:1",)),
    ):
        with pytest.raises(ValueError, match=f"GiB on {where}, which has"):
            check(target, draft, scale)


def test_graphs_take_memory_where_there_are_graphs_and_their_largest_forward_counts_once():
    """Llama 3.1 8B in bf16, its logits written out by hand; nothing of it on the CPU, and all of it on each share."""
    config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128_256)
    config.update({"num_hidden_layers": 32, "dtype": torch.bfloat16})
    source, models = Source("a", ".", None, config), Models(target="a", draft=None, dtype="bfloat16")
    source.__dict__["_weights"] = [("w", 8_000_000_000)]
    size = Size(rows=2, slots=4096, wanted=10)

    def taken(kind: str, **more) -> int:
        return memory_bytes(models, source, torch.device(kind), size, **more)

    kept = 2 * 8_000_000_000 + 2 * 4096 * 2 * 32 * 8 * 128 * 2
    graphs = taken("cuda") - kept
    assert taken("cpu") == taken("xpu") == kept
    assert taken("cuda", shares=2) == kept // 2 + graphs
    # Ten places are filled up to sixteen. Masks for two rows of 256 queries: bytes, then two bytes, then those of four heads.
    logits, masks = 16 * 128_256, 2 * 256 * 4096
    assert graphs > logits * (2 + 4 + 4) + masks * (1 + 2 + 8)
    assert graphs < logits * 64 + masks * 16 + 256 * 2 * 100_000
    assert graph_bytes(config, torch.bfloat16, replace(size, wanted=16)) == graphs
    more = graph_bytes(config, torch.bfloat16, replace(size, wanted=17)) - graphs
    assert logits * 10 <= more <= logits * 64
    # What is beyond the largest bucket is not captured.
    largest, beyond = (graph_bytes(config, torch.bfloat16, replace(size, wanted=wanted)) for wanted in (256, 5000))
    assert largest == beyond


def test_an_engine_whose_graphs_alone_do_not_fit_is_refused(monkeypatch, tiny_pair):
    plan, seen = hand_typed(*tiny_pair), []
    monkeypatch.setattr("ssd.models.graph_bytes", lambda config, dtype, size: seen.append(size) or 9 << 30)
    monkeypatch.setattr("ssd.models.has_graphs", lambda _: True)
    with pytest.raises(ValueError, match=r"need 18.0 GiB on memory, which has 8.0"):
        ssd.Engine.from_plan(plan, max_num_seqs=2)
    assert [(size.rows, size.wanted) for size in seen] == [(2, 8), (2, 10)]


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_a_model_that_is_placed_on_another_device_is_loaded_again_there(tiny_pair, monkeypatch):
    """Cores stand for accelerators: each is a device of its own to the engine."""
    # To torch `cpu:0` and `cpu:1` are two names of one device, which differ.
    monkeypatch.setattr("ssd.engine.engine.torch_device", lambda ids: torch.device("cpu", CORES.index(ids[0])))
    loads = []
    monkeypatch.setattr(
        "ssd.engine.engine.load", lambda source, device, dtype: (loads.append(device.index), load(source, device, dtype))[1]
    )
    first, other = Placement(target=CORES[:1], draft=CORES[1:]), Placement(target=CORES[1:], draft=CORES[:1])
    with ssd.Engine.from_plan(hand_typed(*tiny_pair)) as engine:
        texts, processes = [], [engine.peer.process]
        for place in (first, other):
            engine.configure(Configuration(mode="sd", num_speculative_tokens=2, placement=place))
            texts.append(engine.generate("a text", SamplingParams(max_tokens=12))[0].token_ids)
            processes.append(engine.peer.process)
        assert engine.health().draft == "ok"
    assert len(set(texts)) == 1
    assert loads == [0, 1]
    assert [old is new for old, new in pairwise(processes)] == [True, False]
    assert all(process.poll() is not None for process in processes)
