"""Several draft workers: the outcomes of one dealt out, the same tokens and hits, and whoever is lost costs hits alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

import ssd
from ssd.engine.group import DraftGroup
from ssd.engine.link import BackUp, Draft, Drafts, Outcome, Outcomes, Sent
from ssd.engine.peer import DraftPeer
from ssd.specs import Configuration, Placement, SamplingParams
from tests.engine.inprocess import PROCESS, joined, noisy, pair, reference, setup, tiny_model
from tests.engine.test_batch import ASKED, watched
from tests.engine.test_processes import alive, wait_for
from tests.plans import CORES
from tests.plans import two_cores as two_cores_of
from tests.strategies import fan_outs, several
from tests.tiny import tokenizer

CONTEXT = 96
SCHEMES = tuple(one for one in ASKED if one.get("verification") != "rejection")


@st.composite
def situations(draw, schemes=SCHEMES, backups=("jit", "ngram", "none"), buildings=("fixed", "anytime")):
    """A pair, how it drafts, and requests that are decoded together."""
    K = draw(st.integers(1, 4))
    adaptive = draw(st.booleans())
    lists = {} if adaptive else {"fan_out_hit": draw(fan_outs(K)), "fan_out_miss": draw(fan_outs(K))}
    chosen = {"budget": draw(st.integers(1, 8))} if adaptive else {}
    one = st.fixed_dictionaries({"prompt": st.lists(st.integers(0, 255), min_size=1, max_size=12), "params": st.sampled_from(schemes)})
    return {
        "workers": draw(st.sampled_from([2, 3])),
        "how": setup(K, **lists, **chosen, backup=draw(st.sampled_from(backups)), building=draw(st.sampled_from(buildings))),
        "noise": draw(st.sampled_from([0.05, 0.1, 0.3])),
        "model": draw(st.integers(0, 10_000)),
        "requests": draw(st.lists(one, min_size=1, max_size=3)),
        "tokens": draw(st.integers(4, 24)),
        "patient": draw(st.booleans()),
    }


def opened(case, workers, **more):
    target = tiny_model("llama", case["model"])
    return pair(target, noisy(target, case["noise"], case["model"] + 1), CONTEXT, rows=3, workers=workers, **more)


def play(both, case, how, patient=None, before=lambda step: None):
    """Decode the requests of a case together, and return them."""
    requests = [both.request(one["prompt"], case["tokens"], **{"seed": 7, **one["params"]}) for one in case["requests"]]
    patient = case["patient"] if patient is None else patient
    scheduler = both.scheduler(how, patient and how is not None)
    for request in requests:
        scheduler.add(request)
    step = 0
    while scheduler.busy:
        before(step)
        scheduler.step()
        step += 1
    return requests


def outputs(requests):
    return [request.output for request in requests]


def hits(requests):
    return [bool(done.hit) for request in requests for done in request.rounds]


def test_tokens_are_those_of_the_target_alone_whoever_drafts_and_whatever_is_cached():
    """Greedy and coupled; rows of a batch, every backup, lists and budgets, drafts waited for or not."""
    seen: Counter = Counter()

    @several(14)
    @given(situations())
    def law(case):
        with opened(case, case["workers"]) as both:
            found, alone = play(both, case, case["how"]), play(both, case, None)
            assert all(peer.lost is None for peer in both.peer.peers)
        seen["differ"] += outputs(found) != outputs(alone)
        seen.update(hits(found))

    law()
    # Roundings may turn near ties.
    assert seen["differ"] <= 1
    assert min(seen[True], seen[False]) > 20, seen


@pytest.mark.parametrize("unplugged", [False, True])
def test_by_rejection_with_the_draft_as_backup_tokens_are_those_of_sd_also_where_workers_are_lost(unplugged):
    """With as many workers as there may be, all but one of which are lost, one after another."""
    rejection = tuple({"temperature": T, "verification": "rejection"} for T in (0.5, 1.0))
    seen: Counter = Counter()

    @several(8)
    @given(situations(rejection, ("jit",), ("fixed",)), st.permutations([0, 1, 2]), st.integers(2, 8))
    def law(case, order, first):
        leaving = [worker for worker in order if worker < case["workers"]][1:] if unplugged else []

        def before(step):
            if step >= first and leaving:
                both.peer.peers[leaving.pop()].lose("unplugged")

        with opened(case, case["workers"]) as both:
            found = play(both, case, case["how"], before=before)
            assert both.peer.lost is None
        with opened(case, 1) as one:
            sd = play(one, case, setup(case["how"].num_speculative_tokens))
        assert outputs(found) == outputs(sd)
        assert [[r.accepted for r in a.rounds] for a in found] == [[r.accepted for r in b.rounds] for b in sd]
        seen.update(hits(found))

    law()
    assert min(seen[True], seen[False]) > 10, seen


def planted(both):
    """What each drafter drafts for: (text, accepted tokens after it, bonus)."""

    def look(wave):
        return [(tuple(row.tokens), k, int(row.seen.bonus[k, r])) for _, row, k, r in wave]

    return [watched(drafter, "_planted", look) for drafter in both.drafters]


def flat(waves):
    return [outcome for wave in waves for outcome in wave]


def test_what_workers_cache_is_what_one_would_dealt_out_evenly_and_the_hits_are_the_same():
    seen: Counter = Counter()

    @several(12)
    @given(situations(buildings=("fixed",)))
    def law(case):
        if case["how"].budget:
            # Which rows share a budget hangs on the moment at which each is met.
            case = {**case, "requests": case["requests"][:1]}
        found, rounds = {}, {}
        for count in (1, 2, 3):
            with opened(case, count) as both:
                cached = planted(both)
                rounds[count] = hits(play(both, case, case["how"], patient=True))
                found[count] = [flat(waves) for waves in cached]
        for count in (2, 3):
            assert rounds[count] == rounds[1]
            for one, other in combinations(found[count], 2):
                assert not set(one) & set(other)
            assert Counter(flat(found[count])) == Counter(found[1][0])
            seen.update({(count, worker): len(own) for worker, own in enumerate(found[count])})
        seen.update(rounds[1])

    law()
    assert min(seen[True], seen[False]) > 30, seen
    for count in (2, 3):
        shares = [seen[count, worker] for worker in range(count)]
        assert max(shares) < 1.2 * min(shares), shares


@pytest.mark.parametrize("back", [False, True])
def test_a_lost_worker_costs_hits_and_neither_requests_nor_tokens_and_drafts_again_when_it_is_back(back, monkeypatch):
    monkeypatch.setattr("ssd.engine.peer.FIRST_BACK_OFF", 0.01)
    seen: Counter = Counter()

    @several(5)
    @given(situations(backups=("jit",), buildings=("fixed",)), st.integers(0, 4), st.sampled_from([0, 1]))
    def law(case, first, lost):
        fan_out = case["how"].fan_out_hit
        # The same list whatever came before, so that rounds can be held against each other.
        how = replace(case["how"], fan_out_miss=fan_out)
        case = {**case, "tokens": 60, "requests": case["requests"][:1]}
        with opened(case, case["workers"]) as both:
            whole = play(both, case, how, patient=True)

        def before(step):
            peer = both.peer.peers[lost]
            if step == first:
                peer.lose("unplugged")
            if back and step == first + 2:
                assert wait_for(lambda: peer._spare is not None or peer.lost is None)

        with opened(case, case["workers"], returns=back) as both:
            found = play(both, case, how, patient=True, before=before)
            peer = both.peer.peers[lost]
            assert (peer.lost, peer.restarts) == ((None, 1) if back else ("unplugged", 0))
        assert outputs(found) == outputs(whole)
        ours, theirs = hits(found), hits(whole)
        if not how.budget and not back:
            assert all(b or not a for a, b in zip(ours, theirs, strict=True))
        late = slice(first + 5, None)
        seen.update(before=sum(theirs), after=sum(ours), late=sum(ours[late]), could=sum(theirs[late]))

    law()
    assert seen["after"] < seen["before"], seen
    # Once it is back, and has read the text, it hits as before.
    assert (seen["late"] > 0.9 * seen["could"]) == back, seen


def test_when_all_are_lost_decoding_goes_on_as_ar():
    target = tiny_model("llama", 5)
    expected = reference(target, [1, 2, 3], 40)
    with pair(target, noisy(target, 0.1, 6), CONTEXT, workers=3) as both:
        scheduler, request = both.scheduler(setup(3, (2, 2, 2, 2)), patient=True), both.request([1, 2, 3], 40)
        scheduler.add(request)
        step = 0
        while scheduler.busy:
            if step >= 4 and step - 4 < 3:
                both.peer.peers[step - 4].lose("unplugged")
            scheduler.step()
            step += 1
        assert both.peer.lost == "worker 1: unplugged; worker 2: unplugged; worker 3: unplugged"
    assert request.output == expected
    assert [r.drafted for r in request.rounds[8:]] == [0] * len(request.rounds[8:])


# --- the messages of a round ---


def group_of(count, deadline=5.0, backup="jit"):
    """A group whose workers are played by the test, at the far ends; all have been told of requests a and b."""
    links = [joined() for _ in range(count)]
    peers = [DraftPeer(PROCESS, near, deadline, 10) for near, _ in links]
    for peer in peers:
        peer._setup = setup(1)
        peer.known = {"a", "b"}
    group = DraftGroup(peers)
    group._backup = backup
    return group, [far for _, far in links]


OUTCOMES = Outcomes(3, (Outcome("a", 0, 7), Outcome("b", 1, 8)))
A, B, NO_A, NO_B = Draft("a", (1,), True), Draft("b", (2,), True), Draft("a", (), False), Draft("b", (), False)


def test_each_rows_draft_is_of_the_worker_that_holds_its_outcome_and_all_hear_of_it():
    group, fars = group_of(2)
    group.report(OUTCOMES)
    fars[0].send(Drafts(3, (NO_A, B)))
    fars[1].send(Drafts(3, (A, NO_B)))
    assert group.drafts() == {"a": A, "b": B}
    for far in fars:
        assert far.receive(1) == OUTCOMES
        told = far.receive(1)
        assert isinstance(told, Sent)
        assert sorted(told.drafts, key=lambda draft: draft.request) == [A, B]
        assert far.peek() is None
    assert group.drafts() == {}


def test_one_worker_drafts_for_what_nobody_holds_and_if_it_is_lost_the_next_does():
    for lost in (False, True):
        group, fars = group_of(2)
        group.report(OUTCOMES)
        for far in fars:
            far.send(Drafts(3, (A if far is fars[0] else NO_A, NO_B)))
        backed = Draft("b", (5,), False, True)
        if lost:
            # It goes with its answer said, when it is asked for the backup.
            fars[1].send(Drafts(3, (backed,)))
            receive, told = group.peers[0].link.send, []
            group.peers[0].link.send = lambda message, send=receive, far=fars[0], told=told: (
                send(message),
                told.append(message),
                far.close() if isinstance(message, BackUp) else None,
            )
        else:
            fars[0].send(Drafts(3, (backed,)))
        assert group.drafts() == {"a": A, "b": backed}
        asked = fars[1] if lost else fars[0]
        assert [type(asked.receive(1)) for _ in range(3)] == [Outcomes, BackUp, Sent]
        assert (group.peers[0].lost is not None) == lost
        if not lost:
            assert [type(fars[1].receive(1)) for _ in range(2)] == [Outcomes, Sent]


@pytest.mark.parametrize("backup", ["ngram", "none"])
def test_other_backups_take_no_further_message(backup):
    group, fars = group_of(2, backup=backup)
    group.report(OUTCOMES)
    found = Draft("b", (5,), False, True) if backup == "ngram" else NO_B
    for far in fars:
        far.send(Drafts(3, (NO_A, found)))
    assert group.drafts() == {"a": NO_A, "b": found}
    assert [type(fars[0].receive(1)) for _ in range(2)] == [Outcomes, Sent]


def test_a_worker_that_lags_is_not_waited_for_where_another_holds_the_outcomes_and_its_late_answer_is_passed_over():
    group, fars = group_of(2, deadline=60.0)
    for number in (3, 4, 5):
        group.report(replace(OUTCOMES, round=number))
        fars[1].send(Drafts(number, (A, B)))
        begin = time.monotonic()
        assert group.drafts() == {"a": A, "b": B}
        assert time.monotonic() - begin < 30
    for number in (3, 4, 5):
        fars[0].send(Drafts(number, (NO_A, NO_B)))
    # Now it holds what the other does not.
    group.report(replace(OUTCOMES, round=6))
    fars[0].send(Drafts(6, (A, B)))
    fars[1].send(Drafts(6, (NO_A, NO_B)))
    assert group.drafts() == {"a": A, "b": B}
    assert all(peer.lost is None for peer in group.peers)


def test_workers_that_are_silent_past_the_deadline_are_lost_together():
    group, fars = group_of(3, deadline=0.2)
    group.report(OUTCOMES)
    fars[1].send(Drafts(3, (A, NO_B)))
    fars[1].send(Drafts(3, (Draft("b", (4,), False, True),)))
    begin = time.monotonic()
    assert group.drafts() == {"a": A, "b": Draft("b", (4,), False, True)}
    assert time.monotonic() - begin < 10
    assert [peer.lost for peer in group.peers] == ["no message within 0.2 s", None, "no message within 0.2 s"]


def test_what_the_engine_stands_still_itself_is_not_held_against_its_workers(monkeypatch):
    group, fars = group_of(2, deadline=60.0)
    group.report(OUTCOMES)
    clock = iter([0.0, 1000.0])

    def stands_still():
        now = next(clock, 1001.0)
        if now == 1000.0:
            for far in fars:
                far.send(Drafts(3, (A, B)))
        return now

    monkeypatch.setattr("ssd.engine.group.monotonic", stands_still)
    assert group.drafts() == {"a": A, "b": B}
    assert all(peer.lost is None for peer in group.peers)


def test_what_a_stopped_request_left_is_not_sent_on_and_nobody_waits_for_it():
    group, fars = group_of(2)
    group.report(OUTCOMES)
    for peer in group.peers:
        peer.known.discard("b")
    fars[0].send(Drafts(3, (A, NO_B)))
    assert group.drafts() == {"a": A}
    assert [type(fars[1].receive(1)), fars[1].receive(1)] == [Outcomes, Sent(3, (A,))]


# --- placements ---


def test_workers_divide_the_drafts_devices_in_order():
    four = ("cpu:1", "cpu:2", "cpu:3", "cpu:4")
    place = Placement(target=("cpu:0",), draft=four, draft_workers=2)
    assert place.workers == (four[:2], four[2:])
    assert place.of_worker(1) == Placement(target=("cpu:0",), draft=four[2:])
    assert Placement(target=("cpu:0",), draft=four).workers == (four,)
    assert Placement(target=("cpu:0",)).workers == ()
    assert Placement.model_validate_json(place.model_dump_json()) == place


def test_a_draft_has_one_worker_on_each_accelerator_unless_it_shares_the_targets():
    assert Placement(target=("cuda:0",), draft=("cuda:1", "cuda:2")).workers == (("cuda:1",), ("cuda:2",))
    assert Placement(target=("cuda:0",), draft=("a/cuda:0", "b/cuda:0")).workers == (("a/cuda:0",), ("b/cuda:0",))
    assert Placement(target=("cuda:0", "cuda:1"), draft=("cuda:0", "cuda:1")).draft_workers == 1


@pytest.mark.parametrize(
    ("draft", "workers", "told"),
    [
        (("cpu:1", "cpu:2", "cpu:3"), 2, r"draft_workers=2 does not divide the 3 devices of placement.draft=.*: give a device"),
        ((), 2, "draft_workers=2 does not divide the 0 devices"),
        (("cpu:1", "cpu:1"), 1, r"gives a worker of draft_workers=1 a device twice"),
        (("a/cpu:1", "b/cpu:1"), 1, r"a model runs on one host"),
        (("cuda:1", "cuda:2"), 1, r"an accelerator holds a whole draft; set draft_workers=2"),
        (("cpu:1",), 0, "draft_workers"),
    ],
)
def test_placements_that_cannot_be_are_refused(draft, workers, told):
    with pytest.raises(ValidationError, match=told):
        Placement(target=("cpu:0",), draft=draft, draft_workers=workers)


def test_only_a_cache_can_be_shared_out():
    place = Placement(target=("cpu:0",), draft=("cpu:1", "cpu:2"), draft_workers=2)
    with pytest.raises(ValidationError, match=r"draft_workers=2: mode='sd' has no outcomes to share out"):
        Configuration(mode="sd", num_speculative_tokens=2, placement=place)


# --- processes ---

PROMPT = "hello, world"
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@pytest.fixture(scope="module")
def expected(tiny_pair):
    return reference(AutoModelForCausalLM.from_pretrained(tiny_pair[0]), tokenizer()(PROMPT)["input_ids"], PARAMS.max_tokens)


def hits_more(engine) -> bool:
    """Whether the cache is hit, now or later: workers that take turns on a busy core are often late."""
    before = engine.metrics().num_cache_hits
    return wait_for(lambda: engine.generate(PROMPT, PARAMS) and engine.metrics().num_cache_hits > before, 120)


def two_workers():
    """Both on the second core, which they take turns on."""
    return Placement(target=CORES[:1], draft=CORES[1:] * 2, draft_workers=2)


@pytest.mark.slow
@two_cores
def test_an_engine_starts_uses_and_closes_as_many_workers_as_are_configured(plan_for, expected):
    plan = plan_for(placement=two_workers())
    with ssd.Engine.from_plan(plan) as engine:
        pids = [peer.process.pid for peer in engine.peer.peers]
        assert len(set(pids)) == 2
        assert all(map(alive, pids))
        assert engine.health().workers == (True, True)
        shared = Placement(target=CORES[:1], draft=CORES[:1])
        one = plan.model_copy(update={"placement": Placement(target=CORES[:1], draft=CORES[1:])})
        for way in (plan, one, Configuration(mode="sd", num_speculative_tokens=2, placement=shared), plan):
            engine.configure(way)
            assert list(engine.generate(PROMPT, PARAMS)[0].token_ids) == expected
        assert [peer.process.pid for peer in engine.peer.peers] == pids
        timeline = engine.timeline()
        assert {span.device for span in timeline.spans} == {"target", "draft", "draft-2"}
        assert timeline.to_chrome()["traceEvents"]
        assert hits_more(engine)
    assert not any(map(alive, pids))


@pytest.mark.slow
@two_cores
def test_a_worker_more_than_was_started_is_started_when_it_is_configured(plan_for, expected):
    with ssd.Engine.from_plan(plan_for()) as engine:
        engine.configure(plan_for(placement=two_workers()))
        assert list(engine.generate(PROMPT, PARAMS)[0].token_ids) == expected
        assert engine.health().workers == (True, True)


@pytest.mark.slow
@two_cores
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("which", [0, 1])
def test_a_worker_that_dies_or_stops_costs_no_request_and_comes_back(plan_for, expected, number, which):
    with ssd.Engine.from_plan(plan_for(placement=two_workers()), deadline=5.0) as engine:
        chunks = engine.stream(PROMPT, PARAMS)
        tokens = [*next(chunks).token_ids, *next(chunks).token_ids]
        pid = engine.peer.peers[which].process.pid
        os.kill(pid, number)
        for chunk in chunks:
            tokens += chunk.token_ids
        assert tokens == expected

        def again():
            assert list(engine.generate(PROMPT, PARAMS)[0].token_ids) == expected
            health = engine.health()
            return health.restarts and (health.draft, health.reason, health.workers) == ("ok", None, (True, True))

        assert wait_for(again, 120)
        assert not alive(pid)
        assert hits_more(engine)


@pytest.mark.slow
@two_cores
def test_health_says_which_worker_is_lost(plan_for, expected):
    with ssd.Engine.from_plan(plan_for(placement=two_workers()), restart=False, deadline=60.0) as engine:
        os.kill(engine.peer.peers[1].process.pid, signal.SIGKILL)
        output = engine.generate(PROMPT, PARAMS)[0]
        assert list(output.token_ids) == expected
        assert output.metrics.num_draft_tokens > 0
        health = engine.health()
        assert (health.draft, health.workers) == ("fewer", (True, False))
        assert health.reason.startswith("worker 2: the peer is gone")
        os.kill(engine.peer.peers[0].process.pid, signal.SIGKILL)
        assert list(engine.generate(PROMPT, PARAMS)[0].token_ids) == expected
        assert (engine.health().draft, engine.health().workers) == ("lost", (False, False))


@pytest.mark.slow
@two_cores
def test_workers_of_other_hosts_share_a_cache_and_one_that_is_killed_comes_again(plan_for, expected, monkeypatch):
    """Here two names for this one, over its loopback."""
    monkeypatch.setenv("SSD_SECRET", "a secret")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    ids = tuple(f"{name}/{CORES[1]}" for name in ("a", "b"))
    near = two_cores_of()
    there = tuple(near.devices[1].model_copy(update={"id": name}) for name in ids)
    hardware = near.model_copy(update={"devices": (*near.devices, *there)})
    place = Placement(target=CORES[:1], draft=ids, draft_workers=2)
    words = [sys.executable, "-m", "ssd.cli", "draft", "--connect", address, "--name"]
    workers = [subprocess.Popen([*words, name], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for name in "ab"]
    try:
        with ssd.Engine.from_plan(plan_for(hardware=hardware, placement=place), listen=address, deadline=20.0) as engine:
            assert list(engine.generate(PROMPT, PARAMS)[0].token_ids) == expected
            assert hits_more(engine)
            assert engine.health().workers == (True, True)
            children = subprocess.run(["pgrep", "-P", str(workers[1].pid)], capture_output=True, text=True, check=True).stdout
            os.kill(int(children), signal.SIGKILL)

            def again():
                assert list(engine.generate(PROMPT, PARAMS)[0].token_ids) == expected
                return engine.health().restarts == 1 and engine.health().workers == (True, True)

            assert wait_for(again, 120)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
