"""The target's own text: which, how much, and only once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from ssd.training.samples import BATCH, TEMPERATURES, Job, continuations, jobs, sampled_stream
from tests.tiny import EOS, VOCAB

END = VOCAB[EOS]


@pytest.fixture(scope="module")
def model(tiny_pair):
    return AutoModelForCausalLM.from_pretrained(tiny_pair[0]).eval()


@given(st.integers(1, 12), st.integers(1, 60))
def test_every_prompt_is_continued_as_often_as_the_others_and_greedily_once(prompts, count):
    wanted = jobs([[place] for place in range(prompts)], count)
    assert len(wanted) == count
    often = [sum(job.prompt == (place,) for job in wanted) for place in range(prompts)]
    assert max(often) - min(often) <= 1
    greedy = [job for job in wanted if job.temperature == 0]
    assert len(greedy) == len(set(greedy)) == min(count, prompts)
    assert {job.temperature for job in wanted} <= set(TEMPERATURES)


@torch.no_grad()
def test_greedy_continuations_of_ragged_prompts_are_those_of_each_alone(model):
    prompts = [[5, 6, 7], [40], [9, 8, 100, 3, 2]]
    for prompt, row in zip(prompts, continuations(model, prompts, 12, 0.0, END, 0), strict=True):
        ids = list(prompt)
        for _ in range(12):
            best = int(model(torch.tensor([ids])).logits[0, -1].argmax())
            if best == END:
                break
            ids.append(best)
        assert row == ids[len(prompt) :]


def test_sampled_continuations_hang_on_the_seed_and_follow_the_law_of_the_model(model):
    prompt = [5, 6, 7]
    drawn = [row[0] if row else END for seed in range(8) for row in continuations(model, [prompt] * BATCH, 1, 1.0, END, seed)]
    with torch.no_grad():
        law = model(torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy()
    seen = np.bincount(drawn, minlength=len(law)) / len(drawn)
    assert 0.5 * abs(seen - law).sum() < 2.5 * 0.5 * np.sqrt(law * (1 - law) / len(drawn)).sum()
    assert continuations(model, [prompt] * 3, 9, 1.0, END, 1) == continuations(model, [prompt] * 3, 9, 1.0, END, 1)


def test_a_stream_is_prompts_with_continuations_and_is_not_made_again(model, tmp_path):
    wanted = [Job((5, 6), 0.0), Job((7,), 0.0), Job((5, 6), 1.0)]
    heard = []
    stream = sampled_stream(model, wanted, 6, END, 0, tmp_path, lambda what, share: heard.append(share))
    texts = [list(map(int, text.split())) for text in " ".join(map(str, stream)).split(f" {END}") if text]
    assert sorted(tuple(text[:1]) for text in texts) == [(5,), (5,), (7,)]
    assert heard == [0.0, 0.5]

    def refuse(*_, **__):
        raise AssertionError("made again")

    again = sampled_stream(refuse, wanted, 6, END, 0, tmp_path, lambda *_: None)
    assert np.array_equal(again, stream)
    (tmp_path / "00001.npy").unlink()
    assert np.array_equal(sampled_stream(model, wanted, 6, END, 0, tmp_path, lambda *_: None), stream)
