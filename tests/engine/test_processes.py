"""The two real processes: what each does when the other dies, hangs, errs or is done."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from transformers import AutoModelForCausalLM

import ssd
from ssd.engine.engine import Health
from ssd.specs import Configuration, Placement, SamplingParams
from tests.engine.inprocess import reference
from tests.engine.patience import patient
from tests.plans import CORES, hand_typed, heed_interrupts

PROMPT = "hello, world"
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds: float = 60.0) -> bool:
    """Whether the condition comes true within so many seconds, of which a pause of this process, or of the machine, counts one."""
    past, before = 0.0, time.monotonic()
    while past < seconds:
        if condition():
            return True
        time.sleep(0.05)
        now = time.monotonic()
        past, before = past + min(now - before, 1.0), now
    return condition()


@pytest.fixture(scope="module")
def expected(tiny_pair):
    model = AutoModelForCausalLM.from_pretrained(tiny_pair[0])
    from tests.tiny import tokenizer

    return reference(model, tokenizer()(PROMPT)["input_ids"], PARAMS.max_tokens)


def test_all_modes_and_placements_of_one_engine_give_the_same_tokens(plan_for, expected):
    plan = plan_for()
    shared = Placement(target=CORES[:1], draft=CORES[:1])
    both = Placement(target=CORES, draft=CORES)
    with ssd.Engine.from_plan(plan) as engine:
        for configuration in (
            plan,
            Configuration(mode="sd", num_speculative_tokens=2, placement=shared),
            Configuration(mode="ar", placement=Placement(target=CORES)),
            Configuration(mode="sd", num_speculative_tokens=5, placement=both),
            plan.model_copy(update={"backup": "none"}),
        ):
            engine.configure(configuration)
            if configuration.mode == "ssd":
                patient(engine)
            output = engine.generate(PROMPT, PARAMS)[0]
            assert list(output.token_ids) == expected, configuration.mode
        metrics = engine.metrics()
        assert metrics.num_output_tokens == 5 * PARAMS.max_tokens
        assert metrics.num_cache_hits > 0
        spans = engine.timeline().spans
        assert {(span.device, span.activity) for span in spans} >= {("target", "verify"), ("draft", "build"), ("draft", "answer")}
        assert engine.health().draft == "ok"


@pytest.mark.parametrize("restart", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_draft_loses_no_request(plan_for, expected, restart):
    with ssd.Engine.from_plan(plan_for(), restart=restart) as engine:
        assert engine.health() == Health("ok")
        chunks = engine.stream(PROMPT, PARAMS)
        tokens = [*next(chunks).token_ids, *next(chunks).token_ids]
        os.kill(engine.peer.process.pid, signal.SIGKILL)
        for chunk in chunks:
            tokens += chunk.token_ids
        assert tokens == expected
        assert chunk.output.token_ids == tuple(expected)
        if not restart:
            assert engine.health().draft == "lost"
            assert engine.health().reason
        assert list(engine.generate(PROMPT, PARAMS)[0].token_ids) == expected
        assert engine.timeline().spans
        if restart:
            assert wait_for(lambda: list(engine.generate(PROMPT, PARAMS)[0].token_ids) == expected and engine.health().draft == "ok", 60)
            assert engine.health() == Health("ok", None, 1)
            output = engine.generate(PROMPT, PARAMS)[0]
            assert list(output.token_ids) == expected
            assert output.metrics.num_draft_tokens > 0
        else:
            assert engine.health().draft == "lost"


def test_a_stopped_draft_costs_one_deadline_and_no_request(plan_for, expected):
    with ssd.Engine.from_plan(plan_for(), deadline=1.0, restart=False) as engine:
        pid = engine.peer.process.pid
        os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        assert list(engine.generate(PROMPT, PARAMS)[0].token_ids) == expected
        # Not one a round, of which there are dozens.
        assert 0.9 < time.monotonic() - begin < 25
        assert "1 s" in engine.health().reason
        assert not alive(pid)


def test_a_lying_draft_is_lost_and_the_request_is_right(plan_for, expected, monkeypatch):
    from ssd.engine.link import Draft, Drafts, Link

    honest = Link.receive

    def lying(self, deadline=None):
        message = honest(self, deadline)
        if not isinstance(message, Drafts) or message.round != 3:
            return message
        return Drafts(message.round + 7, tuple(Draft(draft.request, ("x",)) for draft in message.drafts))

    monkeypatch.setattr(Link, "receive", lying)
    with ssd.Engine.from_plan(plan_for(), restart=False) as engine:
        assert list(engine.generate(PROMPT, PARAMS)[0].token_ids) == expected
        assert engine.health().draft == "lost"
        assert "malformed or out of turn" in engine.health().reason


def test_closing_leaves_no_process(plan_for):
    with ssd.Engine.from_plan(plan_for()) as engine:
        pid = engine.peer.process.pid
        assert alive(pid)
    assert not alive(pid)
    engine.close()
    with pytest.raises(ValueError, match="closed"):
        engine.generate(PROMPT)


def test_an_error_inside_the_block_leaves_no_process(plan_for):
    pids = []

    def fail():
        with ssd.Engine.from_plan(plan_for()) as engine:
            pids.append(engine.peer.process.pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not alive(pids[0])


def test_a_draft_that_cannot_load_is_an_error_with_its_reason_and_no_process(plan_for, monkeypatch):
    import ssd.engine.engine as module

    spawned = []
    real = module.spawn

    def sabotaged(boot):
        from dataclasses import replace

        process, link = real(replace(boot, draft="./nowhere"))
        spawned.append(process.pid)
        return process, link

    monkeypatch.setattr(module, "spawn", sabotaged)
    with pytest.raises(RuntimeError, match="no such folder"):
        ssd.Engine.from_plan(plan_for())
    assert not alive(spawned[0])


@pytest.mark.parametrize("role", [0, 1])
def test_weights_that_are_missing_are_named(tiny_pair, tmp_path, role):
    pair = list(tiny_pair)
    pair[role] = str(shutil.copytree(pair[role], tmp_path / "model"))
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises((ValueError, RuntimeError), match=r"the weights of '.*model' cannot be read"):
        ssd.Engine.from_plan(hand_typed(*pair))


SCRIPT = """
import sys, ssd
from ssd.specs import Plan, SamplingParams
engine = ssd.Engine.from_plan(Plan.load(sys.argv[1]))
print(engine.peer.process.pid, flush=True)
while True:
    engine.generate("again and again", SamplingParams(max_tokens=60, ignore_eos=True))
