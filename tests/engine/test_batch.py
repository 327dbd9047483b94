"""Many requests together: each gets the tokens that it gets alone, whoever joins, leaves or is cancelled meanwhile."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sim.tempo import Tempo
from ssd.engine.draft import Drafter
from ssd.engine.kv import Trunk
from ssd.engine.prefix import place_for, share_prefix
from ssd.engine.target import Target, TargetRow
from ssd.engine.waiting import WaitingRoom
from ssd.sampling import prefix_hash
from ssd.specs import SamplingParams
from tests.engine.inprocess import NEAR_TIE, differs, loaded, noisy, pair, recorded, reference, setup, tiny_model
from tests.strategies import fan_outs, several

CONTEXT = 96
ASKED = (
    {},
    {"temperature": 1.0, "verification": "coupled"},
    {"temperature": 0.6, "top_k": 9, "verification": "coupled"},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.3, "verification": "coupled"},
    {"temperature": 0.8, "top_p": 0.9, "bad_words_token_ids": ((3,), (5, 6)), "verification": "coupled"},
    {"temperature": 1.0, "verification": "rejection"},
)


@st.composite
def asked(draw, schemes=ASKED):
    """One request: prompt, length, parameters, when it joins and when it is cancelled."""
    return {
        "prompt": draw(st.lists(st.integers(0, 255), min_size=1, max_size=30)),
        "tokens": draw(st.integers(1, 30)),
        "params": {**draw(st.sampled_from(schemes)), "seed": draw(st.integers(0, 1000))},
        "joins": draw(st.integers(0, 12)),
        "leaves": draw(st.one_of(st.none(), st.none(), st.integers(0, 14))),
    }


@st.composite
def situations(draw, schemes=ASKED, backups=("jit", "ngram", "none")):
    K = draw(st.integers(1, 4))
    adaptive = draw(st.booleans())
    lists = {} if adaptive else {"fan_out_hit": draw(fan_outs(K)), "fan_out_miss": draw(fan_outs(K))}
    chosen = {"budget": draw(st.integers(1, 6))} if adaptive else {}
    return {
        "rows": draw(st.sampled_from([1, 2, 3, 4, 8])),
        "how": setup(K, **lists, **chosen, backup=draw(st.sampled_from(backups)), building=draw(st.sampled_from(["fixed", "anytime"]))),
        "noise": draw(st.sampled_from([0.0, 0.05, 0.1, 0.3, 1.0])),
        "seed": draw(st.integers(0, 10_000)),
        "requests": draw(st.lists(asked(schemes), min_size=1, max_size=8)),
        "patient": draw(st.booleans()),
    }


def finish(scheduler):
    """Play rounds until nobody is left."""
    while scheduler.busy:
        scheduler.step()


def join(scheduler, late, after):
    """Let one request decode a little, and another one join it then."""
    scheduler.add(after)
    while len(after.output) < 4:
        scheduler.step()
    scheduler.add(late)


def watched(owner, name, look):
    """The list of what `look` makes of each call of a method, which does what it did."""
    seen, method = [], getattr(owner, name)
    setattr(owner, name, lambda *given: (seen.append(look(*given)), method(*given))[1])
    return seen


def play(both, case, how):
    """Decode the requests of a case together; return them."""
    requests = [both.request(one["prompt"], one["tokens"], **one["params"]) for one in case["requests"]]
    joins, leaves = ([one[name] for one in case["requests"]] for name in ("joins", "leaves"))
    return both.decode_all(how, requests, joins, leaves, case["patient"] and how is not None)


def same(target, one, ours, alone) -> str | None:
    """Say where two outputs of one request differ, as far as both go, unless the best two perturbed scores there are nearly equal."""
    size = min(len(ours), len(alone))
    if one["params"].get("temperature", 0) == 0:
        return differs(target, one["prompt"], ours[:size], alone[:size])
    return None if ours[:size] == alone[:size] else f"{ours} against {alone}"


@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_every_request_of_a_batch_gets_the_tokens_that_it_gets_alone(architecture):
    """Greedy and seeded, in every mode, with rows that join and leave at any round. Near ties that roundings turn are few, and counted."""
    seen: Counter = Counter()
    schemes = [one for one in ASKED if one.get("verification") != "rejection"]

    @several(60)
    @given(situations(schemes))
    def law(case):
        target = tiny_model(architecture, case["seed"])
        with pair(target, noisy(target, case["noise"], case["seed"] + 1), CONTEXT, rows=case["rows"]) as both:
            together = play(both, case, case["how"])
            ar = play(both, case, None)
            assert both.peer.lost is None
            for one, request, other in zip(case["requests"], together, ar, strict=True):
                alone = both.decode(None, one["prompt"], one["tokens"], **one["params"])
                for found in (request, other):
                    if one["leaves"] is None:
                        assert len(found.output) == len(alone.output), one
                    problem = same(target, one, found.output, alone.output)
                    seen["places"] += len(found.output)
                    seen["near ties"] += problem is not None
                    assert problem is None or near(both, one, found.output, alone.output), (problem, one)
                seen["whole" if one["leaves"] is None else "cancelled"] += 1
                seen.update(r.drafter for r in request.rounds)

    law()
    assert min(seen["cache"], seen["jit"], seen["ngram"], seen["none"], seen["whole"], seen["cancelled"]) > 10, seen
    assert seen["near ties"] <= 1, seen


def near(both, one, ours, alone) -> bool:
    """Whether the target's own two best perturbed scores are nearly equal at the first place of difference."""
    from ssd.sampling import Before, Parameters, Purpose, gumbel, log_law, noise_key, padded, processed

    place = next(i for i, (a, b) in enumerate(zip(ours, alone, strict=False)) if a != b)
    text = [*one["prompt"], *alone[:place]]
    model = both.target.module
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, -1:]
    model.set_attn_implementation("ssd_slots")
    params = SamplingParams(max_tokens=one["tokens"], **one["params"])
    parameters = Parameters.of([params], [len(one["prompt"])], [()], logits.shape[-1], "cpu")
    before = Before(torch.tensor([len(text)]), padded([text]))
    keys = noise_key(np.array([params.seed]), Purpose.TARGET, np.array([len(text)]), np.array([prefix_hash(text)]))
    best = (log_law(processed(logits, parameters, before), parameters) + gumbel(torch.from_numpy(keys), logits.shape[-1])).topk(2).values[0]
    return float(best[0] - best[1]) < NEAR_TIE


