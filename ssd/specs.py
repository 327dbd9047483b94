"""The values that travel between planner, engine and user: frozen, validated, JSON both ways.

Units are SI (seconds, bytes, FLOP, hertz) and stand in every field's description.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, computed_field, field_validator, model_validator

from sim.metrics import Metrics, Round
from sim.names import unknown
from ssd import devices as names

Mode = Literal["ar", "sd", "ssd"]
Backup = Literal["jit", "ngram", "none"]
Verification = Literal["rejection", "coupled"]
Ranking = Literal["shared_noise", "probability"]
Building = Literal["fixed", "anytime"]
Objective = Literal["latency", "throughput", "cost"]
Source = Literal["measured", "roofline", "assumed"]

# The pair that comes with the package.
EMBEDDED = "embedded/"
EMBEDDED_TARGET, EMBEDDED_DRAFT = EMBEDDED + "target", EMBEDDED + "draft"


TokenId = Annotated[int, Field(ge=0)]
TokenSequence = tuple[TokenId, ...]


class Spec(BaseModel):
    """A frozen value that refuses unknown keys by naming the nearest known one."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    raise ValueError(unknown(cls.__name__, str(key), cls.model_fields))
        return data

    def save(self, path: str | Path) -> None:
        """Write this value as JSON to `path`."""
        Path(path).write_text(self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a value that `save` wrote; ValueError where the file is missing or does not fit."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise ValueError(f"path={str(path)!r} cannot be read ({error.strerror}): give a file that {cls.__name__}.save wrote") from error
        return cls.model_validate_json(text)


class Device(Spec):
    """One place where a model, or a share of it, can run."""

    id: str = Field(
        pattern=r"^([\w.-]+/)?[a-z]+:\d+$",
        description="torch's name of the device, `cpu:3` meaning core 3; of another host after its name, as in `node1/cuda:0` (no unit)",
    )
    name: str = Field(description="product name (no unit)")
    memory_bytes: int = Field(gt=0, description="memory, bytes; of the whole machine where devices share it")
    memory_bandwidth: float = Field(gt=0, description="sustained read bandwidth, bytes per second")
    flops: float = Field(gt=0, description="dense matrix rate at the compute type, FLOP per second")
    flops_fp32: float | None = Field(None, gt=0, description="dense matrix rate in fp32, FLOP per second; none if `flops` is it")
    interconnect: str = Field("", description="what joins it to its like in one machine, such as NVLink or PCIe (no unit)")
    interconnect_bandwidth: float | None = Field(None, gt=0, description="its rate, one way, bytes per second; none where memory is shared")
    price_per_hour: float | None = Field(None, ge=0, description="list price, US dollars per hour")
    source: str = Field("", description="where these figures come from (no unit)")

    @property
    def kind(self) -> str:
        """The part of the id before the colon: `cpu`, `cuda`, ..."""
        return names.kind(self.id)

    @property
    def is_core(self) -> bool:
        """Whether it is a CPU core, or a CPU."""
        return names.are_cores((self.id,))


class Hardware(Spec):
    """The devices of one machine and the latency between them."""

    name: str = Field(description="what it is called in reports (no unit)")
    devices: tuple[Device, ...] = Field(min_length=1, description="in order; the draft gets the last (list of devices)")
    shared_memory: bool = Field(False, description="whether the devices draw on one memory, as CPU cores do (yes or no)")
    link_seconds: float = Field(1e-4, ge=0, description="one-way latency of a small message between devices, seconds")
    is_local: bool = Field(False, description="whether it is the machine it was made on, so that profiling can measure it (yes or no)")

    @model_validator(mode="after")
    def _ids_differ(self) -> Self:
        ids = [device.id for device in self.devices]
        if len(set(ids)) < len(ids):
            raise ValueError(f"devices={ids} names a device twice: give each its own id")
        return self

    @classmethod
    def local(cls) -> Hardware:
        """Return this machine: its accelerators, and beside one alone the CPU cores; else the cores. Rates are measured in a second."""
        from ssd.catalog import local_hardware

        return local_hardware()

    @classmethod
    def named(cls, description: str) -> Hardware:
        """Return the machine that `description` names, such as `5xH100-SXM` or `4xH100-SXM + 1xL40S`."""
        from ssd.catalog import named_hardware

        return named_hardware(description)

    def draws_on_one_memory(self, ids: tuple[str, ...]) -> bool:
        """Whether the devices with these ids have one memory together: all of `shared_memory`, and the cores of this machine."""
        return self.shared_memory or (self.is_local and names.are_cores(ids))

    def select(self, ids: tuple[str, ...]) -> tuple[Device, ...]:
        """Return the devices with these ids, in their order."""
        known = {device.id: device for device in self.devices}
        for name in ids:
            if name not in known:
                raise ValueError(f"placement names device {name!r}, but hardware {self.name!r} has {', '.join(known)}")
        return tuple(known[name] for name in ids)


class Models(Spec):
    """A target and a draft, each by hub id, local transformers folder or GGUF file; by default the embedded pair."""

    target: str = Field(EMBEDDED_TARGET, min_length=1, description="the model whose law is sampled: hub id, folder or .gguf file (no unit)")
    draft: str | None = Field(None, min_length=1, description="the model that proposes, or none for AR only (no unit)")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="type computed in; auto is float32 on a CPU and bfloat16 elsewhere (no unit)"
    )
    max_model_len: int | None = Field(
        None, ge=2, description="prompt and output together, tokens; none takes what the target can, at most 4096"
    )
    draft_weights: Literal["auto", "checkpoint", "int8"] = Field(
        "auto",
        description="how a draft on a CPU keeps its matrices: as the checkpoint has them, or in a byte a weight, which changes what is "
        "proposed and how fast, never what is emitted; auto is int8 from 100 million weights on (no unit)",
    )

    @model_validator(mode="before")
    @classmethod
    def _embedded_together(cls, data: Any) -> Any:
        if isinstance(data, dict) and "target" not in data:
            return {"draft": EMBEDDED_DRAFT, **data}
        return data


