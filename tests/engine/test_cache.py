"""Which outcomes are cached."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd.engine.cache import Branches, choose_outcomes


def draft_of(logits: torch.Tensor) -> tuple[Branches, int]:
    """A draft of one column that has these logits `[drafted+1, vocabulary]`."""
    drafted = len(logits) - 1
    branch = Branches(torch.tensor([0]), np.zeros(1, int), np.zeros(1, int), np.zeros((1, drafted + 2), int), np.zeros((1, 4), bool))
    for row in logits:
        branch.grow(row[None])
    return branch, drafted


@given(st.integers(0, 5), st.integers(0, 2**31), st.data())
def test_the_likeliest_tokens_are_chosen_without_the_sent_one_and_without_end_tokens(drafted, seed, data):
    fan_out = data.draw(st.lists(st.integers(0, 4), min_size=drafted + 1, max_size=drafted + 1).filter(any))
    ends = data.draw(st.lists(st.integers(0, 11), max_size=2, unique=True))
    logits = torch.randn(drafted + 1, 12, generator=torch.Generator().manual_seed(seed))
    draft, drafted = draft_of(logits)
    chosen = choose_outcomes(draft, drafted, fan_out, ends)
    pairs = list(zip(chosen.accepted.tolist(), chosen.bonus.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs) == sum(fan_out)
    for k, wanted in enumerate(fan_out):
        barred = {*ends, *([int(logits[k].argmax())] if k < drafted else [])}
        ranked = [token for token in logits[k].argsort(descending=True).tolist() if token not in barred]
        assert [bonus for accepted, bonus in pairs if accepted == k] == ranked[:wanted]


def test_a_list_wider_than_the_vocabulary_caches_every_possible_token_once():
    logits = torch.randn(2, 6)
    draft, drafted = draft_of(logits)
    chosen = choose_outcomes(draft, drafted, (100, 100), [])
    pairs = list(zip(chosen.accepted.tolist(), chosen.bonus.tolist(), strict=True))
    sent = int(logits[0].argmax())
    assert {bonus for k, bonus in pairs if k == 0} == set(range(6)) - {sent}
    assert len(pairs) == len(set(pairs)) == 10
