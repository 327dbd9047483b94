"""The draft's side of a round: answer from the cache at once, build the next cache while the target verifies, wait for the outcome."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TypeVar

import numpy as np
import torch

from sim.timeline import Span
from ssd.engine.cache import Branches, Outcomes, Roots, advance, choose_outcomes
from ssd.engine.forward import Queries, SlotModel
from ssd.engine.kv import Abort, Aborted, Slots
from ssd.engine.link import Draft, Link, Outcome, Setup, Start, Stop
from ssd.engine.packed import Laws
from ssd.engine.proposer import Proposer
from ssd.engine.spans import MAX_SPANS, recorded
from ssd.models import LoadedModel
from ssd.sampling import extend, padded, prefix_hash

T = TypeVar("T")

PREFILL_CHUNK = 256


def slots_needed(max_model_len: int, setup: Setup) -> int:
    """Return the slots of a row: the waste slot, the context, the draft under verification, every branch."""
    branches = max(sum(setup.fan_out_hit), sum(setup.fan_out_miss))
    return 1 + max_model_len + (branches + 1) * (setup.num_speculative_tokens + 1)


class DraftRow:
    """One request as the draft knows it, row `index` of its batch.

    `trunk` shows the slots of the committed tokens before the root of `draft`; `pending` are committed tokens not yet fed, `committed` all,
    and `prefix` their hash. `draft` has one column: its root is the last committed token, and `sent` are the tokens of it at the target.
    """

    def __init__(self, index: int, start: Start, slots: int, proposer: Proposer) -> None:
        self.index, self.request, self.proposer = index, start.request, proposer
        self.end_ids: tuple[int, ...] = ()
        self.committed = list(start.prompt)
        self.prefix = prefix_hash(start.prompt)
        self.pending = list(start.prompt)
        self.trunk = np.zeros(slots, dtype=bool)
        self.slots = Slots(slots)
        self.draft: Branches | None = None
        self.cache: Branches | None = None
        self.sent: tuple[int, ...] = ()
        self.hit = False
        self.speculates = True

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.committed)

    def commit(self, accepted: int, bonus: int) -> None:
        """Make outcome (accepted, bonus) the trunk by mask alone; a cached branch becomes the draft; `hit` says whether there was one."""
        # A branch without a token yet is no help: that is a miss.
        column = self.cache.find(accepted, bonus) if self.cache is not None and self.cache.fed else None
        if self.draft is not None:
            fed = self.draft.slots[0, : self.draft.fed]
            self.trunk[fed[: accepted + 1]] = True
            self.pending += [int(tokens) for tokens in self.draft.tokens[self.draft.fed : accepted + 1]]
        self.draft = self.cache.column(column) if self.cache is not None and column is not None else None
        self.hit = self.draft is not None
        if not self.hit:
            self.pending.append(bonus)
        tokens = (*self.sent[:accepted], bonus)
        self.committed += tokens
        self.prefix = prefix_hash(tokens, self.prefix)
        self.cache, self.sent = None, ()
        self._release_unused()

    def _release_unused(self) -> None:
        unused = ~self.trunk
        unused[0] = False
        if self.draft is not None:
            unused[self.draft.slots[0]] = False
        self.slots.release(np.flatnonzero(unused))

    def plant(self, draft: Branches, fan_out: tuple[int, ...], steps: int) -> Branches:
        """Choose outcomes of `draft` and give each a branch of `steps` places, rooted after the accepted tokens and seeing only them."""
        drafted = len(self.sent)
        chosen = choose_outcomes(draft, drafted, fan_out, self.end_ids)
        shown = np.repeat(self.trunk[None], drafted + 1, axis=0)
        for k in range(drafted + 1):
            shown[k, draft.slots[0, : k + 1]] = True
        count = len(chosen.accepted)
        slots = self.slots.take(count * steps).reshape(steps, count).T
        roots = self._roots(draft, chosen)
        return Branches(self.proposer, roots, chosen.accepted, self.length + chosen.accepted, slots, shown[chosen.accepted])

    def _roots(self, draft: Branches, chosen: Outcomes) -> Roots:
        before = torch.cat(draft.prefixes)[torch.from_numpy(chosen.accepted).to(chosen.bonus.device, non_blocking=True)]
        ids = None
        if self.proposer.reads_prefix:
            texts = [[*self.committed, *self.sent[:k]] for k in chosen.accepted]
            ids = torch.cat([padded(texts).to(chosen.bonus.device), chosen.bonus[:, None]], 1)
        return Roots(chosen.bonus, extend(before, chosen.bonus), ids)


class Drafter:
    """The draft model, its key-value slots and the speculation cache of every row."""

    def __init__(self, loaded: LoadedModel, link: Link, rows: int, max_model_len: int, vocab_size: int) -> None:
        self.loaded, self.link, self.max_model_len = loaded, link, max_model_len
        self.vocab_size = min(vocab_size, loaded.vocab_size)
        self.rows: list[DraftRow | None] = [None] * rows
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)

    def configure(self, setup: Setup) -> None:
        """Draft as `setup` says from the next request on."""
        self.setup = setup
        self.model = SlotModel(self.loaded, len(self.rows), slots_needed(self.max_model_len, setup))

    def start(self, start: Start) -> None:
        """Take a request in and feed its prompt; then draft for its likeliest first tokens, as if an empty draft were being verified."""
        proposer = Proposer(start, self.setup, self.vocab_size, self.model.device)
        row = DraftRow(self.rows.index(None), start, self.model.slots, proposer)
        row.end_ids = tuple(token for token in start.end_ids if token < self.vocab_size)
        row.speculates = self._fits(row) and max(start.prompt) < self.vocab_size
        self.rows[row.index] = row
        if not row.speculates:
            return
        try:
            with recorded(self.spans, "draft", "prefill", 0, row.request):
                self._feed_pending(row, self._stopped)
        except Aborted:
            return
        self._build(row, 0)

    def stop(self, request: str) -> None:
        """Forget a request."""
        self.rows = [None if row is not None and row.request == request else row for row in self.rows]

    def answer(self, outcome: Outcome) -> None:
        """Send the draft that follows `outcome`, from the cache or by the backup, then build the next cache until disturbed."""
        row = self._row(outcome.request)
        row.commit(outcome.accepted, outcome.bonus)
        row.speculates = row.speculates and self._fits(row) and outcome.bonus < self.vocab_size
        drafting = row.speculates and (row.hit or self.setup.backup == "jit")
        row.sent = self._complete(row, outcome.round) if drafting else ()
        caching = bool(self.setup.fan_out_hit)
        missed = caching and not row.hit
        laws = Laws.of([law for law in row.draft.laws[: len(row.sent)] if law is not None]) if row.draft and row.proposer.sends_q else None
        self.link.send(Draft(row.request, outcome.round, row.sent, row.hit if caching else None, missed and drafting, laws))
        if row.speculates:
            self._build(row, outcome.round)

    def _row(self, request: str) -> DraftRow:
        return next(row for row in self.rows if row is not None and row.request == request)

    def _fits(self, row: DraftRow) -> bool:
        # A branch reaches K+1 tokens past a draft of K tokens.
        return row.length + 2 * self.setup.num_speculative_tokens + 2 <= self.loaded.max_positions

    def _complete(self, row: DraftRow, round_index: int) -> tuple[int, ...]:
        """Return the row's K draft tokens, drafting now those that no cached branch holds."""
        K, draft = self.setup.num_speculative_tokens, row.draft
        if draft is None or len(draft.tokens) <= K:
            with recorded(self.spans, "draft", "answer", round_index, row.request):
                draft = draft or self._feed_pending(row)
                while len(draft.tokens) <= K:
                    self._advance(row, draft)
        return tuple(torch.cat(draft.tokens[1 : K + 1]).tolist())

    def _build(self, row: DraftRow, round_index: int) -> None:
        """Draft for the chosen outcomes, one token of every branch a step, until all is drafted or a message makes it moot."""
        fan_out = self.setup.fan_out_hit if row.hit else self.setup.fan_out_miss
        if not fan_out:
            return
        with recorded(self.spans, "draft", "build", round_index, row.request), suppress(Aborted):
            draft = row.draft or self._feed_pending(row, self._moot)
            while draft.fed <= len(row.sent):
                self._advance(row, draft, self._moot)
            row.cache = row.plant(draft, fan_out, self.setup.num_speculative_tokens + 1)
            while row.cache.fed < self.setup.num_speculative_tokens and self.link.peek() is None:
                self._advance(row, row.cache, self._moot)

    def _feed_pending(self, row: DraftRow, abort: Abort | None = None) -> Branches:
        """Feed the committed tokens that the model has not seen and return the row's new draft, rooted at the last of them."""
        while row.pending:
            chunk = row.pending[:PREFILL_CHUNK]
            slots = row.slots.take(len(chunk))
            visible = np.repeat(row.trunk[None], len(chunk), axis=0)
            visible[:, slots] = np.tri(len(chunk), dtype=bool)
            first = row.length - len(row.pending)
            queries = Queries(torch.tensor(chunk, device=self.model.device), np.arange(first, first + len(chunk)), slots, visible)
            try:
                logits = self.model.forward(self._only(row, queries), last_only=True, abort=abort)
            except Aborted:
                row.slots.release(slots)
                raise
            row.trunk[slots] = True
            del row.pending[: len(chunk)]
        row.trunk[slots[-1]] = False
        own = np.concatenate([slots[-1:], row.slots.take(self.setup.num_speculative_tokens)])
        device = self.model.device
        ids = padded([row.committed]).to(device) if row.proposer.reads_prefix else None
        root = Roots(torch.tensor(chunk[-1:], device=device), torch.tensor([row.prefix], device=device), ids)
        parts = np.zeros(1, dtype=int), np.array([row.length - 1]), own[None], row.trunk[None].copy()
        row.draft = Branches(row.proposer, root, *parts, after_hit=False)
        row.draft.visible[0, slots[-1]] = True
        row.draft.grow(logits[row.index, :, : self.vocab_size])
        return row.draft

    def _advance(self, row: DraftRow, branches: Branches, abort: Abort | None = None) -> None:
        advance(self.model, self._only(row, branches), self.vocab_size, abort)

    def _only(self, row: DraftRow, item: T) -> list[T | None]:
        return [item if index == row.index else None for index in range(len(self.rows))]

    def _moot(self) -> bool:
        """Whether a message has come that the step under way cannot help: any but the outcome of a branch that is growing."""
        message = self.link.peek()
        if not isinstance(message, Outcome):
            return message is not None
        cache = self._row(message.request).cache
        return cache is None or cache.find(message.accepted, message.bonus) is None

    def _stopped(self) -> bool:
        return isinstance(self.link.peek(), Stop)
