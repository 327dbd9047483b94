"""The catalogue is complete and sane; machines are found by name; this machine is described."""

import os

import pytest

import ssd
from ssd.catalog import accelerators
from ssd.shapes import catalogue, shape


@pytest.mark.parametrize("name", accelerators())
def test_an_accelerator_has_positive_rates_and_a_source(name):
    row = accelerators()[name]
    assert row["source"].strip()
    (device,) = ssd.Hardware.named(f"1x{name}").devices
    assert 10e9 < device.memory_bytes < 1e12
    assert 0.3e12 < device.memory_bandwidth < 20e12
    assert 10e12 < device.flops < 10e15
    assert 5e12 < device.flops_fp32 <= device.flops
    assert row["source"] in device.source
    # A price without a place and a time is a rumour.
    assert ("price" in row) == ("priced" in row) == ("price:" in device.source)
    assert device.price_per_hour is None or 0.1 < device.price_per_hour < 20
    # Two of an accelerator are joined by something; Apple's are one to a machine.
    assert (device.interconnect_bandwidth is None) == (device.interconnect == "") == (device.kind == "mps")
    assert device.interconnect_bandwidth is None or device.interconnect_bandwidth < device.memory_bandwidth


def test_the_catalogue_has_what_people_rent_and_own():
    wanted = "A100-40GB A100-80GB H100-PCIe H100-SXM H200 B200 L40S RTX-4090 RTX-5090 MI300X M4-Max EPYC-9654 Xeon-8480 Graviton4"
    assert set(wanted.split()) <= set(accelerators())


@pytest.mark.parametrize("name", catalogue())
def test_a_shape_has_the_parameters_that_its_authors_state(name):
    row = catalogue()[name]
    assert row["source"].strip()
    found = shape(name)
    assert found.parameters == pytest.approx(row["billions"] * 1e9, rel=0.005)
    unread = 0 if row["tied"] else row["vocab"] * row["hidden"]
    # A forward of very many tokens reads all but an embedding that is no head.
    assert found.read(1e6) == pytest.approx(found.parameters - unread)
    assert found.shared <= found.active <= found.read(2) <= found.parameters
    assert found.read(1) == pytest.approx(found.active)
    assert found.kv_values_per_token > 0


def test_key_values_of_llama_70b():
    # 80 layers, keys and values, 8 heads of 128.
    assert shape("meta-llama/Llama-3.1-70B-Instruct").kv_values_per_token == 80 * 2 * 8 * 128


def test_a_shape_is_found_by_the_end_of_its_hub_id_in_any_case():
    assert shape("someone/qwen3-32b").parameters == shape("Qwen/Qwen3-32B").parameters


def test_an_unknown_model_is_refused_with_what_is_known():
    with pytest.raises(ValueError, match=r"draft='./nowhere'.*no such folder.*Llama-3.1-70B"):
        shape("./nowhere", "draft")


