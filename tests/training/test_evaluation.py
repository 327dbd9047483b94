"""The report on a draft."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ssd.training.evaluation import LARGEST, DraftReport, agreement, held_out_loss, report
from tests.tiny import EOS, VOCAB

END = VOCAB[EOS]
PROMPTS = [[5, 6, 7], [40, 41], [9, 8, 100, 3, 2]]


@pytest.fixture(scope="module")
def models(tiny_pair):
    return [AutoModelForCausalLM.from_pretrained(path).eval() for path in tiny_pair]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_model_accepts_all_of_its_own_tokens(models, temperature):
    found = agreement(models[0], models[0], PROMPTS, 10, temperature, END, 0)
    assert found.acceptance == pytest.approx(1, abs=1e-6)
    assert temperature or found.hit_if_accepted == (1.0,) * LARGEST


@torch.no_grad()
def test_greedy_acceptance_and_hits_are_counted_on_the_targets_own_text(models):
    target, draft = models
    found = agreement(target, draft, PROMPTS, 10, 0.0, END, 0)
    agreed, ranks, all_ranks = 0, [], []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(10):
            scores = draft(torch.tensor([ids])).logits[0, -1]
            best = int(target(torch.tensor([ids])).logits[0, -1].argmax())
            rank = int((scores > scores[best]).sum())
            all_ranks.append(rank)
            agreed += rank == 0
            ranks += [rank - 1] if rank else []
            if best == END:
                break
            ids.append(best)
    assert found.acceptance == pytest.approx(agreed / len(all_ranks))
    assert found.hit_if_rejected == pytest.approx([np.mean([rank < F for rank in ranks]) for F in range(1, LARGEST + 1)])
    assert found.hit_if_accepted == pytest.approx([np.mean([rank < F for rank in all_ranks]) for F in range(1, LARGEST + 1)])


def test_a_draft_that_may_not_propose_a_token_never_hits_with_it(models):
    target, draft = models
    every = agreement(target, draft, PROMPTS, 10, 1.0, END, 0)
    few = agreement(target, draft, PROMPTS, 10, 1.0, END, 0, vocabulary=torch.arange(0, 200, 7))
    assert few.acceptance < every.acceptance
    assert few.hit_if_accepted[-1] < every.hit_if_accepted[-1]


@torch.no_grad()
def test_the_loss_on_held_out_rows_is_the_mean_surprise_of_their_tokens(models):
    rows = np.array([[5, 9, 2, 77, 30], [1, 1, 4, 200, 8]], dtype=np.int32)
    surprises = [
        -float(models[0](torch.tensor([row[:place].tolist()])).logits[0, -1].log_softmax(-1)[row[place]])
        for row in rows
        for place in range(1, len(row))
    ]
    assert held_out_loss(models[0], rows) == pytest.approx(np.mean(surprises), abs=1e-5)


def test_a_report_has_every_temperature_and_its_table_a_row_for_each(models):
    found = report(*models, PROMPTS, 10, 0.25, END, 0, lambda *_: None)
    assert [one.temperature for one in found.agreements] == [0.0, 0.7, 1.0]
    assert len(found.table().splitlines()) == 5
    assert f"{found.agreements[1].acceptance:.3f}" in found.table()
    assert DraftReport.model_validate_json(found.model_dump_json()) == found
