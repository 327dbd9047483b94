"""Two rounds of the engine's own draft and target code over tables of laws, played for all that the noise can be.

The models are tables and the noise is enumerated, cell by cell; what lies between is what the engine runs: Proposer, Branches,
candidates, Laws, Target._judge and with it all of ssd.sampling. Every path through the noise is a row of one batch: where a row asks
for noise that is not settled yet, it is split into one row for each cell, until no row asks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ssd.engine.cache import Branches, Roots, candidates
from ssd.engine.kv import Trunk
from ssd.engine.link import Setup, Start
from ssd.engine.packed import Laws
from ssd.engine.proposer import Proposer
from ssd.engine.target import Proposal, Target, TargetRow
from ssd.sampling import Purpose, noise_key, prefix_hash
from ssd.specs import Placement, SamplingParams
from tests.sampling.cells import Cell, gumbel_cells, uniform_cells
from theory.acceptance import residual
from theory.saguaro import saguaro_law
from theory.sampling import sampling_law

SEED = 7
PROMPT = (0,)
NOWHERE = Placement(target=("meta:0",), draft=("meta:0",))
Tokens = tuple[int, ...]
# Which outcomes are cached, given the draft [K] and the noise that its bonus will be drawn with at each place [K+1, vocabulary].
Rule = Callable[[Tokens, np.ndarray], set[tuple[int, int]]]


@dataclass(frozen=True)
class World:
    """Laws of target and draft after every text, the parameters that warp them, and how they are played."""

    p: Callable[[Tokens], np.ndarray]
    q: Callable[[Tokens], np.ndarray]
    vocab_size: int
    K: int
    params: dict = field(default_factory=dict)
    draft_params: dict | None = None
    verification: str = "rejection"
    fan_out: int = 1
    saguaro: tuple[float, ...] = ()
    ranking: str = "shared_noise"
    backup: str = "none"
    rounds: int = 1
    rule: Rule | None = None

    def warped(self, side: str, text: Tokens) -> np.ndarray:
        """What is sampled from after `text`, [V]; by theory."""
        table, params = (self.p, self.params) if side == "target" else (self.q, self.draft_params or self.params)
        with np.errstate(divide="ignore"):
            logits = np.log(table(text))
        return sampling_law(logits, params.get("temperature", 1.0), params.get("top_k", 0), params.get("top_p", 1.0))

    def pressed(self, text: Tokens, place: int) -> np.ndarray:
        law = self.warped("draft", text)
        return saguaro_law(law, self.saguaro[place], self.fan_out) if self.saguaro else law


@dataclass
class Path:
    """One way through the noise so far: the text, what noise is settled, its probability, and what noise is asked for next.

    speaks: whether the draft model drafts in the round to come, as it does at first and after a hit.
    """

    text: Tokens
    speaks: bool
    settled: dict[tuple[str, int], np.ndarray]
    weight: float
    wants: tuple[str, int] | None = None

    def number(self, kind: str, key: int, size: int, known: Container[tuple[str, int]]) -> np.ndarray:
        if (kind, key) not in self.settled:
            # What is not known is asked for the padding of a shorter draft, and read by nobody.
            if (kind, key) in known:
                self.wants = self.wants or (kind, key)
            return np.zeros(size) if size else np.array(0.5)
        return self.settled[kind, key]


class Noise:
    """Stands for the engine's noise while a batch of paths is played."""

    def __init__(self) -> None:
        self.rows: list[Path] = []
        self.known: Container[tuple[str, int]] = ()

    def gumbel(self, keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
        each = len(keys) // len(self.rows)
        found = [self.rows[i // each].number("gumbel", key, vocab_size, self.known) for i, key in enumerate(keys.tolist())]
        return torch.tensor(np.array(found)).view(len(keys), vocab_size)

    def uniform(self, keys: torch.Tensor) -> torch.Tensor:
        found = [[path.number("uniform", key, 0, self.known) for key in row] for path, row in zip(self.rows, keys.tolist(), strict=True)]
        return torch.tensor(np.array(found)).view(keys.shape)


@contextmanager
def enumerated(noise: Noise) -> Iterator[None]:
    """Let the production code draw from `noise`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssd.sampling.drafting.gumbel", noise.gumbel)
        patch.setattr("ssd.sampling.verification.uniform", noise.uniform)
        yield
    torch.set_default_dtype(before)


class Play:
    """All paths of a world."""

    def __init__(self, world: World) -> None:
        self.world, self.noise = world, Noise()
        shared = {"temperature": 1.0, "seed": SEED, "verification": world.verification}
        self.target_params = SamplingParams(**{**shared, **world.params})
        draft_params = SamplingParams(**{**shared, **(world.draft_params or world.params)})
        fan_out = (world.fan_out,) * (world.K + 1)
        setup = Setup(world.K, fan_out, fan_out, world.backup, NOWHERE, world.ranking, world.saguaro)
        self.proposer = Proposer(Start("r", PROMPT, (), draft_params), setup, world.vocab_size, torch.device("cpu"))
        self.texts: dict[tuple[str, int], set[Tokens]] = defaultdict(set)
        self.noise.known = self.cells = self._cells()

    def run(self) -> list[Path]:
        """Play all rounds and return every end that there is; the last round's `speaks` says whether it was a hit."""
        paths = [Path(PROMPT, True, {}, 1.0)]
        with enumerated(self.noise):
            for number in range(self.world.rounds):
                paths = self._merged(self._round(paths, number == self.world.rounds - 1))
        return paths

    def _round(self, paths: list[Path], last: bool) -> list[Path]:
        """Play one round from each path, splitting it where noise is asked for."""
        done: list[Path] = []
        while paths:
            for path in paths:
                path.wants = None
            ends = self._play(paths, last)
            split = []
            for path, end in zip(paths, ends, strict=True):
                if path.wants is None:
                    done.append(end)
                else:
                    cells = self.cells[path.wants]
                    split += [
                        replace(path, settled={**path.settled, path.wants: number}, weight=path.weight * weight)
                        for number, weight in cells
                        if weight > 0
                    ]
            paths = split
        return done

    def _merged(self, paths: list[Path]) -> list[Path]:
        """Put together what goes on alike: the same text and draft, and the same noise where a later text may meet it again."""
        found: dict[object, Path] = {}
        for path in paths:
            size = len(path.text)
            kept = {key: n for key, n in path.settled.items() if any(text[:size] == path.text for text in self.texts[key])}
            same = path.text, path.speaks, tuple((key, kept[key].tobytes()) for key in sorted(kept))
            if same in found:
                found[same].weight += path.weight
            else:
                found[same] = replace(path, settled=kept)
        return list(found.values())

    # --- what the noise can be ---

    def _cells(self) -> dict[tuple[str, int], list[Cell]]:
        """For every key that can be asked for, the cells that the laws it may meet tell apart; a key met in two ways gets both."""
        world = self.world
        laws: dict[int, list[np.ndarray]] = defaultdict(list)
        ranked: dict[int, list[np.ndarray]] = defaultdict(list)
        thresholds: dict[int, set[float]] = defaultdict(set)
        for length in range(world.rounds * (world.K + 1)):
            for tail in product(range(world.vocab_size), repeat=length):
                text = PROMPT + tail
                p, q = world.warped("target", text), world.warped("draft", text)
                pressed = [world.pressed(text, place) for place in range(world.K)] if world.saguaro else [q]
                for law in pressed:
                    thresholds[self._key(Purpose.ACCEPT, text)] |= {float(a / b) for a, b in zip(p, law, strict=True) if b > 0}
                if world.backup == "ngram":
                    thresholds[self._key(Purpose.ACCEPT, text)] |= set(p.tolist())
                    laws[self._key(Purpose.TARGET, text)] += [np.where(np.arange(len(p)) == x, 0, p) for x in range(len(p))]
                laws[self._key(Purpose.DRAFT, text)] += pressed
                laws[self._key(Purpose.TARGET, text)] += [p, *(residual(p, law) for law in pressed)]
                if world.verification == "coupled":
                    laws[self._key(Purpose.TARGET, text)] += [q]
                if world.rounds > 1 and length <= world.K:
                    ranked[self._key(Purpose.TARGET, text)] += [q]
                for purpose in Purpose:
                    for kind in ("gumbel", "uniform"):
                        self.texts[kind, self._key(purpose, text)].add(text)
        found = {("gumbel", key): gumbel_cells(known, ranked[key], world.vocab_size) for key, known in laws.items()}
        return found | {("uniform", key): uniform_cells(known) for key, known in thresholds.items()}

    @staticmethod
    def _key(purpose: Purpose, text: Tokens) -> int:
        return int(noise_key(np.array([SEED]), purpose, np.array([len(text)]), np.array([prefix_hash(text)]))[0])

    # --- one pass over a batch of paths ---

    def _play(self, paths: Sequence[Path], last: bool) -> list[Path]:
        texts = [path.text for path in paths]
        drafts = self._draft(paths, texts, [path.speaks for path in paths])
        cached = [set()] * len(paths) if last else self._cached(paths, drafts)
        outcomes = self._judge(paths, texts, [proposal for proposal, _ in drafts])
        return [
            replace(path, text=path.text + emitted, speaks=(k, emitted[-1]) in known)
            for path, (k, emitted), known in zip(paths, outcomes, cached, strict=True)
        ]

    def _draft(self, paths: Sequence[Path], texts: Sequence[Tokens], speaks: Sequence[bool]) -> list[tuple[Proposal, Branches | None]]:
        """Draft after each text: by the draft model where it `speaks` (its branch was cached, or the backup is jit), else by the backup."""
        found: list[tuple[Proposal, Branches | None]] = [(self._backup(text), None) for text in texts]
        chosen = [i for i in range(len(paths)) if speaks[i] or self.world.backup == "jit"]
        if not chosen:
            return found
        self.noise.rows = [paths[i] for i in chosen]
        prefixes = torch.tensor([prefix_hash(texts[i]) for i in chosen])
        bonus = np.array([texts[i][-1] for i in chosen])
        roots = Roots(torch.from_numpy(bonus), prefixes)
        positions = np.array([len(texts[i]) - 1 for i in chosen])
        none = np.zeros((len(chosen), 1), int)
        branches = Branches(self.proposer, roots, none[:, 0], bonus, positions, none, none.astype(bool))
        growing = [texts[i] for i in chosen]
        for _ in range(self.world.K + 1):
            branches.grow(_logits(self.world.q, growing))
            growing = [(*text, int(token)) for text, token in zip(growing, branches.tokens[-1], strict=True)]
        for column, i in enumerate(chosen):
            alone = branches.column(column)
            tokens = tuple(int(token) for token in alone.tokens[1 : self.world.K + 1])
            laws = Laws.of([law for law in alone.laws[: self.world.K] if law is not None]) if self.proposer.sends_q else None
            found[i] = Proposal(tokens, laws), alone
        return found

    def _backup(self, text: Tokens) -> Proposal:
        """`none` drafts nothing; `ngram` a fixed guess: what the text says, it says again."""
        if self.world.backup != "ngram":
            return Proposal()
        return Proposal(tuple((text[-1] + k) % self.world.vocab_size for k in range(self.world.K)))

    def _cached(self, paths: Sequence[Path], drafts: Sequence[tuple[Proposal, Branches | None]]) -> list[set[tuple[int, int]]]:
        return [
            set() if branches is None else self._choose(path, proposal, branches)
            for path, (proposal, branches) in zip(paths, drafts, strict=True)
        ]

    def _choose(self, path: Path, proposal: Proposal, branches: Branches) -> set[tuple[int, int]]:
        self.noise.rows = [path]
        if self.world.rule is None:
            found = candidates(branches, self.world.K, (), self.world.fan_out)
            listed = np.nonzero(found.listed((self.world.fan_out,) * (self.world.K + 1)))
            return {(int(k), int(found.bonus[k, r])) for k, r in zip(*listed, strict=True)}
        prefixes = torch.cat(branches.prefixes[: self.world.K + 1])
        length = torch.cat([branches.length(k) for k in range(self.world.K + 1)])
        keys = noise_key(torch.tensor([SEED]), Purpose.TARGET, length, prefixes)
        return self.world.rule(proposal.tokens, self.noise.gumbel(keys, self.world.vocab_size).numpy())

    def _judge(self, paths: Sequence[Path], texts: Sequence[Tokens], proposals: Sequence[Proposal]) -> list[tuple[int, Tokens]]:
        """Verify with the target's own code; each row's logits are as many as it wants, as they come from a forward."""
        self.noise.rows = list(paths)
        target = Target.__new__(Target)
        target.model, target._stacked = SimpleNamespace(device=torch.device("cpu")), ((), None)
        trunk = Trunk(1)
        rows = [TargetRow(self.target_params, (), trunk, len(PROMPT), list(text), prefix_hash(text)) for text in texts]
        logits = [
            _logits(self.world.p, [text + proposal.tokens[:k] for k in range(len(proposal.tokens) + 1)])
            for text, proposal in zip(texts, proposals, strict=True)
        ]
        verdicts = target._judge(logits, rows, proposals)
        return [(v.accepted, (*proposal.tokens[: v.accepted], v.bonus)) for v, proposal in zip(verdicts, proposals, strict=True)]


def _logits(table: Callable[[Tokens], np.ndarray], texts: Sequence[Tokens]) -> torch.Tensor:
    with np.errstate(divide="ignore"):
        return torch.tensor(np.log(np.array([table(text) for text in texts])))


def law_of_texts(world: World, played: Sequence[Path]) -> np.ndarray:
    """The law of the first rounds * (K+1) tokens, each path gone on by the target alone, [V] * length."""
    length = world.rounds * (world.K + 1)
    law = np.zeros((world.vocab_size,) * length)
    totals: dict[Tokens, float] = defaultdict(float)
    for one in played:
        totals[one.text[len(PROMPT) :]] += one.weight
    for emitted, weight in totals.items():
        for tail in product(range(world.vocab_size), repeat=length - len(emitted)):
            law[emitted + tail] += weight * _chance(world, emitted, tail)
    return law


def exact_law(world: World) -> np.ndarray:
    """The target's law of as many tokens."""
    length = world.rounds * (world.K + 1)
    law = np.zeros((world.vocab_size,) * length)
    for tail in product(range(world.vocab_size), repeat=length):
        law[tail] = _chance(world, (), tail)
    return law


def _chance(world: World, emitted: Tokens, tail: Tokens) -> float:
    text, chance = PROMPT + emitted, 1.0
    for token in tail:
        chance *= float(world.warped("target", text)[token])
        text += (token,)
    return chance
