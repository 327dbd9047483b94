"""The public engine: a process for each model, one a device, behind generate and stream and their async twins."""

from __future__ import annotations

import asyncio
import itertools
import logging
import operator
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from queue import SimpleQueue
from typing import TYPE_CHECKING, Never, Self

from sim.metrics import Metrics
from sim.timeline import Span, Timeline
from ssd.catalog import check_here
from ssd.devices import check_present, core_ids, host, pin, pinned, torch_device
from ssd.engine import draft as draft_side
from ssd.engine import target as target_side
from ssd.engine.address import local_rank, rank, this_host, under_torchrun
from ssd.engine.draft_process import spawn
from ssd.engine.graph_memory import Size
from ssd.engine.group import DraftGroup, reason
from ssd.engine.link import Boot, LinkError, Ready, Setup, Shutdown, Spans, TakeSpans
from ssd.engine.peer import LOAD_DEADLINE, DraftPeer, Spawned
from ssd.engine.resolve import resolved
from ssd.engine.scheduler import Request, Scheduler
from ssd.engine.shares import follow, lead, leaders, shares
from ssd.engine.spans import MAX_SPANS, on_our_clock
from ssd.engine.target import Target
from ssd.engine.text import Text
from ssd.engine.worker import Delivery, Job, Worker
from ssd.models import Pair, check_lookahead, check_memory, check_shares, compute_dtype, inspect, keeps_int8, load
from ssd.specs import Configuration, Placement, Plan, RequestOutput, SamplingParams, StreamChunk

