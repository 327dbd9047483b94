"""Sampling through the engine: what a seed promises, token for token, and what the law of short texts is."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd.engine.kv import ATTENTION
from ssd.sampling import Before, Parameters, Purpose, gumbel, log_law, noise_key, prefix_hash, processed
from ssd.specs import SamplingParams
from tests.engine.inprocess import NEAR_TIE, noisy, pair, setup, tiny_model
from tests.strategies import fan_outs, several

CONTEXT = 96
# A p-value below this would be no chance: a dozen of them are looked at.
LEAST_P = 1e-4

params = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.3, 0.7, 1.0, 1.5]), "seed": st.integers(0, 2**40)},
    optional={
        "top_k": st.sampled_from([2, 5, 40]),
        "top_p": st.sampled_from([0.5, 0.9]),
        "min_p": st.sampled_from([0.02, 0.2]),
        "repetition_penalty": st.sampled_from([1.2, 0.9]),
        "presence_penalty": st.sampled_from([1.0, -0.5]),
        "frequency_penalty": st.sampled_from([0.7]),
        "logit_bias": st.sampled_from([{7: 5.0, 9: -5.0}]),
        "bad_words_token_ids": st.sampled_from([((7,), (8, 9)), ((3, 4, 5), (11,))]),
        "min_tokens": st.sampled_from([3]),
    },
)


@st.composite
def situations(draw):
    K = draw(st.integers(1, 5))
    return {
        "K": K,
        "hit": draw(fan_outs(K)),
        "miss": draw(fan_outs(K)),
        "ranking": draw(st.sampled_from(["shared_noise", "probability"])),
        "noise": draw(st.sampled_from([0.0, 0.1, 0.3, 1.0])),
        "model": draw(st.integers(0, 10_000)),
        "prompt": draw(st.lists(st.integers(0, 255), min_size=1, max_size=12)),
        "tokens": draw(st.integers(3, 30)),
        # Where the draft is not waited for, hits hang on the moment.
        "patient": draw(st.sampled_from([True, True, True, False])),
        "params": draw(params),
    }


def scores_at(model, prompt: list[int], text: list[int], asked: SamplingParams, purpose: Purpose, ends: tuple[int, ...]) -> torch.Tensor:
    """What a token after prompt + text is chosen by, from the model's own plain forward."""
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = model(torch.tensor([prompt + text])).logits[:, -1]
    model.set_attn_implementation(ATTENTION)
    parameters = Parameters.of([asked], [len(prompt)], [ends], logits.shape[-1], "cpu")
    before = Before(torch.tensor([len(prompt + text)]), torch.tensor([prompt + text]))
    law = log_law(processed(logits, parameters, before), parameters)
    position, prefix = torch.tensor([len(prompt + text)]), torch.tensor([prefix_hash(prompt + text)])
    return (law + gumbel(noise_key(torch.tensor([asked.seed]), purpose, position, prefix), logits.shape[-1]))[0]


def near_tie(model, prompt, text, asked, purpose, ends=()) -> bool:
    best = scores_at(model, prompt, text, asked, purpose, ends).topk(2).values
    return float(best[0] - best[1]) < NEAR_TIE


