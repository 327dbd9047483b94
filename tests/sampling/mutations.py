"""Plausible mistakes in the sampling code, put in one at a time: each must be caught by the test named beside it.

`python -m tests.sampling.mutations` makes the table; a mistake that its test lets pass, or that no longer fits the code, ends it with 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ROUND = "tests/sampling/test_enumeration.py::test_a_round_emits_the_targets_law"
TWO = "tests/sampling/test_enumeration.py::test_two_rounds_with_a_cache_between_them_emit_the_targets_law"
LOOKS = "tests/sampling/test_enumeration.py::test_a_cache_that_looks_at_all_draws_leaves_the_law_alone"
NOISE = "tests/sampling/test_noise.py"
ALONE = "tests/sampling/test_verification.py::test_a_row_is_verified_as_if_it_were_alone"
SAME = "tests/engine/test_sampling.py::test_a_draft_that_is_the_target_is_accepted_whole_whatever_the_request_asks"
BATCH = "tests/engine/test_batch.py::test_every_request_of_a_batch_gets_the_tokens_that_it_gets_alone"
JIT = "tests/engine/test_sampling.py::test_rejection_with_the_draft_as_backup_gives_the_tokens_of_sd_whatever_is_cached"


class Mutation(NamedTuple):
    """A mistake: what it is, where, the code and what it becomes, and the test that sees it."""

    what: str
    file: str
    code: str
    mistake: str
    test: str


VERIFY, DRAFTER, TARGET = "ssd/sampling/verification.py", "ssd/engine/proposer.py", "ssd/engine/target.py"
MUTATIONS = [
    Mutation(
        "the ratio is taken with q before top-k, top-p and temperature",
        DRAFTER,
        "return Step(scores, log_q, draw(",
        "return Step(scores, torch.log_softmax(logits, -1), draw(",
        ROUND,
    ),
    Mutation(
        "a fixed guess is accepted where it is the target's likeliest token",
        VERIFY,
        "proposal = torch.where(drafts.has_q[:, None], _at(drafts.q, tokens).double(), 1.0)",
        "has = drafts.has_q[:, None]; proposal = torch.where(has, _at(drafts.q, tokens).double(), 1.0); "
        "chance = torch.where(has, chance, (log_p[:, :-1].argmax(-1) == tokens).double())",
        TWO,
    ),
    Mutation(
        "after a rejection the bonus is drawn from p, not from the residual",
        VERIFY,
        "law = torch.where((rejected & (left > 0).any(-1))[:, None], left, law)",
        "pass",
        ROUND,
    ),
    Mutation(
        "the residual is the absolute difference of p and q",
        VERIFY,
        "(law - _row(drafts.q, at)).clamp_(min=0)",
        "(law - _row(drafts.q, at)).abs()",
        ROUND,
    ),
    Mutation("a random number of 0 accepts what p forbids: <= for <", VERIFY, "* proposal < chance", "* proposal <= chance", ROUND),
    Mutation(
        "the noise of the bonus decides acceptance too",
        VERIFY,
        "stands = (uniform(accept) if accept is not None else torch.full_like(chance, 0.5)) * proposal < chance",
        "from ssd.sampling import drafting; V = log_p.shape[-1]; stands = torch.exp(-torch.exp(-_at(drafting.gumbel("
        "target[:, :-1].flatten(), V).view(*tokens.shape, V), tokens))) * proposal < chance",
        ROUND,
    ),
    Mutation(
        "draft tokens and bonus are drawn with the same noise under rejection",
        DRAFTER,
        "Purpose.TARGET if self.coupled else Purpose.DRAFT",
        "Purpose.TARGET",
        ROUND,
    ),
    Mutation(
        "noise is keyed by position, without the tokens before it",
        "ssd/sampling/noise.py",
        "+ position * GOLDEN + prefix)",
        "+ position * GOLDEN + 0 * prefix)",
        LOOKS,
    ),
    Mutation(
        "a draft token of low confidence is dropped after its draw",
        TARGET,
        "drafted = torch.tensor([len(draft.tokens) for draft in drafts])",
        "drafted = torch.tensor([len(d.tokens) if d.laws is None else int((d.laws.dense(vocab_size)[range(len(d.tokens)), list(d.tokens)]"
        " > 0.4).long().cumprod(0).sum()) for d in drafts])",
        ROUND,
    ),
    Mutation(
        "the residual is taken against q of the place before",
        VERIFY,
        "(law - _row(drafts.q, at))",
        "(law - _row(drafts.q, (at - 1).clamp(min=0)))",
        ROUND,
    ),
    Mutation("acceptance looks at p of the next place", VERIFY, "log_p[:, :-1].exp()", "log_p[:, 1:].exp()", ROUND),
    Mutation(
        "Saguaro's factor is in the draw and not in the q that is sent",
        DRAFTER,
        "return Step(scores, log_q, draw(",
        "return Step(scores, log_law(scores, self.parameters), draw(",
        ROUND,
    ),
    Mutation(
        "Saguaro's factor is in the q that is sent and not in the draw",
        DRAFTER,
        "draw(log_q, noise_key(",
        "draw(log_law(scores, self.parameters), noise_key(",
        ROUND,
    ),
    Mutation(
        "the residual of a fixed guess keeps the guess",
        VERIFY,
        "left = law.scatter(1, _row(tokens, at)[:, None], 0.0)",
        "left = law.clone()",
        TWO,
    ),
    Mutation(
        "the residual is taken after full acceptance too",
        VERIFY,
        "(rejected & (left > 0).any(-1))",
        "((left > 0).any(-1))",
        ROUND,
    ),
    Mutation(
        "one random number decides all acceptances of a round",
        TARGET,
        "noise_key(seeds, Purpose.ACCEPT, length[:, :-1], prefixes[:, :-1])",
        "noise_key(seeds, Purpose.ACCEPT, length[:, :1], prefixes[:, :1]).repeat(length.shape[1] - 1, 1)",
        ROUND,
    ),
    Mutation("the padding of a shorter draft is verified", VERIFY, "_leading(stands & _meant(drafts))", "_leading(stands)", ALONE),
    Mutation(
        "coupling compares with the target's likeliest token",
        VERIFY,
        "_leading((own[:, :-1] == drafts.tokens)",
        "_leading((log_p[:, :-1].argmax(-1) == drafts.tokens)",
        ROUND,
    ),
    Mutation(
        "coupling draws with the draft's noise, the target with its own",
        DRAFTER,
        "Purpose.TARGET if self.coupled else Purpose.DRAFT",
        "Purpose.DRAFT",
        "tests/sampling/test_enumeration.py::test_coupling_accepts_as_often_as_theory_says",
    ),
    Mutation(
        "the noise is exponential, not Gumbel",
        "ssd/sampling/noise.py",
        "return parts.log1p_().neg_().log_().neg_()",
        "return parts.log1p_().neg_()",
        NOISE,
    ),
    Mutation(
        "tokens of a vocabulary share their noise in pairs",
        "ssd/sampling/noise.py",
        "torch.arange(1, vocab_size + 1, device=device)",
        "torch.arange(1, vocab_size + 1, device=device) // 2",
        NOISE,
    ),
    Mutation(
        "a branch's penalties are computed from the text before the branch",
        "ssd/engine/cache.py",
        "self.ids = torch.cat([self.ids, tokens[:, None]], 1)",
        "pass",
        SAME,
    ),
    Mutation(
        "a branch's noise knows the text before the branch, not its own tokens",
        "ssd/engine/draft.py",
        "Roots(bonus, extend(torch.cat(draft.prefixes)[after], bonus), ids)",
        "Roots(bonus, torch.cat(draft.prefixes)[after], ids)",
        JIT,
    ),
    Mutation(
        "after a miss the draft's prefix forgets the bonus",
        "ssd/engine/draft.py",
        "self.prefix = prefix_hash(tokens, self.prefix)",
        "self.prefix = prefix_hash(tokens[:-1], self.prefix)",
        JIT,
    ),
    Mutation(
        "all rows of a batch draw with the seed of the first",
        TARGET,
        "seeds = np.array([row.params.seed or 0 for row in rows])[:, None]",
        "seeds = np.array([rows[0].params.seed or 0 for row in rows])[:, None]",
        BATCH,
    ),
    Mutation(
        "a row that joins as another leaves is judged by the other's parameters",
        TARGET,
        " or any(one is not other for one, other in zip(known, rows, strict=True))",
        "",
        BATCH,
    ),
]


def caught(mutation: Mutation, folder: Path) -> bool:
    """Put the mistake into a copy of the project and say whether its test fails."""
    path = folder / mutation.file
    source = path.read_text()
    if source.count(mutation.code) != 1:
        raise SystemExit(f"{mutation.what!r} fits {source.count(mutation.code)} places of {mutation.file}: bring it up to date")
    path.write_text(source.replace(mutation.code, mutation.mistake))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", mutation.test]
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False)
    path.write_text(source)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{mutation.what!r}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 1


def main() -> None:
    """Print the table."""
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("ssd", "sim", "theory", "tests", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        print("| mistake | seen by | caught |\n|---|---|---|")
        for mutation in MUTATIONS:
            found = caught(mutation, folder)
            missed += not found
            print(f"| {mutation.what} | `{mutation.test.split('::')[-1]}` | {'yes' if found else 'NO'} |", flush=True)
    raise SystemExit(int(missed > 0))


if __name__ == "__main__":
    main()
