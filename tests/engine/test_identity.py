"""AR, SD and SSD give the tokens of transformers' greedy generate, whatever the models, K, fan-outs, backup and prompt."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ssd.models import ARCHITECTURES
from tests.engine.inprocess import differs, noisy, pair, reference, setup, tiny_model
from tests.strategies import fan_outs, several

QUICK = ("llama", "qwen2", "qwen3", "gpt2")
CONTEXT = 96


@st.composite
def situations(draw):
    K = draw(st.integers(1, 6))
    return {
        "K": K,
        "hit": draw(fan_outs(K)),
        "miss": draw(fan_outs(K)),
        "backup": draw(st.sampled_from(["jit", "ngram", "none"])),
        "noise": draw(st.sampled_from([0.0, 0.05, 0.1, 0.3, 1.0])),
        "seed": draw(st.integers(0, 10_000)),
        "prompt": draw(st.lists(st.integers(0, 255), min_size=1, max_size=20)),
        "tokens": draw(st.integers(1, 40)),
        "patient": draw(st.booleans()),
    }


def check(architecture: str, case: dict, seen: Counter) -> None:
    target = tiny_model(architecture, case["seed"])
    draft = noisy(target, case["noise"], case["seed"] + 1)
    prompt, count, K = case["prompt"], case["tokens"], case["K"]
    expected = reference(target, prompt, count)
    modes = {"ar": None, "sd": setup(K), "ssd": setup(K, case["hit"], case["miss"], case["backup"])}
    with pair(target, draft, CONTEXT) as both:
        for mode, how in modes.items():
            request = both.decode(how, prompt, count, patient=case["patient"] and how is not None)
            assert both.peer.lost is None
            assert differs(target, prompt, request.output, expected) is None, mode
            seen.update(f"{mode} hit {r.hit}" for r in request.rounds)
            seen.update(f"{mode} accepted {r.accepted == r.drafted}" for r in request.rounds if r.drafted)


def run(architecture: str, examples: int) -> Counter:
    seen: Counter = Counter()

    @several(examples)
    @given(situations())
    def law(case):
        check(architecture, case, seen)

    law()
    return seen


@pytest.mark.parametrize("architecture", QUICK)
def test_every_mode_gives_the_greedy_tokens_of_transformers(architecture):
    seen = run(architecture, 20)
    assert seen["ssd hit True"] > 20, seen
    assert seen["ssd hit False"] > 20, seen
    assert seen["sd accepted True"] > 20, seen
    assert seen["sd accepted False"] > 20, seen
    assert seen["ar hit None"] > 50, seen


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_supported_architecture_rolls_back(architecture):
    seen = run(architecture, 60)
    assert min(seen["ssd hit True"], seen["ssd hit False"], seen["sd accepted False"]) > 30, seen


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_supported_architecture_decodes_alike_in_every_mode(architecture):
    case = {
        "K": 3,
        "hit": (1, 1, 1, 2),
        "miss": (1, 1, 1, 2),
        "backup": "jit",
        "noise": 0.1,
        "seed": 3,
        "prompt": [7, 8, 9],
        "tokens": 30,
        "patient": True,
    }
    check(architecture, case, Counter())


def test_a_perfect_draft_is_always_accepted_and_always_hits():
    target = tiny_model("llama", 5)
    with pair(target, noisy(target, 0.0, 0), CONTEXT) as both:
        request = both.decode(setup(3, (0, 0, 0, 1)), [1, 2, 3], 41, patient=True)
    assert [r.accepted for r in request.rounds] == [3] * 10
    assert all(r.hit for r in request.rounds[1:])


def test_an_outcome_that_is_in_the_cache_hits_and_one_that_is_not_misses():
    """The cache of a whole vocabulary always hits; one for full acceptance alone never hits after a rejection."""
    target = tiny_model("qwen2", 8)
    vocabulary = target.config.vocab_size
    with pair(target, noisy(target, 1.0, 1), CONTEXT) as both:
        every = both.decode(setup(1, (vocabulary, vocabulary)), [5], 30, patient=True)
        last = both.decode(setup(2, (0, 0, 1)), [5], 30, patient=True)
    assert all(r.hit for r in every.rounds[1:])
    rejected = [after.hit for before, after in zip(last.rounds, last.rounds[1:], strict=False) if before.accepted < before.drafted]
    assert rejected
    assert not any(rejected)


def test_a_wider_fan_out_hits_what_a_narrower_one_hits_and_more():
    target = tiny_model("llama", 21)
    rates = []
    with pair(target, noisy(target, 0.3, 1), CONTEXT) as both:
        for width in (1, 4, 32):
            rounds = [r for p in range(6) for r in both.decode(setup(2, (width,) * 3), [p], 30, patient=True).rounds[1:]]
            rates.append(sum(bool(r.hit) for r in rounds) / len(rounds))
    assert rates[0] < rates[1] < rates[2], rates


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_output_stops_at_the_first_end_token_wherever_it_stands_in_a_block(mode):
    target = tiny_model("llama", 11)
    how = {"ar": None, "sd": setup(4), "ssd": setup(4, (1, 1, 1, 1, 1))}[mode]
    with pair(target, noisy(target, 0.05, 2), CONTEXT) as both:
        free = both.decode(how, [1, 2], 40).output
        for place in range(1, 12):
            ends = frozenset([free[place]])
            request = both.decode(how, [1, 2], 40, ends)
            assert request.output == reference(target, [1, 2], 40, ends)
            assert request.finish_reason == "stop"
            assert sum(r.committed for r in request.rounds) + 1 == len(request.output)


@pytest.mark.parametrize("count", range(1, 9))
def test_no_more_than_max_tokens_come_whatever_the_lookahead(count):
    target = tiny_model("llama", 12)
    with pair(target, noisy(target, 0.0, 2), CONTEXT) as both:
        request = both.decode(setup(5, (1,) * 6), [3], count)
    assert len(request.output) == count
    assert request.finish_reason == "length"


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_request_runs_to_the_context_limit_and_ends_there(architecture):
    target = tiny_model(architecture, 13)
    prompt = [4, 5, 6]
    with pair(target, noisy(target, 0.05, 2), CONTEXT) as both:
        request = both.decode(setup(3, (1, 1, 1, 1)), prompt, 1000)
    assert len(prompt) + len(request.output) == CONTEXT
    assert request.finish_reason == "length"
    assert differs(target, prompt, request.output, reference(target, prompt, CONTEXT - 3)) is None


def test_a_draft_with_a_shorter_context_stops_drafting_and_the_row_goes_on():
    target = tiny_model("gpt2", 14)
    small = type(target.config)(**{**target.config.to_dict(), "n_positions": 24})
    torch.manual_seed(0)
    draft = type(target)(small).eval()
    with pair(target, draft, CONTEXT) as both:
        request = both.decode(setup(2, (1, 1, 1)), [1, 2, 3], 60)
        long = both.decode(setup(2, (1, 1, 1)), list(range(30)), 10)
    assert differs(target, [1, 2, 3], request.output, reference(target, [1, 2, 3], 60)) is None
    assert request.rounds[0].drafted == 2
    assert request.rounds[-1].drafted == 0
    assert {r.drafted for r in long.rounds} == {0}


def test_a_cancelled_request_leaves_nothing_behind_for_the_next():
    target = tiny_model("llama", 15)
    with pair(target, noisy(target, 0.1, 2), CONTEXT) as both:
        how = setup(3, (1, 1, 1, 1))
        alone = both.decode(how, [9, 9], 30).output
        for stop_after in range(5):
            both.decode(how, [1, 2, 3], 30, stop_after=stop_after)
            assert both.decode(how, [9, 9], 30).output == alone
        assert both.peer.lost is None


def test_a_prompt_longer_than_a_prefill_chunk_is_fed_in_pieces(monkeypatch):
    monkeypatch.setattr("ssd.engine.draft.PREFILL_CHUNK", 4)
    monkeypatch.setattr("ssd.engine.scheduler.PREFILL_CHUNK", 3)
    target = tiny_model("qwen2", 16)
    prompt = list(range(1, 24))
    with pair(target, noisy(target, 0.1, 2), CONTEXT) as both:
        request = both.decode(setup(3, (1, 1, 1, 1)), prompt, 30)
    assert differs(target, prompt, request.output, reference(target, prompt, 30)) is None


def test_an_end_token_that_the_draft_does_not_have_does_not_disturb_it():
    target = tiny_model("llama", 18)
    small = type(target.config)(**{**target.config.to_dict(), "vocab_size": target.config.vocab_size - 6})
    draft = type(target)(small).eval()
    end = target.config.vocab_size - 1
    with pair(target, draft, CONTEXT) as both:
        request = both.decode(setup(2, (2, 2, 2)), [1, 2], 40, frozenset([end]), patient=True)
        assert both.peer.lost is None
    assert request.output == reference(target, [1, 2], 40, frozenset([end]))


def test_a_draft_that_is_hardly_ever_right_is_reported_once_with_the_number(caplog):
    target, stranger = tiny_model("llama", 19), tiny_model("llama", 20)
    with pair(target, stranger, CONTEXT) as both:
        both.decode(setup(4), [1, 2], 90)
    told = [record for record in caplog.records if "does not fit the target" in record.message]
    assert len(told) == 1
    assert "draft tokens were accepted in" in told[0].message