if TYPE_CHECKING:
    from ssd.engine.hosts import Meeting

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None
LONGEST_DEADLINE = 86400.0
MAX_WAITING = 1024
# How often a task looks whether there is room to wait in.
ROOM_SECONDS = 0.005
# How long a draft of another host may take to come at first.
COMING_DEADLINE = 300.0


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the draft is at work (`ok`), was lost and why (`lost`), or is not wanted (`none`); how often it was started again.

    Of several draft workers some may be lost (`fewer`), and `workers` says of each whether it is at work. failed: the error in the target's
    own process that ended the engine.
    """

    draft: str
    reason: str | None = None
    restarts: int = 0
    failed: str | None = None
    workers: tuple[bool, ...] = ()


class Engine:
    """Decodes as a plan says. Use as a context manager, or call `close`. Its methods may be called from any thread."""

    def __init__(
        self,
        plan: Plan,
        *,
        deadline: float = 30.0,
        max_num_seqs: int | None = None,
        max_waiting: int = MAX_WAITING,
        restart: bool = True,
        listen: str | None = None,
    ) -> None:
        """Check, then load both models.

        deadline: the longest wait for a draft, seconds, after which decoding goes on without it. max_num_seqs: requests decoded together,
        as many as the plan's workload has unless said otherwise. max_waiting: requests that may wait for their turn, of all callers
        together; whoever asks for more waits to be heard. restart: whether a draft that is lost is started again, with back-off, or on
        another host awaited. listen: HOST:PORT of this host, for a draft of another host to come to; torchrun's processes have theirs.

        In a further process of torchrun this serves the draft, and leaves with SystemExit when the engine does.
        """
        if not isinstance(plan, Plan):
            raise ValueError(f"plan={plan!r} is no Plan: make one with ssd.plan or read one with Plan.load")
        count = shares(plan.placement.target)
        if 0 < rank() < count:
            follow(plan.placement.target, rank(), count)
        if rank():
            _serve_rank(plan)
        if not isinstance(deadline, int | float) or not 0 < deadline <= LONGEST_DEADLINE:
            raise ValueError(f"deadline={deadline}: give the seconds to wait for a draft, more than 0 and at most {LONGEST_DEADLINE:.0f}")
        self.max_num_seqs = _count("max_num_seqs", plan.workload.batch_size if max_num_seqs is None else max_num_seqs)
        self.plan, self.deadline = plan, deadline
        if listen is not None and not any(map(host, plan.placement.workers)):
            raise ValueError(f"listen={listen!r}: the plan has no draft on another host that could come there; leave it out")
        check_here(plan.hardware)
        self.pair = inspect(plan.models)
        self._check_configuration(plan, self.pair)
        # Of the draft workers that were started, those that the configuration uses.
        self.peer: DraftPeer | DraftGroup | None = None
        self._started: tuple[DraftPeer, ...] = ()
        self._draft_on: tuple[tuple[str, ...], ...] = ()
        self._restart, self._listen, self._cores = restart, listen, core_ids()
        self._numbers = itertools.count()
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._setup: Setup | None = None
        self._worker = Worker(_count("max_waiting", max_waiting))
        self._meeting: Meeting | None = None
        self._close = weakref.finalize(self, _shut, self._worker, (), None)
        try:
            self._start(plan)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        *,
        deadline: float = 30.0,
        max_num_seqs: int | None = None,
        max_waiting: int = MAX_WAITING,
        restart: bool = True,
        listen: str | None = None,
    ) -> Self:
        """Start the engine that `plan` describes: one process a model, both loaded. ValueError before loading where it cannot run."""
        return cls(plan, deadline=deadline, max_num_seqs=max_num_seqs, max_waiting=max_waiting, restart=restart, listen=listen)

    def _check_configuration(self, plan: Plan, pair: Pair) -> None:
        check_lookahead(pair, plan.num_speculative_tokens)
        check_shares("target", pair.target, shares(plan.placement.target))
        check_memory(pair, plan.models, plan.hardware, plan.placement, sizes_for(plan, self.max_num_seqs, pair.max_model_len))
        check_present("placement.target", plan.placement.target)
        for ids in plan.placement.workers if plan.mode != "ar" else ():
            if host(ids) is None:
                check_present("placement.draft", ids)

    def _start(self, plan: Plan) -> None:
        if (count := shares(plan.placement.target)) > 1:
            # The others are there already, and would not wait as long as a draft of another host may take.
            lead(count)
        if plan.mode != "ar":
            self._start_drafts(plan)
        self._load_target(plan)
        self._await_ready()
        self._worker.call(lambda: self._configure(plan))

    def _starters(self, boot: Boot) -> tuple[Callable[[], Spawned], Callable[[], Spawned]]:
        """Return how a draft worker is had at first, and again after it was lost."""
        name = host(boot.placement.draft)
        if name is None:
            return lambda: spawn(boot), lambda: spawn(boot)
        from ssd.engine.hosts import Meeting, await_draft

        if self._meeting is None:
            self._meeting = Meeting(self._listen)
        meeting = self._meeting
        logger.warning("waiting for the draft of %s to come to %s", name, meeting.address)
        return lambda: await_draft(meeting, name, boot, COMING_DEADLINE), lambda: await_draft(meeting, name, boot, inf)

    def _start_drafts(self, plan: Plan) -> None:
        """Start a process for each draft worker; they load meanwhile."""
        self._started, self._draft_on, self._setup = (), plan.placement.workers, None
        for index in range(len(self._draft_on)):
            first, again = self._starters(self._boot(plan, plan.placement.of_worker(index)))
            try:
                started = first()
            except LinkError as error:
                raise RuntimeError(f"the draft did not start: {error}") from error
            peer = DraftPeer(*started, self.deadline, self.pair.target.vocab_size, again if self._restart else None)
            self._started = (*self._started, peer)
            self._close.detach()
            self._close = weakref.finalize(self, _shut, self._worker, self._started, self._meeting)

    def _load_target(self, plan: Plan) -> None:
        target = plan.placement.target
        device = torch_device(target)
        dtype, count = compute_dtype(plan.models, device), shares(target)
        with pinned(leaders(target)):
            self.loaded = lead(count).load(self.pair.target, target, dtype) if count > 1 else load(self.pair.target, device, dtype)

    def _boot(self, plan: Plan, place: Placement) -> Boot:
        device = torch_device(place.draft)
        name = str(compute_dtype(plan.models, device)).removeprefix("torch.")
        vocab_size = self.pair.target.vocab_size
        int8 = self.pair.draft is not None and keeps_int8(plan.models, self.pair.draft, device)
        return Boot(str(plan.models.draft), name, place, self.max_num_seqs, self.pair.max_model_len, vocab_size, int8)

    def _await_ready(self) -> None:
        for peer in self._started:
            try:
                peer.link.expect(Ready, deadline=LOAD_DEADLINE)
            except LinkError as error:
                raise RuntimeError(f"the draft's process did not start: {error}") from error

    def configure(self, configuration: Configuration) -> None:
        """Decode as `configuration` says from the next request on, with the models that are loaded; for comparing modes and placements.

        A model that it places on another accelerator, or on CPU cores instead of one, is loaded again there. ValueError while requests are
        on their way.
        """
        self._worker.check()
        if not isinstance(configuration, Configuration):
            raise ValueError(f"configuration={configuration!r} is no Configuration: make one, or take one of plan.alternatives")
        if isinstance(configuration, Plan) and configuration.models != self.plan.models:
            raise ValueError(f"models={configuration.models!r} are not those that are loaded: start another engine for them")
        plan = self.plan.with_configuration(configuration)
        if plan.mode != "ar" and not self._started:
            raise ValueError(
                f"mode={plan.mode!r}: this engine was started in mode 'ar', without a draft; start it from an 'sd' or 'ssd' plan"
            )
        for old, new in zip(self._draft_on, plan.placement.workers, strict=False):
            if host(old) != host(new):
                raise ValueError(f"placement.draft={new}: a loaded model does not move to another host; start another engine")
        self._check_configuration(plan, self.pair)
        self._worker.call(lambda: self._configure(plan))

    def _move(self, plan: Plan) -> None:
        """Load again what another device is to hold; between CPU cores models need not move."""
        workers = plan.placement.workers if plan.mode != "ar" else ()
        moved = any(torch_device(new) != torch_device(old) for new, old in zip(workers, self._draft_on, strict=False))
        if moved or len(workers) > len(self._started):
            for peer in self._started:
                peer.close(Shutdown())
            # This thread is pinned to the target's cores, where a process that loads would be in the way.
            with pinned(self._cores):
                self._start_drafts(plan)
            self._await_ready()
        if shares(plan.placement.target) != shares(self.plan.placement.target):
            raise ValueError(
                f"placement.target={plan.placement.target} splits the target otherwise than {self.plan.placement.target}: "
                "start another process for it"
            )
        if torch_device(plan.placement.target) != self.loaded.device:
            # Let go before it is loaded: both need not fit.
            self._worker.scheduler = None
            del self.loaded
            self._load_target(plan)

    def _configure(self, plan: Plan) -> None:
        """Set the scheduler up, in the worker's thread."""
        scheduler = self._worker.scheduler
        if scheduler is not None and scheduler.busy:
            raise ValueError(
                f"requests are being decoded ({len(scheduler.running)}) or wait ({len(scheduler.waiting)}): let them finish, or close "
                "their streams, before another configuration"
            )
        try:
            self._move(plan)
        except BaseException as error:
            self._worker.failed = error
            raise
        self.plan = plan
        pin(leaders(plan.placement.target))
        slots = target_side.slots_needed(self.pair.max_model_len, plan.num_speculative_tokens)
        setup, drafts = setup_for(plan), plan.mode != "ar"
        if drafts and setup != self._setup:
            used = self._started[: plan.placement.draft_workers]
            self.peer = DraftGroup(used) if len(used) > 1 else used[0]
            self.peer.configure(setup)
            self._setup = setup
        peer = self.peer if drafts else None
        self._worker.scheduler = Scheduler(Target(self.loaded, self.max_num_seqs, slots), peer, self._spans, plan.backup)

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[RequestOutput]:
        """Decode prompts (text or token ids) together and return the outputs in order, `params.n` for each prompt.

        params: for all prompts, or one for each. ValueError names a prompt or an option that cannot be decoded, before anything is.
        """
        box: SimpleQueue[Delivery] = SimpleQueue()
        jobs = self._jobs(prompts, params, box.put)
        done: dict[Job, RequestOutput] = {}
        try:
            for job in jobs:
                self._worker.submit(job)
            while len(done) < len(jobs):
                _keep(done, box.get())
        finally:
            self._forget(jobs, done)
        return [done[job] for job in jobs]

    async def agenerate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[RequestOutput]:
        """Do what `generate` does without blocking the event loop; cancelling the task cancels the requests."""
        box, put = _async_box()
        jobs = self._jobs(prompts, params, put)
        done: dict[Job, RequestOutput] = {}
        try:
            for job in jobs:
                await self._asubmit(job)
            while len(done) < len(jobs):
                _keep(done, await box.get())
        finally:
            self._forget(jobs, done)
        return [done[job] for job in jobs]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Decode one prompt and yield what each round adds; the last chunk carries the whole output. Closing it ends the request."""
        box: SimpleQueue[Delivery] = SimpleQueue()
        job = self._streamed(prompt, params, box.put)
        return self._stream(job, box)

    def _stream(self, job: Job, box: SimpleQueue[Delivery]) -> Iterator[StreamChunk]:
        last = False
        try:
            self._worker.submit(job)
            while not last:
                chunk = _chunk(box.get())
                last = chunk.output is not None
                yield chunk
        finally:
            if not last:
                self._worker.cancel(job)

    def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[StreamChunk]:
        """Do what `stream` does as an async iterator; leaving it, or cancelling its task, ends the request."""
        return self._astream(self._streamed(prompt, params, lambda _: None))

    async def _astream(self, job: Job) -> AsyncIterator[StreamChunk]:
        box, job.deliver = _async_box()
        last = False
        try:
            await self._asubmit(job)
            while not last:
                chunk = _chunk(await box.get())
                last = chunk.output is not None
                yield chunk
        finally:
            if not last:
                self._worker.cancel(job)

    async def _asubmit(self, job: Job) -> None:
        """Submit without blocking the event loop, or one of its threads, while the room is full."""
        while not self._worker.submit(job, patient=False):
            await asyncio.sleep(ROOM_SECONDS)

    def metrics(self) -> Metrics:
        """Return the sums over all requests gone by; seconds in all are wall clock with something to decode, others summed by request."""
        found = self._worker.metrics()
        if not self._started:
            return found
        messages, size = (sum(getattr(peer.traffic, name) for peer in self._started) for name in ("messages", "size"))
        seconds = max((peer.link_seconds for peer in self._started if peer.link_seconds is not None), default=None)
        return replace(found, link_messages=messages, link_bytes=size, link_seconds=seconds)

    def timeline(self) -> Timeline:
        """Return what both devices were busy with since the last call, and the rounds of the requests that ended meanwhile."""
        return self._worker.call(self._timeline)

    def _timeline(self) -> Timeline:
        spans, rounds = list(self._spans), list(self._worker.rounds)
        self._spans.clear()
        self._worker.rounds.clear()
        for index, (peer, ids) in enumerate(zip(self._started, self._draft_on, strict=True)):
            if (answer := peer.ask(TakeSpans(), Spans)) is not None:
                told = answer.spans if host(ids) is None else on_our_clock(answer.spans, peer.clock_ahead)
                spans += [replace(span, device=f"draft-{index + 1}") for span in told] if index else told
        return Timeline(sorted(spans, key=lambda span: span.start), rounds)

    def health(self) -> Health:
        """Return whether the draft is at work, and what ended the engine if something has."""
        failed = self._worker.failed
        ended = None if failed is None else f"{type(failed).__name__}: {failed}"
        if self.peer is None or self.plan.mode == "ar":
            return Health("none", failed=ended)
        peers, restarts = self.peer.peers, sum(peer.restarts for peer in self.peer.peers)
        if len(peers) == 1:
            lost = self.peer.lost
            return Health("ok" if lost is None else "lost", lost, restarts, ended)
        alive = tuple(peer.lost is None for peer in peers)
        return Health("ok" if all(alive) else "fewer" if any(alive) else "lost", reason(peers), restarts, ended, alive)

    def close(self) -> None:
        """End the draft's process and let the models go; harmless when called twice. Requests on their way get a ValueError."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _forget(self, jobs: Sequence[Job], done: dict[Job, RequestOutput]) -> None:
        for job in jobs:
            if job not in done:
                self._worker.cancel(job)

    def _streamed(self, prompt: Prompt, params: SamplingParams | None, deliver: Callable[[Delivery], None]) -> Job:
        params = _params_of([prompt], params)[0]
        jobs = self._listed([(prompt, params)], deliver)
        if len(jobs) > 1:
            raise ValueError(f"n={len(jobs)}: a stream is one output; ask for n=1, or use generate")
        jobs[0].streams = True
        return jobs[0]

    def _jobs(self, prompts: Prompt | Sequence[Prompt], params: Params, deliver: Callable[[Delivery], None]) -> list[Job]:
        """Check prompts and parameters before anything is decoded; return the requests, n of each prompt."""
        listed = _as_list(prompts)
        return self._listed(list(zip(listed, _params_of(listed, params), strict=True)), deliver)

    def _listed(self, asked: Sequence[tuple[Prompt, SamplingParams]], deliver: Callable[[Delivery], None]) -> list[Job]:
        self._worker.check()
        caller = self._worker.caller()
        return [
            Job(request, prompt if isinstance(prompt, str) else None, deliver)
            for place, (prompt, own) in enumerate(asked)
            for request in self._requests(prompt, own, place, caller)
        ]

    def _requests(self, prompt: Prompt, params: SamplingParams, place: int, caller: int) -> list[Request]:
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
            Request(f"request-{next(self._numbers)}", ids, one, ends, room, Text(self.pair.tokenizer, params.stop), index, caller)
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


