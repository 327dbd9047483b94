"""Verification of batches: rows of unequal length, without drafts, with and without q, by either scheme, do not disturb one another."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd.sampling import Proposed, coupled, outcome_scores, press, rejection, verify
from theory.saguaro import saguaro_law

VOCAB, K = 6, 3


def laws(seed: int, *shape: int) -> torch.Tensor:
    return torch.softmax(2 * torch.randn(*shape, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), -1)


def keys(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 62), 1 << 62, shape, generator=torch.Generator().manual_seed(seed))


@given(st.lists(st.tuples(st.integers(0, K), st.booleans(), st.booleans()), min_size=1, max_size=5), st.integers(0, 1000))
def test_a_row_is_verified_as_if_it_were_alone(rows, seed):
    n = len(rows)
    count, has_q, couples = (torch.tensor(column) for column in zip(*rows, strict=True))
    p, q = laws(seed, n, K + 1), laws(seed + 1, n, K)
    tokens = torch.randint(0, VOCAB, (n, K), generator=torch.Generator().manual_seed(seed))
    accept, target = keys(seed, n, K), keys(seed + 1, n, K + 1)
    together = verify(p.log(), Proposed(tokens, count, q, has_q), couples, accept, target)
    for r, (drafted, own_q, coupling) in enumerate(rows):
        pick, width = slice(r, r + 1), slice(0, drafted)
        alone = Proposed(tokens[pick, width], count[pick], q[pick, width] if own_q else None, has_q[pick] if own_q else None)
        mine = verify(p[pick, : drafted + 1].log(), alone, bool(coupling), accept[pick, width], target[pick, : drafted + 1])
        assert (int(together.accepted[r]), int(together.bonus[r])) == (int(mine.accepted[0]), int(mine.bonus[0]))
        assert 0 <= int(together.accepted[r]) <= drafted


@given(st.integers(0, 1000))
def test_a_draft_from_the_targets_own_law_is_accepted_whole_by_rejection(seed):
    p = laws(seed, 1, K + 1)
    drafts = Proposed(torch.tensor([[1, 2, 0]]), torch.tensor([K]), p[:, :K], torch.tensor([True]))
    assert int(rejection(p.log(), drafts, keys(seed, 1, K), keys(seed, 1, K + 1)).accepted[0]) == K


@given(st.integers(0, 1000))
def test_coupling_with_the_same_law_accepts_everything_and_greedy_accepts_the_likeliest(seed):
    p, noise = laws(seed, 1, K + 1), keys(seed, 1, K + 1)
    nothing = Proposed(torch.zeros(1, 0, dtype=torch.long), torch.tensor([0]))
    for target in (noise, None):
        own = [int(coupled(p[:, k : k + 1].log(), nothing, None if target is None else target[:, k : k + 1]).bonus) for k in range(K + 1)]
        found = coupled(p.log(), Proposed(torch.tensor([own[:K]]), torch.tensor([K])), target)
        assert (int(found.accepted[0]), int(found.bonus[0])) == (K, own[K])
        if target is None:
            assert own == p[0].argmax(-1).tolist()


@given(st.integers(0, 1000), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, VOCAB))
def test_pressed_laws_are_those_of_definition_14(seed, factor, count):
    q = laws(seed, 2)
    q[0, :3] = 0
    q /= q.sum(-1, keepdim=True)
    found = press(q.log(), factor, count).exp()
    assert torch.allclose(found, torch.from_numpy(saguaro_law(q.numpy(), factor, count)), atol=1e-12)


@given(st.integers(0, 1000))
def test_tokens_that_the_drafts_law_leaves_out_are_ranked_after_all_others_by_its_logits(seed):
    scores = laws(seed, 1).log()
    kept = scores >= scores.topk(3, -1).values[:, -1:]
    log_q = torch.log_softmax(scores.masked_fill(~kept, -torch.inf), -1)
    order = outcome_scores(scores, log_q, None)[0].argsort(descending=True)
    assert order.tolist() == scores[0].argsort(descending=True).tolist()
    noisy = outcome_scores(scores, log_q, keys(seed, 1))[0].argsort(descending=True)
    assert set(noisy[:3].tolist()) == set(kept[0].nonzero()[:, 0].tolist())
