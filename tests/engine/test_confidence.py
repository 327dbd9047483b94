"""What the draft expects: outcomes by its calibrated confidence, seconds by what it measured, and the waves it plans by both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sim.tempo import Tempo
from ssd.engine.cache import Branches, Roots, candidates
from ssd.engine.confidence import GREEDY, Confidence, kinds
from ssd.engine.link import Start
from ssd.engine.proposer import Proposer
from ssd.engine.rehearsal import rank_tokens
from ssd.specs import SamplingParams
from tests.engine.inprocess import loaded, reference, setup, tiny_model
from theory.outcomes import estimated_outcomes

V = 10


def proposer(**asked) -> Proposer:
    settled = SamplingParams(**{"seed": 3, "verification": "rejection", **asked})
    return Proposer(Start("r", (5,), (), settled), setup(3, ranking="probability"), V, torch.device("cpu"))


def drafted(how: Proposer, logits: torch.Tensor) -> Branches:
    """A draft of one column that has these logits `[K+1, V]`."""
    none = np.zeros(1, int)
    roots = Roots(torch.tensor([0]), torch.tensor([0]))
    branch = Branches(how, roots, none, none, none, np.zeros((1, len(logits) + 1), int), np.zeros((1, 4), bool))
    for row in logits:
        branch.grow(row[None])
    return branch


@given(st.integers(0, 4), st.integers(0, 10_000), st.sampled_from([0.0, 0.7, 1.0]))
def test_without_outcomes_yet_the_chances_are_those_of_theory(K, seed, temperature):
    """prod a_j (1 - a_{k+1}) q_k(t), the sent token left out, for all outcomes at once; the confidence is taken at its word."""
    logits = 0.8 * torch.randn(K + 1, V, generator=torch.Generator().manual_seed(seed))
    how = proposer(temperature=temperature)
    branch = drafted(how, logits)
    seen = candidates(branch, K, (), 32)
    found = Confidence().chances(kinds(how), seen)
    q = torch.softmax(logits / (temperature or 1.0), -1).double().numpy()
    q /= q.sum(-1, keepdims=True)
    sent = np.array([int(token) for token in branch.tokens[1 : K + 1]], dtype=int)
    expected = estimated_outcomes(q[np.arange(K), sent], q, sent)
    table = np.zeros((K + 1, V))
    np.put_along_axis(table, seen.bonus, found, -1)
    np.testing.assert_allclose(table, expected, atol=2e-3)
    assert seen.confidences == pytest.approx(q[np.arange(K), sent], abs=1e-5)
    assert found.sum() <= 1 + 1e-2
    assert (found >= 0).all()


def test_outcomes_teach_what_a_confidence_is_worth():
    """A draft that is surer than it is right comes to be believed as often as it is right."""
    rng, how, confidence = np.random.default_rng(0), proposer(), Confidence()
    logits = torch.zeros(2, V)
    logits[:, 3] = 5.0
    seen = candidates(drafted(how, logits), 1, (), 32)
    before = confidence.chances(GREEDY, seen)
    for _ in range(600):
        right = rng.random() < 0.3
        confidence.learn(GREEDY, seen, int(right), 4 if right else int(seen.bonus[0][2]))
    after = confidence.chances(GREEDY, seen)
    assert before[0].sum() < 0.1
    assert float(confidence.calibrations["greedy sent"].calibrated(seen.confidences)[0]) == pytest.approx(0.3, abs=0.08)
    assert after[0].sum() > 0.5
    # The bonus after full acceptance was never what the draft was surest of.
    assert after[1].max() < before[1].max()


def test_kinds_of_confidence_are_told_apart():
    ways = [{}, {"temperature": 1.0}, {"temperature": 1.0, "verification": "coupled"}]
    assert len({kind for asked in ways for kind in kinds(proposer(**asked))}) == 9
    assert kinds(proposer()) == GREEDY


def test_a_text_that_is_the_models_own_confirms_it_and_another_does_not():
    model = tiny_model("llama", 2)
    own = [1, 2, *reference(model, [1, 2], 40)]
    wrong = [1, 2, *np.random.default_rng(0).integers(0, 200, 40).tolist()]
    for text, share in ((own, 1.0), (wrong, 0.1)):
        confidence = Confidence()
        ranks = rank_tokens(loaded(model), tuple(text), 2, confidence)
        sent = confidence.calibrations["greedy sent"]
        assert sent.successes.sum() / sent.trials.sum() <= share
        assert (ranks == [1] * 40) == (share == 1)
        assert sent.trials.sum() == pytest.approx(39, abs=3)
        full = confidence.calibrations.get("greedy full")
        assert share < 1 or full.successes.sum() == pytest.approx(sent.successes.sum())


# --- seconds ---


@given(st.floats(1e-3, 0.1), st.floats(1e-5, 1e-2), st.lists(st.integers(1, 40), min_size=8, max_size=40).filter(lambda x: len(set(x)) > 2))
def test_seconds_of_a_step_are_read_off_a_line_through_the_measured_ones(base, each, sizes):
    tempo = Tempo()
    assert tempo.step(1) is None
    for size in sizes:
        tempo.stepped(size, base + each * size)
    for size in range(1, 50):
        assert float(tempo.step(size)) == pytest.approx(base + each * size, rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(1e-3, 1)), min_size=6, max_size=20))
def test_a_step_of_more_tokens_is_never_said_to_be_quicker_nor_any_to_take_no_time(measured):
    tempo = Tempo()
    for size, seconds in measured:
        tempo.stepped(size, seconds)
    said = tempo.step(np.arange(1, 50))
    assert (np.diff(said) >= -1e-9).all()
    assert (said > 0).all()


def told(tempo: Tempo) -> float:
    return float(tempo.step(1))


@given(st.integers(0, 20), st.integers(0, 20), st.floats(0.1, 1e4), st.integers(1, 8))
def test_a_step_that_stood_still_is_no_slow_step_wherever_it_comes(before, after, seconds, tokens):
    """At first too, where a process makes ready what it needs: nothing is quicker than it can be."""
    tempo = Tempo()
    for spent in (*[1e-3] * before, seconds, *[1e-3] * max(after, 6 - before)):
        tempo.stepped(tokens, spent)
    assert 1e-3 * 0.999 <= told(tempo) < 4e-3


def test_steps_that_have_become_slow_for_good_are_believed_soon_and_quick_ones_at_once():
    tempo = Tempo()
    for seconds, count, least, most in ((1e-3, 50, 0.9e-3, 1.1e-3), (20e-3, 200, 15e-3, 21e-3), (1e-3, 1, 0.9e-3, 5e-3)):
        for _ in range(count):
            tempo.stepped(2, seconds)
        assert least < told(tempo) < most


def rounds(tempo: Tempo, clock: list[float], verification: float, count: int) -> int:
    """Play rounds in which no step is measured but those that are tried, of a millisecond; return how many are."""
    tried = 0
    for _ in range(count):
        if tempo.worthwhile([0], [0], 1):
            tempo.stepped(1, 1e-3)
            tried += 1
        tempo.sent()
        clock[0] += verification
        tempo.heard()
        tempo.verified(1, 1)
    return tried


def test_what_was_once_too_slow_is_tried_again_and_what_is_too_slow_is_tried_rarely():
    clock = [0.0]
    tempo = Tempo(lambda: clock[0])
    for _ in range(6):
        tempo.stepped(1, 0.1)
    rounds(tempo, clock, 2e-3, 30_000)
    assert rounds(tempo, clock, 2e-3, 100) == 100
    # Now a verification takes a tenth of a step, and what is tried in vain a hundredth of the time.
    rounds(tempo, clock, 1e-4, 1000)
    assert 0 < rounds(tempo, clock, 1e-4, 20_000) * 1e-3 < 20_000 * 1e-4 / 95
    # What is tried need not be measured, as where a row is caught up with in the same forward.
    tempo.stepped = lambda *_: None
    assert 0 < rounds(tempo, clock, 1e-4, 20_000) * 1e-3 < 20_000 * 1e-4 / 95


def test_a_verification_is_what_it_mostly_was_and_one_long_wait_is_no_verification():
    now = 0.0
    tempo = Tempo(lambda: now)
    assert tempo.left() is None
    for _ in range(20):
        tempo.sent()
        now += 0.1
        tempo.heard()
    assert tempo.verification == pytest.approx(0.1)
    tempo.sent()
    now += 0.04
    assert tempo.left() == pytest.approx(0.06)
    now += 1000
    tempo.heard()
    assert tempo.verification < 0.2
    assert tempo.left() is None


def test_acceptance_follows_the_outcomes():
    tempo = Tempo()
    for _ in range(300):
        tempo.verified(1, 4)
    assert tempo.acceptance == pytest.approx(0.5, abs=0.02)


# --- waves ---


def paced(step: float, each: float, left: float) -> Tempo:
    """A tempo that knows these seconds and nothing else."""
    tempo = Tempo()
    for size in (1, 2, 4, 8, 16, 1, 8):
        tempo.stepped(size, step + each * size)
    tempo.left = lambda: left
    return tempo


CHANCES = np.array([0.4, 0.2, 0.1, 0.08, 0.05, 0.02, 0.01, 0.01])


@pytest.mark.parametrize(
    ("step", "each", "left", "width"),
    [(0.01, 0.0, 1.0, 8), (0.01, 0.01, 10.0, 8), (0.1, 0.05, 0.16, 1), (0.01, 0.1, 0.46, 1)],
)
def test_a_wave_is_as_wide_as_its_tokens_come_in_time(step, each, left, width):
    assert paced(step, each, left).best_width(CHANCES, 4) == width


@given(st.floats(1e-3, 0.2), st.floats(0, 0.05), st.floats(1e-3, 2), st.integers(1, 6))
def test_no_other_width_is_worth_more(step, each, left, K):
    tempo = paced(step, each, left)
    a = tempo.acceptance

    def worth(width: int) -> float:
        seconds = float(tempo.step(width))
        steps = min(K, max(left, float(tempo.step(1))) // seconds)
        return CHANCES[:width].sum() * sum(a ** (j + 1) for j in range(int(steps)))

    assert worth(tempo.best_width(CHANCES, K)) == pytest.approx(max(worth(width) for width in range(1, 9)))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.floats(0.01, 0.5), st.floats(0.01, 0.5))
def test_a_short_draft_is_completed_just_as_far_as_it_speeds_the_round_up(drafted, step, verification):
    tempo = paced(step, 0.0, 1.0)
    tempo.verification = verification
    short = [count for count in drafted if count < 4]
    a = tempo.acceptance
    # To first order: tokens gained a second of drafting, against tokens a second without it.
    speed = sum(sum(a**j for j in range(count + 1)) for count in drafted) / verification
    assert tempo.worthwhile(drafted, short, 1) == (sum(a ** (count + 1) for count in short) / step > speed)


@given(st.floats(1e-3, 0.2), st.floats(0, 0.05), st.floats(1e-3, 2), st.integers(1, 16))
def test_a_step_is_in_time_if_it_ends_before_outcomes_are_due(step, each, left, tokens):
    tempo = paced(step, each, left)
    assert tempo.in_time(tokens) == (float(tempo.step(tokens)) <= left)


def test_what_is_not_measured_yet_holds_nothing_back():
    assert Tempo().in_time(8)
    assert Tempo().best_width(CHANCES, 4) == len(CHANCES)
    assert Tempo().worthwhile([0], [0], 1)
