"""Latency from first principles: what a forward must read and compute, on devices that reach a known share of their stated rates.

Calibrated on few published figures and held against many others: `python benchmarks/roofline.py` prints both (docs/planning.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ssd.acceptance import AssumedAcceptance, assumed_acceptance
from ssd.outcomes import published_misses
from ssd.placements import placements
from ssd.shapes import Shape, shape
from ssd.specs import Device, ForwardLatency, Hardware, Models, Profile, Texts, Workload

# Shares of the stated rates. Experts are gathered in small pieces; no published figure is bound by arithmetic, so its share is assumed.
MEMORY_EFFICIENCY = 0.81
EXPERT_MEMORY_EFFICIENCY = 0.52
COMPUTE_EFFICIENCY = 0.6
# Launching a layer; each of its two all-reduces, by what joins the devices (assumed but for NVLink); each further token.
LAYER_SECONDS = 50e-6
ALL_REDUCE_SECONDS = {"NVLink": 8e-6, "Infinity Fabric": 8e-6, "PCIe": 20e-6}
OTHER_ALL_REDUCE_SECONDS = 8e-6
TOKEN_SECONDS = 40e-6
# Sampling, verdicts and host work of a round that has drafts, beyond what a round of AR takes.
ROUND_SECONDS = 1e-3
GIB = 2**30
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32)
# For batches: seconds bend where rows end, which read their own contexts, and where arithmetic begins to bind.
MORE_TOKENS = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2304, 4096, 8192)


@dataclass(frozen=True, slots=True)
class Forward:
    """A model in its compute type, the tokens that a row attends to, and the rows of a batch."""

    shape: Shape
    bytes_per_value: int
    context: int
    rows: int = 1
    fp32: bool = False

    def weights(self) -> int:
        """Bytes of all weights."""
        return self.shape.parameters * self.bytes_per_value

    def footprint(self, length: int) -> int:
        """Bytes of weights and of the keys and values of `length` tokens in each row."""
        return self.weights() + self.rows * length * self.shape.kv_values_per_token * self.bytes_per_value

    def seconds(self, devices: tuple[Device, ...], tokens: int) -> float:
        """Seconds for `tokens` queries of as many rows as there are, weights and work shared equally.

        The slower of memory and arithmetic, and overheads.
        """
        bound = max(max(self._reading(device, tokens), self._computing(device, tokens)) for device in devices) / len(devices)
        return bound + self.shape.layers * (LAYER_SECONDS + 2 * self._reducing(devices, tokens)) + (tokens - 1) * TOKEN_SECONDS

    def _reading(self, device: Device, tokens: int) -> float:
        context = self.context * min(self.rows, tokens)
        experts = self.shape.read(tokens) - self.shape.shared
        values = (self.shape.shared + context * self.shape.kv_values_per_token) / MEMORY_EFFICIENCY + experts / EXPERT_MEMORY_EFFICIENCY
        return values * self.bytes_per_value / device.memory_bandwidth

    def _computing(self, device: Device, tokens: int) -> float:
        return 2 * self.shape.active * tokens / (self.rate(device) * COMPUTE_EFFICIENCY)

    def _reducing(self, devices: tuple[Device, ...], tokens: int) -> float:
        """Seconds of one all-reduce: its latency, and a ring's 2 (n-1)/n of the activations over the slowest joint."""
        if len(devices) == 1:
            return 0.0
        carried = 2 * (1 - 1 / len(devices)) * tokens * self.shape.hidden * self.bytes_per_value
        return max(
            ALL_REDUCE_SECONDS.get(d.interconnect, OTHER_ALL_REDUCE_SECONDS) + carried / (d.interconnect_bandwidth or float("inf"))
            for d in devices
        )

    def rate(self, device: Device) -> float:
        """FLOP a second of the type computed in."""
        return device.flops_fp32 or device.flops if self.fp32 or device.is_core else device.flops

    def spread(self, devices: tuple[Device, ...], length: int, whole: bool) -> tuple[Device, ...]:
        """The first one, two, ... of `devices` that run it best with room for `length` tokens, or if `whole` the fewest that hold it."""
        counts = [n for n in range(1, len(devices) + 1) if self.footprint(length) <= n * _smallest(devices[:n])]
        return devices[: counts[0] if whole else min(counts, key=lambda n: self.seconds(devices[:n], self.rows))]


def roofline_profile(hardware: Hardware, models: Models, workload: Workload) -> Profile:
    """Return latency tables computed from `hardware` and the models' shapes, with an assumed acceptance; ValueError if nothing fits."""
    target = _forward("target", models.target, models, workload)
    draft = None if models.draft is None else _forward("draft", models.draft, models, workload)
    length = workload.prompt_tokens + workload.output_tokens
    forwards = tuple(_tables(hardware, target, draft, length))
    if not any(table.model == "target" for table in forwards):
        raise ValueError(_too_big(hardware, models, target, target.footprint(length)))
    acceptance = None if models.draft is None else assumed_acceptance(models.target, models.draft, workload)
    first = next(table for table in forwards if table.model == "target")
    return Profile(
        hardware=hardware.name,
        models=models,
        texts=(
            Texts(
                prompt_set=workload.prompt_set,
                temperature=workload.temperature,
                draft_acceptance_rate=acceptance.rate if acceptance else 0.0,
                acceptance_source="assumed",
            ),
        ),
        forwards=forwards,
        prefill_seconds_per_token=_prefill(target, hardware.select(first.devices)),
        link_seconds=hardware.link_seconds,
        overhead_seconds=ROUND_SECONDS,
        draft_layers=draft.shape.layers if draft else 1,
        notes=(*_notes(target, draft, acceptance, workload), *_memory_notes(hardware, target, draft, first, length)),
    )