class Workload(Spec):
    """What will be asked of the engine."""

    batch_size: int = Field(1, ge=1, le=256, description="requests decoded together (count)")
    prompt_tokens: int = Field(128, ge=1, description="length of a prompt, tokens")
    output_tokens: int = Field(128, ge=1, description="length of an output, tokens")
    temperature: float = Field(0.0, ge=0, le=2, description="sampling temperature (no unit)")
    prompt_set: Literal["code", "chat", "library"] = Field("code", description="the prompts that acceptance is measured on (no unit)")
    max_seconds_per_token: float | None = Field(
        None,
        gt=0,
        description="longest mean time between the tokens of a request that is bearable, seconds; for objective throughput or cost, which "
        "then take as many requests together as keep it, up to batch_size; none for no limit",
    )

    @property
    def context(self) -> int:
        """Tokens that a query sees on average over an output."""
        return self.prompt_tokens + self.output_tokens // 2


class SamplingParams(Spec):
    """How one request is decoded."""

    max_tokens: int = Field(128, ge=1, description="longest output, tokens (`max_new_tokens` is accepted too)")
    min_tokens: int = Field(0, ge=0, description="shortest output, tokens: end tokens cannot come before, stop strings do not count")
    temperature: float = Field(0.0, ge=0, le=1e6, allow_inf_nan=False, description="sampling temperature (no unit); 0 is greedy")
    top_k: int = Field(0, ge=0, description="draw from the k likeliest tokens (count); 0 draws from all")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the fewest likeliest tokens with this mass (probability)")
    min_p: float = Field(0.0, ge=0, le=1, description="draw from tokens with this share of the likeliest's probability (ratio)")
    repetition_penalty: float = Field(
        1.0, ge=0.01, le=100, description="divides positive and multiplies negative logits of tokens in prompt and output (ratio)"
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="taken off the logits of tokens in the output (logits)")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="taken off the logits once for each time in the output (logits)")
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] = Field({}, description="added to logits (token id to logits)")
    bad_words: tuple[str, ...] = Field((), description="texts that may not come, in the tokens they have alone and after a space (no unit)")
    bad_words_token_ids: tuple[TokenSequence, ...] = Field((), description="sequences of tokens that may not come (token ids)")
    seed: int | None = Field(None, ge=0, lt=1 << 63, description="makes the output repeatable; none draws another one each time (no unit)")
    n: int = Field(1, ge=1, description="outputs for each prompt, each drawn by itself (count)")
    stop: tuple[str, ...] = Field((), description="texts that end the output and are left out of it, with what follows (no unit)")
    stop_token_ids: tuple[TokenId, ...] = Field((), description="further tokens that end the output, kept as its last (token ids)")
    ignore_eos: bool = Field(False, description="whether to go on past the model's end tokens (yes or no)")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="so many likeliest tokens' log-probabilities at each place, and the output's own; none for none (count)",
    )
    verification: Literal["auto", "rejection", "coupled"] = Field(
        "auto",
        description="how draft tokens are verified; auto couples a request that has a seed, and else does as the plan says (no unit)",
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_other_spellings(cls, data: Any) -> Any:
        if isinstance(data, dict):
            if "max_new_tokens" in data:
                if "max_tokens" in data:
                    raise ValueError("max_tokens and max_new_tokens are one option: give one of them")
                data = {("max_tokens" if key == "max_new_tokens" else key): value for key, value in data.items()}
            for name in ("stop", "bad_words"):
                if isinstance(data.get(name), str):
                    data = {**data, name: (data[name],)}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: lower it")
        for name in ("stop", "bad_words", "bad_words_token_ids"):
            if not all(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r} holds an empty one: leave it out")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n={self.n} with temperature=0 gives the same output {self.n} times: raise the temperature or ask for one")
        return self


