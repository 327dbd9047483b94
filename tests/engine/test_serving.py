"""Many callers of one engine: threads and tasks, streams that are left, rooms that are full, a draft that fails under load."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

import ssd
from ssd.engine.link import Link, LinkError, Setup
from ssd.engine.transport import LocalTransport
from ssd.engine.worker import Job, Worker
from ssd.specs import SamplingParams
from tests import handmade
from tests.engine.patience import patient
from tests.engine.test_processes import alive, wait_for
from tests.plans import CORES, hand_typed

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")

PROMPTS = ["hello, world", "what", "another one, rather longer than the others, so that it is fed in pieces", "x"]
PARAMS = [
    SamplingParams(max_tokens=30, ignore_eos=True),
    SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=3),
    SamplingParams(max_tokens=35, ignore_eos=True, temperature=0.7, top_k=20, seed=4),
    SamplingParams(max_tokens=25, ignore_eos=True, repetition_penalty=1.2),
]
ADAPTIVE = {"fan_out_hit": (), "fan_out_miss": (), "budget": 4, "building": "anytime"}


@pytest.fixture(scope="module")
def engine(tiny_pair):
    with ssd.Engine.from_plan(hand_typed(*tiny_pair, **ADAPTIVE), max_num_seqs=3) as running:
        yield running


@pytest.fixture(scope="module")
def expected(engine):
    """What each request gets alone from the target alone."""
    engine.configure(handmade.AR)
    alone = [engine.generate(prompt, params)[0].token_ids for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    engine.configure(hand_typed(*[engine.plan.models.target, engine.plan.models.draft], **ADAPTIVE))
    return alone


def test_prompts_with_parameters_of_their_own_are_decoded_together_and_come_in_order(engine, expected):
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in outputs] == expected
    assert [output.prompt for output in outputs] == PROMPTS
    rounds = engine.timeline().rounds
    assert {r.request for r in rounds} >= {output.request_id for output in outputs}
    together = [s for s in rounds if any(o.request != s.request and o.start == s.start for o in rounds)]
    assert together, "requests were decoded one after another"


@pytest.mark.parametrize("params", [PARAMS[:2], [], "x", [*PARAMS[:3], 5], {"max_tokens": 3}])
def test_parameters_that_do_not_fit_the_prompts_are_refused(engine, params):
    with pytest.raises(ValueError, match=r"params"):
        engine.generate(PROMPTS, params)


@pytest.mark.parametrize("option", ["max_num_seqs", "max_waiting"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_counts_that_are_none_are_refused(tiny_pair, option, value):
    with pytest.raises(ValueError, match=f"{option}={value!r}: give a whole number of at least 1"):
        ssd.Engine.from_plan(hand_typed(*tiny_pair), **{option: value})


def test_threads_share_the_engine(engine, expected):
    def one(place):
        return engine.generate(PROMPTS[place % 4], PARAMS[place % 4])[0].token_ids

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(24)))
    assert found == [expected[place % 4] for place in range(24)]


def test_streams_beside_each_other_and_beside_generate(engine, expected):
    streams = [engine.stream(prompt, params) for prompt, params in zip(PROMPTS[:2], PARAMS[:2], strict=True)]
    tokens = [list(next(stream).token_ids) for stream in streams]
    assert engine.generate(PROMPTS[2], PARAMS[2])[0].token_ids == expected[2]
    for place, stream in enumerate(streams):
        for chunk in stream:
            tokens[place] += chunk.token_ids
    assert list(map(tuple, tokens)) == expected[:2]


def test_the_async_twins_give_the_same_and_let_the_loop_go_on(engine, expected):
    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                await asyncio.sleep(0.001)
                ticks += 1

        async def streamed(place):
            return tuple([token async for chunk in engine.astream(PROMPTS[place], PARAMS[place]) for token in chunk.token_ids])

        clock = asyncio.create_task(tick())
        together = await engine.agenerate(PROMPTS, PARAMS)
        streams = await asyncio.gather(*map(streamed, range(4)))
        clock.cancel()
        return [output.token_ids for output in together], streams, ticks

    outputs, streams, ticks = asyncio.run(main())
    assert outputs == expected
    assert streams == expected
    assert ticks > 10


def test_astream_refuses_a_wrong_prompt_at_once(engine):
    with pytest.raises(ValueError, match="prompt 0 is"):
        engine.astream(5)


def test_a_cancelled_task_and_a_left_stream_free_their_rows(engine, expected):
    long = SamplingParams(max_tokens=10_000, ignore_eos=True)

    async def main():
        tasks = [asyncio.create_task(engine.agenerate(prompt, long)) for prompt in PROMPTS]
        stream = engine.astream(PROMPTS[0], long)
        await anext(stream)
        for task in tasks:
            task.cancel()
        await stream.aclose()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert all(isinstance(found, asyncio.CancelledError) for found in asyncio.run(main()))
    assert [output.token_ids for output in engine.generate(PROMPTS, PARAMS)] == expected
    assert wait_for(lambda: not engine._worker.scheduler.busy)


def test_a_configuration_is_refused_while_requests_are_on_their_way(engine):
    stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=10_000, ignore_eos=True))
    next(stream)
    with pytest.raises(ValueError, match=r"requests are being decoded \(1\) or wait \(0\)"):
        engine.configure(engine.plan)
    stream.close()
    engine.configure(engine.plan)


def test_who_asks_for_little_does_not_wait_for_who_asks_for_much(engine):
    params, asked = SamplingParams(max_tokens=12, ignore_eos=True), threading.Event()
    with ThreadPoolExecutor(3) as pool:
        # Nothing is decoded before all have asked.
        held = pool.submit(engine._worker.call, lambda: asked.wait(120))
        much = pool.submit(engine.generate, ["again"] * 60, params)
        assert wait_for(lambda: engine._worker._adding == 60)
        little = pool.submit(engine.generate, "hello", params)
        assert wait_for(lambda: engine._worker._adding == 61)
        asked.set()
        assert held.result()
        longest = sorted(output.metrics.total_seconds for output in much.result())
        assert little.result()[0].metrics.total_seconds < longest[len(longest) // 2], "the one request waited for all the others"


def test_a_full_room_makes_who_asks_wait_and_loses_nobody(tiny_pair):
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    with ssd.Engine.from_plan(hand_typed(*tiny_pair), max_num_seqs=2, max_waiting=3) as engine:
        most = 0
        step = engine._worker.scheduler.step

        def watched():
            nonlocal most
            most = max(most, len(engine._worker.scheduler.waiting))
            return step()

        engine._worker.scheduler.step = watched
        assert len(engine.generate(["a"] * 20, params)) == 20

        async def main():
            return await asyncio.gather(*(engine.agenerate("a", params) for _ in range(20)))

        assert len(asyncio.run(main())) == 20
    assert most <= 3


def test_closing_ends_requests_with_an_error(tiny_pair):
    engine = ssd.Engine.from_plan(hand_typed(*tiny_pair))
    stream = engine.stream("x", SamplingParams(max_tokens=10_000, ignore_eos=True))
    next(stream)
    pid = engine.peer.process.pid
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        list(stream)
    with pytest.raises(ValueError, match="closed"):
        engine.generate("x")
    assert not alive(pid)


def test_an_engine_that_is_dropped_ends_its_draft(tiny_pair):
    engine = ssd.Engine.from_plan(hand_typed(*tiny_pair))
    engine.generate("x", SamplingParams(max_tokens=3))
    pid = engine.peer.process.pid
    del engine
    gc.collect()
    assert wait_for(lambda: not alive(pid))


def test_an_error_while_decoding_reaches_every_caller_and_the_next_is_told(tiny_pair):
    with ssd.Engine.from_plan(hand_typed(*tiny_pair), max_num_seqs=2) as engine:
        engine._worker.scheduler.target.round = lambda *_: 1 / 0
        with pytest.raises(RuntimeError, match="decoding failed: ZeroDivisionError"):
            engine.generate(["a", "b"])
        with pytest.raises(RuntimeError, match="the engine failed"):
            engine.generate("c")
        with pytest.raises(RuntimeError, match="the engine failed"):
            engine.timeline()


# --- a draft that fails under load ---


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_draft_lost_under_load_loses_no_request_and_comes_back(tiny_pair, expected, number):
    with ssd.Engine.from_plan(hand_typed(*tiny_pair, **ADAPTIVE), max_num_seqs=4, deadline=0.5) as engine:
        with ThreadPoolExecutor(4) as pool:
            pid = engine.peer.process.pid
            asked = [pool.submit(engine.generate, PROMPTS[i % 4], PARAMS[i % 4]) for i in range(12)]
            time.sleep(0.1)
            os.kill(pid, number)
            assert [one.result()[0].token_ids for one in asked] == [expected[i % 4] for i in range(12)]
            # A stopped draft that nobody waits for is noticed with the next request.
            assert wait_for(lambda: engine.generate("x", PARAMS[0]) and engine.health().restarts, 120)
            assert not alive(pid)
        patient(engine)
        # A machine that stands still may have lost another one.
        assert wait_for(lambda: engine.generate("x", PARAMS[0]) and engine.health().draft == "ok", 120)
        before = engine.metrics().num_cache_hits
        assert [output.token_ids for output in engine.generate(PROMPTS, PARAMS)] == expected
        assert engine.metrics().num_cache_hits > before, "the draft that came back drafts nothing"


def test_without_restart_a_lost_draft_stays_lost_and_decoding_goes_on(tiny_pair, expected):
    with ssd.Engine.from_plan(hand_typed(*tiny_pair), max_num_seqs=4, restart=False) as engine:
        os.kill(engine.peer.process.pid, signal.SIGKILL)
        assert [output.token_ids for output in engine.generate(PROMPTS, PARAMS)] == expected
        assert engine.health().draft == "lost"
        assert engine.health().reason


def test_a_draft_that_lies_is_lost_and_the_requests_are_right(tiny_pair, expected):
    from dataclasses import replace

    from ssd.engine.link import Drafts

    with ssd.Engine.from_plan(hand_typed(*tiny_pair), max_num_seqs=4, restart=False) as engine:
        receive, count = engine.peer.link.receive, iter(range(10_000))

        def lying(deadline=None):
            message = receive(deadline)
            return replace(message, drafts=message.drafts[::-1]) if isinstance(message, Drafts) and next(count) > 3 else message

        engine.peer.link.receive = lying
        assert [output.token_ids for output in engine.generate(PROMPTS, PARAMS)] == expected
        assert "malformed or out of turn" in engine.health().reason


def test_hundreds_of_requests_leave_nothing_behind(engine):
    def held():
        gc.collect()
        return (
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            sum(len(row.tokens) for row in engine._worker.scheduler.target.rows if row),
        )

    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.generate(["a"] * 10, params)
    files, threads, _ = held()
    for _ in range(5):
        engine.generate(["a b", "c"] * 20, params)
        stream = engine.stream("d", SamplingParams(max_tokens=1000, ignore_eos=True))
        next(stream)
        stream.close()
    assert wait_for(lambda: not engine._worker.scheduler.busy)
    after = held()
    assert after[0] <= files
    assert after[1] <= threads
    assert not engine._worker._jobs
    assert not engine.peer.known


# --- found by a reviewer ---


def test_who_waits_for_room_is_let_in_when_those_before_are_cancelled(engine):
    worker = Worker(max_waiting=1)
    worker.scheduler = SimpleNamespace(busy=False, waiting=[], add=lambda _: None, cancel=lambda _: True)
    try:
        started, going_on = threading.Event(), threading.Event()
        blocking = threading.Thread(target=lambda: worker.call(lambda: (started.set(), going_on.wait(10))))
        blocking.start()
        started.wait(10)
        first, second = (Job(type("Asked", (), {"first_token": 0.0})(), None, print) for _ in range(2))
        worker.submit(first)
        assert not worker.submit(second, patient=False)
        waiting = threading.Thread(target=worker.submit, args=(second,), daemon=True)
        waiting.start()
        worker.cancel(first)
        going_on.set()
        waiting.join(10)
        assert not waiting.is_alive(), "the second caller was never let in"
        blocking.join(10)
    finally:
        worker.close(lambda: None)


def test_an_engine_that_is_dropped_before_its_first_request_ends_its_draft(tiny_pair):
    engine = ssd.Engine.from_plan(hand_typed(*tiny_pair))
    pid = engine.peer.process.pid
    del engine
    gc.collect()
    assert wait_for(lambda: not alive(pid))


def test_an_error_in_what_is_done_between_rounds_reaches_every_caller(tiny_pair):
    with ssd.Engine.from_plan(hand_typed(*tiny_pair)) as engine:
        engine._worker.scheduler.cancel = lambda _: 1 / 0
        stream = engine.stream("x", SamplingParams(max_tokens=10_000, ignore_eos=True))
        next(stream)
        stream.close()
        assert wait_for(lambda: engine._worker.failed is not None)
        assert "ZeroDivisionError" in engine.health().failed
        with pytest.raises(RuntimeError, match="the engine failed"):
            engine.generate("y")


@pytest.mark.parametrize(
    "junk", [b"", b"garbage", b"\x06", b"\xff\x00\x00\x00\x00", b"\x06\x02\x00\x00\x00{}", b"\x80\x05\x95\xff\xff\xff\xff\xff\xff\xff\xff."]
)
def test_bytes_that_are_no_message_lose_the_draft_only(junk):
    ours, theirs = Pipe()
    theirs.send_bytes(junk)
    with pytest.raises(LinkError):
        Link(LocalTransport(ours)).receive(1.0)


def test_a_draft_that_cannot_be_started_again_is_tried_again(tiny_pair):
    with ssd.Engine.from_plan(hand_typed(*tiny_pair)) as engine:
        respawn, failures = engine.peer._respawn, iter([OSError("no more processes"), LinkError("gone")])

        def failing():
            if (error := next(failures, None)) is not None:
                raise error
            return respawn()

        engine.peer._respawn, engine.peer._back_off = failing, 0.05
        os.kill(engine.peer.process.pid, signal.SIGKILL)
        assert wait_for(lambda: engine.generate("x", PARAMS[0]) and engine.health().restarts == 1, 60)


def test_what_was_learnt_survives_a_restart_and_new_processes_load_off_the_targets_core(tiny_pair, monkeypatch):
    monkeypatch.setattr("ssd.engine.peer.FIRST_BACK_OFF", 0.05)
    with ssd.Engine.from_plan(hand_typed(*tiny_pair, **ADAPTIVE)) as engine:
        cores: list = []
        told: list = []
        respawn, ask = engine.peer._respawn, engine.peer.ask
        engine.peer._respawn = lambda: (cores.append(os.sched_getaffinity(0)), respawn())[1]
        for _ in range(12):
            engine.generate("hello", SamplingParams(max_tokens=60, ignore_eos=True))
        learnt = engine.peer._setup.calibration
        assert {kind for kind, _, _ in learnt} >= {"greedy sent"}
        engine.peer.ask = lambda question, kind: (told.append(question), ask(question, kind))[1]
        os.kill(engine.peer.process.pid, signal.SIGKILL)
        assert wait_for(lambda: engine.generate("x", PARAMS[0]) and engine.health().restarts == 1, 60)
        # What the new process was told, not what it has learnt since.
        assert [question.calibration for question in told if isinstance(question, Setup)] == [learnt]
    assert cores == [os.sched_getaffinity(0)]


def test_a_pause_between_requests_is_no_slow_verification_and_no_wait(engine, expected):
    engine.configure(engine.plan)
    stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=10_000, ignore_eos=True))
    next(stream)
    stream.close()
    time.sleep(0.5)
    engine.timeline()
    begin = time.monotonic()
    engine.generate(PROMPTS[0], PARAMS[0])
    assert all(span.start >= begin - 0.1 for span in engine.timeline().spans if span.device == "target")
