"""Which outcomes are cached."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd.engine.cache import Branches, Roots, advance, candidates
from ssd.engine.draft import Drafter, DraftRow
from ssd.engine.kv import Trunk
from ssd.engine.link import Outcome, Outcomes, Start, Stop, TakeSpans
from ssd.engine.proposer import Proposer
from ssd.specs import SamplingParams
from tests.engine.inprocess import differs, noisy, pair, reference, setup, tiny_model

START = Start("r", (5,), (), SamplingParams())
GREEDY = Proposer(START, setup(2), 12, torch.device("cpu"))


def roots(token: int) -> Roots:
    return Roots(torch.tensor([token]), torch.tensor([token]))


def branches(token: int, accepted: int, position: int, slots: list[int], visible: np.ndarray) -> Branches:
    """One column rooted at `token`."""
    return Branches(GREEDY, roots(token), np.array([accepted]), np.array([token]), np.array([position]), np.array([slots]), visible)


def draft_of(logits: torch.Tensor) -> tuple[Branches, int]:
    """A draft of one column that has these logits `[drafted+1, vocabulary]`."""
    drafted = len(logits) - 1
    branch = branches(0, 0, 0, [0] * (drafted + 2), np.zeros((1, 4), bool))
    for row in logits:
        branch.grow(row[None])
    return branch, drafted


def chosen(draft: Branches, drafted: int, fan_out: list[int], ends: list[int], most: int) -> list[tuple[int, int]]:
    """The outcomes that a list grants, (accepted, bonus) in order."""
    found = candidates(draft, drafted, ends, most)
    assert found.tokens.tolist() == found.bonus.tolist()
    return [(int(k), int(found.bonus[k, r])) for k, r in zip(*np.nonzero(found.listed(fan_out)), strict=True)]


@given(st.integers(0, 5), st.integers(0, 2**31), st.data())
def test_the_likeliest_tokens_are_chosen_without_the_sent_one_and_without_end_tokens(drafted, seed, data):
    fan_out = data.draw(st.lists(st.integers(0, 4), min_size=drafted + 1, max_size=drafted + 1).filter(any))
    ends = data.draw(st.lists(st.integers(0, 11), max_size=2, unique=True))
    logits = torch.randn(drafted + 1, 12, generator=torch.Generator().manual_seed(seed))
    draft, drafted = draft_of(logits)
    pairs = chosen(draft, drafted, fan_out, ends, data.draw(st.integers(max(fan_out), 14)))
    assert len(set(pairs)) == len(pairs) == sum(fan_out)
    for k, wanted in enumerate(fan_out):
        barred = {*ends, *([int(logits[k].argmax())] if k < drafted else [])}
        ranked = [token for token in logits[k].argsort(descending=True).tolist() if token not in barred]
        assert [bonus for accepted, bonus in pairs if accepted == k] == ranked[:wanted]


@given(st.integers(0, 5), st.integers(0, 2**31), st.lists(st.integers(0, 11), max_size=2, unique=True))
def test_chances_are_the_drafts_own_among_what_may_come_and_confidences_those_of_what_was_sent(drafted, seed, ends):
    logits = torch.randn(drafted + 1, 12, generator=torch.Generator().manual_seed(seed))
    law = torch.softmax(logits.double(), -1)
    found = candidates(*draft_of(logits), ends, 12)
    assert found.confidences == pytest.approx(law[:drafted].max(-1).values.numpy(), abs=1e-6)
    for k in range(drafted + 1):
        allowed = law[k].clone()
        allowed[[*ends, *([int(logits[k].argmax())] if k < drafted else [])]] = 0
        assert found.chances[k] == pytest.approx((allowed / allowed.sum())[found.tokens[k]].numpy(), abs=1e-6)
        assert not found.chances[k][allowed[found.tokens[k]].numpy() == 0].any()


def test_a_list_wider_than_the_vocabulary_caches_every_possible_token_once():
    logits = torch.randn(2, 6)
    draft, drafted = draft_of(logits)
    pairs = chosen(draft, drafted, [100, 100], [], 100)
    sent = int(logits[0].argmax())
    assert {bonus for k, bonus in pairs if k == 0} == set(range(6)) - {sent}
    assert {bonus for k, bonus in pairs if k == 1} == set(range(6))
    assert len(pairs) == len(set(pairs)) == 11


def test_places_that_were_not_drafted_give_their_outcomes_to_the_last():
    logits = torch.randn(2, 12)
    draft, drafted = draft_of(logits)
    pairs = chosen(draft, drafted, [1, 2, 3], [], 12)
    assert [k for k, _ in pairs] == [0] + [1] * 5


def row_with_cache(fed: int, request: str = "r") -> DraftRow:
    """A row after a prompt of one token whose cache holds outcome (0, 3), grown by so many tokens."""
    trunk = Trunk(16)
    row = DraftRow(0, Start(request, (5,), (), SamplingParams()), trunk, GREEDY, 0)
    row.draft = branches(5, 0, 0, [1, 2], trunk.mask[None].copy())
    row.draft.grow(torch.randn(1, 8))
    row.waves = [branches(3, 0, 1, [4, 5, 6], trunk.mask[None].copy())]
    trunk.slots.take(6)
    for _ in range(fed):
        row.waves[0].queries()
        row.waves[0].grow(torch.randn(1, 8))
    return row


@pytest.mark.parametrize(("fed", "bonus", "hit"), [(1, 3, True), (2, 3, True), (0, 3, False), (1, 4, False)])
def test_an_outcome_hits_if_its_branch_has_a_token(fed, bonus, hit):
    row = row_with_cache(fed)
    row.commit(0, bonus)
    assert row.hit is hit
    assert row.pending == ([] if hit else [bonus])
    assert (row.draft is not None) is hit
    assert np.flatnonzero(row.trunk.mask).tolist() == row.trunk.places.tolist() == [1]
    assert (row.tokens, row.length, row.trunk.length) == ([5, bonus], 2, 1)
    # Whatever else was taken is free again.
    assert row.trunk.slots.take(4).tolist() == ([2, 3, 7, 8] if hit else [2, 3, 4, 5])


def test_an_outcome_hits_in_whichever_wave_has_its_branch():
    row = row_with_cache(1)
    late = branches(6, 0, 1, [7, 8, 9], row.trunk.mask[None].copy())
    row.waves.append(late)
    assert row.find(0, 6) is None
    late.queries()
    late.grow(torch.randn(1, 8))
    assert row.find(0, 6) == (late, 0)
    assert row.find(0, 3) == (row.waves[0], 0)
    row.commit(0, 6)
    assert row.hit
    assert row.draft.bonus.tolist() == [6]
    assert row.waves == []


def outcomes(*found: tuple[str, int, int]) -> Outcomes:
    return Outcomes(1, tuple(Outcome(*one) for one in found))


@pytest.mark.parametrize("in_time", [True, False])
@pytest.mark.parametrize("building", ["fixed", "anytime"])
def test_the_last_token_of_branches_is_fed_where_there_is_time_and_makes_no_difference(building, in_time, monkeypatch):
    """What is fed need not be caught up with; an answer that lies ready would have to wait for it."""
    played, asked = [], {"building": building, "fan_out_hit": (2, 2, 2, 2)}
    monkeypatch.setattr("sim.tempo.Tempo.in_time", lambda *_: in_time)
    monkeypatch.setattr("sim.tempo.Tempo.worthwhile", lambda *_: True)

    def counted(model, growing, *rest):
        played.append({branches.fed for branches in growing.values()})
        return advance(model, growing, *rest)

    monkeypatch.setattr("ssd.engine.draft.advance", counted)
    target = tiny_model("llama", 3)
    with pair(target, noisy(target, 0.02, 4), 96) as both:
        request = both.decode(setup(3, **asked), [5, 6], 40, patient=True)
    assert both.peer.lost is None
    assert differs(target, [5, 6], request.output, reference(target, [5, 6], 40)) is None
    assert sum(each.hit is True for each in request.rounds) > 3
    # Of K = 3 tokens the last is fed by a fourth step.
    assert ({3} in played) == in_time
    assert {0} in played


@pytest.mark.parametrize(
    ("message", "fed", "others", "moot"),
    [
        (None, 0, [], False),
        (outcomes(("r", 0, 3)), 0, [], False),
        (outcomes(("r", 0, 3)), 1, [], False),
        # Complete with K = 2 tokens: nothing that is due is still being drafted.
        (outcomes(("r", 0, 3)), 2, [], True),
        (outcomes(("r", 0, 4)), 0, [], True),
        (outcomes(("r", 1, 3)), 0, [], True),
        (outcomes(("other", 0, 3)), 0, ["other"], True),
        (outcomes(("other", 0, 4), ("r", 0, 3)), 0, ["other"], False),
        (outcomes(("other", 0, 4), ("r", 0, 4)), 0, ["other"], True),
        (Stop("r"), 0, [], True),
        (Stop("r"), 0, ["other"], False),
        (TakeSpans(), 0, [], False),
    ],
)
def test_a_step_is_given_up_for_outcomes_that_it_cannot_help_and_for_the_end_of_the_only_request(message, fed, others, moot):
    row = row_with_cache(fed)
    drafter = Drafter.__new__(Drafter)
    drafter.setup, drafter.link = setup(2, (1, 1, 1)), SimpleNamespace(peek=lambda: message)
    drafter.rows = [row, *(row_with_cache(0, name) for name in others)]
    drafter._growing = [(row, row.waves[0])]
    assert drafter._moot() is moot
