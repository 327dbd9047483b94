"""From logits to the law: transformers' own processors and theory's sampling_law give the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.logits_process import SequenceBiasLogitsProcessor

from ssd.sampling import Before, Parameters, log_law, processed
from ssd.specs import SamplingParams
from theory.sampling import sampling_law

VOCAB = 12
END = 3


def law_of(rows: list[SamplingParams], logits: torch.Tensor, texts: list[list[int]], prompts: list[int]) -> torch.Tensor:
    parameters = Parameters.of(rows, prompts, [[END]] * len(rows), logits.shape[-1], "cpu")
    longest = max(map(len, texts))
    ids = torch.tensor([[-1] * (longest - len(text)) + text for text in texts])
    return log_law(processed(logits, parameters, Before(torch.tensor([len(text) for text in texts]), ids)), parameters).exp()


def drawn(seed: int, rows: int = 1) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


temperatures = st.sampled_from([0.1, 0.7, 1.0, 1.8])
warps = st.fixed_dictionaries({"temperature": temperatures, "top_k": st.integers(0, 15), "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.05])})
everything = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.0]),
        "top_k": st.sampled_from([0, 3]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 0.5, -0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.4]),
        "logit_bias": st.sampled_from([{}, {2: 5.0, 7: -3.0}]),
        "bad_words_token_ids": st.sampled_from([(), ((4,),), ((1, 2), (5,), (3, 1, 2))]),
        "min_tokens": st.sampled_from([0, 2]),
    }
)
texts = st.lists(st.integers(0, 4), min_size=1, max_size=7)


@given(warps, st.integers(0, 1000))
def test_temperature_top_k_and_top_p_are_those_of_theory(warp, seed):
    logits = drawn(seed)
    law = law_of([SamplingParams(**warp)], logits, [[0]], [1])[0]
    assert law.numpy() == pytest.approx(sampling_law(logits[0].numpy(), **warp), abs=1e-12)


@given(warps, st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([1.0, 1.4, 0.7]), texts, st.integers(0, 1000), st.data())
def test_the_law_is_that_of_transformers_processors(warp, min_p, repetition, text, seed, data):
    prompt = data.draw(st.integers(1, len(text)))
    words = data.draw(st.sampled_from([[], [[4]], [[1, 2], [4]], [[0, 1, 2]]]))
    bias = data.draw(st.sampled_from([{}, {0: 2.0, 5: -4.0}]))
    minimum = data.draw(st.integers(0, 3))
    params = SamplingParams(
        **warp, min_p=min_p, repetition_penalty=repetition, bad_words_token_ids=words, logit_bias=bias, min_tokens=minimum
    )
    theirs = LogitsProcessorList()
    if bias:
        theirs.append(SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]))
    if words:
        theirs.append(NoBadWordsLogitsProcessor(words))
    if minimum:
        theirs.append(MinNewTokensLengthLogitsProcessor(prompt, minimum, [END]))
    theirs += [RepetitionPenaltyLogitsProcessor(repetition), TemperatureLogitsWarper(warp["temperature"])]
    if warp["top_k"]:
        theirs.append(TopKLogitsWarper(warp["top_k"]))
    theirs += [TopPLogitsWarper(warp["top_p"]), MinPLogitsWarper(min_p)] if min_p else [TopPLogitsWarper(warp["top_p"])]
    logits = drawn(seed)
    expected = torch.softmax(theirs(torch.tensor([text]), logits.clone()), -1)
    assert law_of([params], logits, [text], [prompt]).numpy() == pytest.approx(expected.numpy(), abs=1e-9)


@given(texts, st.data())
def test_presence_and_frequency_count_the_output_alone(text, data):
    prompt = data.draw(st.integers(1, len(text)))
    logits = drawn(1)
    law = law_of([SamplingParams(temperature=1, presence_penalty=0.5, frequency_penalty=0.25)], logits, [text], [prompt])[0]
    counts = np.bincount(text[prompt:], minlength=VOCAB)
    assert law.numpy() == pytest.approx(sampling_law(logits[0].numpy() - 0.25 * counts - 0.5 * (counts > 0)), abs=1e-12)


@given(st.lists(st.tuples(everything, texts), min_size=1, max_size=4), st.integers(0, 1000), st.data())
def test_a_rows_law_is_its_own_whatever_its_batch_mates_ask_for(rows, seed, data):
    prompts = [data.draw(st.integers(1, len(text))) for _, text in rows]
    params, spoken = [SamplingParams(**asked) for asked, _ in rows], [text for _, text in rows]
    logits = drawn(seed, len(rows))
    together = law_of(params, logits, spoken, prompts)
    for place in range(len(rows)):
        alone = law_of(params[place : place + 1], logits[place : place + 1], spoken[place : place + 1], prompts[place : place + 1])
        assert together[place].numpy() == pytest.approx(alone[0].numpy(), abs=1e-12)


@given(everything, texts, st.integers(0, 1000))
def test_temperature_zero_is_the_limit(asked, text, seed):
    cold, cool = (SamplingParams(**{**asked, "temperature": T}) for T in (0.0, 1e-7))
    logits = drawn(seed)
    assert torch.allclose(law_of([cold], logits, [text], [1]), law_of([cool], logits, [text], [1]))


EXTREMES = [
    {"temperature": 1.0, "top_p": 1e-50},
    {"temperature": 1e6, "top_k": 3, "bad_words_token_ids": ((0,),)},
    {"temperature": 1e-45, "min_p": 1.0},
    {"temperature": 1e-6, "repetition_penalty": 100.0},
    {"temperature": 1.0, "repetition_penalty": 0.01, "logit_bias": {1: 100.0, 2: -100.0}},
]


@pytest.mark.parametrize("asked", EXTREMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_parameters_still_give_a_law(asked, dtype):
    logits = (30 * drawn(3)).to(dtype)
    logits[0, 5] = -torch.inf
    law = law_of([SamplingParams(**asked)], logits, [[0, 1, 2, 2]], [2])
    assert law.dtype == dtype
    assert float(law.sum()) == pytest.approx(1, abs=1e-5)
    assert float(law[0, 5]) == 0


def test_a_law_that_reads_the_text_must_be_given_it():
    parameters = Parameters.of([SamplingParams(repetition_penalty=1.2)], [1], [[]], VOCAB, "cpu")
    with pytest.raises(ValueError, match=r"before\.ids is missing"):
        processed(drawn(0), parameters, Before(torch.tensor([2])))
