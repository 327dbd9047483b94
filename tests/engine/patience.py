"""Real engines whose target waits for the draft's cache: what is hit hangs on the texts, and not on how fast or busy the machine is."""

from __future__ import annotations

from time import monotonic, sleep

import ssd
from ssd.engine.link import Spans, TakeSpans
from ssd.engine.peer import DraftPeer

# A process that does not answer or build for so long, seconds, is a fault; a machine that stands still for a while is none.
LONG = 250.0


def patient(engine: ssd.Engine) -> None:
    """As it is configured now, with a cache and one draft worker, let it verify drafts only once some steps of the next cache are done."""
    scheduler = engine._worker.scheduler
    # After one that may catch up the others give every branch a token; whether last tokens are fed as well hangs on the time there is.
    due, steps = scheduler._drafts_due, max(2, engine.plan.num_speculative_tokens)
    (peer,) = engine.peer.peers
    peer.deadline = LONG

    def patiently(index: int):
        drafts = due(index)
        if any(draft.tokens for draft in drafts.values()):
            engine._spans.extend(built(peer, index - 1, steps))
        return drafts

    scheduler._drafts_due = patiently


def built(peer: DraftPeer, number: int, steps: int) -> list:
    """Wait for so many steps after round `number`; return what the draft was busy with meanwhile."""
    spans: list = []
    end = monotonic() + LONG
    while sum(span.activity == "build" and span.round == number for span in spans) < steps:
        answer = peer.ask(TakeSpans(), Spans)
        if answer is None:
            break
        spans += answer.spans
        assert monotonic() < end, "the draft builds no cache"
        # It works between two messages.
        sleep(1e-3)
    return spans
