"""Acceptance of pairs whose speed was published, for planning without a measurement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ssd.specs import EMBEDDED, Workload
from ssd.tables import read_table

# Acceptance by temperature over that at 0: what the published SD speeds of Llama-3.1-70B imply (benchmarks/paper.py: .88 .85 .82 .75).
FALL = {0.0: 1.0, 0.3: 0.966, 0.7: 0.932, 1.0: 0.852}


@dataclass(frozen=True, slots=True)
class AssumedAcceptance:
    """A chance that a draft token is accepted, a note that says where it comes from, and whether that is another pair."""

    rate: float
    note: str
    lent: bool = False


def assumed_acceptance(target: str, draft: str, workload: Workload) -> AssumedAcceptance:
    """Return what is known of the pair by the last parts of its hub ids, else what is known of the pair published first."""
    known = read_table("acceptance.toml")
    asked = f"{_last(target)} + {_last(draft)}"
    found = next((pair for pair in known if pair.lower() == asked.lower()), None)
    # Of the same target, if with another draft, before any other.
    pair = found or next((pair for pair in known if pair.lower().startswith(f"{_last(target)} + ".lower())), next(iter(known)))
    kind = workload.prompt_set if workload.prompt_set in known[pair] else "code"
    greedy = float(known[pair][kind])
    rate = round(greedy * float(np.interp(workload.temperature, list(FALL), list(FALL.values()))), 3)
    lent = "" if found else ", another pair: profile yours before you rely on it"
    warmer = f" ({greedy} greedily, falling as that of Llama-3.1-70B did)" if workload.temperature else ""
    where = f"{rate} at every position of {kind} prompts"
    return AssumedAcceptance(rate, f"acceptance: {where}{warmer}, implied by {known[pair]['source']}{lent}", lent=not found)


def _last(name: str) -> str:
    return name if name.startswith(EMBEDDED) else name.rsplit("/", 1)[-1]
