"""The most memory that processes had in use at once, as the kernel counts it, and what a plan reckons with."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ssd.devices import torch_device
from ssd.engine.engine import Engine, sizes_for
from ssd.models import memory_bytes
from ssd.specs import Configuration


def forget_peak(pid: int) -> None:
    """Let the peak of a process begin anew from what it has in use now; where the kernel does not, peaks are since its start."""
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int | None:
    """Return the most resident bytes of a process since its start or since they were forgotten; None where there is no /proc."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return None


def processes(engine: Engine, configuration: Configuration) -> tuple[int, ...]:
    """Return the process of the target, and those of the draft's workers that are at work on this host."""
    drafts = configuration.mode != "ar" and engine.peer is not None
    found = [peer.process.pid for peer in engine.peer.peers] if drafts and engine.peer is not None else []
    return (os.getpid(), *(pid for pid in found if pid is not None))


def planned_bytes(engine: Engine, configuration: Configuration) -> tuple[int, int]:
    """Return what target and draft take by the plan: weights, key-value slots for all rows that the engine has room for, and graphs."""
    pair, place = engine.pair, configuration.placement
    sizes = sizes_for(configuration, engine.max_num_seqs, pair.max_model_len)
    target = memory_bytes(engine.plan.models, pair.target, torch_device(place.target), sizes[0])
    if configuration.mode == "ar" or pair.draft is None:
        return target, 0
    return target, memory_bytes(engine.plan.models, pair.draft, torch_device(place.draft), sizes[1], drafts=True)
