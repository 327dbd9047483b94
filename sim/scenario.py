"""What is simulated: a machine's latencies, a model pair's outcomes, a configuration and a load."""

from dataclasses import dataclass

from sim.latency import Latency
from sim.outcomes import Outcomes
from theory import check

CHOICES = {"mode": ("ar", "sd", "ssd"), "backup": ("jit", "none"), "interrupt": ("step", "layer", "moot")}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One configuration under one load, requests one after another. All times in seconds. ValueError names what is wrong.

    mode: "ar" (target alone), "sd" (draft, then verify), "ssd". verify: latency of a target forward by its tokens. output_tokens: of
    each request. overhead_seconds: the target's own work a round besides the forward. noise: sigma of a log-normal factor of mean 1 on
    every forward. For sd and ssd: outcomes, draft_step (latency of a draft forward by its branches), num_speculative_tokens (K),
    link_seconds (one way). For ssd: fan_out_hit and fan_out_miss (F_k, K+1 each; used to build while the target verifies a cached
    draft, and any other or the prompt), backup, and interrupt: a draft that builds its cache looks for the outcome between steps, or
    between its draft_layers layers, where it gives up the step under way.
    """

    mode: str
    verify: Latency
    output_tokens: int
    num_requests: int = 1
    target_prefill_seconds: float = 0.0
    overhead_seconds: float = 0.0
    noise: float = 0.0
    outcomes: Outcomes | None = None
    draft_step: Latency | None = None
    draft_prefill_seconds: float = 0.0
    link_seconds: float = 0.0
    num_speculative_tokens: int = 0
    fan_out_hit: tuple[int, ...] = ()
    fan_out_miss: tuple[int, ...] = ()
    backup: str = "jit"
    interrupt: str = "step"
    draft_layers: int = 1

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: use one of {choices}")
        for name in ("output_tokens", "num_requests", "draft_layers"):
            check.count(name, getattr(self, name), 1)
        for name in ("target_prefill_seconds", "draft_prefill_seconds", "overhead_seconds", "link_seconds", "noise"):
            check.non_negative(name, getattr(self, name))
        if self.mode != "ar":
            self._check_draft()
        if self.mode == "ssd":
            self._check_fan_out("fan_out_hit", self.fan_out_hit)
            self._check_fan_out("fan_out_miss", self.fan_out_miss)

    def _check_draft(self) -> None:
        check.count("num_speculative_tokens", self.num_speculative_tokens, 1)
        for name in ("outcomes", "draft_step"):
            if getattr(self, name) is None:
                raise ValueError(f"{name}=None with mode={self.mode!r}: give one, or use mode='ar'")

    def _check_fan_out(self, name: str, fan_out: tuple[int, ...]) -> None:
        K = self.num_speculative_tokens
        if len(fan_out) != K + 1:
            raise ValueError(f"{name}={fan_out!r} has {len(fan_out)} entries: num_speculative_tokens={K} needs {K + 1}")
        for k, F in enumerate(fan_out):
            check.count(f"{name}[{k}]", F, 0)
        if sum(fan_out) == 0:
            raise ValueError(f"{name}={fan_out!r} caches nothing: give it at least one branch, or use mode='sd'")