@pytest.mark.slow
def test_rejection_with_whole_drafts_and_jit_gives_in_any_batch_what_sd_gives_alone():
    seen: Counter = Counter()

    @several(40)
    @given(situations([ASKED[-1]], backups=("jit",)))
    def law(case):
        target = tiny_model("llama", case["seed"])
        how = replace(case["how"], building="fixed")
        with pair(target, noisy(target, case["noise"], case["seed"] + 1), CONTEXT, rows=case["rows"]) as both:
            together = play(both, case, how)
            for one, request in zip(case["requests"], together, strict=True):
                alone = both.decode(setup(how.num_speculative_tokens), one["prompt"], one["tokens"], **one["params"])
                size = min(len(request.output), len(alone.output))
                assert request.output[:size] == alone.output[:size], one
                seen["tokens"] += size
                seen.update(r.drafter for r in request.rounds)

    law()
    assert min(seen["cache"], seen["jit"]) > 50, seen


def test_a_prompt_that_is_fed_in_pieces_lets_the_others_go_on(monkeypatch):
    monkeypatch.setattr("ssd.engine.scheduler.SHARED_CHUNK", 5)
    monkeypatch.setattr("ssd.engine.draft.SHARED_CHUNK", 4)
    target = tiny_model("llama", 3)
    with pair(target, noisy(target, 0.1, 1), CONTEXT, rows=2) as both:
        quick, long = both.request([1, 2], 40), both.request(range(1, 60), 10)
        scheduler = both.scheduler(setup(3, (1, 1, 1, 1)))
        join(scheduler, long, after=quick)
        gained = 0
        while not long.output:
            before = len(quick.output)
            scheduler.step()
            gained += 1
            assert len(quick.output) > before or quick.finish_reason
        assert gained >= 12
        finish(scheduler)
    assert differs(target, [1, 2], quick.output, reference(target, [1, 2], 40)) is None
    assert differs(target, list(range(1, 60)), long.output, reference(target, list(range(1, 60)), 10)) is None


