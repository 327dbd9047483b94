"""What is simulated: a machine's latencies, a model pair's outcomes, a configuration and a load."""

from dataclasses import dataclass

from sim.latency import Latency
from sim.outcomes import Outcomes
from theory import check

CHOICES = {"mode": ("ar", "sd", "ssd"), "backup": ("jit", "ngram", "none"), "interrupt": ("step", "layer", "moot")}

Lengths = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One configuration under one load. All times in seconds. ValueError names what is wrong.

    The load: num_requests requests of output_tokens each, a number or a list to draw from. They run in a closed loop, batch_size at a time,
    unless request_rate (Poisson arrivals, a second) or arrival_seconds (rising, one each) is given. A prompt is fed whole, in
    target_prefill_seconds; or, with prompt_chunk, in pieces of so many tokens, prompt_tokens in all (a number or a list to draw from; with
    an equally long list of output_tokens, in pairs).

    mode: "ar" (target alone), "sd" (draft, then verify), "ssd". verify: latency of a target forward by its tokens, over all rows.
    overhead_seconds: the target's own work a round besides the forward. noise: sigma of a log-normal factor of mean 1 on every forward.

    For sd and ssd: outcomes, of which every row has a stream of its own; draft_step (latency of a draft forward by its branches or
    tokens, over all rows) and draft_alone (the same by its rows while the target waits; default: draft_step); draft_prefill_seconds, of a
    prompt fed whole; num_speculative_tokens (K); link_seconds (one way).

    For ssd: fan_out_hit and fan_out_miss (F_k, K+1 each; used to build while the target verifies a cached draft, and any other or the
    prompt); backup, by row: "jit" (all rows that lack tokens are drafted for together, and the batch waits), "ngram" (with chance
    ngram_found K tokens at no cost, whose outcomes are ngram_outcomes; else none) or "none"; interrupt: a draft that builds its cache looks
    for the outcomes between steps ("step"), or between its draft_layers layers, where it gives up the step under way ("layer") unless a
    true branch grows in it ("moot").
    """

    mode: str
    verify: Latency
    output_tokens: Lengths
    num_requests: int = 1
    batch_size: int = 1
    request_rate: float | None = None
    arrival_seconds: tuple[float, ...] = ()
    prompt_tokens: Lengths = 0
    prompt_chunk: int = 0
    target_prefill_seconds: float = 0.0
    overhead_seconds: float = 0.0
    noise: float = 0.0
    outcomes: Outcomes | None = None
    draft_step: Latency | None = None
    draft_alone: Latency | None = None
    draft_prefill_seconds: float = 0.0
    link_seconds: float = 0.0
    num_speculative_tokens: int = 0
    fan_out_hit: tuple[int, ...] = ()
    fan_out_miss: tuple[int, ...] = ()
    backup: str = "jit"
    ngram_outcomes: Outcomes | None = None
    ngram_found: float = 1.0
    interrupt: str = "step"
    draft_layers: int = 1

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: use one of {choices}")
        for name in ("num_requests", "batch_size", "draft_layers"):
            check.count(name, getattr(self, name), 1)
        for name in ("target_prefill_seconds", "draft_prefill_seconds", "overhead_seconds", "link_seconds", "noise"):
            check.non_negative(name, getattr(self, name))
        self._check_lengths()
        self._check_arrivals()
        if self.mode != "ar":
            self._check_draft()
        if self.mode == "ssd":
            self._check_fan_out("fan_out_hit", self.fan_out_hit)
            self._check_fan_out("fan_out_miss", self.fan_out_miss)
            self._check_ngram()

    def _check_lengths(self) -> None:
        check.count("prompt_chunk", self.prompt_chunk, 0)
        _check_counts("output_tokens", self.output_tokens)
        if self.prompt_chunk:
            _check_counts("prompt_tokens", self.prompt_tokens)
        elif self.prompt_tokens != 0:
            raise ValueError(f"prompt_tokens={self.prompt_tokens!r} is read with prompt_chunk alone: set it, or use target_prefill_seconds")
        for name in ("target_prefill_seconds", "draft_prefill_seconds"):
            if self.prompt_chunk and getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is of prompts fed whole: leave it out, or prompt_chunk={self.prompt_chunk!r}"
                )

    def _check_arrivals(self) -> None:
        if self.request_rate is not None:
            check.positive("request_rate", self.request_rate)
            if self.arrival_seconds:
                raise ValueError(f"request_rate={self.request_rate!r} and arrival_seconds are two loads: leave one of them out")
        if self.arrival_seconds:
            times = check.non_negative("arrival_seconds", self.arrival_seconds)
            if times.size != self.num_requests:
                raise ValueError(f"arrival_seconds has {times.size} entries: num_requests={self.num_requests} needs as many")
            if (times[1:] < times[:-1]).any():
                raise ValueError(f"arrival_seconds={self.arrival_seconds!r} must not fall: sort them")

    def _check_ngram(self) -> None:
        check.probability("ngram_found", self.ngram_found)
        if self.backup == "ngram" and self.ngram_outcomes is None:
            raise ValueError("ngram_outcomes=None with backup='ngram': say what its drafts are worth, or use backup='none'")

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


def _check_counts(name: str, lengths: Lengths) -> None:
    if lengths == ():
        raise ValueError(f"{name}=() leaves nothing to draw from: give a number or at least one")
    for length in lengths if isinstance(lengths, tuple) else (lengths,):
        check.count(name, length, 1)
