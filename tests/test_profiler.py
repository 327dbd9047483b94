"""The profile of a pair on this machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import ssd
from sim.outcomes import outcome_at
from ssd.engine.ngram import Lookup
from ssd.placements import placements
from ssd.profiler import BRANCHES, LOOKUP_TOKENS, POINT_SECONDS, PROMPTS, REPEATS, REPLAYS, TRACE_TOKENS, VERIFY_TOKENS, _Profiler
from ssd.specs import Configuration, Models, Placement, Profile, SamplingParams, Workload
from ssd.stages import Stages
from tests.plans import CORES, hand_typed, two_cores

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
TEXTS = ["a short text", "another one", "and x = 3"]


@pytest.fixture(scope="module")
def found(tiny_pair) -> Profile:
    models = Models(target=tiny_pair[0], draft=tiny_pair[1])
    return ssd.profile(two_cores(), models, Workload(prompt_tokens=8, output_tokens=16), prompts=TEXTS)


def test_every_placement_of_a_plan_has_its_tables(found):
    for place in placements(two_cores()):
        for model, devices in (("target", place.target), ("draft", place.draft)):
            table = found.forward(model, devices, contended=not place.overlaps)
            assert table is not None
            assert table.contended == (not place.overlaps)
            assert table.source == "measured"
            assert min(table.seconds) > 0


def test_one_request_needs_forwards_of_its_own_tokens_only(found):
    for table in found.forwards:
        assert table.tokens in ((1,), VERIFY_TOKENS if table.model == "target" else BRANCHES)


def test_a_batch_needs_forwards_of_all_its_rows(tiny_pair):
    models = Models(target=tiny_pair[0], draft=tiny_pair[1])
    found = ssd.profile(two_cores(), models, Workload(prompt_tokens=8, output_tokens=16, batch_size=6), prompts=TEXTS[:1])
    for place in placements(two_cores()):
        target, branches = (
            found.forward(*which, contended=not place.overlaps) for which in (("target", place.target), ("draft", place.draft))
        )
        waited = found.forward("draft", place.draft)
        assert {1, 6, 6 * VERIFY_TOKENS[-1]} <= set(target.tokens)
        assert {1, 6, 6 * BRANCHES[-1]} <= set(branches.tokens)
        assert {1, 6} <= set(waited.tokens)
        assert max(len(table.tokens) for table in (target, branches, waited)) <= 8
    assert ssd.plan(two_cores(), models, Workload(batch_size=6), profile=found).predicted is not None
    with pytest.raises(ValueError, match=r"batch_size=60 needs forwards of .* tokens"):
        ssd.plan(two_cores(), models, Workload(batch_size=60), profile=found)


def test_forwards_of_a_batch_that_take_long_are_repeated_less_often_and_the_longest_left_out():
    asked = []

    def measure(tokens, repeats):
        asked.append((tokens, repeats))
        return [tokens * POINT_SECONDS / 100] * repeats

    timed = _Profiler(SimpleNamespace(), Workload(batch_size=40), lambda *_: None)._timed((1, 40, 80, 120, 400), measure)
    assert asked == [(1, REPEATS), (40, 2), (80, 1)]
    assert {tokens: len(seconds) for tokens, seconds in timed.items()} == dict(asked)
    asked.clear()
    _Profiler(SimpleNamespace(), Workload(), lambda *_: None)._timed((1, 40, 80, 400), measure)
    assert asked == [(1, REPEATS), (40, REPEATS), (80, REPEATS), (400, REPEATS)]


def test_prompt_lookup_is_replayed_on_the_texts(found, tiny_pair):
    assert [len(accepted) for accepted in found.ngram_accepted] == [len(trace) for trace in found.traces]
    with ssd.Engine.from_plan(hand_typed(*tiny_pair)) as engine:
        for text, accepted in zip(TEXTS, found.ngram_accepted, strict=True):
            output = engine.generate(text, SamplingParams(max_tokens=TRACE_TOKENS))[0]
            for place in range(len(output.token_ids)):
                lookup = Lookup()
                lookup.add(output.prompt_token_ids + output.token_ids[:place])
                proposal = lookup.propose(LOOKUP_TOKENS)
                right = [a == b for a, b in zip(proposal, output.token_ids[place:], strict=False)]
                assert accepted[place] == (([*right, False].index(False)) if proposal else -1)


def test_the_trace_tells_the_rounds_of_the_engine_exactly(found, tiny_pair):
    """The rank of every token of the target's text, read as rounds, is what the engine accepts for any K."""
    shared = Placement(target=CORES[:1], draft=CORES[:1])
    with ssd.Engine.from_plan(hand_typed(*tiny_pair)) as engine:
        for K in (1, 2, 5):
            engine.configure(Configuration(mode="sd", num_speculative_tokens=K, placement=shared))
            for text, trace in zip(TEXTS, found.traces, strict=True):
                output = engine.generate(text, SamplingParams(max_tokens=len(trace)))[0]
                assert len(output.token_ids) == len(trace)
                accepted, place = [], 1
                while place + K < len(trace):
                    accepted.append(outcome_at(trace, place, K)[0])
                    place += accepted[-1] + 1
                histogram = output.metrics.acceptance_histogram
                assert sum(accepted) <= output.metrics.num_accepted_tokens
                assert output.metrics.num_accepted_tokens - sum(accepted) <= K
                assert abs(sum(histogram) - len(accepted)) <= K + 1


