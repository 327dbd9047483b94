"""What is simulated: a machine's latencies, a model pair's outcomes, a configuration and a load."""

from dataclasses import dataclass
from itertools import pairwise

from sim.latency import LatencyByContext, Seconds
from sim.outcomes import Outcomes
from theory import check

CHOICES = {
    "mode": ("ar", "sd", "ssd"),
    "backup": ("jit", "ngram", "none"),
    "interrupt": ("step", "layer", "moot"),
    "building": ("fixed", "anytime"),
}

Lengths = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One configuration under one load. All times in seconds. ValueError names what is wrong.

    The load: num_requests requests of output_tokens each, a number or a list to draw from. They run in a closed loop, batch_size at a time,
    unless request_rate (Poisson arrivals, a second) or arrival_seconds (rising, one each) is given; or a trace, of each request its
    arrival, prompt and output tokens. A prompt is fed whole, in target_prefill_seconds, beside running rows one in a forward, else all that
    wait; or, with prompt_chunk, forwards feed up to so many tokens of prompts, prompt_tokens each (a number or a list to draw from; with an
    equally long list of output_tokens, in pairs).

    mode: "ar" (target alone), "sd" (draft, then verify), "ssd". verify: latency of a target forward by its tokens, over all rows, and by
    the tokens of prompts and outputs that it reads. overhead_seconds: the target's own work a round besides the forward. Every forward
    takes its latency times one of target_residuals or draft_residuals, measured ratios that are drawn from; without them times noise, a
    log-normal factor of mean 1 with this sigma. target_slots, draft_slots: key-values that each target, or each draft device, has room for;
    a request waits until there is room in both for its prompt, its output and K tokens.

    For sd and ssd: outcomes, of which every row has a stream of its own; draft_step (latency of a draft forward by its branches or
    tokens, over all rows) and draft_alone (the same by its rows while the target waits; default: draft_step); draft_prefill_seconds, of a
    prompt fed whole; draft_plan_seconds, of the draft's host to choose what the branches of a round are drafted for; num_speculative_tokens
    (K); link_seconds (one way), link_bandwidth (bytes a second, each way) and draft_token_bytes (its id and, where drawn, its law). The
    draft is away at draft_outages, pairs of death and return, or after draft_mtbf seconds on average for draft_repair_seconds on average;
    the target waits for a dead draft for lost_after_seconds and goes on as in mode ar.

    For sd: one_device, where the draft feeds prompts on the device of the target, before it.

    For ssd: fan_out_hit and fan_out_miss (F_k, K+1 each; used to build while the target verifies a cached draft, and any other or the
    prompt), or a budget: as many outcomes a row, over all rows those that are likeliest by what the outcome model knows; cut to what
    draft_slots has room for beside prompts and outputs; building: "fixed", drafts of K tokens for what is planned, or "anytime", in waves,
    the likeliest first, for as long as the target verifies, where drafts may be short (sim.anytime); draft_devices that branches are
    shared out to; backup, by row:
    "jit" (all rows that lack tokens are drafted for together, and the batch waits), "ngram" (with chance ngram_found K tokens at no cost,
    whose outcomes are ngram_outcomes; else none) or "none"; interrupt: a draft that builds its cache looks for the outcomes between steps
    ("step"), or between its draft_layers layers, where it gives up the step under way ("layer") unless a true branch grows in it ("moot").
    """

    mode: str
    verify: Seconds
    output_tokens: Lengths = 0
    num_requests: int = 1
    batch_size: int = 1
    request_rate: float | None = None
    arrival_seconds: tuple[float, ...] = ()
    trace: tuple[tuple[float, int, int], ...] = ()
    prompt_tokens: Lengths = 0
    prompt_chunk: int = 0
    target_prefill_seconds: float = 0.0
    overhead_seconds: float = 0.0
    noise: float = 0.0
    target_residuals: tuple[float, ...] = ()
    draft_residuals: tuple[float, ...] = ()
    target_slots: int | None = None
    draft_slots: int | None = None
    outcomes: Outcomes | None = None
    draft_step: Seconds | None = None
    draft_alone: Seconds | None = None
    draft_prefill_seconds: float = 0.0
    draft_plan_seconds: float = 0.0
    link_seconds: float = 0.0
    link_bandwidth: float | None = None
    draft_token_bytes: float = 4.0
    draft_outages: tuple[tuple[float, float], ...] = ()
    draft_mtbf: float | None = None
    draft_repair_seconds: float = 0.0
    lost_after_seconds: float = 0.0
    one_device: bool = False
    num_speculative_tokens: int = 0
    fan_out_hit: tuple[int, ...] = ()
    fan_out_miss: tuple[int, ...] = ()
    budget: int = 0
    building: str = "fixed"
    draft_devices: int = 1
    backup: str = "jit"
    ngram_outcomes: Outcomes | None = None
    ngram_found: float = 1.0
    interrupt: str = "step"
    draft_layers: int = 1

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: use one of {choices}")
        for name in ("num_requests", "batch_size", "draft_layers", "draft_devices"):
            check.count(name, getattr(self, name), 1)
        for name in (
            *("target_prefill_seconds", "draft_prefill_seconds", "overhead_seconds", "link_seconds", "noise", "draft_token_bytes"),
            *("draft_plan_seconds", "draft_repair_seconds", "lost_after_seconds"),
        ):
            check.non_negative(name, getattr(self, name))
        for name in ("link_bandwidth", "draft_mtbf"):
            if getattr(self, name) is not None:
                check.positive(name, getattr(self, name))
        self._check_load()
        self._check_noise()
        if self.mode != "ar":
            self._check_draft()
        if self.mode == "ssd":
            self._check_cache()
            self._check_ngram()
        elif self.budget or self.building != "fixed":
            raise ValueError(f"budget={self.budget!r}, building={self.building!r} with mode={self.mode!r}: only mode 'ssd' has a cache")
        self._check_outages()
        self._check_slots()

    @property
    def slots(self) -> int | None:
        """Key-values that fit into the target's memory and, where there is one, the draft's; None for any number."""
        limits = (self.target_slots, None if self.mode == "ar" else self.draft_slots)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def reads_contexts(self) -> bool:
        """Whether anything hangs on how long texts are."""
        tables = (self.verify, self.draft_step, self.draft_alone)
        return self.slots is not None or any(isinstance(table, LatencyByContext) for table in tables)

    def slots_of(self, prompt_tokens: int, output_tokens: int) -> int:
        """Key-values that a request may come to need."""
        return prompt_tokens + output_tokens + (0 if self.mode == "ar" else self.num_speculative_tokens)

    def _check_load(self) -> None:
        if self.trace:
            self._check_trace()
        else:
            self._check_lengths()
            self._check_arrivals()

    def _check_trace(self) -> None:
        for name in ("output_tokens", "prompt_tokens", "arrival_seconds", "request_rate"):
            if getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r} stands in the trace: leave it out, or the trace")
        if self.num_requests not in (1, len(self.trace)):
            raise ValueError(f"num_requests={self.num_requests} with a trace of {len(self.trace)} requests: leave it out")
        arrivals, prompts, outputs = zip(*self.trace, strict=True)
        check.non_negative("trace", arrivals)
        if list(arrivals) != sorted(arrivals):
            raise ValueError("trace: its arrivals must not fall: sort it")
        _check_counts("trace, output_tokens", outputs)
        if self.prompt_chunk:
            _check_counts("trace, prompt_tokens", prompts)
            self._check_prefill()

    def _check_lengths(self) -> None:
        check.count("prompt_chunk", self.prompt_chunk, 0)
        _check_counts("output_tokens", self.output_tokens)
        if self.prompt_chunk:
            _check_counts("prompt_tokens", self.prompt_tokens)
        elif self.prompt_tokens != 0 and not self.reads_contexts:
            raise ValueError(f"prompt_tokens={self.prompt_tokens!r} is read with prompt_chunk alone: set it, or use target_prefill_seconds")
        self._check_prefill()

    def _check_prefill(self) -> None:
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

    def _check_noise(self) -> None:
        for name in ("target_residuals", "draft_residuals"):
            ratios = getattr(self, name)
            check.non_negative(name, ratios)
            if ratios and self.noise:
                raise ValueError(f"noise={self.noise!r} and {name} are two spreads: leave one of them out")

    def _check_outages(self) -> None:
        times = [time for outage in self.draft_outages for time in outage]
        if any(len(outage) != 2 for outage in self.draft_outages) or not all(0 <= a <= b for a, b in pairwise([0.0, *times])):
            raise ValueError(f"draft_outages={self.draft_outages!r} must be pairs of death and return, one after another: sort them")
        if times and self.draft_mtbf is not None:
            raise ValueError(f"draft_mtbf={self.draft_mtbf!r} and draft_outages are two accounts of failures: leave one of them out")

    def _check_slots(self) -> None:
        for name in ("target_slots", "draft_slots"):
            if getattr(self, name) is not None:
                check.count(name, getattr(self, name), 1)
        if self.slots is None:
            return
        asked = [(prompt, output) for _, prompt, output in self.trace] or [(_longest(self.prompt_tokens), _longest(self.output_tokens))]
        most = max(self.slots_of(prompt, output) for prompt, output in asked)
        if most > self.slots:
            name = "target_slots" if self.slots == self.target_slots else "draft_slots"
            raise ValueError(f"{name}={self.slots} has no room for a request of {most} tokens, drafts and all: raise it to {most} or more")

    def _check_draft(self) -> None:
        check.count("num_speculative_tokens", self.num_speculative_tokens, 1)
        for name in ("outcomes", "draft_step"):
            if getattr(self, name) is None:
                raise ValueError(f"{name}=None with mode={self.mode!r}: give one, or use mode='ar'")
        if self.one_device and self.mode != "sd":
            raise ValueError(f"one_device=True with mode={self.mode!r}: only in mode 'sd' do the models take turns on one device")
        if self.draft_devices > 1 and self.mode != "ssd":
            raise ValueError(f"draft_devices={self.draft_devices} with mode={self.mode!r}: only mode 'ssd' has branches to share out")

    def _check_cache(self) -> None:
        check.count("budget", self.budget, 0)
        if self.building == "anytime" and self.draft_devices > 1:
            raise ValueError(f"building='anytime' with draft_devices={self.draft_devices}: only one is built on so, use 'fixed'")
        for name in ("fan_out_hit", "fan_out_miss"):
            if not self.budget:
                self._check_fan_out(name, getattr(self, name))
            elif getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} with budget={self.budget}, which chooses by itself: leave one of them out"
                )

    def _check_fan_out(self, name: str, fan_out: tuple[int, ...]) -> None:
        K = self.num_speculative_tokens
        if len(fan_out) != K + 1:
            raise ValueError(f"{name}={fan_out!r} has {len(fan_out)} entries: num_speculative_tokens={K} needs {K + 1}")
        for k, F in enumerate(fan_out):
            check.count(f"{name}[{k}]", F, 0)
        if sum(fan_out) == 0:
            raise ValueError(f"{name}={fan_out!r} caches nothing: give it at least one branch or a budget, or use mode='sd'")


def _longest(lengths: Lengths) -> int:
    return max(lengths) if isinstance(lengths, tuple) else lengths


def _check_counts(name: str, lengths: Lengths) -> None:
    if lengths == ():
        raise ValueError(f"{name}=() leaves nothing to draw from: give a number or at least one")
    for length in lengths if isinstance(lengths, tuple) else (lengths,):
        check.count(name, length, 1)