class Placement(Spec):
    """Which devices a model runs on; a draft that shares the target's devices takes turns with it."""

    target: tuple[str, ...] = Field(min_length=1, description="device ids of the target (no unit)")
    draft: tuple[str, ...] = Field((), description="device ids of the draft, maybe of other hosts, none in mode ar (no unit)")
    draft_workers: int = Field(
        1,
        ge=1,
        description="processes with a whole draft each, which divide the draft's devices evenly in their order and share the outcomes out; "
        "by default one for each accelerator, and one for all CPU cores. Several may be given the same core, which they then take turns "
        "on: to see what they hit, not how fast (count)",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_for_each_accelerator(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "draft_workers" in data:
            return data
        target, draft = (data.get(name) for name in ("target", "draft"))
        apart = isinstance(draft, list | tuple) and isinstance(target, list | tuple) and not set(map(str, target)) & set(map(str, draft))
        return {**data, "draft_workers": len(draft)} if apart and draft and not any(names.is_core(str(one)) for one in draft) else data

    @model_validator(mode="after")
    def _workers_divide_the_devices(self) -> Self:
        count, ids = self.draft_workers, self.draft
        if count > 1 and (not ids or len(ids) % count):
            raise ValueError(
                f"draft_workers={count} does not divide the {len(ids)} devices of placement.draft={ids} evenly: give a device, or as many "
                "cores, for each worker"
            )
        for own in self.workers:
            if len(set(own)) < len(own):
                raise ValueError(
                    f"placement.draft={ids} gives a worker of draft_workers={count} a device twice: name it once, or give more workers"
                )
            names.host(own)
            if len(own) > 1 and not self.overlaps and not names.are_cores(own):
                raise ValueError(
                    f"placement.draft={ids} with draft_workers={count}: an accelerator holds a whole draft; set draft_workers={len(ids)}"
                )
        return self

    @field_validator("target")
    @classmethod
    def _target_is_here(cls, ids: tuple[str, ...]) -> tuple[str, ...]:
        if any("/" in name for name in ids):
            raise ValueError(f"placement.target={ids}: the target runs on the host where the engine is started; leave the host's name out")
        return ids

    @property
    def workers(self) -> tuple[tuple[str, ...], ...]:
        """The devices of each of the draft's workers; none without a draft."""
        size = len(self.draft) // self.draft_workers
        return tuple(self.draft[begin : begin + size] for begin in range(0, len(self.draft), size)) if size else ()

    def of_worker(self, index: int) -> Placement:
        """Return the placement that one of the draft's workers has a part in."""
        return Placement(target=self.target, draft=self.workers[index], draft_workers=1)

    @property
    def devices(self) -> tuple[str, ...]:
        """Every device used, once each."""
        return tuple(dict.fromkeys(self.target + self.draft))

    @property
    def overlaps(self) -> bool:
        """Whether target and draft share a device."""
        return bool(set(self.target) & set(self.draft))

    @property
    def takes_turns(self) -> bool:
        """Whether they share a CPU core, which does one thing at a time; an accelerator runs the kernels of two processes as it can."""
        return bool(set(names.cores(self.target)) & set(names.cores(self.draft)))


class ForwardLatency(Spec):
    """Seconds of one forward of a model against the tokens in it."""

    model: Literal["target", "draft"] = Field(description="whose forward (no unit)")
    devices: tuple[str, ...] = Field(min_length=1, description="device ids it ran on (no unit)")
    tokens: tuple[int, ...] = Field(min_length=1, description="query tokens in the forward, rising (count)")
    seconds: tuple[float, ...] = Field(min_length=1, description="mean duration, seconds")
    spread: tuple[float, ...] = Field((), description="interquartile range over mean (ratio)")
    contended: bool = Field(False, description="whether the other model was at work on its own device meanwhile (yes or no)")
    source: Source = Field("measured", description="where the numbers come from (no unit)")
    context: int = Field(0, ge=0, description="tokens that each query sees besides the forward's own; 0 where that is not known")
    growth: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (), description="what each token of context more adds, for each of tokens; none where one context was measured (seconds)"
    )

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if len(self.tokens) != len(self.seconds) or list(self.tokens) != sorted(set(self.tokens)):
            raise ValueError(f"tokens={self.tokens} must rise and match seconds={self.seconds} one to one")
        if self.growth and len(self.growth) != len(self.tokens):
            raise ValueError(f"growth={self.growth} must match tokens={self.tokens} one to one: give it so, or leave it out")
        return self

    def at(self, context: int) -> ForwardLatency:
        """Return the table at another context, tokens: linear in it, never falling, never below 0; as it is where one was measured."""
        if not self.growth:
            return self
        more = context - self.context
        seconds = tuple(max(0.0, each + more * growth) for each, growth in zip(self.seconds, self.growth, strict=True))
        return self.model_copy(update={"seconds": seconds, "context": context})


class Calibrated(Spec):
    """What one kind of the draft's confidence has been worth: how often it was tried and how often what it spoke of came, in each bin."""

    kind: str = Field(description="in a token sent, or in a bonus candidate after a rejection or after full acceptance (no unit)")
    trials: tuple[float, ...] = Field(description="outcomes in each bin of theory.calibration (counts)")
    successes: tuple[float, ...] = Field(description="those that came (counts)")


class RoundCost(Spec):
    """What rounds take beyond the forwards in the latency tables, as some did in the engine: sampling, host work, caches gone cold."""

    mode: Mode = Field(description="whose rounds (no unit)")
    placement: Placement = Field(description="where (no unit)")
    verification: Verification = Field("rejection", description="how drafts were verified above temperature 0 (no unit)")
    temperature: float = Field(0.0, ge=0, description="temperature of the requests (no unit)")
    tokens: tuple[float, ...] = Field(min_length=1, description="mean tokens in a verification, rising (count)")
    verify: tuple[float, ...] = Field(min_length=1, description="a verification, above a forward of so many, for each; seconds")
    answer: float = Field(
        0.0,
        description="from the leaving of the outcomes to the coming of drafts that lay ready, above two messages over the link; seconds",
    )
    step: float = Field(0.0, description="a draft token of every row while the target waits, above the draft's forward; seconds")
    build_step: float = Field(0.0, description="a step of all branches beside a verification, above the draft's forward; seconds")
    plan: float = Field(0.0, ge=0, description="between a build's forwards, choosing what is drafted for by lists; seconds a round")
    weigh: float = Field(0.0, ge=0, description="the same by estimated chances, as for a budget or at any time; seconds a round")

    @model_validator(mode="after")
    def _lengths_agree(self) -> Self:
        if len(self.tokens) != len(self.verify) or list(self.tokens) != sorted(set(self.tokens)):
            raise ValueError(f"tokens={self.tokens} must rise and match verify={self.verify} one to one")
        return self


class Texts(Spec):
    """What was read off texts of one prompt set at one temperature: acceptance, hits, what prompt lookup and confidence are worth.

    Saved with it, and read as properties: acceptance by position, and curves of the bonus's rank after hits and after misses.
    """

    prompt_set: str = Field(description="the prompts, `given` where they were the caller's own (no unit)")
    temperature: float = Field(0.0, ge=0, description="temperature that the texts were written at (no unit)")
    traces: tuple[tuple[int, ...], ...] = Field(
        (),
        description="for each prompt, the rank of every output token among the draft's choices, 1 being its own and accepted; above "
        "temperature 0 one more than its rank among the candidates for the bonus where it was not (rank)",
    )
    end_traces: tuple[tuple[int, ...], ...] = Field(
        (),
        description="above temperature 0, for each trace the rank of every token where all draft tokens before it were accepted, under the "
        "noise that it was drawn with; 1 is what coupling accepts (rank)",
    )
    ngram_accepted: tuple[tuple[Annotated[int, Field(ge=-1)], ...], ...] = Field(
        (),
        description="for each trace, how many of 8 tokens that prompt lookup proposes before each token are accepted, -1 where it proposes "
        "none (tokens); none if not measured",
    )
    calibration: tuple[Calibrated, ...] = Field(
        (), description="what the draft's confidence is worth under greedy decoding, for an engine to start from (list)"
    )
    draft_acceptance_rate: float = Field(ge=0, le=1, description="chance that a draft token is accepted given those before it were (ratio)")
    acceptance_source: Source = Field(description="where acceptance comes from (no unit)")

    @model_validator(mode="before")
    @classmethod
    def _without_properties(cls, data: Any) -> Any:
        properties = ("acceptance_by_position", "bonus_after_hit", "bonus_after_miss")
        return {key: value for key, value in data.items() if key not in properties} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _lookups_match_traces(self) -> Self:
        known = [len(text) for text in self.traces]
        if self.end_traces and [len(text) for text in self.end_traces] != known:
            raise ValueError(f"end_traces must have a rank for each in traces, texts of {known} tokens: give them so, or leave them out")
        lengths = [len(text) for text in self.ngram_accepted]
        if lengths and lengths != known:
            raise ValueError(f"ngram_accepted has texts of {lengths} tokens, traces of {known}: give one entry for each, or leave it out")
        return self

    @computed_field  # type: ignore[prop-decorator]
    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Chance that the 1st, 2nd, ... of 8 draft tokens is accepted given those before it were (ratios); none without traces."""
        from ssd.outcomes import acceptance_by_position

        return acceptance_by_position(self)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bonus_after_hit(self) -> tuple[float, ...]:
        """Chance that the bonus is among the best 0, 1, 2, ... candidates of its position, in rounds that come after a hit (ratios).

        Of 3 draft tokens, with the best candidate of each position cached; none where there was no such round.
        """
        from ssd.outcomes import bonus_curves

        return bonus_curves(self)[0]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def bonus_after_miss(self) -> tuple[float, ...]:
        """The same in rounds that come after a miss (ratios)."""
        from ssd.outcomes import bonus_curves

        return bonus_curves(self)[1]


class Profile(Spec):
    """Latency of a pair on a machine, and its acceptance on one load or on several: prompt sets and temperatures."""

    hardware: str = Field(description="name of the hardware (no unit)")
    models: Models = Field(description="the pair (no unit)")
    measured_on: str = Field("", description="day of the measurement, year-month-day; empty where nothing was measured (no unit)")
    texts: tuple[Texts, ...] = Field(min_length=1, description="what was read off texts, of each prompt set and temperature (list)")
    forwards: tuple[ForwardLatency, ...] = Field(description="latency tables (list)")
    prefill_seconds_per_token: float = Field(ge=0, description="target's prefill, seconds per prompt token")
    link_seconds: float = Field(ge=0, description="one-way latency of a message between the two processes, seconds")
    overhead_seconds: float = Field(ge=0, description="a round's host work outside verifications, messages and waits, seconds")
    draft_layers: int = Field(24, ge=1, description="layers of the draft model (count)")
    rounds: tuple[RoundCost, ...] = Field(
        (), description="what rounds were seen to take beyond the tables; none if none was watched (list)"
    )
    notes: tuple[str, ...] = Field((), description="what was assumed, in words (no unit)")

    @model_validator(mode="before")
    @classmethod
    def _of_one_load(cls, data: Any) -> Any:
        """A file of before a profile could hold several loads has what was read off texts beside the rest."""
        if not isinstance(data, dict) or "texts" in data or "prompt_set" not in data:
            return data
        its = {name: data[name] for name in Texts.model_fields if name in data}
        warmth = its.get("temperature", 0.0)
        rounds = [{"temperature": warmth, **cost} if isinstance(cost, dict) else cost for cost in data.get("rounds", ())]
        return {**{name: value for name, value in data.items() if name not in its}, "texts": (its,), "rounds": rounds}

    def of(self, workload: Workload) -> Profile:
        """Return what is known of one load: its texts alone, rounds at its temperature, tables at its context.

        Texts on prompts that were given fit every prompt set. ValueError where none fits.
        """
        warm = [texts for texts in self.texts if texts.temperature == workload.temperature]
        own = sorted(
            (texts for texts in warm if texts.prompt_set in (workload.prompt_set, "given")), key=lambda each: each.prompt_set == "given"
        )
        if not own:
            name, known = (
                ("prompt_set", [texts.prompt_set for texts in warm]) if warm else ("temperature", [t.temperature for t in self.texts])
            )
            when = f" on {self.measured_on}" if self.measured_on else ""
            raise ValueError(
                f"workload.{name}={getattr(workload, name)!r} does not fit the profile, made with "
                f"{' and '.join(map(repr, dict.fromkeys(known)))}{when}: profile again, or leave profile out"
            )
        rounds = tuple(cost for cost in self.rounds if cost.temperature == workload.temperature)
        return self.at(workload.context).model_copy(update={"texts": (own[0],), "rounds": rounds})

    def at(self, context: int) -> Profile:
        """Return the same with the latency tables at this context, tokens."""
        return self.model_copy(update={"forwards": tuple(table.at(context) for table in self.forwards)})

    def explain(self) -> str:
        """Say in a few lines what was measured."""
        from ssd.report import explain_profile

        return explain_profile(self)

    def round_cost(self, mode: Mode, placement: Placement, verification: Verification = "rejection") -> RoundCost | None:
        """Return what rounds of `mode` there take beyond their forwards, preferring those verified so; None if none was watched.

        Of a profile of one load.
        """
        found = [cost for cost in self.rounds if (cost.mode, cost.placement) == (mode, placement)]
        return min(found, key=lambda cost: cost.verification != verification, default=None)

    def forward(self, model: Literal["target", "draft"], devices: tuple[str, ...], *, contended: bool = False) -> ForwardLatency | None:
        """Return the latency table of `model` on `devices`, preferring one measured under the same contention."""
        found = [table for table in self.forwards if table.model == model and table.devices == devices]
        return min(found, key=lambda table: table.contended != contended, default=None)


class Prediction(Spec):
    """What a configuration is expected to do on the workload."""

    tokens_per_second: float = Field(ge=0, description="output tokens per second of decoding, of the whole batch, prefill apart")
    tokens_per_second_between: tuple[float, float] | None = Field(
        None, description="within these the speed is expected to lie, 9 times in 10, tokens per second; none where nothing is known of it"
    )
    speedup_vs_ar: float = Field(ge=0, description="against AR at the same batch size on the target's devices, one more for SSD (ratio)")
    speedup_vs_sd: float | None = Field(None, ge=0, description="against the best SD on the target's devices (ratio)")
    speedup_vs_ar_equal_devices: float = Field(ge=0, description="against AR on every device this configuration uses (ratio)")
    speedup_vs_sd_equal_devices: float | None = Field(
        None, ge=0, description="against the best SD on every device this configuration uses (ratio)"
    )
    hit_rate: float | None = Field(None, ge=0, le=1, description="share of rounds whose outcome is cached, none without a cache (ratio)")
    draft_acceptance_rate: float | None = Field(None, ge=0, le=1, description="accepted over drafted tokens (ratio)")
    mean_acceptance_length: float = Field(ge=1, description="tokens a round, bonus included (tokens)")
    verify_seconds: float = Field(ge=0, description="one verification, with drafts in full for the whole batch, seconds")
    build_seconds: float | None = Field(None, ge=0, description="building the cache in full, of the whole batch, seconds")
    backup_seconds: float | None = Field(
        None, ge=0, description="drafting, before each round or for as many rows as on average miss together, seconds"
    )
    critical_batch_size: int | None = Field(
        None,
        ge=1,
        description="from so many requests on, backup ngram, or none where ngram is not measured, is faster than jit, all else as here "
        "(count); none if there is no such number as far as the latency tables tell",
    )
    method: Literal["theory", "simulation"] = Field(description="what computed tokens_per_second (no unit)")


class Configuration(Spec):
    """One way to decode, with what is expected of it."""

    mode: Mode = Field(description="ar, sd or ssd (no unit)")
    num_speculative_tokens: int = Field(0, ge=0, description="lookahead K (tokens); 0 in mode ar")
    fan_out_hit: tuple[int, ...] = Field((), description="F_0..F_K after a hit: outcomes cached with k accepted (counts)")
    fan_out_miss: tuple[int, ...] = Field((), description="F_0..F_K after a miss (counts)")
    budget: int = Field(
        0,
        ge=0,
        description="outcomes cached for a request on average, each round those most probable by the draft's calibrated confidence over "
        "all requests of the batch (count); 0 leaves the choice to the fan-out lists",
    )
    building: Building = Field(
        "fixed",
        description="fixed: every draft has all K tokens, and exactly what is planned is cached; anytime: the cache is built for as long "
        "as the target verifies, the likeliest first, and a draft that is short is sent as it is where that is faster (no unit)",
    )
    backup: Backup = Field("jit", description="who drafts on a miss: the draft model now, prompt lookup, or nobody (no unit)")
    verification: Verification = Field(
        "rejection", description="how the drafts of a request without a seed are verified above temperature 0 (no unit)"
    )
    ranking: Ranking = Field(
        "shared_noise",
        description="what bonus tokens are ranked by above temperature 0: log q and the noise they are drawn with, or q alone (no unit)",
    )
    saguaro: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(
        (),
        description="C_0..C_{K-1}, factors on q of the F_k likeliest tokens (ratios), or one for all; none leaves q as it is. "
        "For drafts that are verified by rejection; a request that is coupled, as one with a seed is, does without",
    )
    placement: Placement = Field(description="devices of target and draft (no unit)")
    predicted: Prediction | None = Field(None, description="none where a configuration was typed by hand (no unit)")

    @model_validator(mode="before")
    @classmethod
    def _one_factor_for_all(cls, data: Any) -> Any:
        if isinstance(data, dict):
            factor, K = data.get("saguaro"), data.get("num_speculative_tokens")
            if isinstance(factor, int | float) and isinstance(K, int) and not isinstance(factor, bool):
                data = {**data, "saguaro": (factor,) * K}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        K = self.num_speculative_tokens
        if self.saguaro:
            self._check_saguaro()
        if self.mode == "ar":
            if K or self.fan_out_hit or self.fan_out_miss or self.budget or self.building != "fixed":
                raise ValueError(f"mode='ar' drafts nothing: num_speculative_tokens={K}, fan-outs, budget and building must be left out")
            return self
        if K < 1:
            raise ValueError(f"num_speculative_tokens={K}: mode={self.mode!r} needs at least 1; use mode='ar' to decode without a draft")
        if not self.placement.draft:
            raise ValueError(f"placement.draft is empty: mode={self.mode!r} needs a device for the draft")
        if self.mode == "sd":
            if self.placement.draft_workers > 1:
                raise ValueError(
                    f"draft_workers={self.placement.draft_workers}: mode='sd' has no outcomes to share out among workers; give one"
                )
            given = self.fan_out_hit, self.fan_out_miss, self.budget, self.backup, self.building, self.ranking
            if given != ((), (), 0, "jit", "fixed", "shared_noise"):
                raise ValueError(
                    "mode='sd' has no cache: leave fan_out_hit, fan_out_miss, budget, building and ranking out and backup at 'jit'"
                )
            return self
        if self.placement.takes_turns:
            raise ValueError(
                f"placement={self.placement.model_dump()}: mode='ssd' needs a device for the draft alone; use mode='sd' on one"
            )
        if self.budget:
            if self.fan_out_hit or self.fan_out_miss:
                raise ValueError(f"budget={self.budget} chooses the outcomes anew each round: leave fan_out_hit and fan_out_miss out")
            return self
        for name in ("fan_out_hit", "fan_out_miss"):
            check_fan_out(name, getattr(self, name), K)
        return self

    def alone(self) -> Configuration:
        """Return the configuration itself, with what is expected of it: of a plan, without all that it was made from."""
        return Configuration(**{name: getattr(self, name) for name in Configuration.model_fields})

    def unpredicted(self) -> Configuration:
        """Return the configuration itself, without what is expected of it: equal for all that decode in the same way."""
        return self.alone().model_copy(update={"predicted": None})

    def _check_saguaro(self) -> None:
        if self.mode != "ssd" or self.verification != "rejection":
            raise ValueError(
                f"saguaro={self.saguaro} presses tokens down so that the cache holds what is rejected: leave it out unless mode='ssd' "
                "with verification='rejection'"
            )
        if len(self.saguaro) != self.num_speculative_tokens:
            raise ValueError(
                f"saguaro={self.saguaro} has {len(self.saguaro)} factors: give one, or {self.num_speculative_tokens}, one a draft token"
            )


def check_fan_out(name: str, fan_out: tuple[int, ...], K: int) -> None:
    """Raise ValueError unless `fan_out` is F_0..F_K, none negative, at least one positive."""
    if len(fan_out) != K + 1:
        raise ValueError(f"{name}={fan_out} has {len(fan_out)} entries: with num_speculative_tokens={K} give {K + 1}, F_0 to F_{K}")
    if min(fan_out) < 0 or not any(fan_out):
        raise ValueError(
            f"{name}={fan_out} caches nothing or a negative number: give counts of 0 or more, at least one above 0, "
            "give a budget, or use mode='sd'"
        )


class Considered(Spec):
    """A draft that was planned with, and the best that came of it."""

    draft: str | None = Field(description="the draft model (no unit)")
    best: str = Field(description="the configuration in words, or why there is none (no unit)")
    tokens_per_second: float | None = Field(
        None, ge=0, description="its predicted speed, of the whole batch, tokens per second; none where there is none"
    )


class Sensitivity(Spec):
    """How far an input must move until another mode is the better choice, all else as it is."""

    name: str = Field(description="the input (no unit)")
    unit: Literal["", "s"] = Field(description="what it is counted in: seconds, or a share where this is empty (no unit)")
    value: float = Field(description="what the plan rests on (seconds, or a ratio)")
    below: float | None = Field(None, description="under this the choice changes (seconds, or a ratio); none if it does not")
    becomes_below: Mode | None = Field(None, description="to this mode (no unit)")
    above: float | None = Field(None, description="over this the choice changes (seconds, or a ratio); none if it does not")
    becomes_above: Mode | None = Field(None, description="to this mode (no unit)")


class Plan(Configuration):
    """The configuration that the planner would bet on, what it was chosen for and from what it was predicted."""

    hardware: Hardware = Field(description="the machine (no unit)")
    models: Models = Field(description="the pair (no unit)")
    workload: Workload = Field(Workload(), description="the load (no unit)")
    objective: Objective = Field("latency", description="what was optimised (no unit)")
    alternatives: tuple[Configuration, ...] = Field((), description="the ranked rest, AR and SD among them (list)")
    considered: tuple[Considered, ...] = Field((), description="the drafts there were to choose from, if more than one (list)")
    sensitivity: tuple[Sensitivity, ...] = Field((), description="what would change the choice (list)")
    profile: Profile | None = Field(None, description="what the prediction rests on, none where the plan was typed by hand (no unit)")

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Self:
        self.hardware.select(self.placement.devices)
        if self.mode != "ar" and self.models.draft is None:
            raise ValueError(f"models.draft is missing: mode={self.mode!r} needs a draft model")
        return self

    @classmethod
    def of(cls, configuration: Configuration, **fields: Any) -> Plan:
        """Return the plan to decode by a configuration; `fields` are all else that it has, or take the place of what the former says."""
        return cls(**{**dict(configuration.alone()), **fields})

    def with_configuration(self, configuration: Configuration) -> Plan:
        """Return this plan with another configuration in place of its own, to force an alternative."""
        return Plan(**{**dict(self), **dict(configuration.alone())})

    def with_draft_on(self, host: str) -> Plan:
        """Return this plan with the draft on devices of the same names of another host, which its worker is to be started on under the name
        `host`; without predictions, since this machine's link is not the network between the two. ValueError without a draft.
        """
        if self.mode == "ar":
            raise ValueError("mode='ar' has no draft to be moved to another host: plan for mode 'sd' or 'ssd'")
        ids, count = self.placement.draft, self.placement.draft_workers
        moved = {name: f"{host}/{name.rpartition('/')[2]}" for name in ids}
        there = tuple(device.model_copy(update={"id": moved[device.id]}) for device in self.hardware.select(tuple(moved)))
        hardware = self.hardware.model_copy(update={"devices": (*self.hardware.devices, *there)})
        place = Placement(target=self.placement.target, draft=tuple(moved[name] for name in ids), draft_workers=count)
        fields = {name: getattr(self, name) for name in Plan.model_fields}
        return Plan(**{**fields, "hardware": hardware, "placement": place, "predicted": None, "alternatives": (), "sensitivity": ()})

    def explain(self) -> str:
        """Say in a dozen lines what was chosen and why, with measured and assumed inputs apart."""
        from ssd.report import explain

        return explain(self)


class RequestOutput(Spec):
    """What one request gave."""

    request_id: str = Field(description="unique within the engine (no unit)")
    prompt: str | None = Field(description="the prompt, none where token ids were given (no unit)")
    prompt_token_ids: tuple[int, ...] = Field(description="the prompt's tokens (token ids)")
    index: int = Field(0, ge=0, description="which of the prompt's n outputs (no unit)")
    text: str = Field(description="decoded output without special tokens, ended before a stop string (no unit)")
    token_ids: tuple[int, ...] = Field(description="output tokens, a stop token or a stop string's last token included (token ids)")
    logprobs: tuple[dict[int, float], ...] | None = Field(
        None,
        description="for each output token its log-probability and the likeliest tokens', by the target's own law at temperature 1, "
        "before anything else is done to it (token id to nats)",
    )
    finish_reason: Literal["stop", "length"] = Field(
        description="an end token or stop string, or max_tokens or the context limit (no unit)"
    )
    stop_reason: int | str | None = Field(None, description="the token or string that ended the output (token id or no unit)")
    metrics: Metrics = Field(description="counts, rates and seconds of this request (units in its own fields)")
    rounds: tuple[Round, ...] = Field((), description="every round: who drafted how much, what was accepted, where the time went (list)")


class StreamChunk(Spec):
    """What one round added to a streamed request."""

    request_id: str = Field(description="unique within the engine (no unit)")
    text: str = Field(description="new text; half a character only where the output ends in one (no unit)")
    token_ids: tuple[int, ...] = Field(description="new tokens (token ids)")
    output: RequestOutput | None = Field(None, description="the whole, with the last chunk only (no unit)")