def built_from(kind, row, folder, **more):
    """The shape of a model of this kind, read from a configuration with a row's numbers."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        kind,
        hidden_size=row["hidden"],
        num_hidden_layers=row["layers"],
        num_attention_heads=row["heads"],
        num_key_value_heads=row["kv_heads"],
        intermediate_size=row["intermediate"],
        vocab_size=row["vocab"],
        tie_word_embeddings=row["tied"],
        **more,
    )
    config.save_pretrained(folder)
    return shape(str(folder))


def test_the_catalogues_shape_is_that_of_the_model_built_from_its_configuration(tmp_path):
    row = catalogue()["Qwen2.5-Coder-0.5B-Instruct"]
    built = built_from("qwen2", row, tmp_path)
    listed = shape("Qwen2.5-Coder-0.5B-Instruct")
    assert built.parameters == pytest.approx(listed.parameters, rel=1e-3)
    assert built.read() == pytest.approx(listed.read(), rel=1e-3)
    assert (built.layers, built.kv_values_per_token) == (listed.layers, listed.kv_values_per_token)


def test_a_mixture_read_from_its_configuration_is_that_of_the_catalogue(tmp_path):
    row = catalogue()["Mixtral-8x7B-Instruct-v0.1"]
    # Three layers of it: the whole would take seconds to count.
    experts = {"num_local_experts": row["experts"], "num_experts_per_tok": row["experts_per_token"]}
    built = built_from("mixtral", {**row, "layers": 3}, tmp_path, **experts)
    listed = shape("Mixtral-8x7B-Instruct-v0.1")
    assert (built.experts, built.experts_per_token) == (8, 2)
    assert built.expert * listed.layers == listed.expert * 3
    assert built.active / built.parameters == pytest.approx(listed.active / listed.parameters, rel=0.1)


@pytest.mark.parametrize(("name", "billions"), [("Mixtral-8x7B-Instruct-v0.1", 12.9), ("Qwen3-30B-A3B", 3.3), ("DeepSeek-V3", 37)])
def test_a_token_goes_through_as_many_weights_as_the_authors_of_a_mixture_state(name, billions):
    row = catalogue()[name]
    # They count the embedding, of which a token reads a row, as active.
    embedding = row["vocab"] * row["hidden"]
    assert shape(name).active + embedding == pytest.approx(billions * 1e9, rel=0.05)


def test_more_tokens_wake_more_experts_but_never_more_than_there_are():
    mixture = shape("Qwen3-30B-A3B")
    reads = [mixture.read(tokens) for tokens in (1, 2, 8, 64, 4096)]
    assert reads == sorted(reads)
    assert reads[1] < 2 * reads[0]
    assert reads[-1] == pytest.approx(mixture.shared + mixture.experts * mixture.expert)


def test_a_machine_is_named_by_count_and_accelerator():
    hardware = ssd.Hardware.named("5xh100-sxm")
    assert hardware.name == "5xH100-SXM"
    assert [device.id for device in hardware.devices] == [f"cuda:{i}" for i in range(5)]
    assert not hardware.is_local


def test_a_mix_is_numbered_through():
    hardware = ssd.Hardware.named("4xH100-SXM + L40S")
    assert [device.name for device in hardware.devices] == ["H100-SXM"] * 4 + ["L40S"]
    assert (hardware.name, hardware.devices[-1].id) == ("4xH100-SXM + 1xL40S", "cuda:4")


def test_a_machine_without_cuda_names_its_devices_by_their_kind():
    assert [device.id for device in ssd.Hardware.named("2xEPYC-9654 + RTX-4090").devices] == ["cpu:0", "cpu:1", "cuda:2"]
    assert [device.id for device in ssd.Hardware.named("M4-Max").devices] == ["mps:0"]


def test_an_unknown_accelerator_is_refused_with_the_nearest_and_the_list():
    with pytest.raises(ValueError, match=r"'H100-SMX' is unknown, nearest are 'H100-SXM', '.*', '.*'; known are A100-40GB.*MI300X"):
        ssd.Hardware.named("5xH100-SMX")


@pytest.mark.parametrize("description", ["0xH100-SXM", "-1xH100-SXM", "65xH100-SXM"])
def test_an_impossible_count_is_refused(description):
    with pytest.raises(ValueError, match="give a count from 1 to 64"):
        ssd.Hardware.named(description)


@pytest.mark.parametrize("description", ["", "2xH100-SXM + "])
def test_a_missing_name_is_refused(description):
    with pytest.raises(ValueError, match="names nothing"):
        ssd.Hardware.named(description)


def test_this_machine_is_its_cores_unless_it_has_two_accelerators():
    import torch

    threads, affinity = torch.get_num_threads(), os.sched_getaffinity(0)
    hardware = ssd.Hardware.local()
    assert hardware.is_local
    if torch.cuda.device_count() < 2:
        assert [device.id for device in hardware.devices] == [f"cpu:{core}" for core in sorted(affinity)]
        assert hardware.shared_memory
    assert all(device.memory_bandwidth > 1e8 and device.flops > 1e8 for device in hardware.devices)
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (threads, affinity)
    assert ssd.Hardware.model_validate_json(hardware.model_dump_json()) == hardware


def test_a_plan_for_another_machine_is_refused_before_anything_is_loaded():
    named = ssd.Hardware.named("2xEPYC-9654")
    place = ssd.Placement(target=("cpu:0",))
    plan = ssd.Plan(mode="ar", placement=place, hardware=named, models=ssd.Models(target="./nowhere"))
    with pytest.raises(ValueError, match="for hardware '2xEPYC-9654', not for this machine: plan again"):
        ssd.Engine.from_plan(plan)
    here = ssd.Hardware.local()
    if here.devices[0].kind == "cpu":
        moved = tuple(device.model_copy(update={"name": "Another CPU"}) for device in here.devices)
        first = ssd.Placement(target=(here.devices[0].id,))
        plan = ssd.Plan(
            mode="ar", placement=first, hardware=here.model_copy(update={"devices": moved}), models=ssd.Models(target="./nowhere")
        )
        with pytest.raises(ValueError, match=r"was made where cpu:.* is 'Another CPU', here it is .*: it is of another machine"):
            ssd.Engine.from_plan(plan)
        # Of this machine it gets as far as the model.
        with pytest.raises(ValueError, match="no such folder"):
            ssd.Engine.from_plan(plan.model_copy(update={"hardware": here}))


def test_a_saved_plan_on_a_core_that_is_not_ours_is_refused(tmp_path, tiny_pair):
    from tests.plans import two_cores

    forbidden = two_cores().devices[0].model_copy(update={"id": "cpu:9999"})
    hardware = two_cores().model_copy(update={"devices": (forbidden,)})
    plan = ssd.Plan(mode="ar", placement=ssd.Placement(target=("cpu:9999",)), hardware=hardware, models=ssd.Models(target=tiny_pair[0]))
    plan.save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"placement.target=\('cpu:9999',\): this process may not run there .*; it has cpu:"):
        ssd.Engine.from_plan(ssd.Plan.load(tmp_path / "plan.json"))
