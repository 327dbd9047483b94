"""The draft's process as the target sees it: asked with deadlines, given up when it fails, started again with back-off, taken back."""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import TypeVar

from ssd.devices import available_cores, pin_to
from ssd.engine.draft_process import Process, end
from ssd.engine.link import BackUp, Draft, Drafts, Link, LinkError, Outcomes, Ping, Ready, Setup, Traffic

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOAD_DEADLINE = 900.0
FIRST_BACK_OFF, LONGEST_BACK_OFF = 0.5, 60.0
# A draft that has served this long has earned a quick restart again.
STEADY_SECONDS = 60.0
# Messages there and back to measure the link by.
PINGS = 5

Spawned = tuple[Process, Link]


class DraftPeer:
    """While it is lost it drafts nothing, and no request fails for it. `known` are the requests that it has been told of.

    respawn: starts another process, which loads and then says Ready, or waits for that of another host; without it, a draft that is lost
    stays lost. link_seconds: one way, as measured when the draft was set up, when its clock was `clock_ahead` seconds ahead of ours.
    traffic: of all links since, but for what sets them up. since: when it began to serve, by this process's clock.
    """

    def __init__(
        self,
        process: Process,
        link: Link,
        deadline: float,
        vocab_size: int,
        respawn: Callable[[], Spawned] | None = None,
    ) -> None:
        self.process, self.link, self.deadline, self.vocab_size = process, link, deadline, vocab_size
        self.lost: str | None = None
        self.restarts = 0
        self.link_seconds: float | None = None
        self.clock_ahead = 0.0
        self.traffic = Traffic()
        self.known: set[str] = set()
        self._setup: Setup | None = None
        self._awaited: tuple[int, tuple[str, ...]] | None = None
        self._early: Drafts | None = None
        # Rounds whose drafts are still to come, though nobody waits for them any more.
        self._passed: set[int] = set()
        self._respawn, self._back_off, self.since = respawn, FIRST_BACK_OFF, monotonic()
        self._loading: Spawned | None = None
        self._spare: Spawned | None = None
        self._closed = threading.Event()
        # Re-entrant: an engine may be collected, and closed, in the midst of it.
        self._lock = threading.RLock()
        self._cores = available_cores()
        link.give_up_after(deadline)

    @property
    def peers(self) -> tuple[DraftPeer, ...]:
        """Itself, where there may be several."""
        return (self,)

    def configure(self, setup: Setup) -> bool:
        """Let it draft as `setup` says from the next request on; False if it is lost."""
        self._setup = setup
        ready = self._set_up(setup)
        # Drafts of before came before the answer, and nobody wants them any more.
        self._expect_nothing()
        self.known.clear()
        return ready

    def _expect_nothing(self) -> None:
        self._awaited = self._early = None
        self._passed.clear()

    def _set_up(self, setup: Setup) -> bool:
        self.link.stay_awake(setup.placement)
        ready = self.ask(setup, Ready) is not None and self._measure_link()
        # Counted is what rounds cost.
        self.link.traffic = self.traffic
        return ready

    def _measure_link(self) -> bool:
        """Time a few messages there and back: half the shortest way is the link's latency, and the draft's clock is read half-way."""
        found = []
        for _ in range(PINGS):
            begin = monotonic()
            answer = self.ask(Ping(), Ping)
            if answer is None:
                return False
            end = monotonic()
            found.append((end - begin, answer.clock - (begin + end) / 2))
        shortest, self.clock_ahead = min(found)
        self.link_seconds = shortest / 2
        return True

    def tell(self, message: object) -> None:
        """Send `message`, or note that the draft is lost."""
        if self.lost is None:
            try:
                self.link.send(message)
            except LinkError as error:
                self.lose(str(error))

    def report(self, outcomes: Outcomes) -> None:
        """Send what a round came to; its drafts are then due."""
        self._ask_for_drafts(outcomes, tuple(outcome.request for outcome in outcomes.outcomes))

    def back_up(self, message: BackUp) -> dict[str, Draft]:
        """Ask for drafts by the backup, and wait for them as `drafts` does."""
        self._ask_for_drafts(message, message.requests)
        return self.drafts()

    def _ask_for_drafts(self, message: Outcomes | BackUp, requests: tuple[str, ...]) -> None:
        self.tell(message)
        if self.lost is None:
            self._awaited = message.round, requests

    @property
    def due(self) -> tuple[int, tuple[str, ...]] | None:
        """The round that drafts are due after, and the requests that they are for."""
        return self._awaited if self.lost is None else None

    @property
    def answers(self) -> bool:
        """Whether `drafts` need not wait."""
        try:
            while self.due is not None and self._early is None and self.link.peek() is not None:
                message = self.link.expect(Drafts)
                self._early = message if self._wanted(message) else None
        except LinkError as error:
            self.lose(str(error))
        return self._early is not None or self.due is None

    def pass_over(self) -> None:
        """Do without the drafts that are due; when they come, nobody looks at them."""
        if self._awaited is not None and self._early is None:
            self._passed.add(self._awaited[0])
        self._awaited = self._early = None

    def _wanted(self, message: object) -> bool:
        if isinstance(message, Drafts) and message.round in self._passed:
            self._passed.remove(message.round)
            return False
        return True

    def drafts(self) -> dict[str, Draft]:
        """Wait for the drafts that are due, by request; none if none are, or if the draft is lost, as one silent past the deadline is."""
        if self._awaited is None or self.lost is not None:
            return {}
        (round_index, requests), self._awaited = self._awaited, None
        try:
            message, self._early = self._early or self._await(Drafts), None
            self._check(message, round_index, requests)
            if message.calibration and self._setup is not None:
                self._setup = replace(self._setup, calibration=message.calibration)
        except LinkError as error:
            self.lose(str(error))
            return {}
        return {draft.request: draft for draft in message.drafts}

    def _check(self, message: Drafts, round_index: int, requests: Sequence[str]) -> None:
        """Raise LinkError for what are no drafts of this round: they must not fail the requests."""
        try:
            if message.round != round_index or tuple(draft.request for draft in message.drafts) != tuple(requests):
                raise ValueError("they are for other requests")
            for draft in message.drafts:
                self._check_draft(draft)
        except Exception as error:
            raise LinkError(f"the drafts after round {round_index} came malformed or out of turn: {error}") from error

    def _check_draft(self, draft: Draft) -> None:
        lookahead = self._setup.num_speculative_tokens if self._setup is not None else 0
        if len(draft.tokens) > lookahead or not all(isinstance(token, int) and 0 <= token < self.vocab_size for token in draft.tokens):
            raise ValueError(f"{draft.tokens} are not up to {lookahead} tokens")
        if draft.laws is not None:
            draft.laws.check(draft.tokens, self.vocab_size)

    def ask(self, question: object, kind: type[T], deadline: float | None = None) -> T | None:
        """Send `question` and return the answer, a `kind`; None if the draft is lost. Drafts that come meanwhile are kept."""
        self.tell(question)
        try:
            return self._await(kind, deadline) if self.lost is None else None
        except LinkError as error:
            self.lose(str(error))
            return None

    def _await(self, kind: type[T], deadline: float | None = None) -> T:
        while True:
            message: object = self.link.expect(kind, Drafts, deadline=deadline or self.deadline)
            if not self._wanted(message):
                continue
            if isinstance(message, kind):
                return message
            if isinstance(message, Drafts):
                self._early = message

    # --- loss and return ---

    def lose(self, reason: str) -> None:
        """Give the draft up: end its process, go on as AR, and start another one after a while."""
        self.lost = reason
        self.known.clear()
        self._expect_nothing()
        end(self.process, self.link)
        if self._respawn is None or self._closed.is_set():
            logger.warning("draft lost: %s; decoding goes on without it", reason)
            return
        if monotonic() - self.since > STEADY_SECONDS:
            self._back_off = FIRST_BACK_OFF
        wait, self._back_off = self._back_off, min(2 * self._back_off, LONGEST_BACK_OFF)
        logger.warning("draft lost: %s; decoding goes on without it, and it is started again in %g s", reason, wait)
        threading.Thread(target=self._restart, args=(wait,), name="ssd-draft-restart", daemon=True).start()

    def _restart(self, wait: float) -> None:
        """Start processes, each after a longer wait, until one is ready; it is then kept until `take_back`."""
        # This thread was begun by one that is pinned to the target's cores, where a process that loads would be in the way.
        pin_to(self._cores)
        while self._respawn is not None and not self._closed.wait(wait):
            try:
                # Another host may take its time to come, and nobody is to wait for it.
                started = self._respawn()
                with self._lock:
                    if self._closed.is_set():
                        end(*started)
                        return
                    self._loading = started
                self._loading[1].expect(Ready, deadline=LOAD_DEADLINE)
            except Exception as error:
                if self._loading is not None:
                    end(*self._loading)
                    self._loading = None
                if self._closed.is_set():
                    return
                wait, self._back_off = self._back_off, min(2 * self._back_off, LONGEST_BACK_OFF)
                logger.warning("the draft did not start again: %s; next try in %g s", error, wait)
                continue
            with self._lock:
                self._spare, self._loading = self._loading, None
            return

    def take_back(self) -> bool:
        """Adopt a process that was started again; whether there was one that obeys. It knows no request yet."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is None:
            return False
        (self.process, self.link), self.lost = spare, None
        self.since = monotonic()
        self.link.give_up_after(self.deadline)
        if self._setup is not None and not self._set_up(self._setup):
            return False
        self.restarts += 1
        logger.warning("the draft is back")
        return True

    def close(self, farewell: object) -> None:
        """End the process, after saying `farewell` to it, and whatever is being started."""
        self._closed.set()
        if self.lost is None:
            self.tell(farewell)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(2.0)
        with self._lock:
            started = [pair for pair in (self._loading, self._spare) if pair is not None]
        for process, link in [(self.process, self.link), *started]:
            end(process, link)