def test_rows_that_hit_are_not_drafted_anew_when_another_misses():
    """The draft's forwards after outcomes hold the rows that missed, and no others."""
    target = tiny_model("llama", 7)
    whole = (target.config.vocab_size,) * 3
    with pair(target, noisy(target, 0.3, 1), CONTEXT, rows=4) as both:
        answers = watched(both.drafter, "_feed", lambda rows, _, abort=None: [row.hit for row in rows] if abort is None else [])
        both.decode_all(setup(2, (1, 0, 1), (1, 0, 1)), [both.request([p], 30) for p in range(4)], patient=True)
        some = list(chain.from_iterable(answers))
        answers.clear()
        both.decode_all(setup(2, whole), [both.request([p], 9) for p in range(4)], patient=True)
    fed = list(chain.from_iterable(answers))
    assert any(not hit for hit in some)
    assert not any(some), "a hit was drafted anew"
    assert set(fed) <= {False}
    assert len(fed) < len(some)


@pytest.mark.parametrize("budget", [1, 3, 8])
def test_an_adaptive_budget_is_kept_over_all_rows_together(budget):
    target = tiny_model("llama", 9)
    with pair(target, noisy(target, 0.2, 1), CONTEXT, rows=4) as both:
        planted = watched(both.drafter, "_planted", lambda wave: Counter(row.request for _, row, _, _ in wave))
        both.decode_all(setup(2, budget=budget), [both.request([p], 40) for p in range(4)], patient=True)
    assert max(sum(wave.values()) for wave in planted) == 4 * budget
    assert all(sum(wave.values()) <= budget * max(len(wave), 4) for wave in planted)
    if budget > 1:
        assert any(len(set(wave.values())) > 1 for wave in planted), "no row ever had more than another"


def test_a_draft_under_an_anytime_build_is_shorter_rather_than_late():
    """Where the draft is slow against the target, drafts get shorter than K, and the tokens stay those of the target."""
    target = tiny_model("llama", 12)
    with pair(target, noisy(target, 0.05, 1), CONTEXT) as both, recorded(both.peer) as sent:
        tempo = both.drafter.tempo
        request = both.decode(setup(6, budget=6, building="anytime"), [1, 2], 60)
        assert both.drafter.tempo is not tempo
    assert differs(target, [1, 2], request.output, reference(target, [1, 2], 60)) is None
    assert {len(draft.tokens) for draft in sent} <= set(range(7))
    assert len({len(draft.tokens) for draft in sent}) > 1


# --- prompts that begin alike ---


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), min_size=2, max_size=6), st.integers(0, 1000), st.integers(1, 40))
@several(25)
def test_prompts_that_begin_alike_are_fed_once_and_the_tokens_stay_the_same(monkeypatch, tails, seed, chunk):
    monkeypatch.setattr("ssd.engine.scheduler.SHARED_CHUNK", chunk)
    target = tiny_model("llama", seed)
    shared = [int(token) for token in np.random.default_rng(seed).integers(0, 200, 30)]
    prompts = [[*shared, *tail][:60] for tail in tails]
    with pair(target, noisy(target, 0.1, seed), CONTEXT, rows=3) as both:
        requests = [both.request(prompt, 8) for prompt in prompts]
        scheduler = both.scheduler(setup(2, (1, 1, 1)))
        fed = watched(scheduler.target.model, "forward", lambda rows, *_: sum(len(q.slots) for q in rows.values()))
        for request in requests:
            scheduler.add(request)
        finish(scheduler)
        verified = sum(1 + r.drafted for request in requests for r in request.rounds)
        assert sum(fed) - verified <= sum(map(len, prompts)) - 30 * (len(prompts) - 1) + 16 * len(prompts)
        for prompt, request in zip(prompts, requests, strict=True):
            assert differs(target, prompt, request.output, both.decode(None, prompt, 8).output) is None


