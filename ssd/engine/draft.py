"""The draft's side of a round: answer from the cache at once, build the next cache while the target verifies, wait for the outcomes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from time import monotonic

import numpy as np
import torch

from sim.tempo import Tempo
from sim.timeline import Span
from ssd.engine.cache import CANDIDATES, Branches, Candidates, advance, candidates
from ssd.engine.confidence import Confidence, Kinds, kinds
from ssd.engine.draft_row import Catch, DraftRow
from ssd.engine.forward import SlotModel
from ssd.engine.kv import Abort, Aborted
from ssd.engine.link import BackUp, Counts, Draft, Drafts, Link, Outcome, Outcomes, Sent, Setup, Start, Stop
from ssd.engine.ngram import Lookup
from ssd.engine.packed import Laws
from ssd.engine.prefix import PREFILL_CHUNK, SHARED_CHUNK, place_for, share_prefix
from ssd.engine.proposer import Proposer
from ssd.engine.spans import MAX_SPANS, recorded
from ssd.models import LoadedModel
from theory.fanout import shortened

# Outcomes are learnt from when there is nothing else to do, but before so many are due.
MOST_LESSONS = 16
# How often what the draft's confidence has been worth is told to the target.
TELL_EVERY = 256


def most_branches(setup: Setup, rows: int) -> int:
    """Return the branches that one row may have at once."""
    planned = max(sum(setup.fan_out_hit), sum(setup.fan_out_miss), setup.budget * rows)
    # Built for as long as the outcomes keep waiting, a cache may grow to twice what was planned.
    return 2 * planned if setup.building == "anytime" else planned


def slots_needed(max_model_len: int, setup: Setup, rows: int = 1) -> int:
    """Return the slots of a row: the waste slot, the context, the draft under verification, every branch."""
    return 1 + max_model_len + (most_branches(setup, rows) + 1) * (setup.num_speculative_tokens + 1)


class Drafter:
    """The draft model, its key-value slots and the speculation cache of every row."""

    def __init__(self, loaded: LoadedModel, link: Link, rows: int, max_model_len: int, vocab_size: int) -> None:
        self.loaded, self.link, self.max_model_len = loaded, link, max_model_len
        self.vocab_size = min(vocab_size, loaded.vocab_size)
        self.rows: list[DraftRow | None] = [None] * rows
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self.round = 0
        self.confidence = Confidence()
        self.tempo = Tempo()
        self._ages = count()
        # Whether it is still to be heard which drafts the target verifies.
        self._unsettled = False
        self._builder: Iterator[None] | None = None
        self._growing: list[tuple[DraftRow, Branches]] = []
        self._lessons: list[tuple[Kinds, Candidates, int, int]] = []

    def configure(self, setup: Setup) -> None:
        """Draft as `setup` says from the next request on."""
        self.setup, self.tempo, self._builder, self._unsettled = setup, Tempo(), None, False
        self.rows = [None] * len(self.rows)
        self.model = SlotModel(self.loaded, len(self.rows), slots_needed(self.max_model_len, setup, len(self.rows)))
        if setup.calibration:
            self.confidence = Confidence(setup.calibration)

    @property
    def caches(self) -> bool:
        """Whether there is a speculation cache: SD has none."""
        return bool(self.setup.fan_out_hit or self.setup.budget)

    @property
    def weighs(self) -> bool:
        """Whether it hangs on their estimated chances which outcomes are drafted for, or when."""
        return self.setup.budget > 0 or self.setup.building == "anytime"

    def start(self, start: Start) -> None:
        """Take a request in; its prompt is fed while there is time, and its likeliest first tokens drafted for, as if an empty draft were
        being verified."""
        proposer = Proposer(start, self.setup, self.vocab_size, self.model.device)
        index, trunk = place_for([*start.prompt, *start.output], self.rows, self.model)
        row = DraftRow(index, start, trunk, proposer, next(self._ages))
        row.end_ids = tuple(token for token in start.end_ids if token < self.vocab_size)
        row.speculates = self._fits(row) and max(row.tokens) < self.vocab_size
        if self.setup.backup == "ngram":
            row.lookup = Lookup()
            row.lookup.add(row.tokens)
        self.rows[index] = row
        self._build_on()

    def stop(self, request: str) -> None:
        """Let a request go; what was fed of its text is kept for whoever begins alike."""
        for row in self._active():
            if row.request == request:
                row.active, row.age = False, next(self._ages)
                row.draft, row.waves, row.seen, row.lookup = None, [], None, None
                row.trunk.cut(row.trunk.length)
        if not self._active():
            self.tempo.rest()
        else:
            self._build_on()

    def answer(self, message: Outcomes) -> None:
        """Send a draft for each outcome: those in the cache as they are, the others by the backup. The next cache is built by `work`.

        One of several workers sends none for what it does not hold, and waits until it hears what the target verifies.
        """
        self.tempo.heard()
        self._builder, self._growing, self.round = None, [], message.round
        rows, alone = [self._commit(outcome) for outcome in message.outcomes], self.setup.workers == 1
        self._send(rows, self.confidence.counts() if message.round % TELL_EVERY == 0 else (), backs_up=alone)
        self._unsettled = not alone
        if alone:
            self.tempo.sent()
        self._build_on()

    def back_up(self, message: BackUp) -> None:
        """Draft for rows whose outcome no worker holds."""
        rows = {row.request: row for row in self._active()}
        self._send([rows[request] for request in message.requests])

    def follow(self, message: Sent) -> None:
        """Go on from the drafts that are at the target, whoever made them."""
        rows = {row.request: row for row in self._active()}
        for draft in message.drafts:
            # A request may have been stopped meanwhile.
            if draft.request in rows:
                rows[draft.request].follow(draft.tokens, hit=bool(draft.hit))
        self.tempo.sent()
        self._builder, self._unsettled = None, False
        self._build_on()

    def _send(self, rows: Sequence[DraftRow], told: tuple[Counts, ...] = (), *, backs_up: bool = True) -> None:
        with recorded(self.spans, "draft", "answer", self.round, _names(rows)):
            self._complete(rows, backs_up=backs_up)
            drafts = Drafts(self.round, tuple(map(self._draft, rows, self._drafted(rows))), told)
        self.link.send(drafts)

    def _build_on(self) -> None:
        """Let `work` build the next cache, where it is known for which drafts."""
        if self._builder is None and not self._unsettled:
            self._builder = self._building()

    def work(self) -> bool:
        """Do the next piece of what is worth doing before a message comes; False if nothing is."""
        if self._builder is None:
            return False
        try:
            next(self._builder)
        except (Aborted, StopIteration):
            self._builder = None
        return self._builder is not None

    def _active(self) -> list[DraftRow]:
        return [row for row in self.rows if row is not None and row.active]

    def _commit(self, outcome: Outcome) -> DraftRow:
        row = next(row for row in self._active() if row.request == outcome.request)
        if row.seen is not None and self.weighs:
            self._lessons.append((kinds(row.proposer), row.seen, outcome.accepted, outcome.bonus))
        if row.sent:
            self.tempo.verified(outcome.accepted, len(row.sent))
        row.commit(outcome.accepted, outcome.bonus)
        row.speculates = row.speculates and self._fits(row) and outcome.bonus < self.vocab_size
        return row

    def _fits(self, row: DraftRow) -> bool:
        # A branch reaches K+1 tokens past a draft of K tokens.
        return row.length + 2 * self.setup.num_speculative_tokens + 2 <= self.loaded.max_positions

    # --- the answer ---

    def _drafted(self, rows: Sequence[DraftRow]) -> list[tuple[int, ...]]:
        """Return up to K tokens of each row's draft, in one transfer from the device."""
        found = [row.draft.tokens[1 : self.setup.num_speculative_tokens + 1] if row.draft is not None else [] for row in rows]
        every = [token for tokens in found for token in tokens]
        known = iter(torch.cat(every).tolist() if every else ())
        return [tuple(islice(known, len(tokens))) for tokens in found]

    def _draft(self, row: DraftRow, drafted: tuple[int, ...]) -> Draft:
        laws = None
        if row.speculates and row.draft is not None:
            row.sent = drafted
            if row.proposer.sends_q:
                laws = Laws.of([law for law in row.draft.laws[: len(row.sent)] if law is not None])
        elif row.speculates and row.lookup is not None:
            row.sent, row.backup = self._looked_up(row.lookup), True
        return Draft(row.request, row.sent, row.hit if self.caches else None, row.backup and self.caches, laws)

    def _looked_up(self, lookup: Lookup) -> tuple[int, ...]:
        proposed = lookup.propose(self.setup.num_speculative_tokens)
        unknown = next((place for place, token in enumerate(proposed) if token >= self.vocab_size), len(proposed))
        return proposed[:unknown]

    def _complete(self, rows: Sequence[DraftRow], *, backs_up: bool) -> None:
        """Draft now what is missing: of branches that are short, and for misses where the backup is `jit`, all of these in one forward a
        step; hits that are complete cost nothing. Where drafts may be of any length, only as long as it speeds the round up."""
        late = self.setup.building == "anytime"
        drafting = [
            row
            for row in rows
            if row.speculates
            and (row.hit or (backs_up and self.setup.backup == "jit"))
            # Nobody waits for a prompt; but where drafts are to be whole, for one that is read for the first time.
            and not (len(row.pending) > SHARED_CHUNK and (late or row.resumed))
        ]
        if self.setup.redraft_all and not all(row.hit for row in rows):
            for row in drafting:
                row.forget_draft()
        for row in drafting:
            row.backup = not row.hit
        while short := [row for row in drafting if row.drafted < self.setup.num_speculative_tokens]:
            lengths = [row.drafted for row in rows], [row.drafted for row in short]
            if late and not self.tempo.worthwhile(*lengths, sum(max(1, len(row.pending)) for row in short)):
                return
            self._feed(short, PREFILL_CHUNK)

    def _feed(self, rows: Sequence[DraftRow], chunk: int, abort: Abort | None = None) -> None:
        """Bring each row one forward on: what is pending, else the next token of its draft."""
        catches = {row.index: Catch(row, chunk, self.setup.num_speculative_tokens, self.model.device) for row in rows if row.draft is None}
        drafts = {row.index: row.draft for row in rows if row.draft is not None}
        queries = {index: catch.queries() for index, catch in catches.items()}
        begin = monotonic()
        try:
            logits = self.model.forward({**queries, **{index: draft.queries() for index, draft in drafts.items()}}, abort)
        except Aborted:
            for catch in catches.values():
                catch.row.trunk.slots.release(queries[catch.row.index].slots)
            raise
        for index, catch in catches.items():
            catch.take(queries[index], logits[index][:, : self.vocab_size])
        for index, draft in drafts.items():
            draft.grow(logits[index][:, : self.vocab_size])
        if not catches:
            self.tempo.stepped(len(drafts), monotonic() - begin)

    # --- the cache ---

    def _building(self) -> Iterator[None]:
        """Do what can be done before the outcomes come, one forward after another: catch up, plant and grow branches, feed prompts."""
        if len(self._lessons) >= MOST_LESSONS:
            self._learn()
        waiting = [row for row in self._active() if row.speculates]
        short = [row for row in waiting if len(row.pending) <= SHARED_CHUNK]
        while behind := [row for row in short if row.active and row.lags] if self.caches else []:
            with recorded(self.spans, "draft", "build", self.round, _names(behind)):
                self._feed(behind, SHARED_CHUNK, self._moot)
            yield
        yield from self._prompt(islice(self._prompts(), 1))
        yield from self._waves()
        yield from self._prompt(self._prompts())
        yield from self._waves()
        self._learn()

    def _learn(self) -> None:
        """Take in what the outcomes gone by say of the draft's confidence."""
        for lesson in self._lessons:
            self.confidence.learn(*lesson)
        self._lessons.clear()

    def _prompts(self) -> Iterator[DraftRow]:
        """Yield the row whose prompt is to be fed next, the first that came, until there is none."""
        while rows := [row for row in self._active() if row.speculates and row.draft is None]:
            yield min(rows, key=lambda row: row.age)

    def _prompt(self, rows: Iterable[DraftRow]) -> Iterator[None]:
        """Feed a piece of each prompt; never given up, or a long one would not come to an end beside quick rounds."""
        for row in rows:
            share_prefix(row, row.index, self.rows, self.model)
            chunk = SHARED_CHUNK if len(self._active()) > 1 else PREFILL_CHUNK
            with recorded(self.spans, "draft", "prefill", self.round, row.request):
                self._feed([row], chunk, partial(self._stopped, row.request))
            yield

    def _waves(self) -> Iterator[None]:
        """Grow a branch for each outcome that is planned, the likeliest first; for as long as there is time, for further ones too."""
        rows = [row for row in self._active() if row.speculates and row.seen is None and not row.lags]
        if not rows or not self.caches:
            return
        K, anytime = self.setup.num_speculative_tokens, self.setup.building == "anytime"
        planned, spare = self._ranked(rows)
        for outcomes in (planned, spare) if anytime else (planned,):
            while outcomes:
                chances = np.array([outcome[0] for outcome in outcomes])
                wave = outcomes[: self.tempo.best_width(chances, K)] if anytime else outcomes
                outcomes = outcomes[len(wave) :]
                # Meanwhile a request may have been stopped.
                self._growing = self._planted([outcome for outcome in wave if outcome[1].active])
                # The last draft token of every branch is fed as well, where no answer that lies ready has to wait for it: should it come
                # true, what may follow it is known at once.
                for step in range(K + 1):
                    if step == K and not self.tempo.in_time(len(wave)):
                        break
                    with recorded(self.spans, "draft", "build", self.round, _names(rows)):
                        self._step()
                    yield

    def _ranked(self, rows: Sequence[DraftRow]) -> tuple[list[Ranked], list[Ranked]]:
        """Return the outcomes that the plan grants the rows, and as many further ones, the likeliest first."""
        total = self.setup.budget * len(rows)
        planned: list[Ranked] = []
        spare: list[Ranked] = []
        for row in rows:
            fan_out = self.setup.fan_out_hit if row.hit else self.setup.fan_out_miss
            widest = max(CANDIDATES * self.weighs, *shortened(fan_out, len(row.sent))) if fan_out else CANDIDATES
            row.seen = candidates(row.branch, len(row.sent), row.end_ids, widest, weigh=self.weighs)
            chances = self.confidence.chances(kinds(row.proposer), row.seen) if self.weighs else row.seen.chances
            granted = row.seen.listed(fan_out) if fan_out else np.zeros(chances.shape, dtype=bool)
            planned += _likeliest(row, chances, granted, sum(fan_out))
            if not self.weighs:
                continue
            # A row has slots for as many again, and no more.
            spare += _likeliest(row, chances, ~granted & (chances > 0), sum(fan_out) or 2 * total)
        for found in (planned, spare):
            found.sort(key=lambda outcome: -outcome[0])
        if total:
            planned, spare = spare[:total], spare[total : 2 * total]
        if self.setup.workers > 1:
            planned, spare = (list(filter(self._owns, found)) for found in (planned, spare))
        return planned, spare

    def _owns(self, outcome: Ranked) -> bool:
        """Whether it is this worker's to draft for: the candidates of each place are dealt out in turn, and every place and round begins
        with another worker. It hangs on nothing that workers may see differently but the candidates' own order."""
        _, row, accepted, rank = outcome
        return (row.length + accepted + rank) % self.setup.workers == self.setup.worker

    def _planted(self, wave: Sequence[Ranked]) -> list[tuple[DraftRow, Branches]]:
        steps = self.setup.num_speculative_tokens + 1
        planted = []
        for row in {id(row): row for _, row, _, _ in wave}.values():
            chosen = sorted((k, r) for _, owner, k, r in wave if owner is row)
            accepted, ranks = np.array(chosen, dtype=np.int64).T
            branches = row.plant(accepted, ranks, steps)
            row.waves.append(branches)
            planted.append((row, branches))
        return planted

    def _step(self) -> None:
        begin = monotonic()
        growing = {row.index: branches for row, branches in self._growing if row.active}
        if growing:
            advance(self.model, growing, self.vocab_size, self._moot)
            self.tempo.stepped(sum(len(branches.accepted) for branches in growing.values()), monotonic() - begin)

    def _moot(self) -> bool:
        """Whether outcomes have come that the step under way cannot help: none is that of a branch growing in it that is still short."""
        message = self.link.peek()
        if not isinstance(message, Outcomes):
            return isinstance(message, Stop) and len(self._active()) == 1
        return not any(self._grows(outcome) for outcome in message.outcomes)

    def _grows(self, outcome: Outcome) -> bool:
        return any(
            row.request == outcome.request
            and branches.drafted < self.setup.num_speculative_tokens
            and branches.find(outcome.accepted, outcome.bonus) is not None
            for row, branches in self._growing
        )

    def _stopped(self, request: str) -> bool:
        message = self.link.peek()
        return isinstance(message, Stop) and message.request == request


# An outcome to draft for: its estimated probability, its row, accepted draft tokens and the rank of its bonus there.
Ranked = tuple[float, DraftRow, int, int]


def _likeliest(row: DraftRow, chances: np.ndarray, among: np.ndarray, most: int) -> list[Ranked]:
    """Return up to `most` outcomes of a row among those that are marked, [places, R] each."""
    marked = np.flatnonzero(among)
    best = marked[np.argsort(-chances.flat[marked], kind="stable")][:most]
    places, ranks = np.divmod(best, chances.shape[1])
    return [(float(chances[k, r]), row, int(k), int(r)) for k, r in zip(places, ranks, strict=True)]


def _names(rows: Iterable[DraftRow]) -> str:
    return ", ".join(row.request for row in rows)
