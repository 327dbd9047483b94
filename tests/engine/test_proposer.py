"""How the draft speaks for one request: which law its tokens are drawn from, and what outcomes are ranked by."""

from __future__ import annotations

import pytest
import torch

from ssd.engine.link import Start
from ssd.engine.proposer import Proposer
from ssd.sampling import Before, Purpose, gumbel, noise_key, prefix_hash
from ssd.specs import SamplingParams
from tests.engine.inprocess import setup
from theory.saguaro import saguaro_law

VOCAB = 9
LOGITS = 2 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
Q = torch.softmax(LOGITS, -1)
TEXT = [4, 7, 2]
BEFORE, PREFIX = Before(torch.tensor([3])), torch.tensor([prefix_hash(TEXT)])


def proposer(verification: str = "rejection", temperature: float = 1.0, **how) -> Proposer:
    params = SamplingParams(temperature=temperature, seed=11, verification=verification)
    return Proposer(Start("r", (4, 7), (), params), setup(2, (1, 2, 3), (3, 1, 2), **how), VOCAB, torch.device("cpu"))


@pytest.mark.parametrize(("after_hit", "fan_out"), [(True, (1, 2)), (False, (3, 1))])
def test_the_tokens_pressed_down_are_as_many_as_are_cached_there(after_hit, fan_out):
    speaks = proposer(saguaro=(0.2, 0.6))
    for place, (factor, count) in enumerate(zip((0.2, 0.6), fan_out, strict=True)):
        law = speaks.step(LOGITS, BEFORE, PREFIX, place, after_hit).log_q.exp()
        assert torch.allclose(law, torch.from_numpy(saguaro_law(Q.double().numpy(), factor, count)).float(), atol=1e-6)
    assert torch.allclose(speaks.step(LOGITS, BEFORE, PREFIX, 2, after_hit).log_q.exp(), Q)


def test_a_coupled_request_is_not_pressed_and_draws_with_the_targets_noise():
    coupled = proposer("coupled", saguaro=(0.2, 0.6)).step(LOGITS, BEFORE, PREFIX, 0, True)
    assert torch.allclose(coupled.log_q.exp(), Q)
    noise = gumbel(noise_key(torch.tensor([11]), Purpose.TARGET, torch.tensor([3]), PREFIX), VOCAB)
    assert coupled.tokens.tolist() == (LOGITS + noise).argmax(-1).tolist()


@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_outcomes_are_ranked_as_asked(verification):
    by_q = proposer(verification, ranking="probability").rank(LOGITS, BEFORE.length, PREFIX)
    assert by_q.argsort().tolist() == LOGITS.argsort().tolist()
    noise = gumbel(noise_key(torch.tensor([11]), Purpose.TARGET, torch.tensor([3]), PREFIX), VOCAB)
    assert proposer(verification).rank(LOGITS, BEFORE.length, PREFIX).argsort().tolist() == (LOGITS + noise).argsort().tolist()
    assert torch.equal(proposer(verification, temperature=0.0).rank(LOGITS, BEFORE.length, PREFIX), LOGITS)
