"""Plans typed by hand for two cores of this machine."""

from __future__ import annotations

import signal

from ssd.devices import available_cores
from ssd.specs import Device, Hardware, Models, Placement, Plan

CORES = tuple(f"cpu:{core}" for core in available_cores())[:2]


def heed_interrupts() -> None:
    """For a child process: take SIGINT as a terminal's child does, also where the tests run in the background and ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def two_cores(memory_bytes: int = 8 << 30) -> Hardware:
    """Two CPU cores that share a memory; the one there is, twice named, where there is only one."""
    ids = CORES if len(CORES) == 2 else (CORES[0], "cpu:9999")
    devices = [Device(id=name, name="core", memory_bytes=memory_bytes, memory_bandwidth=1e10, flops=5e10) for name in ids]
    return Hardware(name="two cores", devices=devices, shared_memory=True, is_local=True)


def hand_typed(target: str, draft: str | None, **changes) -> Plan:
    """An SSD plan with K = 3; `changes` replace its fields."""
    fields = {
        "mode": "ssd",
        "num_speculative_tokens": 3,
        "fan_out_hit": (1, 1, 1, 2),
        "fan_out_miss": (1, 1, 1, 2),
        "placement": Placement(target=CORES[:1], draft=CORES[1:] or ("cpu:9999",)),
        "hardware": two_cores(),
        "models": Models(target=target, draft=draft),
    }
    return Plan(**{**fields, **changes})
