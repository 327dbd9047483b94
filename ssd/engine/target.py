"""The target's side of a round: feed a prompt, draw its first token, verify a draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count

import numpy as np
import torch

from ssd.devices import upload
from ssd.engine.forward import SlotModel, chain
from ssd.engine.graphs import sampling_graphs
from ssd.engine.kv import Trunk
from ssd.engine.packed import Laws
from ssd.engine.prefix import PREFILL_CHUNK, gains_by_waiting, place_for, share_prefix
from ssd.engine.queries import Queries
from ssd.models import LoadedModel
from ssd.sampling import Before, Parameters, Proposed, Purpose, draw, log_law, noise_key, padded, prefix_hash, processed, verify
from ssd.specs import SamplingParams

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
    """One request as the target knows it: all its tokens with their hash, and of which the keys and values lie in slots.

    Until its prompt is fed it draws nothing; from then on its last token alone is not fed. age: when it was last taken or left.
    """

    params: SamplingParams
    end_ids: tuple[int, ...]
    trunk: Trunk
    prompt: int
    tokens: list[int]
    prefix: int
    begun: bool = False
    active: bool = True
    age: int = 0

    @property
    def unfed(self) -> list[int]:
        """Tokens whose keys and values are not there yet."""
        return self.tokens[self.trunk.length :]

    def commit(self, tokens: Sequence[int]) -> None:
        """Go on by `tokens`."""
        self.tokens += tokens
        self.prefix = prefix_hash(tokens, self.prefix)


def slots_needed(max_model_len: int, num_speculative_tokens: int) -> int:
    """Return the slots of a row: the waste slot, the context and one draft."""
    return 1 + max_model_len + num_speculative_tokens + 1


class Target:
    """The target model and the key-value slots of every row. A row that is left keeps its text for whoever begins alike."""

    def __init__(self, loaded: LoadedModel, rows: int, slots: int) -> None:
        self.model = SlotModel(loaded, rows, slots)
        self.rows: list[TargetRow | None] = [None] * rows
        self._ages = count()
        # The rows that were judged last, and their parameters by the number of places of each.
        self._stacked: Sequence[TargetRow] = ()
        self._parameters_of: dict[int, Parameters] = {}

    @property
    def idle(self) -> int:
        """Rows that a request may take."""
        return sum(row is None or not row.active for row in self.rows)

    def start(self, prompt: Sequence[int], params: SamplingParams, end_ids: Sequence[int]) -> int:
        """Give a request an idle row, where part of its prompt may lie already, and return it; its prompt is fed in the rounds to come."""
        index, trunk = place_for(prompt, self.rows, self.model)
        self.rows[index] = TargetRow(
            params=params,
            end_ids=tuple(end_ids),
            trunk=trunk,
            prompt=len(prompt),
            tokens=list(prompt),
            prefix=prefix_hash(prompt),
            age=next(self._ages),
        )
        return index

    def stop(self, index: int) -> None:
        """Let the request of a row go."""
        row = self.rows[index]
        if row is not None:
            row.active, row.age = False, next(self._ages)
            row.trunk.cut(row.trunk.length)

    def round(self, proposals: Mapping[int, Proposal], chunk: int = PREFILL_CHUNK) -> dict[int, Verdict]:
        """Verify a proposal for each row that has begun, and feed up to `chunk` tokens of prompts, all in one forward.

        Return what the rows emit, each by its own parameters; a row whose prompt is fed emits its first token.
        """
        fed = {index: self._fed(index, proposal.tokens) for index, proposal in proposals.items()}
        prompts, whole = self._prompts(chunk)
        judged = {**proposals, **dict.fromkeys(whole, Proposal())}
        fed |= prompts
        logits = self.model.forward(fed)
        indices = sorted(judged)
        rows, drafts = [self._row(index) for index in indices], [judged[index] for index in indices]
        verdicts = dict(zip(indices, self._judge([logits[index] for index in indices], rows, drafts), strict=True)) if judged else {}
        # Last of all: whatever broke this off before has left the rows as they were.
        for index, queries in fed.items():
            row, verdict = self._row(index), verdicts.get(index)
            stays = len(queries.slots) - len(judged[index].tokens) + verdict.accepted if verdict is not None else len(queries.slots)
            row.trunk.add(queries.slots[:stays])
            row.trunk.slots.release(queries.slots[stays:])
            if verdict is not None:
                row.begun = True
                row.commit([*judged[index].tokens[: verdict.accepted], verdict.bonus])
        return verdicts

    def _row(self, index: int) -> TargetRow:
        row = self.rows[index]
        if row is None:
            raise RuntimeError(f"row {index} is idle")
        return row

    def _fed(self, index: int, drafted: Sequence[int]) -> Queries:
        row = self._row(index)
        return chain(row.trunk, [*row.unfed, *drafted], 1 + len(drafted), self.model.device)

    def _prompts(self, chunk: int) -> tuple[dict[int, Queries], list[int]]:
        """Return what is fed of prompts, up to `chunk` tokens in all, in the order in which they came, and whose then are fed whole."""
        fed: dict[int, Queries] = {}
        whole: list[int] = []
        waiting = [index for index, row in enumerate(self.rows) if row is not None and row.active and not row.begun]
        for index in sorted(waiting, key=lambda index: self._row(index).age):
            row = self._row(index)
            # What another row holds already is taken over first: it may be all but the last token.
            share_prefix(row, index, self.rows, self.model)
            if chunk and not gains_by_waiting(row, [self._row(other) for other in fed]):
                tokens = row.unfed[:chunk]
                whole += [index] if len(tokens) == len(row.unfed) else []
                fed[index] = chain(row.trunk, tokens, int(len(tokens) == len(row.unfed)), self.model.device)
                chunk -= len(tokens)
        return fed, whole

    def _judge(self, logits: Sequence[torch.Tensor], rows: Sequence[TargetRow], drafts: Sequence[Proposal]) -> list[Verdict]:
        """Return what each of n rows emits. logits `[K+1, vocabulary]` of each row's draft of K tokens; one transfer to the host."""
        width, vocab_size = max(map(len, logits)), logits[0].shape[-1]
        every, judged = self._parameters(rows, width, vocab_size), list(zip(rows, drafts, strict=True))
        # A shorter draft is filled up; what is read there, nobody uses.
        stacked = torch.stack(list(logits)) if min(map(len, logits)) == width else torch.nn.utils.rnn.pad_sequence(list(logits), True)
        length = np.array([len(row.tokens) for row in rows])[:, None] + np.arange(width)
        ids = self._ids(rows, drafts, width) if every.reads_prefix else None
        before = Before(self._upload(length.reshape(-1)), ids)
        accept, target = (None, None) if every.greedy else self._keys(rows, drafts, length)
        # Where nothing was drafted, rejection comes to the draw that coupling makes.
        couples = [row.params.verification == "coupled" or row.params.temperature == 0 or not draft.tokens for row, draft in judged]
        if all(couples):
            # The target's own tokens are all that is read back: a draft token stands where it is the same.
            own = self._played(_own, stacked, every, before, target).tolist()
            outcomes = [_agreed(draft.tokens, tokens) for draft, tokens in zip(drafts, own, strict=True)]
        else:
            mixed = self._upload(np.array(couples)) if any(couples) else False
            outcomes = self._played(_verified, stacked, every, before, self._proposed(drafts, stacked), mixed, accept, target).tolist()
        return [
            Verdict(accepted, bonus, _logprobs(own, [*draft.tokens[:accepted], bonus], row.params.logprobs))
            for (accepted, bonus), own, draft, row in zip(outcomes, logits, drafts, rows, strict=True)
        ]

    def _played(self, function: Callable[..., torch.Tensor], *arguments: object) -> torch.Tensor:
        """Call a function of tensors, from a graph where there are graphs; what reads the whole text is of another size each time."""
        graphs = None if self._parameters_of[1].reads_prefix else sampling_graphs(self.model.device)
        return function(*arguments) if graphs is None else graphs.play(function, *arguments)

    def _parameters(self, rows: Sequence[TargetRow], width: int, vocab_size: int) -> Parameters:
        """Return the rows' parameters side by side, each for `width` places: those of the last rounds where the rows are the same."""
        if len(self._stacked) != len(rows) or any(one is not other for one, other in zip(self._stacked, rows, strict=True)):
            columns = [row.params for row in rows], [row.prompt for row in rows], [row.end_ids for row in rows]
            self._stacked, self._parameters_of = rows, {1: Parameters.of(*columns, vocab_size, self.model.device)}
        if width not in self._parameters_of:
            self._parameters_of[width] = self._parameters_of[1].repeated(width)
        return self._parameters_of[width]

    def _proposed(self, drafts: Sequence[Proposal], logits: torch.Tensor) -> Proposed:
        _, width, vocab_size = logits.shape
        tokens = torch.zeros(len(drafts), width - 1, dtype=torch.long)
        has_q = torch.tensor([draft.laws is not None for draft in drafts])
        q = torch.zeros(len(drafts), width - 1, vocab_size, dtype=logits.dtype) if bool(has_q.any()) else None
        for place, draft in enumerate(drafts):
            count = len(draft.tokens)
            tokens[place, :count] = torch.tensor(draft.tokens, dtype=torch.long)
            if q is not None and draft.laws is not None:
                q[place, :count] = draft.laws.dense(vocab_size)[:count]
        drafted = torch.tensor([len(draft.tokens) for draft in drafts])
        tokens, drafted = self._upload(tokens.numpy()), self._upload(drafted.numpy())
        return Proposed(tokens, drafted) if q is None else Proposed(tokens, drafted, self._upload(q.numpy()), self._upload(has_q.numpy()))

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
        return self._upload(padded(texts).numpy())

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return upload(array, self.model.device)


