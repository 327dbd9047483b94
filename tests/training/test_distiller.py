"""What a draft is trained on, and towards."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from ssd.training.distiller import distil, divergence
from ssd.training.fit import Schedule
from tests import tiny


@settings(max_examples=50)
@given(st.integers(0, 2**31), st.integers(2, 9), st.booleans())
def test_the_loss_is_the_divergence_summed_over_the_tokens_that_the_draft_may_propose(seed, size, short):
    generator = torch.Generator().manual_seed(seed)
    theirs, ours = 3 * torch.randn(2, 3, 3, size, generator=generator).double()
    kept = torch.randperm(size, generator=generator)[: max(1, size // 2)] if short else torch.arange(size)
    expected = 0.0
    for row in range(9):
        p, q = (logits.reshape(9, size)[row, kept].exp().numpy() for logits in (theirs, ours))
        p, q = p / p.sum(), q / q.sum()
        expected += float((p * np.log(p / q)).sum()) / 9
    assert float(divergence(theirs, ours, kept if short else None)) == pytest.approx(expected, abs=1e-5)


def test_a_model_does_not_diverge_from_itself_and_padding_rows_of_either_do_not_count():
    logits = torch.randn(2, 4, 10)
    assert float(divergence(logits, logits)) == pytest.approx(0, abs=1e-6)
    padded = torch.cat([logits, torch.full((2, 4, 3), 50.0)], -1)
    assert float(divergence(padded, logits)) == pytest.approx(0, abs=1e-6)


def test_a_student_comes_nearer_to_its_teacher(tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **tiny.GROUPED)
    teacher, student = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config)
    tiny.vary(teacher)
    rng = np.random.default_rng(0)
    text, own = (rng.integers(0, 200, size=4000, dtype=np.int32) for _ in range(2))
    held_out = rng.integers(0, 200, size=(8, 16), dtype=np.int32)
    before = [weight.clone() for weight in teacher.parameters()]
    with torch.no_grad():
        ids = torch.from_numpy(held_out.astype(np.int64))
        at_first = float(divergence(teacher(ids).logits, student(ids).logits))
    after = distil(
        teacher, student, [own, text], held_out, Schedule(steps=150, batch_size=8, window=16, learning_rate=1e-2), tmp_path, lambda *_: None
    )
    assert after < 0.8 * at_first
    assert all(torch.equal(old, new) for old, new in zip(before, teacher.parameters(), strict=True))
