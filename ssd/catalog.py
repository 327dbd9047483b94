"""Known accelerators, machines by name, and this machine."""

from __future__ import annotations

import difflib
import os
import platform
import re
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ssd import devices
from ssd.specs import Device, Hardware
from ssd.tables import read_table

if TYPE_CHECKING:
    import torch

MAX_COUNT = 64
# Read in passes much longer than a cache, and multiplied in blocks that fit one.
READ_FLOATS, MATRIX, REPEATS = 1 << 25, 512, 5
PROBED = "memory as the system tells, rates as measured on this machine"


@cache
def accelerators() -> dict[str, dict[str, Any]]:
    """Return what `named_hardware` knows: name to memory (GB), bandwidth (TB/s), dense rates (TFLOP/s), interconnect, price and sources."""
    return read_table("accelerators.toml")


def named_hardware(description: str) -> Hardware:
    """Return the machine that `description` names, such as `5xH100-SXM` or `4xH100-SXM + 1xL40S`; devices are cuda:0, cuda:1, ..."""
    parts = [_part(description, part.strip()) for part in description.split("+")]
    names = [name for count, name in parts for _ in range(count)]
    listed = tuple(_accelerator(index, name) for index, name in enumerate(names))
    return Hardware(name=" + ".join(f"{count}x{name}" for count, name in parts), devices=listed)


def _part(description: str, part: str) -> tuple[int, str]:
    match = re.fullmatch(r"(?:(-?\d+)\s*x\s*)?(\S.*)", part, re.IGNORECASE)
    if match is None:
        raise ValueError(f"hardware={description!r} names nothing: write a count and a name, such as '5xH100-SXM' or '4xH100-SXM + 1xL40S'")
    count = int(match[1] or 1)
    if not 1 <= count <= MAX_COUNT:
        raise ValueError(f"hardware={description!r} asks for {count} of {match[2]}: give a count from 1 to {MAX_COUNT}")
    return count, _known_name(description, match[2])


def _known_name(description: str, name: str) -> str:
    known = {key.lower(): key for key in accelerators()}
    if name.lower() in known:
        return known[name.lower()]
    near = ", ".join(repr(known[found]) for found in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.0))
    raise ValueError(f"hardware={description!r}: {name!r} is unknown, nearest are {near}; known are {', '.join(accelerators())}")


def _accelerator(index: int, name: str) -> Device:
    row = accelerators()[name]
    rate = row.get("interconnect_rate")
    return Device(
        id=f"{row.get('kind', devices.ACCELERATOR)}:{index}",
        name=name,
        memory_bytes=round(row["memory"] * 1e9),
        memory_bandwidth=row["bandwidth"] * 1e12,
        flops=row["bf16"] * 1e12,
        flops_fp32=row["fp32"] * 1e12,
        interconnect=row.get("interconnect", ""),
        # Stated of both ways together.
        interconnect_bandwidth=None if rate is None else rate / 2 * 1e9,
        price_per_hour=row.get("price"),
        source="; price: ".join([row["source"], *([row["priced"]] if "price" in row else [])]),
    )


def local_hardware() -> Hardware:
    """Return this machine: its accelerators if there are two or more, a single one with the CPU cores that this process may use after it,
    else the cores alone; rates are measured."""
    found = tuple(_local_accelerator(device) for device in devices.accelerators())
    name = f"{len(found)}x{found[0].name}" if found else ""
    if len(found) > 1:
        return Hardware(name=name, devices=found, is_local=True)
    cores = _local_cores()
    named = f"{len(cores)} cores of {cores[0].name}"
    if found:
        return Hardware(name=f"{name} + {named}", devices=(*found, *cores), is_local=True)
    return Hardware(name=named, devices=cores, shared_memory=True, is_local=True)


def _local_accelerator(device: torch.device) -> Device:
    import torch

    bandwidth, flops = _rates(device, torch.bfloat16)
    return Device(
        id=str(device),
        name=devices.product_name(device),
        memory_bytes=devices.memory_bytes(device),
        memory_bandwidth=bandwidth,
        flops=flops,
        source=PROBED,
    )


def _local_cores() -> tuple[Device, ...]:
    import torch

    ids, name = devices.core_ids(), _cpu_name()
    with devices.pinned(ids[-1:]):
        bandwidth, flops = _rates(devices.cpu(), torch.float32)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    known = {"name": name, "memory_bytes": memory, "memory_bandwidth": bandwidth, "flops": flops, "source": PROBED}
    return tuple(Device(id=core, **known) for core in ids)


def check_here(hardware: Hardware) -> None:
    """Refuse hardware that is not this machine; of what was typed by hand only the ids tell, which the engine looks at."""
    if not hardware.is_local:
        raise ValueError(f"the plan is for hardware {hardware.name!r}, not for this machine: plan again with Hardware.local()")
    for device in hardware.devices:
        if "/" in device.id:
            continue
        name = _name_here(device) if device.source == PROBED else device.name
        if name != device.name:
            raise ValueError(
                f"the plan was made where {device.id} is {device.name!r}, here it is {name!r}: it is of another machine; "
                "profile and plan again"
            )


def _name_here(device: Device) -> str:
    """What the device with this id is called on this machine; the engine refuses one that is not there."""
    if device.is_core:
        return _cpu_name()
    here = {str(found): found for found in devices.accelerators()}
    return devices.product_name(here[device.id]) if device.id in here else device.name


def _rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return memory bandwidth in bytes a second, of reading or of copying, and matrix rate in FLOP a second, the best of a few tries."""
    import torch

    size = MATRIX if devices.is_cpu(device) else 16 * MATRIX
    data = torch.ones(READ_FLOATS, device=device)
    halves = data.view(2, -1)
    square = torch.ones(size, size, device=device, dtype=dtype)
    # Adding up may be slower than memory, copying reads and writes: the faster is the nearer to what memory gives.
    moved = min(_seconds(work) for work in (data.sum, lambda: halves[0].copy_(halves[1])) for _ in range(REPEATS))
    multiply = min(_seconds(lambda: square @ square) for _ in range(REPEATS))
    return data.nbytes / moved, 2 * size**3 / multiply


def _seconds(work: Any) -> float:
    begin = perf_counter()
    # Reading one number back waits for an accelerator to finish.
    work().view(-1)[0].item()
    return perf_counter() - begin


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.processor() or platform.machine() or "CPU"