def test_a_row_is_chosen_for_what_it_holds_and_else_for_its_age():
    model = loaded(tiny_model("llama", 1))
    target = Target(model, 3, 64)

    def fed(text, active=False, age=0):
        row = TargetRow(SamplingParams(), (), Trunk(64), 1, list(text), 0, active=active, age=age)
        row.trunk.add(row.trunk.slots.take(len(text)))
        return row

    target.rows = [fed(range(40), age=5), fed(range(20), age=1), fed(range(50), active=True)]
    assert place_for(list(range(60)), target.rows, target.model)[0] == 0
    assert place_for([9, 9], target.rows, target.model)[0] == 1
    target.rows[1] = None
    index, trunk = place_for([9, 9], target.rows, target.model)
    assert (index, trunk.length) == (1, 0)
    target.model.forward({1: target_queries(trunk, target.model)})
    row = fed([*range(45), 7])
    row.trunk.cut(0)
    target.rows[1] = row
    share_prefix(row, 1, target.rows, target.model)
    assert row.trunk.length == 45


def target_queries(trunk, model):
    from ssd.engine.forward import chain as fed_after

    return fed_after(trunk, [1], 1, model.device)


# --- who waits ---


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000)), max_size=40))
def test_callers_take_turns_and_each_is_served_in_order(asks):
    room: WaitingRoom = WaitingRoom()
    for place, (caller, _) in enumerate(asks):
        room.add(caller, (caller, place))
    served = [room.next() for _ in range(len(room))]
    assert sorted(served, key=lambda item: item[1]) == [(caller, place) for place, (caller, _) in enumerate(asks)]
    for caller in range(4):
        own = [place for who, place in served if who == caller]
        assert own == sorted(own)
    # Between two turns of one caller, everybody else who waits has one.
    for i, (caller, _) in enumerate(served):
        later = next((j for j in range(i + 1, len(served)) if served[j][0] == caller), None)
        if later is not None:
            between, after = {who for who, _ in served[i + 1 : later]}, {who for who, _ in served[i + 1 :]}
            assert between == after - {caller}
    with pytest.raises(LookupError):
        room.next()


def test_who_leaves_the_room_is_not_served():
    room: WaitingRoom = WaitingRoom()
    for item in ("a", "b", "c"):
        room.add(1, item)
    assert room.remove("b")
    assert not room.remove("b")
    assert [room.next(), room.next()] == ["a", "c"]
    assert len(room) == 0


# --- found by a reviewer ---


@pytest.mark.parametrize("lists", [{"fan_out_hit": (1, 1, 1), "fan_out_miss": (0, 0, 2)}, {"budget": 3}])
def test_a_cache_that_grows_for_as_long_as_there_is_time_stays_within_its_slots(lists):
    """Up to the context limit, beside rows that are all but certain and so leave every further outcome to the one that is not."""
    target = tiny_model("llama", 4)
    with pair(target, noisy(target, 0.2, 1), CONTEXT, rows=4) as both:
        requests = [both.request([p] * 3, 1000) for p in range(4)]
        both.drafter.confidence.chances = lambda names, seen, chances=both.drafter.confidence.chances: (
            chances(names, seen) * (1.0 if int(seen.bonus[0][0]) % 4 == 0 else 1e-3)
        )
        both.decode_all(setup(2, building="anytime", **lists), requests, patient=True)
        assert both.peer.lost is None
    assert all(len(request.output) == CONTEXT - 3 for request in requests)


