"""The one place that knows device names: from `cpu:3` or `cuda:0` to a torch device, pinned cores and thread counts.

An id may have the name of another host before it, as in `node1/cuda:0`; the device is then one of that host, and means it there. torch is
imported when a device is looked at: whoever only asks about names does not wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch

CORE = "cpu"
# What an accelerator's data sheet is taken to be of, where it does not say.
ACCELERATOR = "cuda"
# Where a stream of kernels can be captured once and replayed.
GRAPHS = ("cuda",)


def host(ids: tuple[str, ...]) -> str | None:
    """Return the other host that `ids` are devices of, None for this one; ValueError where they are of several."""
    names = {name.rpartition("/")[0] for name in ids}
    if len(names) > 1:
        raise ValueError(f"placement {ids}: a model runs on one host; give ids of one")
    return names.pop() or None if names else None


def _there(name: str) -> str:
    """Return what a device is called on its own host."""
    return name.rpartition("/")[2]


def kind(name: str) -> str:
    """Return the part of an id before the colon: `cpu`, `cuda`, ..."""
    return _there(name).split(":")[0]


def index(name: str) -> int:
    """Return the part of an id after the colon: the core, or the place among accelerators."""
    return int(_there(name).split(":")[1])


def is_core(name: str) -> bool:
    """Whether it is a CPU core."""
    return kind(name) == CORE


def are_cores(ids: tuple[str, ...]) -> bool:
    """Whether all `ids` are CPU cores."""
    return all(map(is_core, ids))


def is_cpu(device: torch.device) -> bool:
    """Whether it is the CPU."""
    return device.type == CORE


def has_graphs(device: torch.device) -> bool:
    """Whether kernels can be captured there into graphs and replayed."""
    return device.type in GRAPHS


def cpu() -> torch.device:
    """Return the CPU."""
    import torch

    return torch.device(CORE)


def torch_device(ids: tuple[str, ...], rank: int = 0) -> torch.device:
    """Return the torch device that a model on `ids` computes on; of one that is split over accelerators, the one of share `rank`."""
    import torch

    host(ids)
    if are_cores(ids):
        return cpu()
    if any(kind(name) != kind(ids[0]) for name in ids):
        raise ValueError(f"placement {ids}: a model runs on CPU cores or on accelerators of one kind; give ids of one kind")
    try:
        return torch.device(_there(ids[rank]))
    except RuntimeError as error:
        raise ValueError(f"placement {ids}: torch knows no device {ids[rank]!r}; give ids such as 'cpu:0' or 'cuda:0'") from error


def accelerators() -> tuple[torch.device, ...]:
    """Return the accelerators that torch finds on this machine; they are of one kind."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return () if found is None else tuple(torch.device(found.type, place) for place in range(torch.accelerator.device_count()))


def product_name(device: torch.device) -> str:
    """Return what an accelerator of this machine is sold as, or its kind where torch does not say."""
    import torch

    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def memory_bytes(device: torch.device) -> int:
    """Return the memory of an accelerator of this machine."""
    import torch

    module = torch.get_device_module(device)
    if hasattr(module, "get_device_properties"):
        return int(module.get_device_properties(device).total_memory)
    # Apple's draws on the machine's memory, up to a limit.
    return int(module.recommended_max_memory())


def ready_for(device: torch.device, array: np.ndarray) -> torch.Tensor:
    """Return `array` on the host, in memory from which it can be sent to `device` without waiting."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor if is_cpu(device) else tensor.pin_memory()


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return `array` on `device`, without waiting for what that is doing."""
    return ready_for(device, array).to(device, non_blocking=True)


def training_device() -> torch.device:
    """Return where models are trained: the first accelerator, else the CPU."""
    found = accelerators()
    return found[0] if found else cpu()


def has_fast_bf16(device: torch.device) -> bool:
    """Whether matrices multiply faster in bf16 there than in fp32; torch before 2.13 does not say it of a CPU, and it is assumed."""
    import torch

    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return not is_cpu(device) or not capabilities or any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def cores(ids: tuple[str, ...]) -> tuple[int, ...]:
    """Return the CPU cores among `ids`."""
    return tuple(index(name) for name in ids if kind(name) == CORE)


def available_cores() -> tuple[int, ...]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def processes() -> int:
    """Return how many processes torchrun started on this machine, 1 for one that it did not start."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def core_ids() -> tuple[str, ...]:
    """Return the ids of the cores that this process may run on."""
    return tuple(f"{CORE}:{core}" for core in available_cores())


def pin(ids: tuple[str, ...], rank: int = 0) -> None:
    """Keep the calling thread on the cores among `ids`, one torch thread each; without any, let it use the accelerator of share `rank`."""
    import torch

    wanted = cores(ids)
    if not wanted:
        if ids and (device := torch_device(ids, rank)) in accelerators():
            torch.accelerator.set_device_index(device.index)
        return
    pin_to(wanted)
    torch.set_num_threads(len(wanted))


def pin_to(cores: tuple[int, ...]) -> None:
    """Keep the calling thread, and those that it will begin, on these cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def check_present(option: str, ids: tuple[str, ...]) -> None:
    """Refuse devices that this machine does not have."""
    try:
        if are_cores(ids):
            with pinned(ids):
                pass
    except OSError as error:
        have = ", ".join(core_ids())
        raise ValueError(f"{option}={ids}: this process may not run there ({error.strerror}); it has {have}") from error
    for rank in range(len(ids)):
        device = torch_device(ids, rank)
        if not is_cpu(device) and device not in accelerators():
            raise ValueError(f"{option}={ids}: torch finds no {device} on this machine; plan again with Hardware.local()")


@contextmanager
def pinned(ids: tuple[str, ...]) -> Iterator[None]:
    """Pin the calling thread for the length of the block, then give it back its cores and threads."""
    import torch

    before, threads = available_cores(), torch.get_num_threads()
    movable = bool(cores(ids)) and hasattr(os, "sched_setaffinity")
    try:
        pin(ids)
        yield
    finally:
        # Python takes signals after a call: with none before these two, Ctrl-C cannot come between.
        try:
            if movable:
                os.sched_setaffinity(0, before)
        finally:
            torch.set_num_threads(threads)
