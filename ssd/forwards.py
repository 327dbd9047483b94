"""How long forwards of both models of a running engine take, wherever a plan may place them: latency tables of tokens and context."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial as bound
from typing import Literal, TypeVar

import numpy as np

from ssd.devices import pinned
from ssd.engine.engine import Engine
from ssd.engine.link import Ping, Rehearse, Rehearsed
from ssd.engine.peer import DraftPeer
from ssd.engine.rehearsal import rehearse
from ssd.engine.shares import leaders
from ssd.specs import Configuration, ForwardLatency, Placement

VERIFY_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
BRANCHES = (1, 2, 3, 4, 6, 8, 12, 16)
REPEATS = 5
# Batches only: a forward is repeated less often to keep within this, and left out where one would take longer still.
POINT_SECONDS = 2.0
# Cores that share something with others change their speed several times a second: a table, and the rounds of a configuration, are
# measured over at least so many seconds.
LEAST_SECONDS = 2.0
# The longer context that a table's first and last forward are timed at as well: so many times the load's own, and at least so many tokens,
# where the models can; where not even this many times, at none. Each in turn with the same forward at the load's own context.
LONGER, LEAST_LONGER, WORTH_LONGER, LONGER_REPEATS = 4, 1024, 2, 3
# The draft's work beside which the target's contended forwards are timed, and the other way round.
BUSY_BRANCHES = 4
BUSY_TOKENS = 4

Model = Literal["target", "draft"]
# Seconds of forwards by their tokens, how often, and the context that each token sees.
Measure = Callable[[int, int, int], list[float]]
T = TypeVar("T")


class Forwards:
    """Forwards of the two models of an engine, timed at the context of a load and, the smallest and the largest, at a longer one.

    context: tokens that each query sees. rows: requests decoded together; theirs are packed into one row. longest: prompt and output
    together that the models can take. brief: at the one context only.
    """

    def __init__(self, engine: Engine, context: int, rows: int, longest: int, *, brief: bool = False) -> None:
        self.engine, self.context, self.rows, self.longest, self.brief = engine, context, rows, longest, brief

    def at(self, place: Placement) -> Iterator[ForwardLatency]:
        """Time both models at `place`: alone where they take turns there, each beside the other where they do not."""
        alone = place.overlaps or not place.draft
        if place.draft:
            # Of several workers, which are alike, one is asked.
            self.engine.configure(Configuration(mode="sd", num_speculative_tokens=1, placement=place.of_worker(-1)))
        target, draft = (bound(measure, place, alone=alone) for measure in (self._target, self._draft))
        yield self._table("target", place.target, self._sizes(VERIFY_TOKENS), target, not alone)
        if place.draft:
            yield self._table("draft", place.draft, self._sizes(BRANCHES), draft, not alone)
            if not alone:
                # After a miss it drafts for the rows that missed while the target waits.
                waited = sorted({1, -(-self.rows // 4), -(-self.rows // 2), self.rows})
                yield self._table("draft", place.draft, waited, bound(self._draft, place, alone=True), False)

    def probe(self) -> float:
        """Return the seconds of a forward of the target with a token for each row, after a few."""
        with pinned(leaders(self.engine.plan.placement.target)):
            return statistics.median(rehearse(self.engine.loaded, self.rows, self.context, lambda done: done < LONGER_REPEATS))

    def expected_seconds(self, place: Placement, forward: float) -> float:
        """Roughly how long `at` takes where the forward of `probe` takes so long."""
        tables = 1 if not place.draft else 2 if place.overlaps else 3
        longer = 1 if self._longer(self.rows * BRANCHES[-1]) is None else 1.5
        return tables * longer * max(LEAST_SECONDS, forward * REPEATS * len(VERIFY_TOKENS))

    @property
    def peer(self) -> DraftPeer | None:
        """The draft's worker; of several, which are alike, the first."""
        return self.engine.peer.peers[0] if self.engine.peer is not None else None

    def ask(self, question: object, kind: type[T]) -> T:
        """Return the draft's answer; RuntimeError if it is lost."""
        peer = self.peer
        answer = peer.ask(question, kind) if peer is not None else None
        if answer is None:
            raise RuntimeError(f"the draft was lost while profiling: {peer.lost if peer is not None else 'there is none'}")
        return answer

    def _table(self, model: Model, devices: tuple[str, ...], sizes: Sequence[int], measure: Measure, contended: bool) -> ForwardLatency:
        timed = self._timed(sizes, lambda tokens, repeats: measure(tokens, repeats, self.context))
        means = {tokens: statistics.fmean(seconds) for tokens, seconds in timed.items()}
        return ForwardLatency(
            model=model,
            devices=devices,
            tokens=tuple(means),
            seconds=tuple(means.values()),
            spread=tuple(_spread(timed[tokens]) / mean for tokens, mean in means.items()),
            contended=contended,
            context=self.context,
            growth=self._growth(means, measure),
        )

    def _sizes(self, each: Sequence[int]) -> list[int]:
        """Tokens of a forward with so many in each row of the batch, every other of these where it has several, and of a forward of one."""
        return sorted({1, *(self.rows * tokens for tokens in (each if self.rows == 1 else (1, *each[1::2], each[-1])))})

    def _timed(self, sizes: Sequence[int], measure: Callable[[int, int], list[float]]) -> dict[int, list[float]]:
        """Seconds of forwards of rising sizes; the long ones of a batch are repeated less often, and left out past what a plan needs."""
        found: dict[int, list[float]] = {}
        repeats: dict[int, int] = {}
        expected = 0.0
        for size in sizes:
            if self.rows > 1 and expected * size > POINT_SECONDS and size > 2 * self.rows:
                break
            fewer = self.rows > 1 and expected
            repeats[size] = max(1, min(REPEATS, int(POINT_SECONDS / (expected * size)))) if fewer else REPEATS
            found[size] = measure(size, repeats[size])
            expected = statistics.median(found[size]) / size
        while sum(map(sum, found.values())) < LEAST_SECONDS:
            for size in found:
                found[size] += measure(size, repeats[size])
        return found

    def _longer(self, tokens: int) -> int | None:
        """The longer context of a table whose largest forward has so many tokens, none where the models cannot take one worth timing."""
        found = min(max(LONGER * self.context, LEAST_LONGER), self.longest - tokens)
        return None if self.brief or found < WORTH_LONGER * self.context else found

    def _growth(self, seconds: dict[int, float], measure: Measure) -> tuple[float, ...]:
        """Seconds that a token of context more adds to a forward of each size: timed for the first and the last, between them a line.

        Never less than none, and never more than in proportion to the context.
        """
        longer = self._longer(max(seconds))
        if longer is None:
            return ()
        ends = sorted({min(seconds), max(seconds)})
        slopes = [seconds[tokens] * self._share(tokens, longer, measure) for tokens in ends]
        return tuple(min(float(np.interp(tokens, ends, slopes)), each / self.context) for tokens, each in seconds.items())

    def _share(self, tokens: int, longer: int, measure: Measure) -> float:
        """What a token of context more adds to a forward, as a share of it: both contexts in turn, for a machine may change its speed."""
        near, far = list[float](), list[float]()
        while not near or sum(near) + sum(far) < LEAST_SECONDS / 4:
            near += measure(tokens, LONGER_REPEATS, self.context)
            far += measure(tokens, LONGER_REPEATS, longer)
        return max(0.0, statistics.median(far) / statistics.median(near) - 1) / (longer - self.context)

    def _target(self, place: Placement, tokens: int, repeats: int, context: int, alone: bool) -> list[float]:
        with pinned(leaders(place.target)), self._busy_draft(alone):
            return rehearse(self.engine.loaded, tokens, context, lambda done: done < repeats)

    @contextmanager
    def _busy_draft(self, alone: bool) -> Iterator[None]:
        if alone or self.peer is None:
            yield
            return
        self.peer.tell(Rehearse(self.rows * BUSY_BRANCHES, self.context, 0))
        try:
            yield
        finally:
            self.ask(Ping(), Rehearsed)
            self.peer.link.expect(Ping, deadline=self.engine.deadline)

    def _draft(self, place: Placement, tokens: int, repeats: int, context: int, alone: bool) -> list[float]:
        # Several workers share the branches of a cache; for the rows that missed one of them drafts.
        question = Rehearse(tokens if alone else -(-tokens // place.draft_workers), context, repeats)
        if alone or self.peer is None:
            return list(self.ask(question, Rehearsed).seconds)
        link = self.peer.link
        self.peer.tell(question)
        with pinned(leaders(place.target)):
            rehearse(self.engine.loaded, self.rows * BUSY_TOKENS, self.context, lambda _: link.peek() is None)
        return list(link.expect(Rehearsed, deadline=self.engine.deadline).seconds)


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return high - low
