"""Configurations for two cores of this machine, typed by hand, for tests that need no planner."""

from ssd.specs import Configuration, Models, Placement, Plan
from tests.plans import CORES, two_cores

HERE = two_cores()
ALONE, BOTH = CORES[:1], CORES

SSD = Configuration(
    mode="ssd",
    num_speculative_tokens=3,
    fan_out_hit=(1, 1, 1, 2),
    fan_out_miss=(1, 1, 1, 2),
    placement=Placement(target=ALONE, draft=CORES[1:]),
)
AR = Configuration(mode="ar", placement=Placement(target=ALONE))
AR_BOTH = Configuration(mode="ar", placement=Placement(target=BOTH))


def sd(K: int = 3, devices: tuple[str, ...] = ALONE, **changes) -> Configuration:
    """SD with both models on the same cores."""
    return Configuration(mode="sd", num_speculative_tokens=K, placement=Placement(target=devices, draft=devices), **changes)


def plan(pair: tuple[str, str], configuration: Configuration = SSD, alternatives: tuple[Configuration, ...] = ()) -> Plan:
    """A plan for a pair of folders."""
    models = Models(target=pair[0], draft=pair[1])
    return Plan.of(configuration, hardware=HERE, models=models, alternatives=alternatives)
