"""The public engine: two processes, one a device, behind generate and stream."""

from __future__ import annotations

import itertools
import operator
import subprocess
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Self

from sim.metrics import Metrics, Round
from sim.timeline import Span, Timeline
from ssd.devices import check_present, pinned, torch_device
from ssd.engine import draft as draft_side
from ssd.engine import target as target_side
from ssd.engine.draft_process import spawn
from ssd.engine.link import Boot, LinkError, Ready, Setup, Shutdown, Spans, TakeSpans
from ssd.engine.resolve import resolved
from ssd.engine.scheduler import DraftPeer, Request, Scheduler
from ssd.engine.spans import MAX_SPANS
from ssd.engine.target import Target
from ssd.engine.text import Text
from ssd.models import Pair, check_lookahead, check_memory, compute_dtype, inspect, load
from ssd.specs import Configuration, Plan, RequestOutput, SamplingParams, StreamChunk

Prompt = str | Sequence[int]
ROWS = 1
LOAD_DEADLINE = 900.0
LONGEST_DEADLINE = 86400.0


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the draft is at work (`ok`), was lost and why (`lost`), or is not wanted (`none`)."""

    draft: str
    reason: str | None = None


class Engine:
    """Decodes as a plan says. Use as a context manager, or call `close`."""

    def __init__(self, plan: Plan, *, deadline: float = 30.0) -> None:
        """Check, then load both models; `deadline` is the longest wait for a draft, seconds, after which decoding goes on without it."""
        if not isinstance(plan, Plan):
            raise ValueError(f"plan={plan!r} is no Plan: make one with ssd.plan or read one with Plan.load")
        if not isinstance(deadline, int | float) or not 0 < deadline <= LONGEST_DEADLINE:
            raise ValueError(f"deadline={deadline}: give the seconds to wait for a draft, more than 0 and at most {LONGEST_DEADLINE:.0f}")
        self.plan, self.deadline = plan, deadline
        self.pair = inspect(plan.models)
        self._check_configuration(plan, self.pair)
        self.peer: DraftPeer | None = None
        self._numbers = itertools.count()
        self._finished: list[tuple[Metrics, list[Round]]] = []
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._busy = False
        self._setup: Setup | None = None
        self._closed = False
        try:
            self._start(plan)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_plan(cls, plan: Plan, *, deadline: float = 30.0) -> Self:
        """Start the engine that `plan` describes: one process a model, both loaded. ValueError before loading where it cannot run."""
        return cls(plan, deadline=deadline)

    def _check_configuration(self, plan: Plan, pair: Pair) -> None:
        check_lookahead(pair, plan.num_speculative_tokens)
        target_slots = target_side.slots_needed(pair.max_model_len, plan.num_speculative_tokens)
        draft_slots = draft_side.slots_needed(pair.max_model_len, _setup(plan))
        check_memory(pair, plan.models, plan.hardware, plan.placement, (target_slots, draft_slots))
        check_present("placement.target", plan.placement.target)
        if plan.mode != "ar":
            check_present("placement.draft", plan.placement.draft)

    def _start(self, plan: Plan) -> None:
        if plan.mode != "ar":
            self.peer = DraftPeer(*spawn(self._boot(plan)), self.deadline, self.pair.target.vocab_size)
        device = torch_device(plan.placement.target)
        with pinned(plan.placement.target):
            self.loaded = load(self.pair.target, device, compute_dtype(plan.models, device))
        if self.peer is not None:
            self._await_ready(self.peer)
        self._configure(plan)

    def _boot(self, plan: Plan) -> Boot:
        dtype = compute_dtype(plan.models, torch_device(plan.placement.draft))
        name = str(dtype).removeprefix("torch.")
        return Boot(str(plan.models.draft), name, plan.placement, ROWS, self.pair.max_model_len, self.pair.target.vocab_size)

    def _await_ready(self, peer: DraftPeer) -> None:
        try:
            peer.link.expect(Ready, deadline=LOAD_DEADLINE)
        except LinkError as error:
            raise RuntimeError(f"the draft's process did not start: {error}") from error

    def configure(self, configuration: Configuration) -> None:
        """Decode as `configuration` says from the next request on, with the models that are loaded; for comparing modes and placements."""
        self._check_idle()
        if not isinstance(configuration, Configuration):
            raise ValueError(f"configuration={configuration!r} is no Configuration: make one, or take one of plan.alternatives")
        if isinstance(configuration, Plan) and configuration.models != self.plan.models:
            raise ValueError(f"models={configuration.models!r} are not those that are loaded: start another engine for them")
        plan = self.plan.with_configuration(configuration)
        if plan.mode != "ar" and self.peer is None:
            raise ValueError(
                f"mode={plan.mode!r}: this engine was started in mode 'ar', without a draft; start it from an 'sd' or 'ssd' plan"
            )
        for name in ("target", "draft"):
            old, new = getattr(self.plan.placement, name), getattr(plan.placement, name)
            if old and new and torch_device(old) != torch_device(new):
                raise ValueError(f"placement.{name}={new}: a loaded model moves between CPU cores only; start another engine")
        self._check_configuration(plan, self.pair)
        self._configure(plan)

    def _configure(self, plan: Plan) -> None:
        self.plan = plan
        slots = target_side.slots_needed(self.pair.max_model_len, plan.num_speculative_tokens)
        self._scheduler = Scheduler(Target(self.loaded, ROWS, slots), self._spans)
        setup = _setup(plan)
        if self.peer is not None and plan.mode != "ar" and setup != self._setup:
            self.peer.configure(setup)
            self._setup = setup

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> list[RequestOutput]:
        """Decode each prompt (text or token ids) and return the outputs in order, `params.n` for each prompt.

        ValueError names a prompt or an option that cannot be decoded, before anything is.
        """
        asked = [(prompt, request) for place, prompt in enumerate(_as_list(prompts)) for request in self._requests(prompt, params, place)]
        outputs = []
        for prompt, request in asked:
            for _ in self._decode(request):
                pass
            outputs.append(self._output(prompt, request))
        return outputs

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Decode one prompt and yield what each round adds; the last chunk carries the whole output. Closing it ends the request."""
        requests = self._requests(prompt, params, 0)
        if len(requests) > 1:
            raise ValueError(f"n={len(requests)}: a stream is one output; ask for n=1, or use generate")
        return self._stream(prompt, requests[0])

    def _stream(self, prompt: Prompt, request: Request) -> Iterator[StreamChunk]:
        shown = 0
        last: tuple[int, ...] = ()
        with closing(self._decode(request)) as rounds:
            for tokens in rounds:
                if request.finish_reason is not None:
                    last = tokens
                    continue
                text = self._text(request).shown()
                yield StreamChunk(request_id=request.request_id, text=text[shown:], token_ids=tokens)
                shown = len(text)
        output = self._output(prompt, request)
        yield StreamChunk(request_id=request.request_id, text=output.text[shown:], token_ids=last, output=output)

    def metrics(self) -> Metrics:
        """Return the sums over all requests finished so far."""
        done = [metrics for metrics, _ in self._finished]
        firsts = [metrics.time_to_first_token or 0.0 for metrics in done]
        return Metrics.from_rounds(
            [entry for _, rounds in self._finished for entry in rounds],
            num_output_tokens=sum(metrics.num_output_tokens for metrics in done),
            total_seconds=sum(metrics.total_seconds for metrics in done),
            time_to_first_token=sum(firsts) / len(firsts) if firsts else None,
            num_requests=len(done),
        )

    def timeline(self) -> Timeline:
        """Return what both devices were busy with since the last call."""
        self._check_idle()
        spans = list(self._spans)
        self._spans.clear()
        if self.peer is not None and (answer := self.peer.ask(TakeSpans(), Spans)) is not None:
            spans += answer.spans
        return Timeline(sorted(spans, key=lambda span: span.start))

    def health(self) -> Health:
        """Return whether the draft is at work."""
        if self.peer is None or self.plan.mode == "ar":
            return Health("none")
        return Health("ok") if self.peer.lost is None else Health("lost", self.peer.lost)

    def close(self) -> None:
        """End the draft's process and let the models go; harmless when called twice."""
        if self._closed:
            return
        self._closed = True
        if self.peer is None:
            return
        if self.peer.lost is None:
            self.peer.tell(Shutdown())
            with suppress(subprocess.TimeoutExpired):
                self.peer.process.wait(2.0)
        self.peer.process.kill()
        self.peer.process.wait()
        self.peer.link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _requests(self, prompt: Prompt, params: SamplingParams | None, place: int) -> list[Request]:
        """Check a prompt and its parameters before anything is decoded; return its n requests."""
        self._check_idle()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r} is no SamplingParams: pass one, for all prompts")
        ids = self._token_ids(prompt, place)
        if not ids:
            raise ValueError(f"prompt {place} is empty: give at least one token")
        vocab = self.pair.target.vocab_size
        if not all(0 <= token < vocab for token in ids):
            raise ValueError(f"prompt {place} has a token id outside 0..{vocab - 1}: use the target's tokenizer")
        room = self.pair.max_model_len - len(ids)
        if room < 1:
            raise ValueError(
                f"prompt {place} has {len(ids)} tokens, but max_model_len={self.pair.max_model_len} leaves no room for an output: "
                "shorten the prompt or raise max_model_len"
            )
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(self.pair.end_ids))
        settled = resolved(params, self.pair, ends, self.plan.verification)
        return [
            Request(f"request-{next(self._numbers)}", ids, one, ends, room, Text(self.pair.tokenizer, params.stop), index)
            for index, one in enumerate(settled)
        ]

    def _token_ids(self, prompt: Prompt, place: int) -> tuple[int, ...]:
        try:
            if isinstance(prompt, str):
                return tuple(self.pair.tokenizer(prompt.encode().decode())["input_ids"])
            if not isinstance(prompt, dict | bytes):
                return tuple(operator.index(token) for token in prompt)
        except (TypeError, UnicodeError):
            pass
        raise ValueError(f"prompt {place} is {prompt!r:.60}: give text (valid Unicode) or a sequence of token ids")

    def _decode(self, request: Request) -> Generator[tuple[int, ...]]:
        self._check_idle()
        self._busy = True
        peer = self.peer if self.plan.mode != "ar" else None
        rounds = self._scheduler.decode(request, peer)
        try:
            while True:
                with pinned(self.plan.placement.target):
                    tokens = next(rounds, None)
                if tokens is None:
                    break
                yield tokens
        finally:
            self._busy = False
            rounds.close()  # type: ignore[attr-defined]
            if request.first_token:
                self._finished.append((request.metrics(), request.rounds))

    def _check_idle(self) -> None:
        if self._closed:
            raise ValueError("the engine is closed: start another")
        if self._busy:
            raise ValueError("a request is still being streamed: finish its iterator or close it first; this version decodes one at a time")

    def _output(self, prompt: Prompt, request: Request) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=request.prompt,
            index=request.index,
            text=self._text(request).finish(),
            token_ids=tuple(request.output),
            logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
            finish_reason=request.finish_reason or "length",
            stop_reason=request.stop_reason,
            metrics=request.metrics(),
        )

    def _text(self, request: Request) -> Text:
        """Return the request's text, brought up to its tokens."""
        request.text.add(*request.output[request.text.length :], may_stop=False)
        return request.text


def _setup(plan: Configuration) -> Setup:
    return Setup(plan.num_speculative_tokens, plan.fan_out_hit, plan.fan_out_miss, plan.backup, plan.placement, plan.ranking, plan.saguaro)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | bytes | dict) or not isinstance(prompts, Iterable):
        return [prompts]
    listed = list(prompts)
    return [listed] if listed and _is_token(listed[0]) else listed  # type: ignore[list-item,return-value]


def _is_token(thing: object) -> bool:
    with suppress(TypeError):
        return operator.index(thing) is not None  # type: ignore[arg-type]
    return False