def test_prompts_that_are_the_same_wait_for_one_and_then_start_together():
    target = tiny_model("llama", 5)
    prompt = list(range(1, 41))
    with pair(target, noisy(target, 0.1, 1), CONTEXT, rows=8) as both:
        requests = [both.request(prompt, 4, temperature=1.0, seed=n, verification="coupled") for n in range(8)]
        scheduler = both.scheduler(setup(2, (1, 1, 1)))
        for request in requests:
            scheduler.add(request)
        gained = [len(scheduler.step()) for _ in range(2)]
        assert gained[0] == 1
        assert gained[1] == 8
        finish(scheduler)
    assert len({tuple(request.output) for request in requests}) > 1


def test_a_request_that_stops_takes_no_cache_from_the_others():
    """One row leaves while another's prompt is being read; those that go on hit as before."""
    target = tiny_model("llama", 6)
    with pair(target, noisy(target, 0.0, 1), CONTEXT, rows=3) as both:
        scheduler = both.scheduler(setup(2, (0, 0, 1)), patient=True)
        steady, short, long = both.request([1], 60), both.request([2], 8), both.request(range(1, 80), 8)
        scheduler.add(steady)
        join(scheduler, long, after=short)
        finish(scheduler)
    assert all(r.hit for r in steady.rounds[1:])


def test_one_long_prompt_takes_no_draft_from_the_others(monkeypatch):
    monkeypatch.setattr("ssd.engine.draft.SHARED_CHUNK", 4)
    monkeypatch.setattr("sim.tempo.Tempo.worthwhile", lambda *_: True)
    target = tiny_model("llama", 8)
    with pair(target, noisy(target, 0.3, 1), CONTEXT, rows=2) as both:
        answers = watched(both.drafter, "_feed", lambda rows, _, abort=None: [len(row.pending) for row in rows] if abort is None else [])
        scheduler = both.scheduler(setup(3, budget=3, building="anytime"))
        quick, long = both.request([1, 2], 30), both.request(range(1, 80), 4)
        join(scheduler, long, after=quick)
        finish(scheduler)
    assert all(r.drafted == 3 for r in quick.rounds[:-2]), [r.drafted for r in quick.rounds]
    assert max(chain.from_iterable(answers)) <= 8, "an answer waited for a prompt"


def test_a_wide_list_gives_all_it_has_to_the_last_place_of_a_short_draft():
    target = tiny_model("llama", 5)
    with pair(target, noisy(target, 1.0, 1), CONTEXT) as both:
        planted = watched(both.drafter, "_planted", len)
        both.decode(setup(2, (20, 20, 20), backup="none"), [5], 12, patient=True)
    assert set(planted) == {60}


def test_a_draft_that_is_taken_back_goes_on_from_what_each_request_has_by_then():
    """A draft that equals the target is right again from the second round after it was told anew."""
    target = tiny_model("llama", 10)
    how = setup(3, (1, 1, 1, 1))
    with pair(target, noisy(target, 0.0, 1), CONTEXT, rows=2) as both:
        scheduler = both.scheduler(how)
        requests = [both.request([p, 5], 60) for p in range(2)]
        for request in requests:
            scheduler.add(request)
        while len(requests[1].output) < 10:
            scheduler.step()
        # What a restart leaves: a draft that knows no request.
        assert both.peer.configure(how)
        known = [len(request.rounds) for request in requests]
        finish(scheduler)
    for request, before in zip(requests, known, strict=True):
        assert request.rounds[before].drafted == 0
        assert all(r.accepted == r.drafted == 3 for r in request.rounds[before + 1 : -1])


def test_a_stop_that_broke_a_prompt_off_leaves_the_draft_at_work_for_the_others():
    drafter = Drafter.__new__(Drafter)
    rows = [SimpleNamespace(request=name, active=True, trunk=Trunk(8), age=0) for name in ("stays", "goes")]
    drafter.rows, drafter.tempo, drafter._ages, drafter._builder = rows, Tempo(), iter(range(9)), None
    drafter._unsettled = False
    drafter.stop("goes")
    assert [row.active for row in rows] == [True, False]
    assert drafter._builder is not None
