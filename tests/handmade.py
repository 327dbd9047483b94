"""A machine of two cores and plans typed by hand, for tests that need no planner."""

from ssd.specs import Configuration, Device, Hardware, Models, Placement, Plan

CORES = tuple(Device(id=f"cpu:{i}", name="core", memory_bytes=8 << 30, memory_bandwidth=1e10, flops=5e10) for i in range(2))
HERE = Hardware(name="two cores", devices=CORES, shared_memory=True, is_local=True)
APART = Placement(target=("cpu:0",), draft=("cpu:1",))
TOGETHER = Placement(target=("cpu:0",), draft=("cpu:0",))
BOTH = Placement(target=("cpu:0", "cpu:1"), draft=("cpu:0", "cpu:1"))

SSD = Configuration(mode="ssd", num_speculative_tokens=3, fan_out_hit=(1, 1, 1, 2), fan_out_miss=(1, 1, 1, 2), placement=APART)
SD = Configuration(mode="sd", num_speculative_tokens=3, placement=TOGETHER)
AR = Configuration(mode="ar", placement=Placement(target=("cpu:0",)))


def plan(pair: tuple[str, str], configuration: Configuration = SSD, alternatives: tuple[Configuration, ...] = ()) -> Plan:
    """A plan for a pair of folders."""
    fields = {name: getattr(configuration, name) for name in Configuration.model_fields}
    return Plan(**fields, hardware=HERE, models=Models(target=pair[0], draft=pair[1]), alternatives=alternatives)
