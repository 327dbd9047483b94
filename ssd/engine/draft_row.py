"""One request as the draft knows it: its text, its draft and the branches for what may become of it."""

from __future__ import annotations

import numpy as np
import torch

from ssd.devices import upload
from ssd.engine.cache import Branches, Candidates, Roots
from ssd.engine.forward import chain
from ssd.engine.kv import Trunk
from ssd.engine.link import Start
from ssd.engine.ngram import Lookup
from ssd.engine.proposer import Proposer
from ssd.engine.queries import Queries
from ssd.sampling import extend, padded, prefix_hash


class DraftRow:
    """One request as the draft knows it, row `index` of its batch.

    `tokens` are all committed ones and `prefix` their hash; `trunk` holds those that were fed, before the root of `draft`. `draft` has one
    column: its root is the last committed token, and `sent` are the tokens of it at the target. `waves` are the branches drafted for what
    may become of it, `seen` the candidates that they were chosen from.
    """

    def __init__(self, index: int, start: Start, trunk: Trunk, proposer: Proposer, age: int) -> None:
        self.index, self.request, self.trunk, self.proposer, self.age = index, start.request, trunk, proposer, age
        self.end_ids: tuple[int, ...] = ()
        self.tokens = [*start.prompt, *start.output]
        self.prefix = prefix_hash(self.tokens)
        self.draft: Branches | None = None
        self.waves: list[Branches] = []
        self.seen: Candidates | None = None
        self.sent: tuple[int, ...] = ()
        self.lookup: Lookup | None = None
        self.hit = False
        self.backup = False
        self.speculates = True
        self.active = True
        # Taken up on its way, as after a restart.
        self.resumed = bool(start.output)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.tokens)

    @property
    def pending(self) -> list[int]:
        """Committed tokens that the model has not seen, where no draft is rooted at them."""
        return [] if self.draft is not None else self.tokens[self.trunk.length :]

    @property
    def lags(self) -> bool:
        """Whether the last token that was sent is still to be fed: what may follow it is not known before."""
        return self.draft is None or self.draft.fed <= len(self.sent)

    @property
    def drafted(self) -> int:
        """Draft tokens that stand ready."""
        return 0 if self.draft is None else self.draft.drafted

    @property
    def branch(self) -> Branches:
        """The draft, where there is one."""
        if self.draft is None:
            raise RuntimeError(f"{self.request} has no draft")
        return self.draft

    def find(self, accepted: int, bonus: int) -> tuple[Branches, int] | None:
        """Return the branch for an outcome, in which wave and column; one without a token yet is no help."""
        for wave in self.waves:
            column = wave.find(accepted, bonus) if wave.fed else None
            if column is not None:
                return wave, column
        return None

    def commit(self, accepted: int, bonus: int) -> None:
        """Make outcome (accepted, bonus) the trunk by mask alone; a cached branch becomes the draft; `hit` says whether there was one."""
        found = self.find(accepted, bonus)
        if self.draft is not None:
            self.trunk.add(self.draft.slots[0, : min(self.draft.fed, accepted + 1)])
        self.draft = found[0].column(found[1]) if found is not None else None
        self.hit, self.backup = found is not None, False
        tokens = (*self.sent[:accepted], bonus)
        self.tokens += tokens
        self.prefix = prefix_hash(tokens, self.prefix)
        if self.lookup is not None:
            self.lookup.add(tokens)
        self.waves, self.sent, self.seen = [], (), None
        self.trunk.release_all_but(*([self.draft.slots[0]] if self.draft is not None else []))

    def follow(self, tokens: tuple[int, ...], *, hit: bool) -> None:
        """Take it that `tokens` are at the target, whoever drafted them; what was drafted here otherwise is dropped."""
        self.hit = hit
        if tokens != self.sent:
            self.forget_draft()
            self.sent, self.waves, self.seen = tokens, [], None

    def forget_draft(self) -> None:
        """Drop the draft, as if its outcome had not been in the cache."""
        self.draft = None
        self.trunk.release_all_but()

    def plant(self, accepted: np.ndarray, ranks: np.ndarray, steps: int) -> Branches:
        """Give each chosen candidate a branch of `steps` places, rooted after the accepted tokens and seeing only them."""
        draft, seen = self.branch, self.seen
        if seen is None:
            raise RuntimeError(f"{self.request} has no candidates to plant")
        drafted = len(self.sent)
        shown = np.repeat(self.trunk.mask[None], drafted + 1, axis=0)
        for k in range(drafted + 1):
            shown[k, draft.slots[0, : k + 1]] = True
        slots = self.trunk.slots.take(len(accepted) * steps).reshape(steps, len(accepted)).T
        device = seen.tokens.device
        after = upload(accepted, device)
        bonus = seen.tokens[after, upload(ranks, device)]
        ids = None
        if self.proposer.reads_prefix:
            texts = [[*self.tokens, *self.sent[:k]] for k in accepted]
            ids = torch.cat([upload(padded(texts).numpy(), device), bonus[:, None]], 1)
        # Nothing is drawn for a greedy request, and its hashes are read by nobody.
        prefixes = bonus if self.proposer.greedy else extend(torch.cat(draft.prefixes)[after], bonus)
        roots = Roots(bonus, prefixes, ids)
        return Branches(self.proposer, roots, accepted, seen.bonus[accepted, ranks], self.length + accepted, slots, shown[accepted])


class Catch:
    """A row's feed of committed tokens that the model has not seen, and of the draft tokens that others proposed after them."""

    def __init__(self, row: DraftRow, chunk: int, lookahead: int, device: torch.device) -> None:
        pending = row.pending
        self.row, self.lookahead, self.device = row, lookahead, device
        self.whole = len(pending) <= chunk
        self.given = row.sent if self.whole else ()
        self.count = min(len(pending), chunk)
        self.fed = [*pending[:chunk], *self.given]

    def queries(self) -> Queries:
        """Return what is fed; logits are wanted from the last committed token on."""
        return chain(self.row.trunk, self.fed, 1 + len(self.given) if self.whole else 0, self.device)

    def take(self, queries: Queries, logits: torch.Tensor) -> None:
        """Root the row's draft at its last committed token, which is fed now; or only note what was fed, where more is to come."""
        row, slots = self.row, queries.slots
        if not self.whole:
            row.trunk.add(slots)
            return
        root = self.count - 1
        row.trunk.add(slots[:root])
        own = np.concatenate([slots[root:], row.trunk.slots.take(self.lookahead - len(self.given))])
        ids = upload(padded([row.tokens]).numpy(), self.device) if row.proposer.reads_prefix else None
        last, prefix = upload(np.array([row.tokens[-1:], [row.prefix]], dtype=np.int64), self.device)
        roots = Roots(last, prefix, ids)
        visible = row.trunk.mask[None].copy()
        visible[0, slots[root:]] = True
        parts = np.zeros(1, dtype=int), np.array(row.tokens[-1:]), np.array([row.length - 1]), own[None], visible
        row.draft = Branches(row.proposer, roots, *parts, after_hit=row.hit)
        # What was looked up is a point mass; what another worker drafted was drawn from the law that is found here.
        lawless = row.lookup is not None and not row.hit
        for place, token in enumerate((*self.given, None)):
            row.draft.grow(logits[place : place + 1], token, lawless=lawless)
