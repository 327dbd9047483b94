"""Profiles made up for tests: latencies that are lines, texts whose ranks are drawn."""

from __future__ import annotations

import numpy as np

from sim.outcomes import NEVER
from ssd.placements import placements
from ssd.specs import Device, ForwardLatency, Hardware, Models, Profile, Texts

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


def lookups(traces: tuple[tuple[int, ...], ...], alpha: float, proposed: float = 1.0, seed: int = 1) -> tuple[tuple[int, ...], ...]:
    """What prompt lookup is worth at each token: -1 but with chance `proposed`, else 8 tokens, each right with chance alpha."""
    rng = np.random.default_rng(seed)
    worth = [np.minimum(rng.geometric(1 - alpha, len(text)) - 1 if alpha < 1 else np.full(len(text), 8), 8) for text in traces]
    return tuple(tuple(np.where(rng.random(len(values)) < proposed, values, -1).tolist()) for values in worth)


def line(first: float, more: float, tokens: tuple[int, ...] = TOKENS) -> tuple[float, ...]:
    return tuple(first + more * (n - 1) for n in tokens)


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
    tokens: tuple[int, ...] = TOKENS,
    looked_up: tuple[tuple[int, ...], ...] = (),
) -> Profile:
    """Tables for every placement, the same wherever a model runs; published hit curves where no traces are given."""
    forwards = []
    for place in placements(hardware):
        forwards.append(ForwardLatency(model="target", devices=place.target, tokens=tokens, seconds=line(verify, verify_more, tokens)))
        if models.draft is not None:
            forwards.append(ForwardLatency(model="draft", devices=place.draft, tokens=tokens, seconds=line(step, step_more, tokens)))
    return Profile(
        hardware=hardware.name,
        models=models,
        texts=(
            Texts(prompt_set="code", traces=traces, draft_acceptance_rate=alpha, acceptance_source="measured", ngram_accepted=looked_up),
        ),
        forwards=tuple(forwards),
        prefill_seconds_per_token=1e-3,
        link_seconds=link,
        overhead_seconds=overhead,
    )


def with_texts(profile: Profile, **changes) -> Profile:
    """The profile of one load with other fields in its texts."""
    return profile.model_copy(update={"texts": (profile.texts[0].model_copy(update=changes),)})
