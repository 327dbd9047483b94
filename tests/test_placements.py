"""Which placements are offered where."""

from types import SimpleNamespace

import pytest
import torch

import ssd
from ssd.asked import Asked
from ssd.models import keeps_int8
from ssd.options import plan_for
from ssd.placements import placements
from ssd.specs import Models, Placement
from tests.profiles import cores


def split(hardware):
    return [place for place in placements(hardware) if not place.overlaps]


def test_the_draft_gets_the_last_core_or_a_quarter_of_them():
    assert [(len(p.target), len(p.draft)) for p in split(cores(16))] == [(15, 1), (12, 4)]
    assert [(len(p.target), len(p.draft)) for p in split(cores(4))] == [(3, 1)]
    assert split(cores(2)) == [Placement(target=("cpu:0",), draft=("cpu:1",))]
    assert split(cores(1)) == []


def test_the_draft_gets_the_last_accelerator():
    found = split(ssd.Hardware.named("4xH100-SXM + 1xL40S"))
    assert found[0] == Placement(target=("cuda:0", "cuda:1", "cuda:2", "cuda:3"), draft=("cuda:4",))
    assert all(place.draft[-1] == "cuda:4" for place in found)


def test_the_target_is_split_over_all_the_others_or_a_power_of_two_and_the_draft_has_one_two_or_four():
    found = [(len(place.target), len(place.draft)) for place in split(ssd.Hardware.named("8xH100-SXM"))]
    assert found == [(7, 1), (4, 1), (2, 1), (1, 1), (6, 2), (4, 2), (2, 2), (1, 2), (4, 4), (2, 4), (1, 4)]


@pytest.mark.parametrize("hardware", [cores(1), cores(2), cores(16), ssd.Hardware.named("1xH100-SXM"), ssd.Hardware.named("5xH100-SXM")])
def test_sharing_is_offered_on_every_targets_devices_and_on_all(hardware):
    shared = [place.target for place in placements(hardware) if place.overlaps]
    everything = tuple(device.id for device in hardware.devices)
    assert set(shared) == {place.target for place in split(hardware)} | {everything}
    assert len(set(shared)) == len(shared)
    assert all(place.target == place.draft for place in placements(hardware) if place.overlaps)


def test_local_accelerators_hold_one_model_each_as_the_engine_runs_them():
    here = ssd.Hardware.named("3xH100-SXM").model_copy(update={"is_local": True})
    first, last = ("cuda:0",), ("cuda:1", "cuda:2")
    two = Placement(target=first, draft=last, draft_workers=2)
    assert placements(here) == (Placement(target=first, draft=last[1:]), two, Placement(target=first, draft=first))


def test_a_draft_on_several_accelerators_is_as_many_workers_and_one_on_cores_a_single_one():
    assert all(place.draft_workers == len(place.draft) for place in split(ssd.Hardware.named("8xH100-SXM")))
    assert all(place.draft_workers == 1 for place in placements(cores(16)))


def test_under_torchrun_the_target_has_as_many_local_accelerators_as_there_are_processes(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    here = ssd.Hardware.named("5xH100-SXM").model_copy(update={"is_local": True})
    four, last = tuple(f"cuda:{place}" for place in range(4)), ("cuda:4",)
    assert placements(here) == (Placement(target=four, draft=last), Placement(target=four, draft=four))


def test_under_torchrun_every_process_has_a_core_of_this_machine_for_its_share(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    both = ("cpu:0", "cpu:1")
    assert split(cores(2)) == []
    assert split(cores(3)) == [Placement(target=both, draft=("cpu:2",))]
    # Of another machine nobody has started anything.
    assert split(cores(2).model_copy(update={"is_local": False})) == [Placement(target=both[:1], draft=both[1:])]


def typed(hardware, workers, **more):
    asked = Asked(**{"mode": "ssd", "num_speculative_tokens": 2, "budget": 6, "draft_workers": workers, **more})
    return plan_for(asked, machine=hardware).placement


def test_draft_workers_typed_by_hand_get_the_last_devices():
    assert typed(cores(4), 2) == Placement(target=("cpu:0", "cpu:1"), draft=("cpu:2", "cpu:3"), draft_workers=2)
    assert typed(cores(4), None) == typed(cores(4), 1) == placements(cores(4))[0]
    five = ssd.Hardware.named("5xH100-SXM")
    last = ("cuda:2", "cuda:3", "cuda:4")
    assert typed(five, 3) == Placement(target=("cuda:0", "cuda:1"), draft=last)
    assert typed(five.model_copy(update={"is_local": True}), 3) == Placement(target=("cuda:0",), draft=last)


def test_draft_workers_for_which_there_are_no_devices_are_refused():
    for workers in (0, 4):
        with pytest.raises(ValueError, match=f"--draft-workers={workers} needs as many devices beside the target's, but '4 cores' has 3"):
            typed(cores(4), workers)
    with pytest.raises(ValueError, match="draft_workers=2: mode='sd' has no outcomes to share out"):
        typed(cores(4), 2, mode="sd", budget=None)


def test_int8_is_for_drafts_on_a_cpu_and_automatic_for_large_ones():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    small, large = (SimpleNamespace(parameters=count) for count in (99_999_999, 100_000_000))
    asked = Models(target="a", draft="b", draft_weights="int8")
    assert keeps_int8(asked, small, cpu)
    for models, device in ((asked, gpu), (asked.model_copy(update={"dtype": "bfloat16"}), cpu)):
        with pytest.raises(ValueError, match=r"draft_weights='int8'.*float32 on a CPU"):
            keeps_int8(models, small, device)
    free = Models(target="a", draft="b")
    assert [keeps_int8(free, draft, device) for draft in (small, large) for device in (cpu, gpu)] == [False, False, True, False]
    kept = free.model_copy(update={"draft_weights": "checkpoint"})
    assert not keeps_int8(kept, large, cpu)