def alike(one: list[int], other: list[int], excused) -> bool:
    """Whether two outputs are the same, up to a place where a choice hung on rounding."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return excused(one[:place])
    return len(one) == len(other)


def test_a_seed_under_coupling_gives_the_tokens_of_ar_in_every_mode_whatever_is_drafted():
    seen: Counter = Counter()

    @several(100)
    @given(situations(), st.sampled_from(["jit", "ngram", "none"]))
    def law(case, backup):
        target = tiny_model("llama", case["model"])
        asked = {**case["params"], "verification": "coupled"}
        how = setup(case["K"], case["hit"], case["miss"], backup, ranking=case["ranking"])
        with pair(target, noisy(target, case["noise"], case["model"] + 1), CONTEXT) as both:
            alone, sd, ssd = (
                both.decode(mode, case["prompt"], case["tokens"], patient=case["patient"] and mode is not None, **asked)
                for mode in (None, setup(case["K"]), how)
            )
            assert both.peer.lost is None
        excused = lambda text: near_tie(target, case["prompt"], text, SamplingParams(**case["params"]), Purpose.TARGET)  # noqa: E731
        assert alike(alone.output, sd.output, excused)
        assert alike(alone.output, ssd.output, excused)
        seen["differ"] += alone.output != sd.output or alone.output != ssd.output
        seen.update(f"hit {r.hit}" for r in ssd.rounds)
        seen["accepted"] += sum(r.accepted for r in ssd.rounds)
        seen["rejected"] += sum(r.accepted < r.drafted for r in ssd.rounds)

    law()
    assert min(seen["hit True"], seen["hit False"], seen["accepted"], seen["rejected"]) > 30, seen
    assert seen["differ"] <= 1, seen


def test_rejection_with_the_draft_as_backup_gives_the_tokens_of_sd_whatever_is_cached():
    seen: Counter = Counter()

    @several(80)
    @given(situations())
    def law(case):
        target = tiny_model("llama", case["model"])
        draft = noisy(target, case["noise"], case["model"] + 1)
        asked = {**case["params"], "verification": "rejection"}
        how = setup(case["K"], case["hit"], case["miss"], "jit", ranking=case["ranking"])
        with pair(target, draft, CONTEXT) as both:
            sd, ssd = (
                both.decode(mode, case["prompt"], case["tokens"], patient=case["patient"], **asked) for mode in (setup(case["K"]), how)
            )
            assert both.peer.lost is None
        assert sd.output == ssd.output
        assert [r.accepted for r in sd.rounds] == [r.accepted for r in ssd.rounds]
        seen.update(f"hit {r.hit}" for r in ssd.rounds)
        seen["accepted"] += sum(r.accepted for r in ssd.rounds)
        seen["rejected"] += sum(r.accepted < r.drafted for r in ssd.rounds)

    law()
    assert min(seen["hit True"], seen["hit False"], seen["accepted"], seen["rejected"]) > 30, seen


@pytest.mark.parametrize("verification", ["rejection", "coupled"])
def test_a_draft_that_is_the_target_is_accepted_whole_whatever_the_request_asks(verification):
    """Both apply the request to the same texts, branch by branch: with the same logits there is nothing to reject."""
    target = tiny_model("llama", 81)
    asked = {
        "temperature": 0.8,
        "seed": 3,
        "verification": verification,
        "repetition_penalty": 1.5,
        "frequency_penalty": 1.0,
        "presence_penalty": 1.0,
        "bad_words_token_ids": ((5,), (6, 7)),
        "min_tokens": 20,
        "top_k": 30,
    }
    with pair(target, noisy(target, 0.0, 0), CONTEXT) as both:
        request = both.decode(setup(3, (2, 2, 2, 6)), [1, 2, 3], 41, patient=True, **asked)
    assert [r.accepted for r in request.rounds] == [3] * 10
    assert sum(bool(r.hit) for r in request.rounds) > 5


@pytest.mark.slow
def test_shared_noise_hits_more_often_than_ranking_by_probability():
    """At temperature 1, with the same tokens either way."""
    target = tiny_model("llama", 77)
    rates, outputs = {}, {}
    with pair(target, noisy(target, 0.3, 78), CONTEXT) as both:
        for ranking in ("shared_noise", "probability"):
            runs = [
                both.decode(
                    setup(2, (3, 3, 3), ranking=ranking), [9], 60, patient=True, temperature=1.0, seed=seed, verification="rejection"
                )
                for seed in range(12)
            ]
            outputs[ranking] = [run.output for run in runs]
            rounds = [r for run in runs for r in run.rounds[1:]]
            rates[ranking] = sum(bool(r.hit) for r in rounds) / len(rounds)
    assert outputs["shared_noise"] == outputs["probability"]
    assert rates["shared_noise"] > rates["probability"] + 0.05, rates


@pytest.mark.slow
def test_saguaros_factor_moves_rejections_onto_what_is_cached():
    """The tokens pressed down are those that are cached, not the best of the pressed law."""
    target = tiny_model("llama", 79)
    rates, accepted = [], []
    with pair(target, noisy(target, 0.1, 80), CONTEXT) as both:
        for factors in ((), (0.2, 0.2)):
            how = setup(2, (3, 3, 3), ranking="probability", saguaro=factors)
            runs = [
                both.decode(how, [9], 60, patient=True, temperature=1.0, top_k=12, seed=seed, verification="rejection")
                for seed in range(16)
            ]
            rounds = [r for run in runs for r in run.rounds]
            rejected = [after for run in runs for before, after in zip(run.rounds, run.rounds[1:], strict=False) if before.accepted == 0]
            rates.append(sum(bool(r.hit) for r in rejected) / len(rejected))
            accepted.append(sum(r.accepted for r in rounds) / sum(r.drafted for r in rounds))
    assert rates[1] > 2 * rates[0]
    assert accepted[1] < accepted[0]
