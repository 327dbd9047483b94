"""The thread that decodes: it owns scheduler and link, plays rounds while there are requests, and does between them what others ask."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import TypeVar

from sim.metrics import Metrics, Round
from ssd.engine.scheduler import Request, Scheduler
from ssd.specs import RequestOutput, StreamChunk

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Rounds of requests gone by that the timeline can still tell of.
MAX_ROUNDS = 20_000


@dataclass(eq=False)
class Job:
    """A request, the prompt as it was given, and who hears of it: of every chunk if it `streams`, and of the end, an error included."""

    request: Request
    prompt: str | None
    deliver: Callable[[Delivery], None]
    streams: bool = False
    shown: int = 0


# What a job's owner hears, with the job, so that one queue may serve many.
Delivery = tuple[Job, "StreamChunk | RequestOutput | BaseException"]


class Worker:
    """Plays rounds in a thread of its own. max_waiting: so many requests may wait for a row before `submit` makes their caller wait."""

    def __init__(self, max_waiting: int) -> None:
        self.scheduler: Scheduler | None = None
        self.rounds: deque[Round] = deque(maxlen=MAX_ROUNDS)
        self.busy_seconds = 0.0
        self.failed: BaseException | None = None
        self._total: Metrics | None = None
        self._max_waiting = max_waiting
        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._jobs: dict[Request, Job] = {}
        self._adding = 0
        self._closed = False
        self._numbers = count()
        self._thread = threading.Thread(target=self._run, name="ssd-engine", daemon=True)
        self._thread.start()

    def caller(self) -> int:
        """Return a number for a new caller, whose requests take turns with those of others."""
        return next(self._numbers)

    def submit(self, job: Job, *, patient: bool = True) -> bool:
        """Let a request wait for its turn; where too many wait already, wait for room first, or return False if not `patient`.

        ValueError or RuntimeError once the engine is closed or has failed.
        """
        with self._condition:
            if patient:
                self._condition.wait_for(lambda: self._ended or self._waiting() < self._max_waiting)
            self.check()
            if self._waiting() >= self._max_waiting:
                return False
            self._adding += 1
            self._post(lambda: self._add(job))
            return True

    def check(self) -> None:
        """Refuse where nothing can be decoded any more."""
        if self._closed:
            raise ValueError("the engine is closed: start another")
        if self.failed is not None:
            raise RuntimeError(f"the engine failed ({type(self.failed).__name__}: {self.failed}): start another") from self.failed

    def cancel(self, job: Job) -> None:
        """Forget a request, wherever it is; its owner hears no more of it."""
        with self._condition:
            self._post(lambda: self._cancel(job))

    def call(self, action: Callable[[], T]) -> T:
        """Do something between two rounds, where no round can be in its way, and return what it returns."""
        future: Future[T] = Future()

        def act() -> None:
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        with self._condition:
            self.check()
            self._post(act)
        return future.result()

    def metrics(self) -> Metrics:
        """Return the sums over all requests gone by; seconds in all are those in which there was something to decode."""
        total = self._total or Metrics.from_rounds([], num_output_tokens=0, total_seconds=0.0, time_to_first_token=None, num_requests=0)
        return total.over(self.busy_seconds)

    def close(self, unblock: Callable[[], None]) -> None:
        """End the thread after the round under way; `unblock` ends what a round may be waiting for."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)
            if self._thread.is_alive():
                unblock()
                self._thread.join()

    # --- inside the thread ---

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._inbox or self._closed or self._busy)
                # Taken together: once closed, nothing more comes to be done, and nothing that came is left undone.
                actions, self._inbox, closed = self._inbox, deque(), self._closed
            try:
                # What they asked with is let go, so that an engine that is dropped is not kept here.
                while actions:
                    actions.popleft()()
                if closed:
                    break
                if self._busy:
                    self._turn()
            except BaseException as error:
                # What was asked beside it is still to be answered.
                with self._condition:
                    self._inbox.extendleft(reversed(actions))
                self.failed = error
                logger.exception("decoding failed; the engine must be started again")
                self._fail(_failure(error))
            with self._condition:
                self._condition.notify_all()
        self._fail(ValueError("the engine was closed before the request was done"))

    @property
    def _busy(self) -> bool:
        return self.scheduler is not None and self.scheduler.busy and self.failed is None

    def _turn(self) -> None:
        if self.scheduler is None:
            return
        begin = monotonic()
        for request, tokens in self.scheduler.step():
            self._gain(self._jobs[request], tokens)
        self.busy_seconds += monotonic() - begin

    def _gain(self, job: Job, tokens: tuple[int, ...]) -> None:
        request = job.request
        if request.finish_reason is None and not job.streams:
            return
        text = request.text
        text.add(*request.output[text.length :], may_stop=False)
        if request.finish_reason is None:
            shown = text.shown()
            job.deliver((job, StreamChunk(request_id=request.request_id, text=shown[job.shown :], token_ids=tokens)))
            job.shown = len(shown)
            return
        self._leave(job)
        output = _output(job)
        if job.streams:
            last = StreamChunk(request_id=request.request_id, text=output.text[job.shown :], token_ids=tokens, output=output)
            job.deliver((job, last))
        else:
            job.deliver((job, output))

    def _add(self, job: Job) -> None:
        self._adding -= 1
        if self.failed is not None:
            job.deliver((job, _failure(self.failed)))
        elif self.scheduler is not None:
            self._jobs[job.request] = job
            self.scheduler.add(job.request)

    def _cancel(self, job: Job) -> None:
        if job.request in self._jobs and self.scheduler is not None:
            self.scheduler.cancel(job.request)
            self._leave(job)

    def _leave(self, job: Job) -> None:
        del self._jobs[job.request]
        if job.request.first_token:
            metrics = job.request.metrics()
            self._total = metrics if self._total is None else self._total.plus(metrics)
            self.rounds += job.request.rounds

    def _fail(self, told: BaseException) -> None:
        """Let everybody know that nothing more will come."""
        for job in self._jobs.values():
            with suppress(Exception):
                job.deliver((job, told))
        self._jobs.clear()

    def _post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._condition.notify_all()

    @property
    def _ended(self) -> bool:
        return self._closed or self.failed is not None

    def _waiting(self) -> int:
        return self._adding + (len(self.scheduler.waiting) if self.scheduler is not None else 0)


def _failure(error: BaseException) -> BaseException:
    """Return what callers are told of an error that is not theirs."""
    told = RuntimeError(f"decoding failed: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def _output(job: Job) -> RequestOutput:
    request = job.request
    return RequestOutput(
        request_id=request.request_id,
        prompt=job.prompt,
        prompt_token_ids=request.prompt,
        index=request.index,
        text=request.text.finish(),
        token_ids=tuple(request.output),
        logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
        finish_reason=request.finish_reason or "length",
        stop_reason=request.stop_reason,
        metrics=request.metrics(),
        rounds=tuple(request.rounds),
    )
