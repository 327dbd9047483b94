"""The laws of draft tokens on the link: nothing is lost, the smaller form is sent, and what is no law is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd.engine.link import Draft, Drafts, Outcome, Outcomes
from ssd.engine.packed import Laws
from ssd.engine.peer import DraftPeer
from tests.engine.inprocess import joined, noisy, pair, setup, tiny_model

WIDTH = 8


def laws_of(kept: list[int], seed: int = 0) -> tuple[Laws, torch.Tensor]:
    """Laws with so many tokens each."""
    scores = torch.randn(len(kept), WIDTH, generator=torch.Generator().manual_seed(seed))
    for row, count in zip(scores, kept, strict=True):
        row[count:] = -torch.inf
    log_q = torch.log_softmax(scores, -1)
    return Laws.of(list(log_q[:, None])), log_q.exp()


@given(st.lists(st.integers(1, WIDTH), min_size=1, max_size=4), st.integers(0, 100), st.integers(WIDTH, 12))
def test_they_arrive_as_they_were_and_in_the_smaller_form(kept, seed, vocab_size):
    packed, q = laws_of(kept, seed)
    found = packed.dense(vocab_size)
    assert torch.equal(found[:, :WIDTH], q)
    assert not found[:, WIDTH:].any()
    assert sum(part.nbytes for part in (packed.values, packed.ids, packed.counts) if part is not None) <= 4 * WIDTH * len(kept)
    assert (packed.ids is not None) == (2 * sum(kept) + len(kept) < WIDTH * len(kept))
    packed.check([0] * len(kept), vocab_size)


SPARSE, DENSE = laws_of([2, 1])[0], laws_of([8, 8])[0]
MALFORMED = {
    "too few": laws_of([2])[0],
    "wider than the target's vocabulary": replace(DENSE, width=16),
    "counts that do not fit": replace(SPARSE, counts=np.array([5, 5])),
    "counts below zero": replace(SPARSE, counts=np.array([-1, 4])),
    "counts that are no numbers": replace(SPARSE, counts=("x", "y")),
    "values missing": replace(DENSE, values=DENSE.values[:9]),
    "no law": replace(DENSE, values=DENSE.values * 0),
    "more than a law": replace(DENSE, values=DENSE.values * 3),
    "no number": replace(DENSE, values=DENSE.values * np.float32("nan")),
    "a token below zero": replace(DENSE, values=DENSE.values - 0.2),
    "ids past the width": replace(SPARSE, ids=SPARSE.ids + 100),
    "fractional ids": replace(SPARSE, ids=None, counts=None),
    "something else": 7,
}


def peer_that_sends(*drafts: Draft, after: int = 1) -> DraftPeer:
    """A peer with drafts of two tokens due for request r after round 1."""
    near, _ = joined()
    peer = DraftPeer(SimpleNamespace(kill=lambda: None, wait=lambda: None), near, 5.0, 10)
    peer._setup = setup(2)
    peer.report(Outcomes(1, (Outcome("r", 0, 0),)))
    # As if it had been looked at already: not all of it could come over the link, and the peer's check is to see it.
    near._next = Drafts(after, drafts)
    return peer


@pytest.mark.parametrize("laws", [None, DENSE, laws_of([2, 2])[0]])
def test_a_law_and_its_tokens_are_taken_as_they_came(laws):
    peer = peer_that_sends(Draft("r", (0, 1), True, False, laws))
    draft = peer.drafts()["r"]
    assert draft.tokens == (0, 1)
    assert (draft.laws is None) is (laws is None)
    assert laws is None or torch.equal(draft.laws.dense(10), laws.dense(10))
    assert peer.lost is None


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_no_law_loses_the_draft_and_not_the_request(what):
    peer = peer_that_sends(Draft("r", (0, 0), True, False, MALFORMED[what]))
    assert peer.drafts() == {}
    assert "came malformed" in peer.lost


@pytest.mark.parametrize("tokens", [(10, 1), (1, -1), (1, 2, 3), (1.0, 2)])
def test_tokens_that_the_target_cannot_verify_lose_the_draft(tokens):
    peer = peer_that_sends(Draft("r", tokens, True, False))
    assert peer.drafts() == {}
    assert "malformed" in peer.lost


def test_a_draft_that_its_law_forbids_loses_the_draft():
    peer = peer_that_sends(Draft("r", (0, 5), True, False, SPARSE))
    assert peer.drafts() == {}
    assert peer.lost


@pytest.mark.parametrize(
    ("drafts", "after"),
    [([Draft("r")], 2), ([Draft("other")], 1), ([], 1), ([Draft("r"), Draft("r")], 1), ([7], 1), ([Draft("r", None)], 1)],
)
def test_drafts_of_another_round_or_for_other_requests_lose_the_draft(drafts, after):
    peer = peer_that_sends(*drafts, after=after)
    assert peer.drafts() == {}
    assert "malformed or out of turn" in peer.lost


@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_a_draft_that_may_say_nothing_that_the_request_allows_changes_no_law(verification):
    """All that the draft's small vocabulary has is barred: what it says is rejected, and the tokens are those of AR or of the law."""
    target = tiny_model("llama", 18)
    small = type(target.config)(**{**target.config.to_dict(), "vocab_size": 200})
    torch.manual_seed(0)
    asked = {"temperature": 1.0, "seed": 3, "bad_words_token_ids": tuple((token,) for token in range(200)), "verification": verification}
    with pair(target, type(target)(small).eval(), 96) as both:
        alone = both.decode(None, [1, 2], 20, **asked).output
        drafted = both.decode(setup(2, (1, 1, 1)), [1, 2], 20, **asked)
        assert both.peer.lost is None
    assert min(drafted.output) >= 200
    assert all(r.accepted == 0 for r in drafted.rounds)
    if verification == "coupled":
        assert drafted.output == alone


def test_a_draft_lost_under_rejection_costs_no_request():
    target = tiny_model("llama", 18)
    with pair(target, noisy(target, 0.1, 1), 96) as both:
        receive, number = both.peer.drafts, itertools.count(1)
        both.peer.drafts = lambda: both.peer.lose("unplugged") or receive() if next(number) > 3 else receive()
        request = both.decode(setup(2, (1, 1, 1)), [1, 2], 30, temperature=1.0, seed=1, verification="rejection")
    assert len(request.output) == 30
    assert {r.drafted for r in request.rounds[:2]} == {2}
    assert {r.drafted for r in request.rounds[2:]} == {0}
    assert both.peer.lost == "unplugged"
