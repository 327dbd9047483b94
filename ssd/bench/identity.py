"""Whether everybody decodes what AR decodes, and where not, whether a near tie of the two best logits decided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ssd.bench.result import Difference
from ssd.bench.run import Run, Runs
from ssd.bench.setting import Who
from ssd.engine.engine import Engine
from ssd.specs import Configuration, RequestOutput, SamplingParams

# From a prompt and an output up to some place to how far apart the two best logits after it are.
Gap = Callable[[tuple[int, ...]], float]


def reference(runs: Runs) -> Who:
    """Return whose outputs all others are held against: AR's, or the first one's where no AR ran."""
    return next((who for who in runs if who.mode == "ar"), next(iter(runs)))


def differences(runs: Runs, gap: Gap) -> dict[Who, tuple[Difference, ...]]:
    """Return, for everybody, the prompts whose greedy output is not AR's; prompts are numbered through all groups."""
    ours = runs[reference(runs)]
    return {who: tuple(_differences(ours, theirs, gap)) for who, theirs in runs.items()}


def _differences(ours: Sequence[Run], theirs: Sequence[Run], gap: Gap) -> Iterator[Difference]:
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a.outputs, b.outputs, strict=True)]
    for prompt, (a, b) in enumerate(pairs):
        if a.token_ids != b.token_ids:
            yield _difference(prompt, a, b, gap)


def _difference(prompt: int, a: RequestOutput, b: RequestOutput, gap: Gap) -> Difference:
    place = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y), None)
    if place is None:
        return Difference(prompt=prompt, place=min(len(a.token_ids), len(b.token_ids)), gap=None)
    return Difference(prompt=prompt, place=place, gap=gap((*a.prompt_token_ids, *a.token_ids[:place])))


def gap_by(engine: Engine, ar: Configuration) -> Gap:
    """Return what asks the engine's target how far apart the two best logits after some tokens are."""

    def gap(ids: tuple[int, ...]) -> float:
        engine.configure(ar)
        laws = engine.generate(ids, SamplingParams(max_tokens=1, logprobs=2, ignore_eos=True))[0].logprobs
        assert laws is not None
        best, second = sorted(laws[0].values(), reverse=True)[:2]
        return best - second

    return gap
