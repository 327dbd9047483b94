"""The target's side of a round: feed a prompt, draw its first token, verify a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from ssd.engine.forward import Queries, SlotModel
from ssd.engine.kv import Slots
from ssd.engine.packed import Laws
from ssd.models import LoadedModel
from ssd.sampling import Before, Parameters, Proposed, Purpose, log_law, noise_key, padded, prefix_hash, processed, verify
from ssd.specs import SamplingParams

PREFILL_CHUNK = 256

TokenLogprobs = dict[int, float]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens to verify, with the laws they were drawn from; without laws they are point masses."""

    tokens: tuple[int, ...] = ()
    laws: Laws | None = None

    def shortened(self, count: int) -> Proposal:
        """Return the first `count` tokens; a cut that hangs on lengths alone leaves the law as it is."""
        return self if count >= len(self.tokens) else Proposal(self.tokens[:count], self.laws)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a row emits: the accepted draft tokens and the bonus, and if asked for what the target's own law said of each."""

    accepted: int
    bonus: int
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass
class TargetRow:
    """One request as the target knows it: the slots of its fed tokens, all its tokens with their hash; the last is not yet fed."""

    params: SamplingParams
    end_ids: tuple[int, ...]
    trunk: np.ndarray
    slots: Slots
    prompt: int
    tokens: list[int]
    prefix: int
    length: int = 0

    def commit(self, tokens: Sequence[int]) -> None:
        """Go on by `tokens`."""
        self.tokens += tokens
        self.prefix = prefix_hash(tokens, self.prefix)


def slots_needed(max_model_len: int, num_speculative_tokens: int) -> int:
    """Return the slots of a row: the waste slot, the context and one draft."""
    return 1 + max_model_len + num_speculative_tokens + 1


