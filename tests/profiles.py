"""Profiles made up for tests: latencies that are lines, texts whose ranks are drawn."""

from __future__ import annotations

import numpy as np

from sim.outcomes import NEVER
from ssd.placements import placements
from ssd.specs import Device, ForwardLatency, Hardware, Models, Profile

PAIR = Models(target="target", draft="draft")
TOKENS = (1, 2, 4, 8, 9, 16, 32)


def cores(count: int) -> Hardware:
    devices = tuple(Device(id=f"cpu:{i}", name="core", memory_bytes=16 << 30, memory_bandwidth=1e10, flops=5e10) for i in range(count))
    return Hardware(name=f"{count} cores", devices=devices, shared_memory=True, is_local=True)


def texts(alpha: float, hit: float = 0.5, seed: int = 0, count: int = 8, length: int = 200) -> tuple[tuple[int, ...], ...]:
    """Ranks: 1 with chance alpha; else the draft's next candidates, of which each is right with chance `hit`, or none where hit is 0."""
    rng = np.random.default_rng(seed)
    missed = 1 + rng.geometric(hit, (count, length)) if hit else np.full((count, length), NEVER)
    return tuple(map(tuple, np.where(rng.random((count, length)) < alpha, 1, missed).tolist()))


def line(first: float, more: float) -> tuple[float, ...]:
    return tuple(first + more * (n - 1) for n in TOKENS)


def synthetic(
    hardware: Hardware,
    models: Models = PAIR,
    *,
    verify: float = 10e-3,
    verify_more: float = 0.1e-3,
    step: float = 1e-3,
    step_more: float = 0.02e-3,
    traces: tuple[tuple[int, ...], ...] = (),
    alpha: float = 0.8,
    overhead: float = 0.0,
    link: float = 0.0,
) -> Profile:
    """Tables for every placement, the same wherever a model runs; published hit curves where no traces are given."""
    forwards = []
    for place in placements(hardware):
        forwards.append(ForwardLatency(model="target", devices=place.target, tokens=TOKENS, seconds=line(verify, verify_more)))
        if models.draft is not None:
            forwards.append(ForwardLatency(model="draft", devices=place.draft, tokens=TOKENS, seconds=line(step, step_more)))
    return Profile(
        hardware=hardware.name,
        models=models,
        prompt_set="code",
        forwards=tuple(forwards),
        prefill_seconds_per_token=1e-3,
        traces=traces,
        draft_acceptance_rate=alpha,
        acceptance_source="measured",
        link_seconds=link,
        overhead_seconds=overhead,
    )
