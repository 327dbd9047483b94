"""Requests and rounds: the loop that both devices turn around."""

from __future__ import annotations

import logging
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal, TypeVar

from sim.metrics import Metrics, Round
from sim.timeline import Span
from ssd.engine.link import Draft, Link, LinkError, Outcome, Ready, Setup, Start, Stop
from ssd.engine.spans import recorded
from ssd.engine.target import Proposal, Target, TokenLogprobs, Verdict
from ssd.engine.text import Text
from ssd.specs import SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A draft whose tokens are hardly ever right is a mistake its user should hear of.
WARN_AFTER_ROUNDS, WARN_BELOW_RATE = 32, 0.1


@dataclass
class Request:
    """One request on its way."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    end_ids: frozenset[int]
    room: int
    text: Text
    index: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    started: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0
    told: float = 0.0

    def remaining(self) -> int:
        """Tokens that may still follow, by max_tokens and by the context limit."""
        return min(self.params.max_tokens, self.room) - len(self.output)

    def commit(self, tokens: list[int], logprobs: tuple[TokenLogprobs, ...] | None = None) -> tuple[int, ...]:
        """Keep `tokens` up to the earliest end, whatever ends the output there; return what was kept."""
        kept = tokens[: self.remaining()]
        for place, token in enumerate(kept):
            found = self._stop_string(token, len(self.output) + place + 1)
            self.stop_reason = token if token in self.end_ids else found
            if self.stop_reason is not None:
                kept = kept[: place + 1]
                self.finish_reason = "stop"
                break
        self.output += kept
        self.logprobs += (logprobs or ())[: len(kept)]
        if self.finish_reason is None and self.remaining() == 0:
            self.finish_reason = "length"
        return tuple(kept)

    def _stop_string(self, token: int, length: int) -> str | None:
        """Return the stop string that the token completes, in an output that is then of this length."""
        if not self.params.stop:
            return None
        return self.text.add(token, may_stop=length >= self.params.min_tokens)

    def metrics(self) -> Metrics:
        """Return the counts and rates of this request so far."""
        return Metrics.from_rounds(
            self.rounds,
            num_output_tokens=len(self.output),
            total_seconds=self.ended - self.started,
            time_to_first_token=self.first_token - self.started,
        )


class DraftPeer:
    """The draft's process as the scheduler sees it; once lost, it drafts nothing and no request fails for it."""

    def __init__(self, process: subprocess.Popen[bytes], link: Link, deadline: float, vocab_size: int) -> None:
        self.process, self.link, self.deadline, self.vocab_size = process, link, deadline, vocab_size
        self.lost: str | None = None
        self.lookahead = 0
        link.give_up_after(deadline)

    def configure(self, setup: Setup) -> bool:
        """Let it draft as `setup` says from the next request on; False if it is lost."""
        self.lookahead = setup.num_speculative_tokens
        return self.ask(setup, Ready) is not None

    def tell(self, message: object) -> None:
        """Send `message`, or note that the draft is lost."""
        if self.lost is None:
            try:
                self.link.send(message)
            except LinkError as error:
                self.lose(str(error))

    def draft(self, request: str, round_index: int) -> Draft:
        """Wait for the draft after outcome `round_index`; an empty one if the draft is lost, as one silent past the deadline is."""
        if self.lost is None:
            try:
                draft = self._await(Draft, lambda draft: draft.request == request)
                self._check(draft, round_index)
                return draft
            except LinkError as error:
                self.lose(str(error))
        return Draft(request, round_index, (), None, False)

    def _check(self, draft: Draft, round_index: int) -> None:
        """Raise LinkError for what is no draft of this round: it must not fail the request."""
        known = all(isinstance(token, int) and 0 <= token < self.vocab_size for token in draft.tokens)
        if draft.round != round_index or not known or len(draft.tokens) > self.lookahead:
            raise LinkError(f"the draft of round {draft.round} came malformed or out of turn, in round {round_index}")
        if draft.laws is not None:
            try:
                draft.laws.check(draft.tokens, self.vocab_size)
            except Exception as error:
                raise LinkError(f"the draft of round {draft.round} came malformed: {error}") from error

    def ask(self, question: object, kind: type[T], deadline: float | None = None) -> T | None:
        """Send `question` and return the answer, a `kind`; None if the draft is lost."""
        self.tell(question)
        try:
            return self._await(kind, deadline=deadline) if self.lost is None else None
        except LinkError as error:
            self.lose(str(error))
            return None

    def _await(self, kind: type[T], wanted: Callable[[T], bool] = lambda _: True, deadline: float | None = None) -> T:
        """Return the next `kind` that is wanted, passing over drafts that a cancelled request left behind."""
        while True:
            message: object = self.link.expect(kind, Draft, deadline=deadline or self.deadline)
            if isinstance(message, kind) and wanted(message):
                return message

    def lose(self, reason: str) -> None:
        """Give the draft up: end its process and go on as AR."""
        self.lost = reason
        logger.warning("draft lost: %s; decoding goes on without it", reason)
        with suppress(OSError):
            self.process.kill()
        self.process.wait()
        self.link.close()