class Target:
    """The target model and the key-value slots of every row."""

    def __init__(self, loaded: LoadedModel, rows: int, slots: int) -> None:
        self.model = SlotModel(loaded, rows, slots)
        self.rows: list[TargetRow | None] = [None] * rows
        self._stacked: tuple[Sequence[TargetRow], Parameters | None] = ((), None)

    def start(self, prompt: Sequence[int], params: SamplingParams, end_ids: Sequence[int]) -> tuple[int, Verdict]:
        """Take a request in, feed its prompt and return its row and the first token of its output."""
        index = self.rows.index(None)
        row = TargetRow(
            params=params,
            end_ids=tuple(end_ids),
            trunk=np.zeros(self.model.slots, dtype=bool),
            slots=Slots(self.model.slots),
            prompt=len(prompt),
            tokens=list(prompt),
            prefix=prefix_hash(prompt),
        )
        for begin in range(0, len(prompt), PREFILL_CHUNK):
            queries, slots = self._chain(row, prompt[begin : begin + PREFILL_CHUNK])
            logits = self.model.forward([queries if r == index else None for r in range(len(self.rows))], last_only=True)
            row.trunk[slots] = True
            row.length += len(slots)
        verdict = self._judge(logits[index : index + 1], [row], [Proposal()])[0]
        row.commit([verdict.bonus])
        # Last of all: whatever broke this off before has left the row idle.
        self.rows[index] = row
        return index, verdict

    def stop(self, index: int) -> None:
        """Forget a request."""
        self.rows[index] = None

    def verify(self, proposals: Sequence[Proposal | None]) -> list[Verdict | None]:
        """Verify each row's proposal (None: an idle row) in one forward, each by its own parameters, and roll back what does not stand."""
        fed = [
            None if row is None or draft is None else self._chain(row, [row.tokens[-1], *draft.tokens])
            for row, draft in zip(self.rows, proposals, strict=True)
        ]
        logits = self.model.forward([None if pair is None else pair[0] for pair in fed])
        active = [
            (index, row, draft, pair[1])
            for index, (row, draft, pair) in enumerate(zip(self.rows, proposals, fed, strict=True))
            if row is not None and draft is not None and pair is not None
        ]
        if len(active) < len(proposals):
            logits = logits[[index for index, *_ in active]]
        verdicts = self._judge(logits, [row for _, row, _, _ in active], [draft for _, _, draft, _ in active])
        found: list[Verdict | None] = [None] * len(proposals)
        for (index, row, draft, slots), verdict in zip(active, verdicts, strict=True):
            found[index] = verdict
            row.trunk[slots[: verdict.accepted + 1]] = True
            row.slots.release(slots[verdict.accepted + 1 :])
            row.length += verdict.accepted + 1
            row.commit([*draft.tokens[: verdict.accepted], verdict.bonus])
        return found

    def _chain(self, row: TargetRow, tokens: Sequence[int]) -> tuple[Queries, np.ndarray]:
        count = len(tokens)
        slots = row.slots.take(count)
        visible = np.repeat(row.trunk[None], count, axis=0)
        visible[:, slots] = np.tri(count, dtype=bool)
        fed = torch.tensor(tokens, device=self.model.device)
        return Queries(fed, np.arange(row.length, row.length + count), slots, visible), slots

    def _judge(self, logits: torch.Tensor, rows: Sequence[TargetRow], drafts: Sequence[Proposal]) -> list[Verdict]:
        """Return what each of n rows emits. logits `[n, width, vocabulary]`, aligned at the end; one transfer to the host."""
        n, width, vocab_size = logits.shape
        parameters = self._parameters(rows, vocab_size)
        counts = [len(draft.tokens) for draft in drafts]
        if min(counts) < width - 1:
            places = np.minimum(np.arange(width)[None] + width - 1 - np.array(counts)[:, None], width - 1)
            logits = logits.gather(1, self._upload(places)[..., None].expand(-1, -1, vocab_size))
        length = np.array([len(row.tokens) for row in rows])[:, None] + np.arange(width)
        ids = self._ids(rows, drafts, width) if parameters.reads_prefix else None
        before = Before(self._upload(length.reshape(-1)), ids)
        every = parameters.repeated(width)
        scores = processed(logits.flatten(0, 1), every, before)
        # Where all rows are greedy only the largest counts, and it is the same before and after.
        log_p = (scores if parameters.greedy else log_law(scores, every)).view(n, width, vocab_size)
        accept, target = (None, None) if parameters.greedy else self._keys(rows, drafts, length)
        couples = [row.params.verification == "coupled" or row.params.temperature == 0 for row in rows]
        mixed = any(couples) and not all(couples)
        found = verify(
            log_p,
            self._proposed(drafts, log_p, needs_q=not all(couples)),
            torch.tensor(couples, device=logits.device) if mixed else couples[0],
            accept,
            target,
        )
        outcomes = torch.stack([found.accepted, found.bonus], -1).tolist()
        return [
            Verdict(accepted, bonus, _logprobs(own, [*draft.tokens[:accepted], bonus], row.params.logprobs))
            for (accepted, bonus), own, draft, row in zip(outcomes, logits, drafts, rows, strict=True)
        ]

    def _parameters(self, rows: Sequence[TargetRow], vocab_size: int) -> Parameters:
        """Return the rows' parameters side by side, those of the last round where the rows are the same."""
        known, parameters = self._stacked
        if parameters is None or len(known) != len(rows) or any(one is not other for one, other in zip(known, rows, strict=True)):
            columns = [row.params for row in rows], [row.prompt for row in rows], [row.end_ids for row in rows]
            parameters = Parameters.of(*columns, vocab_size, self.model.device)
            self._stacked = rows, parameters
        return parameters

    def _proposed(self, drafts: Sequence[Proposal], log_p: torch.Tensor, needs_q: bool) -> Proposed:
        _, width, vocab_size = log_p.shape
        tokens = torch.zeros(len(drafts), width - 1, dtype=torch.long)
        has_q = torch.tensor([draft.laws is not None for draft in drafts])
        q = torch.zeros(len(drafts), width - 1, vocab_size, dtype=log_p.dtype) if needs_q and bool(has_q.any()) else None
        for place, draft in enumerate(drafts):
            count = len(draft.tokens)
            tokens[place, :count] = torch.tensor(draft.tokens, dtype=torch.long)
            if q is not None and draft.laws is not None:
                q[place, :count] = draft.laws.dense(vocab_size)[:count]
        drafted = torch.tensor([len(draft.tokens) for draft in drafts])
        device = self.model.device
        return Proposed(tokens.to(device), drafted.to(device), None if q is None else q.to(device), None if q is None else has_q.to(device))

    def _keys(self, rows: Sequence[TargetRow], drafts: Sequence[Proposal], length: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys of the acceptances `[n, width - 1]` and of the target's draws `[n, width]`: each knows the tokens before it."""
        # Past the end of a shorter draft stand keys that nobody reads.
        prefixes = np.zeros(length.shape, dtype=np.int64)
        for place, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            known = accumulate(draft.tokens, lambda before, token: prefix_hash([token], before), initial=row.prefix)
            prefixes[place, : len(draft.tokens) + 1] = list(known)
        seeds = np.array([row.params.seed or 0 for row in rows])[:, None]
        accept = noise_key(seeds, Purpose.ACCEPT, length[:, :-1], prefixes[:, :-1])
        return self._upload(accept), self._upload(noise_key(seeds, Purpose.TARGET, length, prefixes))

    def _ids(self, rows: Sequence[TargetRow], drafts: Sequence[Proposal], width: int) -> torch.Tensor:
        """Return the tokens before each place, `[n * width, longest]`, -1 in front."""
        texts = [[*row.tokens, *draft.tokens[:k]] for row, draft in zip(rows, drafts, strict=True) for k in range(width)]
        return padded(texts).to(self.model.device, non_blocking=True)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.model.device, non_blocking=True)


def _logprobs(logits: torch.Tensor, tokens: Sequence[int], wanted: int | None) -> tuple[TokenLogprobs, ...] | None:
    """Return for each token its own log-probability and those of the `wanted` likeliest; logits `[places, vocabulary]`."""
    if wanted is None:
        return None
    law = torch.log_softmax(logits[: len(tokens)], -1)
    best = law.topk(min(wanted, law.shape[-1]), -1)
    own = law.gather(-1, torch.tensor(tokens, device=law.device)[:, None])[:, 0].tolist()
    return tuple(
        {token: value, **dict(zip(ids, values, strict=True))}
        for token, value, ids, values in zip(tokens, own, best.indices.tolist(), best.values.tolist(), strict=True)
    )