def _forward(option: str, name: str, models: Models, workload: Workload) -> Forward:
    fp32 = models.dtype == "float32"
    return Forward(shape(name, option), 4 if fp32 else 2, workload.context, workload.batch_size, fp32)


def _tables(hardware: Hardware, target: Forward, draft: Forward | None, length: int) -> Iterator[ForwardLatency]:
    """Yield a table of each model on each of its device lists, where it fits beside what shares its memory."""
    places = placements(hardware)
    for ids in dict.fromkeys(place.target for place in places):
        devices = hardware.select(ids)
        if target.footprint(length) <= _memory(hardware, devices):
            yield _table("target", target, devices, target.spread(devices, length, whole=False))
    for place in places if draft is not None else ():
        devices = hardware.select(place.draft)
        beside = target.footprint(length) if place.overlaps or hardware.draws_on_one_memory(place.devices) else 0
        if draft is not None and draft.footprint(length) + beside <= _memory(hardware, devices):
            whole = not devices[0].is_core
            used = draft.spread(devices, length, whole)
            # On accelerators of its own it stands whole on each, and they share the branches.
            copies = 1 if place.overlaps or not whole else len(devices) // len(used)
            yield _table("draft", draft, devices, used, copies)


def _table(
    model: Literal["target", "draft"], forward: Forward, devices: tuple[Device, ...], used: tuple[Device, ...], copies: int = 1
) -> ForwardLatency:
    counts = tuple(sorted({*TOKENS, *MORE_TOKENS, forward.rows}))
    seconds = tuple(forward.seconds(used, -(-tokens // copies)) for tokens in counts)
    ids = tuple(device.id for device in devices)
    return ForwardLatency(model=model, devices=ids, tokens=counts, seconds=seconds, source="roofline", context=forward.context)


def _memory(hardware: Hardware, devices: tuple[Device, ...]) -> int:
    ids = tuple(device.id for device in devices)
    return devices[0].memory_bytes if hardware.draws_on_one_memory(ids) else len(devices) * _smallest(devices)


def _smallest(devices: tuple[Device, ...]) -> int:
    return min(device.memory_bytes for device in devices)


def _prefill(target: Forward, devices: tuple[Device, ...]) -> float:
    return 2 * target.shape.active / (len(devices) * min(target.rate(device) for device in devices) * COMPUTE_EFFICIENCY)


def _too_big(hardware: Hardware, models: Models, target: Forward, needed: int) -> str:
    room, last = _memory(hardware, hardware.devices), hardware.devices[-1]
    enough = -(-needed // _smallest(hardware.devices))
    fits = (room / needed) * target.shape.parameters / 1e9
    more = "a machine with more memory" if hardware.shared_memory else f"{enough}x {last.name}"
    return (
        f"target {models.target!r} needs {needed / GIB:.1f} GiB and hardware {hardware.name!r} has {room / GIB:.1f}: "
        f"{(needed - room) / GIB:.1f} GiB are missing; {more} would hold it, and here a target of up to {fits:.0f} billion weights fits; "
        "a shorter workload or a smaller batch needs less"
    )


def _reduces() -> str:
    return ", ".join(f"{seconds * 1e6:.0f} us over {name}" for name, seconds in ALL_REDUCE_SECONDS.items())


def _memory_notes(hardware: Hardware, target: Forward, draft: Forward | None, first: ForwardLatency, length: int) -> tuple[str, ...]:
    """Say what is needed where the target has most devices, and what a draft of its own needs."""
    devices = hardware.select(first.devices)
    found = [("target", target, f"{len(devices)}x{devices[0].name}", _memory(hardware, devices))]
    if draft is not None:
        found.append(("draft", draft, hardware.devices[-1].name, hardware.devices[-1].memory_bytes))
    return tuple(
        f"memory: {who} {each.weights() / GIB:.1f} GiB of weights and {(each.footprint(length) - each.weights()) / GIB:.1f} "
        f"of keys and values in {room / GIB:.1f} of {where}"
        for who, each, where, room in found
    )


def _notes(target: Forward, draft: Forward | None, acceptance: AssumedAcceptance | None, workload: Workload) -> tuple[str, ...]:
    latency: tuple[str, ...] = (
        f"latency: computed, not measured; {MEMORY_EFFICIENCY:.0%} of the stated bandwidth, {COMPUTE_EFFICIENCY:.0%} of the FLOP/s, "
        f"{LAYER_SECONDS * 1e6:.0f} us a layer, {_reduces()} an all-reduce, {TOKEN_SECONDS * 1e6:.0f} us a token more",
        f"target: shape from {target.shape.source}; split over any number of devices, also where its heads do not divide",
        f"a round with drafts: {ROUND_SECONDS * 1e3:.0f} ms more than AR's for sampling and host work, which the calibration includes",
    )
    if target.rows > 1:
        latency += (f"batch: {target.rows} rows, each reading its own context; the seconds of a token more were calibrated on some 18",)
    if draft is None or acceptance is None:
        return latency
    of_hit, of_miss = (published_misses(state, workload.temperature) for state in (True, False))
    return (
        *latency,
        f"draft: shape from {draft.shape.source}; on the fewest accelerators that hold it",
        acceptance.note,
        f"hits: F cached candidates miss with chance {of_hit.c:.2g} F^-{of_hit.r:.2g} after a hit and {of_miss.c:.2g} F^-{of_miss.r:.2g} "
        f"after a miss, as published for Llama-3.1-70B with Llama-3.2-1B at temperature {workload.temperature:g}",
        "prompt lookup: not measured, so backup ngram is not offered",
    )