def test_acceptance_of_a_draft_that_is_the_target_is_one(tiny_pair):
    models = Models(target=tiny_pair[0], draft=tiny_pair[0])
    found = ssd.profile(two_cores(), models, Workload(prompt_tokens=8, output_tokens=8), prompts=TEXTS[:1])
    assert found.draft_acceptance_rate == 1
    assert set(found.traces[0]) == {1}


def test_without_a_draft_only_the_target_is_measured(tiny_pair):
    found = ssd.profile(two_cores(), Models(target=tiny_pair[0]), Workload(prompt_tokens=8, output_tokens=8), prompts=TEXTS[:1])
    assert {table.model for table in found.forwards} == {"target"}
    assert found.traces == found.ngram_accepted == ()
    assert ssd.plan(two_cores(), Models(target=tiny_pair[0]), profile=found).mode == "ar"


def test_progress_rises_to_its_end_and_names_what_is_measured(tiny_pair):
    told = []
    ssd.profile(two_cores(), Models(target=tiny_pair[0]), prompts=TEXTS[:1], progress=lambda what, share: told.append((share, what)))
    assert [share for share, _ in told] == sorted(share for share, _ in told)
    assert all(0 <= share <= 1 and what for share, what in told)


def test_another_machine_cannot_be_measured_from_here(tiny_pair):
    with pytest.raises(ValueError, match="is not this machine: profile where the models will run"):
        ssd.profile(ssd.Hardware.named("2xH100-SXM"), Models(target=tiny_pair[0], draft=tiny_pair[1]))


def test_the_default_prompts_are_enough_for_more_than_one_text():
    assert PROMPTS >= 4


def test_at_a_temperature_texts_are_sampled_and_acceptance_is_of_that_temperature(tiny_pair):
    models = Models(target=tiny_pair[0], draft=tiny_pair[1])
    load = Workload(prompt_tokens=8, output_tokens=16, temperature=1.0)
    found = ssd.profile(two_cores(), models, load, prompts=TEXTS[:2])
    assert (found.temperature, found.acceptance_source) == (1, "measured")
    assert [len(text) for text in found.end_traces] == [len(text) for text in found.traces]
    assert len(found.ngram_accepted) == len(found.traces) == 2 * REPLAYS
    share = sum(text.count(1) for text in found.traces) / sum(map(len, found.traces))
    assert found.draft_acceptance_rate == pytest.approx(share)
    plan = ssd.plan(two_cores(), models, load, profile=found)
    assert plan.workload.temperature == 1
    with pytest.raises(ValueError, match=r"workload.temperature=0.0 does not fit the profile, made with 1.0 on 20"):
        ssd.plan(two_cores(), models, load.model_copy(update={"temperature": 0.0}), profile=found)


def test_sampled_acceptance_of_a_draft_that_is_the_target_is_one(tiny_pair):
    models = Models(target=tiny_pair[0], draft=tiny_pair[0])
    load = Workload(prompt_tokens=8, output_tokens=8, temperature=1.0)
    found = ssd.profile(two_cores(), models, load, prompts=TEXTS[:1])
    assert {rank for text in (*found.traces, *found.end_traces) for rank in text} == {1}


def test_a_profile_that_was_broken_off_goes_on_where_it_ended(tiny_pair, tmp_path, monkeypatch):
    models, load, partial = Models(target=tiny_pair[0], draft=tiny_pair[1]), Workload(prompt_tokens=8, output_tokens=16), tmp_path / "p"
    whole, calls = _Profiler._forwards, []

    def breaks(self, place, share):
        calls.append(place)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(self, place, share)

    monkeypatch.setattr(_Profiler, "_forwards", breaks)
    with pytest.raises(KeyboardInterrupt):
        ssd.profile(two_cores(), models, load, prompts=TEXTS[:1], partial=partial)
    assert partial.exists()
    monkeypatch.setattr(_Profiler, "_decode", lambda *_: pytest.fail("texts were measured before"))
    found = ssd.profile(two_cores(), models, load, prompts=TEXTS[:1], partial=partial)
    # The first placement once, the second begun twice.
    assert calls.count(calls[0]) == 1
    assert calls.count(calls[1]) == 2
    assert not partial.exists()
    assert len(found.traces) == 1


def test_stages_of_another_measurement_or_a_spoilt_file_are_not_gone_on_with(tmp_path):
    path = tmp_path / "partial"
    assert Stages(path, "this").once("a", int, lambda: 1) == 1
    assert Stages(path, "this").once("a", int, lambda: 2) == 1
    assert Stages(path, "that").once("a", int, lambda: 2) == 2
    path.write_text("{")
    assert Stages(path, "that").once("a", int, lambda: 3) == 3
    Stages(path, "that").finish()
    assert not path.exists()
