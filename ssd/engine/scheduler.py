"""Requests and rounds: the loop that both devices turn around."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

from sim.metrics import Metrics, Round, drafter
from sim.timeline import Span
from ssd.engine.group import DraftGroup
from ssd.engine.link import Draft, Outcome, Outcomes, Start, Stop
from ssd.engine.peer import DraftPeer
from ssd.engine.prefix import PREFILL_CHUNK, SHARED_CHUNK
from ssd.engine.spans import recorded
from ssd.engine.target import Proposal, Target, TokenLogprobs, Verdict
from ssd.engine.text import Text
from ssd.engine.waiting import WaitingRoom
from ssd.specs import SamplingParams

logger = logging.getLogger(__name__)

# A draft whose tokens are hardly ever right is a mistake its user should hear of.
WARN_AFTER_ROUNDS, WARN_BELOW_RATE = 32, 0.1


@dataclass(eq=False)
class Request:
    """One request on its way. caller: whose turn it counts for while it waits."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    end_ids: frozenset[int]
    room: int
    text: Text
    index: int = 0
    caller: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None
    started: float = field(default_factory=monotonic)
    first_token: float = 0.0
    ended: float = 0.0

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
        """Return the counts and rates of this request so far; its seconds begin when it was asked for."""
        return Metrics.from_rounds(
            self.rounds,
            num_output_tokens=len(self.output),
            total_seconds=self.ended - self.started,
            time_to_first_token=self.first_token - self.started,
        )


class Scheduler:
    """Decodes requests round by round with a target and, unless mode is ar, a draft; they join and leave between any two rounds."""

    def __init__(self, target: Target, peer: DraftPeer | DraftGroup | None, spans: deque[Span], backup: str = "jit") -> None:
        self.target, self.peer, self.spans, self.backup = target, peer, spans, backup
        self.waiting: WaitingRoom[Request] = WaitingRoom()
        self.running: dict[int, Request] = {}
        # The round whose outcomes left last, and when they did.
        self._round, self._told = 0, 0.0
        self._drafted = self._accepted = self._drafts = 0
        self._warned = False

    @property
    def busy(self) -> bool:
        """Whether there is a request to decode."""
        return bool(self.running) or len(self.waiting) > 0

    def add(self, request: Request) -> None:
        """Let a request wait for a row."""
        self.waiting.add(request.caller, request)

    def cancel(self, request: Request) -> bool:
        """Forget a request, between two rounds; whether it was waiting or running."""
        if self.waiting.remove(request):
            return True
        row = next((row for row, other in self.running.items() if other is request), None)
        if row is not None:
            self._leave(row)
        return row is not None

    def step(self) -> list[tuple[Request, tuple[int, ...]]]:
        """Play one round: take in who waits, verify every draft, feed a piece of one prompt. Return what each request gained.

        The first tokens of a request count as a gain like others; a request that ends has its reason, and has left its row.
        """
        self._admit()
        if not self.running:
            return []
        index = self._round + 1
        drafts = self._drafts_due(index)
        asked = monotonic()
        begun = {row: request for row, request in self.running.items() if request.output}
        proposals = {row: self._proposal(request, drafts) for row, request in begun.items()}
        names = ", ".join(request.request_id for request in self.running.values())
        with recorded(self.spans, "target", "verify" if proposals else "prefill", index, names):
            verdicts = self.target.round(proposals, SHARED_CHUNK if proposals else PREFILL_CHUNK)
        verified = monotonic()
        wait = asked - self._told if self._told and drafts else 0.0
        gains = self._settle(index, proposals, verdicts)
        for row, kept in gains.items():
            request = self.running[row]
            if row not in begun:
                request.first_token = monotonic()
            else:
                draft = drafts.get(request.request_id, Draft(request.request_id))
                self._record(request, draft, len(proposals[row].tokens), verdicts[row], len(kept), verified - asked, wait, asked - wait)
        found = [(self.running[row], kept) for row, kept in gains.items()]
        for row in gains:
            if self.running[row].finish_reason is not None:
                self._leave(row)
        return found

    def _admit(self) -> None:
        """Give idle rows to who waits, and let the draft know of every request that it does not know, as after it was lost."""
        while self.waiting and self.target.idle:
            request = self.waiting.next()
            self.running[self.target.start(request.prompt, request.params, tuple(request.end_ids))] = request
        for peer in self._peers:
            if peer.lost is not None:
                peer.take_back()
            for request in self.running.values():
                if peer.lost is None and request.request_id not in peer.known:
                    peer.known.add(request.request_id)
                    peer.tell(Start(request.request_id, request.prompt, tuple(request.end_ids), request.params, tuple(request.output)))

    def _leave(self, row: int) -> None:
        request = self.running.pop(row)
        request.ended = monotonic()
        self.target.stop(row)
        for peer in self._peers:
            if request.request_id in peer.known:
                peer.known.discard(request.request_id)
                peer.tell(Stop(request.request_id))

    @property
    def _peers(self) -> tuple[DraftPeer, ...]:
        return () if self.peer is None else self.peer.peers

    def _drafts_due(self, index: int) -> Mapping[str, Draft]:
        """Wait for the drafts of round `index`, counting from the outcomes' leaving: on a shared core the draft works from then on."""
        if self.peer is None:
            return {}
        running = {request.request_id for request in self.running.values()}
        drafts = {name: draft for name, draft in self.peer.drafts().items() if name in running}
        if drafts:
            self.spans.append(Span("target", "wait", self._told, monotonic(), index, ", ".join(drafts)))
        return drafts

    def _proposal(self, request: Request, drafts: Mapping[str, Draft]) -> Proposal:
        draft = drafts.get(request.request_id)
        return Proposal() if draft is None else Proposal(draft.tokens, draft.laws).shortened(request.remaining() - 1)

    def _settle(self, index: int, proposals: Mapping[int, Proposal], verdicts: Mapping[int, Verdict]) -> dict[int, tuple[int, ...]]:
        """Commit what the verdicts emit and let the draft know before anything else is done with it."""
        gains, outcomes = {}, []
        for row, verdict in verdicts.items():
            request, drafted = self.running[row], proposals.get(row, Proposal()).tokens
            gains[row] = request.commit([*drafted[: verdict.accepted], verdict.bonus], verdict.logprobs)
            if self.peer is not None and request.finish_reason is None and request.request_id in self.peer.known:
                outcomes.append(Outcome(request.request_id, verdict.accepted, verdict.bonus))
        self._round, self._told = index, monotonic()
        if self.peer is not None and outcomes:
            self.peer.report(Outcomes(index, tuple(outcomes)))
        return gains

    def _record(
        self, request: Request, draft: Draft, drafted: int, verdict: Verdict, committed: int, verify: float, wait: float, start: float
    ) -> None:
        request.rounds.append(
            Round(
                request=request.request_id,
                drafted=drafted,
                accepted=verdict.accepted,
                committed=committed,
                hit=draft.hit,
                backup=draft.backup,
                verify_seconds=verify,
                wait_seconds=wait,
                start=start,
                drafter=drafter(len(draft.tokens), draft.hit, draft.backup, self.backup),
            )
        )
        self._watch_acceptance(drafted, verdict.accepted)

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