class Scheduler:
    """Decodes requests round by round with a target and, unless mode is ar, a draft."""

    def __init__(self, target: Target, spans: deque[Span]) -> None:
        self.target, self.spans = target, spans
        self._drafted = self._accepted = self._drafts = 0
        self._warned = False

    def decode(self, request: Request, peer: DraftPeer | None) -> Iterator[tuple[int, ...]]:
        """Yield the tokens that the prefill and then each round commit, until the request ends or the caller stops asking."""
        request.started = monotonic()
        row = None
        try:
            if peer is not None:
                peer.tell(Start(request.request_id, request.prompt, tuple(request.end_ids), request.params))
            with recorded(self.spans, "target", "prefill", 0, request.request_id):
                row, verdict = self.target.start(request.prompt, request.params, tuple(request.end_ids))
            first = self._settle(request, peer, 0, (), verdict)
            request.first_token = monotonic()
            yield first
            while request.finish_reason is None:
                yield self._round(request, peer, row)
        finally:
            request.ended = monotonic()
            if row is not None:
                self.target.stop(row)
            if peer is not None:
                peer.tell(Stop(request.request_id))

    def _round(self, request: Request, peer: DraftPeer | None, row: int) -> tuple[int, ...]:
        index = len(request.rounds) + 1
        draft = self._next_draft(request, peer, index)
        asked = monotonic()
        proposal = Proposal(draft.tokens, draft.laws).shortened(request.remaining() - 1)
        with recorded(self.spans, "target", "verify", index, request.request_id):
            verdict = self.target.verify([proposal if r == row else None for r in range(len(self.target.rows))])[row]
        verified = monotonic()
        if verdict is None:
            raise RuntimeError(f"row {row} is idle")
        wait = asked - request.told if peer is not None else 0.0
        kept = self._settle(request, peer, index, proposal.tokens, verdict)
        self._record(request, draft, len(proposal.tokens), verdict.accepted, len(kept), verified - asked, wait)
        return kept

    def _next_draft(self, request: Request, peer: DraftPeer | None, index: int) -> Draft:
        """Wait for the draft of round `index`, counting from the outcome's leaving: on a shared core the draft works from then on."""
        if peer is None:
            return Draft(request.request_id, index - 1, (), None, False)
        draft = peer.draft(request.request_id, index - 1)
        self.spans.append(Span("target", "wait", request.told, monotonic(), index, request.request_id))
        return draft

    def _settle(self, request: Request, peer: DraftPeer | None, index: int, drafted: tuple[int, ...], verdict: Verdict) -> tuple[int, ...]:
        """Commit what the verdict emits and let the draft know before anything else is done with it."""
        kept = request.commit([*drafted[: verdict.accepted], verdict.bonus], verdict.logprobs)
        request.told = monotonic()
        if peer is not None and request.finish_reason is None:
            peer.tell(Outcome(request.request_id, index, verdict.accepted, verdict.bonus))
        return kept

    def _record(self, request: Request, draft: Draft, drafted: int, accepted: int, committed: int, verify: float, wait: float) -> None:
        request.rounds.append(
            Round(
                request=request.request_id,
                drafted=drafted,
                accepted=accepted,
                committed=committed,
                hit=draft.hit,
                backup=draft.backup,
                verify_seconds=verify,
                wait_seconds=wait,
            )
        )
        self._watch_acceptance(drafted, accepted)

    def _watch_acceptance(self, drafted: int, accepted: int) -> None:
        self._drafts += drafted > 0
        self._drafted += drafted
        self._accepted += accepted
        if not self._warned and self._drafts >= WARN_AFTER_ROUNDS and self._accepted < WARN_BELOW_RATE * self._drafted:
            self._warned = True
            logger.warning(
                "only %d of %d draft tokens were accepted in %d rounds: the draft does not fit the target; check both, or use mode='ar'",
                self._accepted,
                self._drafted,
                self._drafts,
            )