def _own(logits: torch.Tensor, parameters: Parameters, before: Before, target: torch.Tensor | None) -> torch.Tensor:
    """Return the target's own token at each place, `[n, width]`, of logits `[n, width, vocabulary]`; keys target [n, width]."""
    log_p = _law(logits, parameters, before)
    return draw(log_p, None if target is None else target.flatten()).view(logits.shape[:2])


def _verified(
    logits: torch.Tensor,
    parameters: Parameters,
    before: Before,
    drafts: Proposed,
    couples: torch.Tensor | bool,
    accept: torch.Tensor | None,
    target: torch.Tensor | None,
) -> torch.Tensor:
    """Return how many tokens of each draft stand and the token after them, `[n, 2]`; arguments as for `_own` and `verify`."""
    found = verify(_law(logits, parameters, before).view(logits.shape), drafts, couples, accept, target)
    return torch.stack([found.accepted, found.bonus], -1)


def _law(logits: torch.Tensor, parameters: Parameters, before: Before) -> torch.Tensor:
    """Return log p at all places, `[n * width, vocabulary]`."""
    scores = processed(logits.flatten(0, 1), parameters, before)
    # Where all rows are greedy only the largest counts, and it is the same before and after.
    return scores if parameters.greedy else log_law(scores, parameters)


def _agreed(drafted: Sequence[int], own: Sequence[int]) -> tuple[int, int]:
    """Return how many draft tokens are the target's own at their places, and its own after them."""
    accepted = next((place for place, token in enumerate(drafted) if token != own[place]), len(drafted))
    return accepted, own[accepted]


def _logprobs(logits: torch.Tensor, tokens: Sequence[int], wanted: int | None) -> tuple[TokenLogprobs, ...] | None:
    """Return for each token its own log-probability and those of the `wanted` likeliest; logits `[places, vocabulary]`."""
    if wanted is None:
        return None
    law = torch.log_softmax(logits[: len(tokens)], -1)
    best = law.topk(min(wanted, law.shape[-1]), -1)
    own = law.gather(-1, upload(np.array(tokens, dtype=np.int64), law.device)[:, None])
    count = best.indices.shape[-1]
    # In doubles, which hold both ids and values, for one transfer.
    told = torch.cat([best.indices.double(), best.values.double(), own.double()], -1).tolist()
    return tuple(
        {token: row[-1], **dict(zip(map(int, row[:count]), row[count:-1], strict=True))} for token, row in zip(tokens, told, strict=True)
    )