"""


SLOW = [pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.parametrize("number", [*SLOW, signal.SIGKILL])
def test_whatever_ends_the_engines_process_ends_the_drafts(plan_for, tmp_path, number):
    plan_for().save(tmp_path / "plan.json")
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "plan.json")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed_interrupts)
    try:
        draft = int(process.stdout.readline())
        assert alive(draft)
        process.send_signal(number)
        assert process.wait(30) != 0
        assert wait_for(lambda: not alive(draft))
    finally:
        process.kill()


def test_the_callers_thread_gets_its_cores_back(plan_for):
    before = os.sched_getaffinity(0)
    with ssd.Engine.from_plan(plan_for()) as engine:
        for _ in engine.stream(PROMPT, PARAMS):
            assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


def test_a_stream_is_the_output_in_pieces_and_never_half_a_character(plan_for):
    with ssd.Engine.from_plan(plan_for()) as engine:
        chunks = list(engine.stream("ünïcödé ☃", PARAMS))
        output = chunks[-1].output
        assert "".join(chunk.text for chunk in chunks) == output.text
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == output.token_ids
        assert not any(chunk.text.endswith("\ufffd") for chunk in chunks[:-1])


def slowed(engine):
    """Let every round of the engine take a while."""
    target = engine._worker.scheduler.target
    play = target.round
    target.round = lambda *rest: (time.sleep(0.05), play(*rest))[1]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_request_beside_an_open_stream_is_decoded_too_and_a_closed_stream_frees_the_engine(plan_for, expected, rows):
    plan = plan_for()
    with ssd.Engine.from_plan(plan, max_num_seqs=rows) as engine:
        slowed(engine)
        chunks = engine.stream(PROMPT, PARAMS)
        tokens = list(next(chunks).token_ids)
        with pytest.raises(ValueError, match=r"requests are being decoded \(1\) or wait \(0\): let them finish"):
            engine.configure(plan)
        assert list(engine.generate(PROMPT, PARAMS)[0].token_ids) == expected
        for chunk in chunks:
            tokens += chunk.token_ids
        assert tokens == expected
        engine.configure(plan)
        slowed(engine)
        chunks = engine.stream(PROMPT, PARAMS)
        next(chunks)
        chunks.close()
        engine.configure(plan)
        assert list(engine.generate(PROMPT, PARAMS)[0].token_ids) == expected
        assert engine.health() == Health("ok")


def test_a_draft_of_int8_weights_proposes_and_the_target_decides(plan_for, expected):
    """Rounded weights change what is proposed, never what is emitted; small drafts are left as they are unless it is asked for."""
    plan = plan_for()
    rounded = plan.model_copy(update={"models": plan.models.model_copy(update={"draft_weights": "int8"})})
    boots = []
    with ssd.Engine.from_plan(rounded) as engine:
        boots += [engine._boot(each, each.placement).int8 for each in (rounded, plan)]
        for configuration in (rounded, Configuration(mode="sd", num_speculative_tokens=2, placement=rounded.placement)):
            engine.configure(configuration)
            if configuration.mode == "ssd":
                patient(engine)
            assert list(engine.generate(PROMPT, PARAMS)[0].token_ids) == expected
        assert engine.metrics().num_cache_hits > 0
    assert boots == [True, False]
