"""Acceptance of pairs whose speed was published, for planning without a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from ssd.specs import EMBEDDED, Workload
from ssd.tables import read_table


@dataclass(frozen=True, slots=True)
class AssumedAcceptance:
    """A chance that a draft token is accepted, and a note that says where it comes from."""

    rate: float
    note: str


def assumed_acceptance(target: str, draft: str, workload: Workload) -> AssumedAcceptance:
    """Return what is known of the pair by the last parts of its hub ids, else what is known of the pair published first."""
    known = read_table("acceptance.toml")
    asked = f"{_last(target)} + {_last(draft)}"
    found = next((pair for pair in known if pair.lower() == asked.lower()), None)
    pair = found or next(iter(known))
    kind = workload.prompt_set if workload.prompt_set in known[pair] else "code"
    rate = float(known[pair][kind])
    lent = "" if found else ", another pair: profile yours before you rely on it"
    where = f"{rate} at every position of {kind} prompts"
    return AssumedAcceptance(rate, f"acceptance: {where}, implied by {known[pair]['source']}{lent}")


def _last(name: str) -> str:
    return name if name.startswith(EMBEDDED) else name.rsplit("/", 1)[-1]
