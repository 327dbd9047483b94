"""Which models may run where: the placements that are profiled and planned with."""

from __future__ import annotations

from ssd.devices import are_cores, processes
from ssd.specs import Hardware, Placement

Ids = tuple[str, ...]
# Accelerators that a draft may have for itself, a copy on each.
DRAFT_DEVICES = (1, 2, 4)


def placements(hardware: Hardware) -> tuple[Placement, ...]:
    """Return the placements of SSD (the draft on devices of its own), then those where the draft shares all of the target's devices.

    AR runs on the target's devices of any of them.
    """
    splits = _splits(hardware)
    shared = dict.fromkeys([target for target, _ in splits] + [_whole(hardware)])
    return (*(Placement(target=target, draft=draft) for target, draft in splits), *(Placement(target=ids, draft=ids) for ids in shared))


def _splits(hardware: Hardware) -> list[tuple[Ids, Ids]]:
    ids = _ids(hardware)
    if _runs_here(hardware):
        found = tuple(device.id for device in hardware.devices if not device.is_core)
        cores = tuple(name for name in ids if name not in found)
        spare = found[processes() :]
        # Beside a single accelerator the draft gets the cores, but for the one that feeds it.
        drafts = [spare[-size:] for size in DRAFT_DEVICES if size <= len(spare)] or [cores[1:] or cores]
        return [(_whole(hardware), draft) for draft in drafts if draft]
    if are_cores(ids):
        # Where torchrun has started several processes, each of them has a core for its share at the least.
        least = processes() if hardware.is_local else 1
        return [(ids[:-size], ids[-size:]) for size in sorted({1, len(ids) // 4}) if 1 <= size <= len(ids) - least]
    return [(ids[:count], ids[-size:]) for size in DRAFT_DEVICES if size < len(ids) for count in _degrees(len(ids) - size)]


def _degrees(most: int) -> list[int]:
    """Over how many devices the target may be split: all there are, or a power of two of them, to leave the others unpaid."""
    return [most, *(degree for degree in (8, 4, 2, 1) if degree < most)]


def _whole(hardware: Hardware) -> Ids:
    return _ids(hardware)[: processes()] if _runs_here(hardware) else _ids(hardware)


def _runs_here(hardware: Hardware) -> bool:
    # What is local will be run: the target on as many accelerators as torchrun has started processes, the draft on others.
    return hardware.is_local and not are_cores(_ids(hardware))


def _ids(hardware: Hardware) -> Ids:
    return tuple(device.id for device in hardware.devices)
