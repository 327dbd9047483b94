"""The profile of a pair on this machine."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

import ssd
from sim.outcomes import outcome_at
from ssd.engine.ngram import Lookup
from ssd.forwards import BRANCHES, POINT_SECONDS, REPEATS, VERIFY_TOKENS, Forwards
from ssd.placements import placements
from ssd.profiler import LOOKUP_TOKENS, PROMPTS, REPLAYS, TRACE_TOKENS, _Profiler
from ssd.progress import Course
from ssd.specs import Configuration, Models, Placement, Profile, SamplingParams, Workload
from ssd.stages import Stages
from tests.plans import CORES, hand_typed, two_cores

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
TEXTS = ["a short text", "another one", "and x = 3"]
SHORT = Workload(prompt_tokens=8, output_tokens=16)


@pytest.fixture(scope="module")
def found(tiny_pair) -> Profile:
    models = Models(target=tiny_pair[0], draft=tiny_pair[1])
    return ssd.profile(two_cores(), models, SHORT, prompts=TEXTS)


def test_every_placement_of_a_plan_has_its_tables(found):
    for place in placements(two_cores()):
        for model, devices in (("target", place.target), ("draft", place.draft)):
            table = found.forward(model, devices, contended=not place.overlaps)
            assert table is not None
            assert table.contended == (not place.overlaps)
            assert table.source == "measured"
            assert min(table.seconds) > 0


def test_the_layers_between_which_the_draft_looks_are_its_own(found, tiny_pair):
    assert found.draft_layers == AutoConfig.from_pretrained(tiny_pair[1]).num_hidden_layers


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

    timed = Forwards(SimpleNamespace(), 192, 40, 4096)._timed((1, 40, 80, 120, 400), measure)
    assert asked == [(1, REPEATS), (40, 2), (80, 1)]
    assert {tokens: len(seconds) for tokens, seconds in timed.items()} == dict(asked)
    asked.clear()
    Forwards(SimpleNamespace(), 192, 1, 4096)._timed((1, 40, 80, 400), measure)
    assert asked == [(1, REPEATS), (40, REPEATS), (80, REPEATS), (400, REPEATS)]


def test_prompt_lookup_is_replayed_on_the_texts(found, tiny_pair):
    (its,) = found.texts
    assert [len(accepted) for accepted in its.ngram_accepted] == [len(trace) for trace in its.traces]
    with ssd.Engine.from_plan(hand_typed(*tiny_pair)) as engine:
        for text, accepted in zip(TEXTS, its.ngram_accepted, strict=True):
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
            for text, trace in zip(TEXTS, found.texts[0].traces, strict=True):
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
    (its,) = found.texts
    assert its.draft_acceptance_rate == 1
    assert set(its.traces[0]) == {1}
    assert set(its.acceptance_by_position) == {1}


def test_without_a_draft_only_the_target_is_measured(tiny_pair):
    found = ssd.profile(two_cores(), Models(target=tiny_pair[0]), Workload(prompt_tokens=8, output_tokens=8), prompts=TEXTS[:1])
    assert {table.model for table in found.forwards} == {"target"}
    assert found.texts[0].traces == found.texts[0].ngram_accepted == ()
    assert ssd.plan(two_cores(), Models(target=tiny_pair[0]), profile=found).mode == "ar"


def test_progress_rises_to_its_end_names_what_is_measured_and_says_at_first_how_long_it_will_take(tiny_pair):
    told = []
    ssd.profile(two_cores(), Models(target=tiny_pair[0]), prompts=TEXTS[:1], progress=lambda what, share: told.append((share, what)))
    assert [share for share, _ in told] == sorted(share for share, _ in told)
    assert all(0 <= share <= 1 and what for share, what in told)
    assert told[0] == (0, "loading the models")
    assert re.search(r"^texts of .* \(about \d+ (s|min) in all\)$", told[1][1])
    assert not any("in all" in what for _, what in told[2:])


def test_shares_are_of_the_expected_time():
    told = []
    course = Course(lambda what, share: told.append((what, share)), {"a": 30.0, "b": 60.0, "c": 90.0})
    for step, part in (("a", 0.0), ("b", 0.0), ("b", 0.5), ("c", 1.0)):
        course.at(step, part)
    assert told == [("a (about 3 min in all)", 0), ("b", pytest.approx(1 / 6)), ("b", pytest.approx(1 / 3)), ("c", 1)]
    with pytest.raises(ValueError, match="step='d' is unknown: the course has a, b, c"):
        course.at("d")


def test_another_machine_cannot_be_measured_from_here(tiny_pair):
    with pytest.raises(ValueError, match="is not this machine: profile where the models will run"):
        ssd.profile(ssd.Hardware.named("2xH100-SXM"), Models(target=tiny_pair[0], draft=tiny_pair[1]))


def test_the_default_prompts_are_enough_for_more_than_one_text():
    assert PROMPTS >= 4


def test_at_a_temperature_texts_are_sampled_and_acceptance_is_of_that_temperature(tiny_pair):
    models = Models(target=tiny_pair[0], draft=tiny_pair[1])
    load = Workload(prompt_tokens=8, output_tokens=16, temperature=1.0)
    found = ssd.profile(two_cores(), models, load, prompts=TEXTS[:2])
    (its,) = found.texts
    assert (its.temperature, its.acceptance_source) == (1, "measured")
    assert [len(text) for text in its.end_traces] == [len(text) for text in its.traces]
    assert len(its.ngram_accepted) == len(its.traces) == 2 * REPLAYS
    share = sum(text.count(1) for text in its.traces) / sum(map(len, its.traces))
    assert its.draft_acceptance_rate == pytest.approx(share)
    plan = ssd.plan(two_cores(), models, load, profile=found)
    assert plan.workload.temperature == 1
    with pytest.raises(ValueError, match=r"workload.temperature=0.0 does not fit the profile, made with 1.0 on 20"):
        ssd.plan(two_cores(), models, load.model_copy(update={"temperature": 0.0}), profile=found)


def test_sampled_acceptance_of_a_draft_that_is_the_target_is_one(tiny_pair):
    models = Models(target=tiny_pair[0], draft=tiny_pair[0])
    load = Workload(prompt_tokens=8, output_tokens=8, temperature=1.0)
    found = ssd.profile(two_cores(), models, load, prompts=TEXTS[:1])
    assert {rank for text in (*found.texts[0].traces, *found.texts[0].end_traces) for rank in text} == {1}


@pytest.fixture(scope="module")
def several(tiny_pair) -> Profile:
    models = Models(target=tiny_pair[0], draft=tiny_pair[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssd.profiler.prompt_texts", lambda kind, count, tokenizer: [f"{kind} {text}" for text in TEXTS[:2]])
        return ssd.profile(two_cores(), models, SHORT, temperatures=(0, 1), prompt_sets=("code", "chat"))


def test_one_profile_holds_every_prompt_set_at_every_temperature_and_plans_for_each(several):
    loads = [(its.prompt_set, its.temperature) for its in several.texts]
    assert loads == [("code", 0), ("code", 1), ("chat", 0), ("chat", 1)]
    assert {cost.temperature for cost in several.rounds} == {0, 1}
    assert {cost.verification for cost in several.rounds if cost.temperature == 0} == {"rejection"}
    assert len({its.traces for its in several.texts}) == 4
    for kind, temperature in loads:
        load = Workload.model_validate({**SHORT.model_dump(), "prompt_set": kind, "temperature": temperature})
        plan = ssd.plan(two_cores(), several.models, load, profile=several)
        (its,) = plan.profile.texts
        assert (its.prompt_set, its.temperature) == (kind, temperature)
        assert {cost.temperature for cost in plan.profile.rounds} == {temperature}
    with pytest.raises(ValueError, match=r"workload.prompt_set='library' does not fit the profile, made with 'code' and 'chat' on 20"):
        ssd.plan(two_cores(), several.models, SHORT.model_copy(update={"prompt_set": "library"}), profile=several)
    with pytest.raises(ValueError, match=r"workload.temperature=0.5 does not fit the profile, made with 0.0 and 1.0 on 20"):
        ssd.plan(two_cores(), several.models, SHORT.model_copy(update={"temperature": 0.5}), profile=several)


def test_tables_tell_what_more_context_adds_and_a_plan_is_made_at_its_own(several):
    for table in several.forwards:
        assert table.context == SHORT.context == 16
        assert len(table.growth) == len(table.tokens)
        for seconds, growth in zip(table.seconds, table.growth, strict=True):
            assert 0 <= growth <= seconds / table.context
    load = SHORT.model_copy(update={"prompt_tokens": 40})
    plan = ssd.plan(two_cores(), several.models, load, profile=several)
    assert plan.profile.forwards == several.at(48).forwards
    assert {table.context for table in plan.profile.forwards} == {48}


def test_what_more_context_adds_is_a_line_between_the_smallest_and_the_largest_forward():
    """Forwards whose seconds are lines in both are met exactly, at any context."""
    asked = []

    def measure(tokens, repeats, context):
        asked.append((tokens, context))
        return [1e-3 + 1e-4 * tokens + (1e-7 + 1e-8 * tokens) * context] * repeats

    table = Forwards(SimpleNamespace(), 200, 1, 4096)._table("target", ("cpu:0",), (1, 2, 4, 9), measure, False)
    assert {context for _, context in asked} == {200, 1024}
    assert {tokens for tokens, context in asked if context == 1024} == {1, 9}
    for context in (0, 200, 700, 4000):
        for tokens, seconds in zip(table.tokens, table.at(context).seconds, strict=True):
            assert seconds == pytest.approx(measure(tokens, 1, context)[0])


def test_a_longer_context_is_what_the_models_can_take_or_left_out():
    def contexts(context, longest, *, brief=False):
        return Forwards(SimpleNamespace(), context, 1, longest, brief=brief)._longer(16)

    assert [contexts(192, 4096), contexts(1000, 9000), contexts(192, 600), contexts(400, 600)] == [1024, 4000, 584, None]
    assert contexts(192, 4096, brief=True) is None


def test_forwards_that_do_not_grow_with_context_or_more_than_in_proportion_are_held_to_the_ends():
    for power, expected in ((-1, 0.0), (2, 1 / 200)):
        table = Forwards(SimpleNamespace(), 200, 1, 4096)._table(
            "draft", ("cpu:0",), (1, 4), lambda tokens, repeats, context, power=power: [1e-3 * context**power] * repeats, False
        )
        assert table.growth == pytest.approx([expected * seconds for seconds in table.seconds])


def test_a_brief_profile_is_of_its_own_context_and_without_rounds(tiny_pair):
    found = ssd.profile(two_cores(), Models(target=tiny_pair[0], draft=tiny_pair[1]), SHORT, prompts=TEXTS[:1], brief=True)
    assert found.rounds == ()
    assert {table.growth for table in found.forwards} == {()}
    assert [its.prompt_set for its in found.texts] == ["given"]


def test_prompt_sets_beside_prompts_of_ones_own_are_refused(tiny_pair):
    with pytest.raises(ValueError, match=r"prompt_sets=\('code',\) beside prompts of your own: give one of them"):
        ssd.profile(two_cores(), Models(target=tiny_pair[0]), prompts=TEXTS, prompt_sets=("code",))
    with pytest.raises(ValueError, match="prompt_set"):
        ssd.profile(two_cores(), Models(target=tiny_pair[0]), prompt_sets=("prose",))


# With what a step that is not of interest gives in the test of resuming; the others are taken in earnest.
STEPS = {"_decode": None, "_forwards": list, "_round_cost": lambda: None, "_sampled": None}


@pytest.mark.parametrize("broken", STEPS)
def test_a_profile_that_was_broken_off_goes_on_where_it_ended(tiny_pair, tmp_path, monkeypatch, broken):
    """Whichever step it is broken off in, those before are not taken again, and the bar is of what is left."""
    models, partial = Models(target=tiny_pair[0], draft=tiny_pair[1]), tmp_path / "p"
    taken, told = [], []

    def counted(name, breaks):
        whole, instead = getattr(_Profiler, name), STEPS[name]

        def step(self, *arguments):
            if breaks and name == broken and name in taken:
                raise KeyboardInterrupt
            found = whole(self, *arguments) if instead is None else instead()
            taken.append(name)
            return found

        return step

    def run(breaks):
        with monkeypatch.context() as patch:
            for name in STEPS:
                patch.setattr(_Profiler, name, counted(name, breaks))
            options = {"temperatures": (0, 1, 0.5), "prompts": TEXTS[:1], "partial": partial}
            return ssd.profile(two_cores(), models, SHORT, **options, progress=lambda what, share: told.append((share, what)))

    with pytest.raises(KeyboardInterrupt):
        run(True)
    assert partial.exists()
    assert taken.count(broken) == 1
    told.clear()
    found = run(False)
    # Of AR and SD on one core and on both, and of SSD, and above temperature 0 of both ways to verify.
    assert {name: taken.count(name) for name in STEPS} == {
        "_decode": 3,
        "_forwards": len(placements(two_cores())),
        "_round_cost": 5 + 2 * 8,
        "_sampled": 2,
    }
    assert not partial.exists()
    assert [len(its.traces) for its in found.texts] == [1, REPLAYS, REPLAYS]
    assert (told[1][0], "in all" in told[1][1]) == (0, True)
    assert told == sorted(told, key=lambda each: each[0])


def test_stages_of_another_measurement_or_a_spoilt_file_are_not_gone_on_with(tmp_path):
    path = tmp_path / "partial"
    assert Stages(path, "this").once("a", int, lambda: 1) == 1
    assert Stages(path, "this").once("a", int, lambda: 2) == 1
    assert Stages(path, "that").once("a", int, lambda: 2) == 2
    path.write_text("{")
    assert Stages(path, "that").once("a", int, lambda: 3) == 3
    Stages(path, "that").finish()
    assert not path.exists()