def _shut(worker: Worker, peers: tuple[DraftPeer, ...], meeting: Meeting | None) -> None:
    """End the worker's thread and the draft's processes, and wait for no other."""
    if meeting is not None:
        meeting.close()

    def unblock() -> None:
        for peer in peers:
            peer.process.kill()

    worker.close(unblock)
    for peer in peers:
        peer.close(Shutdown())


def _serve_rank(plan: Plan) -> Never:
    """Be what a further process of torchrun is for: the draft of its host, until the engine leaves."""
    from ssd.engine.draft_host import serve_engines

    address, name = under_torchrun(), this_host()
    assert address is not None, "ranks are torchrun's"
    if name not in map(host, plan.placement.workers):
        raise ValueError(f"placement.draft={plan.placement.draft}: there is nothing to do for torchrun's process {rank()} on {name}")
    if local_rank():
        # One serves; a second would wait for an engine that never calls.
        raise SystemExit(0)
    serve_engines(address, name, once=True)
    raise SystemExit(0)


def sizes_for(plan: Configuration, rows: int, max_model_len: int) -> tuple[Size, Size]:
    """Return the sizes of target and draft over slots, in an engine for so many requests together."""
    setup, places = setup_for(plan), rows * (plan.num_speculative_tokens + 1)
    target = Size(rows, target_side.slots_needed(max_model_len, plan.num_speculative_tokens), places)
    # After a miss the draft reads what was sent, with logits as at the target; otherwise it feeds a token of every branch.
    branches = rows * draft_side.most_branches(setup, 1)
    return target, Size(rows, draft_side.slots_needed(max_model_len, setup, rows), max(places, branches))


