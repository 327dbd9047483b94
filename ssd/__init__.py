"""Speculative speculative decoding: plan it, run it, trust it.

`plan` says whether and how SSD pays on given hardware; `Engine` decodes with a target and a draft on two devices. Names are loaded
when first used: `import ssd` brings neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.metrics import Metrics
    from sim.scenario import Scenario
    from sim.simulate import simulate
    from sim.timeline import Timeline
    from ssd.engine.engine import Engine
    from ssd.planner import plan
    from ssd.profiler import profile
    from ssd.specs import (
        Configuration,
        Hardware,
        Models,
        Placement,
        Plan,
        Profile,
        RequestOutput,
        SamplingParams,
        Workload,
    )
    from ssd.validation import validate

_HOME = {
    "Engine": "ssd.engine.engine",
    "Metrics": "sim.metrics",
    "Timeline": "sim.timeline",
    "Scenario": "sim.scenario",
    "plan": "ssd.planner",
    "profile": "ssd.profiler",
    "simulate": "sim.simulate",
    "validate": "ssd.validation",
    **dict.fromkeys(
        ("Configuration", "Hardware", "Models", "Placement", "Plan", "Profile", "RequestOutput", "SamplingParams", "Workload"), "ssd.specs"
    ),
}

__all__ = [
    "Configuration",
    "Engine",
    "Hardware",
    "Metrics",
    "Models",
    "Placement",
    "Plan",
    "Profile",
    "RequestOutput",
    "SamplingParams",
    "Scenario",
    "Timeline",
    "Workload",
    "plan",
    "profile",
    "simulate",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ssd' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
