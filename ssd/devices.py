"""The one place that knows device names: from `cpu:3` or `cuda:0` to a torch device, pinned cores and thread counts.

An id may have the name of another host before it, as in `node1/cuda:0`; the device is then one of that host, and means it there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def host(ids: tuple[str, ...]) -> str | None:
    """Return the other host that `ids` are devices of, None for this one; ValueError where they are of several."""
    names = {name.rpartition("/")[0] for name in ids}
    if len(names) > 1:
        raise ValueError(f"placement {ids}: a model runs on one host; give ids of one")
    return names.pop() or None if names else None


def _there(ids: tuple[str, ...]) -> tuple[str, ...]:
    """Return what the ids are called on their own host."""
    return tuple(name.rpartition("/")[2] for name in ids)


def torch_device(ids: tuple[str, ...]) -> torch.device:
    """Return the torch device that a model on `ids` computes on."""
    host(ids)
    ids = _there(ids)
    kinds = {name.split(":")[0] for name in ids}
    if kinds == {"cpu"}:
        return torch.device("cpu")
    if len(ids) > 1:
        raise ValueError(f"placement {ids}: a model runs on CPU cores or on one accelerator; give one id, or cpu ids only")
    try:
        return torch.device(ids[0])
    except RuntimeError as error:
        raise ValueError(f"placement {ids}: torch knows no device {ids[0]!r}; give ids such as 'cpu:0' or 'cuda:0'") from error


def training_device() -> torch.device:
    """Return where models are trained: the first accelerator, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")


def has_fast_bf16(device: torch.device) -> bool:
    """Whether matrices multiply faster in bf16 there than in fp32; torch before 2.13 does not say it of a CPU, and it is assumed."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return device.type != "cpu" or not capabilities or any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def cores(ids: tuple[str, ...]) -> tuple[int, ...]:
    """Return the CPU cores among `ids`."""
    return tuple(int(name.split(":")[1]) for name in _there(ids) if name.startswith("cpu:"))


def available_cores() -> tuple[int, ...]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def pin(ids: tuple[str, ...]) -> None:
    """Keep the calling thread on the cores among `ids`, one torch thread each; without cores, change nothing."""
    wanted = cores(ids)
    if not wanted:
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
        with pinned(ids):
            pass
    except OSError as error:
        have = ", ".join(f"cpu:{core}" for core in available_cores())
        raise ValueError(f"{option}={ids}: this process may not run there ({error.strerror}); it has {have}") from error
    device = torch_device(ids)
    if device.type != "cpu" and (device.index or 0) >= _accelerators(device.type):
        raise ValueError(f"{option}={ids}: torch finds no {device} on this machine; plan again with Hardware.local()")


def _accelerators(kind: str) -> int:
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if found is not None and found.type == kind else 0


@contextmanager
def pinned(ids: tuple[str, ...]) -> Iterator[None]:
    """Pin the calling thread for the length of the block, then give it back its cores and threads."""
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