def setup_for(plan: Configuration) -> Setup:
    """Return what the draft is told of a configuration, and of a plan's profile what its confidence has been worth."""
    known = plan.profile.texts[0].calibration if isinstance(plan, Plan) and plan.profile is not None else ()
    return Setup(
        num_speculative_tokens=plan.num_speculative_tokens,
        fan_out_hit=plan.fan_out_hit,
        fan_out_miss=plan.fan_out_miss,
        backup=plan.backup,
        placement=plan.placement,
        ranking=plan.ranking,
        saguaro=plan.saguaro,
        budget=plan.budget,
        building=plan.building,
        calibration=tuple((one.kind, one.trials, one.successes) for one in known),
    )


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: give a whole number of at least 1")
    return value


def _keep(done: dict[Job, RequestOutput], delivery: Delivery) -> None:
    job, item = delivery
    if isinstance(item, BaseException):
        raise item
    if isinstance(item, RequestOutput):
        done[job] = item


def _chunk(delivery: Delivery) -> StreamChunk:
    item = delivery[1]
    if isinstance(item, BaseException):
        raise item
    if not isinstance(item, StreamChunk):
        raise TypeError(f"{type(item).__name__} came where a chunk was due")
    return item


def _async_box() -> tuple[asyncio.Queue[Delivery], Callable[[Delivery], None]]:
    """Return a queue of the running event loop and how other threads put into it; a loop that is gone hears nothing."""
    loop, box = asyncio.get_running_loop(), asyncio.Queue[Delivery]()

    def put(delivery: Delivery) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(box.put_nowait, delivery)

    return box, put


def _params_of(prompts: Sequence[Prompt], params: Params) -> list[SamplingParams]:
    """Return the parameters of each prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * len(prompts)
    listed: list[SamplingParams] = [] if isinstance(params, dict | str) or not isinstance(params, Iterable) else list(params)
    if not listed or not all(isinstance(one, SamplingParams) for one in listed):
        raise ValueError(f"params={params!r} is no SamplingParams: pass one, for all prompts, or one for each")
    if len(listed) != len(prompts):
        raise ValueError(f"params has {len(listed)} entries for {len(prompts)} prompts: pass one, for all prompts, or one for each")
    return listed


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | bytes | dict) or not isinstance(prompts, Iterable):
        return [prompts]
    listed = list(prompts)
    return [listed] if listed and _is_token(listed[0]) else listed  # type: ignore[list-item,return-value]


def _is_token(thing: object) -> bool:
    with suppress(TypeError):
        return operator.index(thing) is not None  # type: ignore[arg-type]
    return False
