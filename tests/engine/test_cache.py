"""Which outcomes are cached."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd.engine.cache import Branches, Roots, choose_outcomes
from ssd.engine.draft import Drafter, DraftRow
from ssd.engine.link import Outcome, Start, Stop
from ssd.engine.proposer import Proposer
from ssd.specs import SamplingParams
from tests.engine.inprocess import setup

START = Start("r", (5,), (), SamplingParams())
GREEDY = Proposer(START, setup(2), 12, torch.device("cpu"))


def roots(token: int) -> Roots:
    return Roots(torch.tensor([token]), torch.tensor([token]))


def draft_of(logits: torch.Tensor) -> tuple[Branches, int]:
    """A draft of one column that has these logits `[drafted+1, vocabulary]`."""
    drafted = len(logits) - 1
    branch = Branches(GREEDY, roots(0), np.zeros(1, int), np.zeros(1, int), np.zeros((1, drafted + 2), int), np.zeros((1, 4), bool))
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


def row_with_cache(fed: int) -> DraftRow:
    """A row after a prompt of one token whose cache holds outcome (0, 3), grown by so many tokens."""
    row = DraftRow(0, START, 16, GREEDY)
    row.pending, row.draft = [], Branches(GREEDY, roots(5), np.zeros(1, int), np.zeros(1, int), np.array([[1, 2]]), row.trunk[None].copy())
    row.draft.grow(torch.randn(1, 8))
    row.cache = Branches(GREEDY, roots(3), np.zeros(1, int), np.ones(1, int), np.array([[4, 5, 6]]), row.trunk[None].copy())
    for _ in range(fed):
        row.cache.queries()
        row.cache.grow(torch.randn(1, 8))
    return row


@pytest.mark.parametrize(("fed", "bonus", "hit"), [(1, 3, True), (2, 3, True), (0, 3, False), (1, 4, False)])
def test_an_outcome_hits_if_its_branch_has_a_token(fed, bonus, hit):
    row = row_with_cache(fed)
    row.commit(0, bonus)
    assert row.hit is hit
    assert row.pending == ([] if hit else [bonus])
    assert (row.draft is not None) is hit
    assert np.flatnonzero(row.trunk).tolist() == [1]


@pytest.mark.parametrize(
    ("message", "moot"),
    [
        (None, False),
        (Outcome("r", 1, 0, 3), False),
        (Outcome("r", 1, 0, 4), True),
        (Outcome("r", 1, 1, 3), True),
        (Stop("r"), True),
    ],
)
def test_a_step_is_given_up_for_any_message_but_the_outcome_that_grows_in_it(message, moot):
    drafter = Drafter.__new__(Drafter)
    drafter.rows, drafter.link = [row_with_cache(0)], SimpleNamespace(peek=lambda: message)
    assert drafter._moot() is moot
