"""Which models may run where: the placements that are profiled and planned with."""

from __future__ import annotations

from ssd.specs import Hardware, Placement

Ids = tuple[str, ...]


def placements(hardware: Hardware) -> tuple[Placement, ...]:
    """Return the placements of SSD (the draft on devices of its own), then those where the draft shares all of the target's devices.

    AR runs on the target's devices of any of them.
    """
    splits = _splits(hardware)
    shared = dict.fromkeys([target for target, _ in splits] + [_whole(hardware)])
    return (*(Placement(target=target, draft=draft) for target, draft in splits), *(Placement(target=ids, draft=ids) for ids in shared))


def _splits(hardware: Hardware) -> list[tuple[Ids, Ids]]:
    ids = _ids(hardware)
    if _one_each(hardware):
        return [(ids[:1], ids[-1:])] if len(ids) > 1 else []
    sizes = {1, len(ids) // 4} if _are_cores(hardware) else {1}
    return [(ids[:-size], ids[-size:]) for size in sorted(sizes) if 1 <= size < len(ids)]


def _whole(hardware: Hardware) -> Ids:
    return _ids(hardware)[:1] if _one_each(hardware) else _ids(hardware)


def _one_each(hardware: Hardware) -> bool:
    # What is local will be run, and the engine runs a model on one accelerator.
    return hardware.is_local and not _are_cores(hardware)


def _are_cores(hardware: Hardware) -> bool:
    return all(device.kind == "cpu" for device in hardware.devices)


def _ids(hardware: Hardware) -> Ids:
    return tuple(device.id for device in hardware.devices)
