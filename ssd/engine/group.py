"""Several draft workers where one might stand: each caches its share of the outcomes of every row, and whoever holds the outcome answers.

Every worker has the whole draft and follows every row's text. A round: the outcomes go to all workers, and each answers at once with the
drafts of those that it holds. Once somebody holds the outcome of every row, or all have answered, one worker drafts for the rows that
nobody holds, where the backup is `jit`: it cannot know sooner that no other does, so a miss takes one message more each way. Then all are
told what is sent to the target, and build the next cache for that. Who owns an outcome is never asked, only who holds it: should two
workers rank the same candidates differently, that costs a hit, and never a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic, sleep

from ssd.engine.link import AWAKE_SECONDS, BackUp, Draft, Outcomes, Sent, Setup
from ssd.engine.peer import DraftPeer
from ssd.engine.transport import PARTS

# Between two looks at who has answered, once the first moments are over.
NAP_SECONDS = 1e-4


class DraftGroup:
    """The workers of a placement, at least two, as the scheduler sees a single one (DraftPeer): lost when all of them are."""

    def __init__(self, peers: Sequence[DraftPeer]) -> None:
        self.peers = tuple(peers)
        self._backup = "jit"

    def configure(self, setup: Setup) -> bool:
        """Let each draft its share of what `setup` says from the next request on; False if all are lost."""
        self._backup = setup.backup
        for index, peer in enumerate(self.peers):
            peer.configure(replace(setup, placement=setup.placement.of_worker(index), worker=index, workers=len(self.peers)))
        return self.lost is None

    # --- rounds ---

    def report(self, outcomes: Outcomes) -> None:
        """Send what a round came to; drafts are then due."""
        for peer in self.peers:
            its = tuple(outcome for outcome in outcomes.outcomes if outcome.request in peer.known)
            if its:
                peer.report(replace(outcomes, outcomes=its))

    def drafts(self) -> dict[str, Draft]:
        """Wait for the drafts that are due, by request, and tell every worker of them; none if none are, or if all workers are lost."""
        due = [peer.due for peer in self.peers if peer.due is not None]
        if not due:
            return {}
        index, known = due[0][0], self.known
        requests = tuple(request for request in dict.fromkeys(name for _, names in due for name in names) if request in known)
        found = self._held(requests)
        missing = tuple(request for request in requests if request not in found or found[request].hit is False)
        if missing and self._backup == "jit":
            found |= self._backed_up(BackUp(index, missing))
        for peer in self.peers:
            if peer.lost is None:
                sent = (Draft(d.request, d.tokens, d.hit, d.backup) for d in found.values() if d.request in peer.known)
                peer.tell(Sent(index, tuple(sent)))
        return found

    def _held(self, requests: Sequence[str]) -> dict[str, Draft]:
        """Wait until somebody holds the outcome of each request, or all have answered; return what they sent, held drafts before others."""
        waiting = [peer for peer in self.peers if peer.due is not None]
        held: dict[str, Draft] = {}
        others: dict[str, Draft] = {}
        while waiting and not held.keys() >= set(requests):
            peer = self._next(waiting)
            waiting.remove(peer)
            for request, draft in peer.drafts().items():
                (held if draft.hit else others).setdefault(request, draft)
        for peer in waiting:
            peer.pass_over()
        return {request: draft for request, draft in {**others, **held}.items() if request in requests}

    def _next(self, waiting: Sequence[DraftPeer]) -> DraftPeer:
        """Return the first to answer. Of several that are all silent past the deadline all are lost; one alone is waited for asleep."""
        deadline, past, before = waiting[0].deadline, 0.0, monotonic()
        while len(waiting) > 1:
            for peer in waiting:
                if peer.answers:
                    return peer
            now = monotonic()
            past, before = past + min(now - before, deadline / PARTS), now
            if past > deadline:
                for peer in waiting:
                    peer.lose(f"no message within {peer.deadline:g} s")
            sleep(NAP_SECONDS if past > AWAKE_SECONDS else 0)
        return waiting[0]

    def _backed_up(self, message: BackUp) -> dict[str, Draft]:
        """Have one worker draft, the one that has been at work longest: it surely has the prompts. If it is lost, the next takes over."""
        for peer in sorted(self.peers, key=lambda peer: peer.since):
            its = tuple(request for request in message.requests if request in peer.known)
            if its and peer.lost is None:
                drafts = peer.back_up(replace(message, requests=its))
                if peer.lost is None:
                    return drafts
        return {}

    @property
    def lost(self) -> str | None:
        """Why the workers are lost, if all are."""
        return None if any(peer.lost is None for peer in self.peers) else reason(self.peers)

    @property
    def known(self) -> set[str]:
        """The requests that any worker has been told of."""
        return set().union(*(peer.known for peer in self.peers))


def reason(peers: Sequence[DraftPeer]) -> str | None:
    """Return why those of them that are lost are; None if none is."""
    return "; ".join(f"worker {number}: {peer.lost}" for number, peer in enumerate(peers, 1) if peer.lost is not None) or None
