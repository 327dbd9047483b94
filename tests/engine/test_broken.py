"""What was once broken: mistakes that came out as other errors, a draft that could not be waited for, positions that change with length."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from copy import deepcopy
from itertools import pairwise
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

import ssd
from ssd.engine.forward import SlotModel
from ssd.engine.kv import Slots
from ssd.engine.link import Draft, Drafts, Failed, Link, LinkError, Outcome, Outcomes, Ping, Ready
from ssd.engine.peer import PINGS, DraftPeer
from ssd.engine.queries import Queries
from ssd.engine.transport import LocalTransport
from ssd.specs import Models, Placement, SamplingParams
from tests.engine.inprocess import differs, joined, loaded, noisy, pair, recorded, reference, setup, tiny_model
from tests.plans import CORES, hand_typed, two_cores
from tests.tiny import EXTRA, tokenizer

AR = {"mode": "ar", "num_speculative_tokens": 0, "fan_out_hit": (), "fan_out_miss": (), "placement": Placement(target=CORES[:1])}
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_pair):
    with ssd.Engine.from_plan(hand_typed(*tiny_pair, **AR)) as running:
        yield running


@pytest.fixture
def unloaded(monkeypatch):
    """Fail where a model is loaded."""
    monkeypatch.setattr("ssd.engine.engine.load", lambda *_: pytest.fail("weights were loaded"))
    monkeypatch.setattr("ssd.engine.engine.spawn", lambda *_: pytest.fail("a process was started"))


@pytest.mark.parametrize(
    "prompts", [5, None, [None], 1.5, [1.5, 2], [[1.5, 2]], b"abc", [b"abc"], {"input_ids": [1]}, [["a"]], ["a", 1], "\ud800"]
)
def test_a_prompt_that_is_neither_text_nor_tokens_is_refused(engine, prompts):
    with pytest.raises(ValueError, match=r"prompt \d is .*: give text \(valid Unicode\) or a sequence of token ids"):
        engine.generate(prompts)


def test_a_stream_takes_one_prompt_and_refuses_a_list(engine):
    with pytest.raises(ValueError, match="prompt 0 is"):
        engine.stream(["a", "b"])


@pytest.mark.parametrize(
    "tokens", [(1, 2, 3), [np.int64(1), np.int64(2), np.int64(3)], np.array([1, 2, 3]), torch.tensor([1, 2, 3]), range(1, 4)]
)
def test_token_ids_may_be_of_any_whole_number_type(engine, tokens):
    (output,) = engine.generate(tokens, SHORT)
    assert output.prompt_token_ids == (1, 2, 3)
    assert engine.generate([tokens], SHORT)[0].token_ids == output.token_ids == engine.generate([1, 2, 3], SHORT)[0].token_ids


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [SHORT, 5], [], "x", 5])
def test_parameters_of_another_type_are_refused(engine, params):
    with pytest.raises(ValueError, match="is no SamplingParams"):
        engine.generate(["x", "y"], params)


@pytest.mark.parametrize("count", [1, 3])
def test_parameters_are_for_all_prompts_or_one_for_each(engine, count):
    with pytest.raises(ValueError, match=f"params has {count} entries for 2 prompts"):
        engine.generate(["x", "y"], [SHORT] * count)
    longer = SHORT.model_copy(update={"max_tokens": 6})
    assert [len(output.token_ids) for output in engine.generate(["x", "y"], [SHORT, longer])] == [4, 6]


def test_a_configuration_of_another_type_or_of_other_models_is_refused(engine, tiny_pair):
    with pytest.raises(ValueError, match="is no Configuration"):
        engine.configure({"mode": "ar"})
    with pytest.raises(ValueError, match="not those that are loaded"):
        engine.configure(hand_typed(tiny_pair[1], tiny_pair[0], **AR))


@pytest.mark.parametrize("deadline", [float("nan"), float("inf"), 1e10, None, "5"])
def test_a_deadline_that_is_no_number_of_seconds_is_refused(tiny_pair, unloaded, deadline):
    with pytest.raises(ValueError, match=r"deadline=.*: give the seconds to wait for a draft, more than 0 and at most"):
        ssd.Engine.from_plan(hand_typed(*tiny_pair), deadline=deadline)


def test_a_plan_of_another_type_is_refused():
    with pytest.raises(ValueError, match=r"plan='plan.json' is no Plan"):
        ssd.Engine.from_plan("plan.json")


@pytest.mark.parametrize("place", ["cpu:777", "xla:0", "foo:0", "xpu:0"])
@pytest.mark.parametrize("side", ["target", "draft"])
def test_a_device_that_this_machine_lacks_is_refused_before_loading(tiny_pair, unloaded, side, place):
    real = two_cores()
    hardware = real.model_copy(update={"devices": (real.devices[0], real.devices[0].model_copy(update={"id": place}))})
    ids = (CORES[:1], (place,)) if side == "draft" else ((place,), CORES[:1])
    with pytest.raises(ValueError, match=place):
        ssd.Engine.from_plan(hand_typed(*tiny_pair, hardware=hardware, placement=Placement(target=ids[0], draft=ids[1])))


def test_a_lookahead_for_which_the_draft_never_has_room_is_refused(tiny_pair, unloaded):
    with pytest.raises(ValueError, match=r"num_speculative_tokens=48 leaves the draft no room .*: give 46 or less"):
        ssd.Engine.from_plan(hand_typed(*tiny_pair, mode="sd", num_speculative_tokens=48, fan_out_hit=(), fan_out_miss=()))


def test_rotary_positions_that_change_with_the_length_are_refused_past_it(tiny_pair, unloaded, tmp_path):
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 3.0, 6.0], "factor": 3.0, "rope_theta": 1e4}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32, **factors}
    AutoConfig.for_model("phi3", **{**EXTRA["phi3"], "rope_parameters": rope, "original_max_position_embeddings": 32}).save_pretrained(
        tmp_path
    )
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"past 32 tokens \(rope_type 'longrope'\): set max_model_len to 32 or less"):
        ssd.Engine.from_plan(hand_typed(str(tmp_path), tiny_pair[1]))
    models = Models(target=str(tmp_path), draft=tiny_pair[1], max_model_len=32)
    with pytest.raises(pytest.fail.Exception, match="a process was started"):
        ssd.Engine.from_plan(hand_typed(str(tmp_path), tiny_pair[1], models=models))


def test_a_prompt_token_that_the_draft_does_not_have_costs_no_draft():
    target = tiny_model("llama", 18)
    small = type(target.config)(**{**target.config.to_dict(), "vocab_size": target.config.vocab_size - 6})
    torch.manual_seed(0)
    odd = [1, target.config.vocab_size - 1, 2]
    with pair(target, type(target)(small).eval(), 96) as both:
        request = both.decode(setup(2, (2, 2, 2)), odd, 20)
        assert both.peer.lost is None
        assert both.decode(setup(2, (2, 2, 2)), [1, 2], 2).output
    assert differs(target, odd, request.output, reference(target, odd, 20)) is None


def test_a_bonus_token_that_the_draft_does_not_have_costs_no_draft():
    target = tiny_model("llama", 18)
    expected = reference(target, [1, 2], 20)
    small = type(target.config)(**{**target.config.to_dict(), "vocab_size": max(expected)})
    torch.manual_seed(0)
    with pair(target, type(target)(small).eval(), 96) as both:
        request = both.decode(setup(2, (2, 2, 2)), [1, 2], 20)
        assert both.peer.lost is None
    assert request.output == expected


def test_a_draft_with_more_tokens_than_the_target_sends_none_of_them():
    target = tiny_model("llama", 18)
    large = type(target.config)(**{**target.config.to_dict(), "vocab_size": 4 * target.config.vocab_size})
    torch.manual_seed(0)
    with pair(target, type(target)(large).eval(), 96) as both:
        request = both.decode(setup(3, (2, 2, 2, 2)), [1, 2], 40)
        assert both.peer.lost is None
    assert differs(target, [1, 2], request.output, reference(target, [1, 2], 40)) is None


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
def test_what_free_slots_hold_does_not_matter(architecture, monkeypatch):
    garbage = lambda self, states: states.new_full((self.rows, states.shape[1], self.slots, states.shape[3]), 1e4)  # noqa: E731
    monkeypatch.setattr("ssd.engine.kv.SlotCache._allocate", garbage)
    target = tiny_model(architecture, 31)
    expected = reference(target, [1, 2, 3], 60)
    with pair(target, noisy(target, 0.1, 1), 96) as both:
        for how in (None, setup(4), setup(4, (1, 2, 1, 2, 3))):
            assert differs(target, [1, 2, 3], both.decode(how, [1, 2, 3], 60, patient=how is not None).output, expected) is None


def test_a_peer_that_stops_reading_is_given_up():
    link, silent = joined()
    link.give_up_after(0.2)
    begin = time.monotonic()
    with pytest.raises(LinkError):
        link.send(Failed("x" * (1 << 24)))
    assert time.monotonic() - begin < 5
    silent.close()


def test_a_peer_that_stops_within_a_message_is_given_up():
    ours, theirs = Pipe()
    link = Link(LocalTransport(ours))
    link.give_up_after(0.2)
    os.write(theirs.fileno(), (1000).to_bytes(4, "big") + b"half")
    with pytest.raises(LinkError):
        link.receive(deadline=5)


def test_what_a_process_stands_still_itself_is_not_held_against_its_peer():
    """As where the whole machine does: the time is over when it goes on, and the peer had none of it."""
    ours, theirs = Pipe()
    transport = LocalTransport(ours)
    poll = transport._poll.poll
    stood_still = iter([True])

    class Poll:
        def poll(self, milliseconds):
            if next(stood_still, False):
                theirs.send_bytes(b"now")
                return []
            return poll(milliseconds)

    transport._poll = Poll()
    assert transport.receive(60.0) == b"now"
    begin = time.monotonic()
    with pytest.raises(LinkError, match=r"no message within 0\.2 s"):
        transport.receive(0.2)
    assert time.monotonic() - begin > 0.19


SCRIPT = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import ssd
with ssd.Engine.from_plan(ssd.Plan.load(sys.argv[2])) as engine:
    engine.generate("x", ssd.SamplingParams(max_tokens=4))
    print(engine.health().draft)
"""


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_the_drafts_process_imports_what_the_callers_does(plan_for, tmp_path):
    """The path that a script has put together holds, and a module that lies in the working directory does not."""
    plan_for().save(tmp_path / "plan.json")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "simpy.py").write_text("raise SystemExit('the wrong module')")
    root = str(Path(ssd.__file__).parents[1])
    command = [sys.executable, str(tmp_path / "script.py"), json.dumps([root]), str(tmp_path / "plan.json")]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path / "here", env=plain, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "ok", done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_interrupts_at_any_moment_leave_an_engine_that_decodes_the_same(plan_for):
    def interrupt(*_):
        raise KeyboardInterrupt

    before, cores = signal.signal(signal.SIGALRM, interrupt), os.sched_getaffinity(0)
    try:
        with ssd.Engine.from_plan(plan_for()) as engine:
            params = SamplingParams(max_tokens=30, ignore_eos=True)
            expected = engine.generate("hello", params)[0].token_ids
            for milliseconds in range(1, 40):
                signal.setitimer(signal.ITIMER_REAL, milliseconds / 1000)
                try:
                    engine.generate("hello", params)
                except KeyboardInterrupt:
                    pass
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert os.sched_getaffinity(0) == cores
                assert engine.generate("hello", params)[0].token_ids == expected
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_every_draft_sent_is_the_drafts_own_greedy_continuation(architecture, patient):
    """What the draft's slots, masks and positions decide is seen here alone: the output is the target's whatever is drafted."""
    target, K = tiny_model(architecture, 41), 4
    draft = noisy(target, 0.1, 1)
    plain = deepcopy(draft)
    hits = 0
    with pair(target, draft, 96) as both:
        for how in (setup(K), setup(K, (2, 2, 2, 2, 3)), setup(K, (1, 1, 1, 1, 1), backup="none")):
            with recorded(both.peer) as sent:
                request = both.decode(how, [1, 2, 3], 50, patient=patient)
            length = 1
            for message, done in zip(sent, request.rounds, strict=True):
                text = [1, 2, 3, *request.output[:length]]
                if message.tokens:
                    assert differs(plain, text, list(message.tokens), reference(plain, text, K)) is None, message
                length += done.committed
            hits += sum(bool(done.hit) for done in request.rounds)
    # Without patience it hangs on the machine whether there is time for a cache.
    assert hits > 3 or not patient


@pytest.mark.slow
def test_after_a_hit_the_list_for_hits_is_used_and_after_a_miss_the_other():
    target = tiny_model("llama", 42)
    whole = (target.config.vocab_size,) * 3
    with pair(target, noisy(target, 0.1, 1), 96) as both:
        wide, narrow = (
            both.decode(setup(2, *lists), [5], 40, patient=True).rounds[1:] for lists in ((whole, (0, 0, 1)), ((0, 0, 1), whole))
        )
    first = next(place for place, done in enumerate(wide) if done.hit)
    assert all(done.hit for done in wide[first:])
    assert any(done.accepted < done.drafted for done in wide[first:-1])
    assert not all(done.hit for done in narrow)
    assert all(before.hit or after.hit for before, after in pairwise(narrow))


def test_drafts_left_by_a_cancelled_request_are_passed_over():
    """Whether they come before the answer to another setup or in their turn: nobody else gets them, and the draft is not lost."""
    near, far = joined()
    peer = DraftPeer(None, near, 5.0, 10)
    peer._setup = setup(1)
    peer.report(Outcomes(1, (Outcome("old", 0, 7),)))
    answers = Ready(), *[Ping()] * PINGS
    for message in (Drafts(1, (Draft("old", (7,)),)), *answers, Drafts(2, (Draft("new", (8,)),)), Drafts(3, (Draft("new", (9,)),))):
        far.send(message)
    assert peer.configure(setup(1))
    assert peer.drafts() == {}
    for number, token in ((2, 8), (3, 9)):
        peer.report(Outcomes(number, (Outcome("new", 0, 1),)))
        assert peer.drafts() == {"new": Draft("new", (token,))}
        assert peer.drafts() == {}
    assert peer.lost is None


def test_a_request_cancelled_while_its_draft_is_due_leaves_nothing_to_the_next():
    target = tiny_model("llama", 15)
    with pair(target, noisy(target, 0.1, 2), 96) as both:
        scheduler = both.scheduler(setup(3, (1, 1, 1, 1)))
        for rounds in range(6):
            old, new = both.request([1, 2, 3], 30), both.request([9, 9], 20)
            scheduler.add(old)
            while len(old.rounds) < rounds:
                scheduler.step()
            assert scheduler.cancel(old)
            assert not scheduler.cancel(old)
            scheduler.add(new)
            while scheduler.busy:
                scheduler.step()
            assert differs(target, [9, 9], new.output, reference(target, [9, 9], 20)) is None
        assert both.peer.lost is None
        assert both.peer.known == set()


def test_rows_of_unequal_width_do_not_see_each_other_or_their_padding():
    model = loaded(tiny_model("qwen2", 43))

    def forward(rows, count=3):
        slotted = SlotModel(model, count, 9)
        queries = {
            index: Queries(
                torch.tensor(row),
                np.arange(len(row)),
                np.arange(1, len(row) + 1),
                np.tri(len(row), slotted.slots, 1, dtype=bool) & (np.arange(slotted.slots) > 0),
            )
            for index, row in rows.items()
        }
        return slotted.forward(queries)

    alone = [forward({0: row}, 1)[0] for row in ([5, 6, 7], [8], [9, 10])]
    # Rows side by side, apart with an idle one between them, and in any order.
    for rows in ((0, 1), (0, 2), (2, 0), (1, 2, 0), (1,), (2, 1)):
        found = forward({index: [[5, 6, 7], [8], [9, 10]][index] for index in rows})
        assert set(found) == set(rows)
        for index in rows:
            assert found[index].shape == alone[index].shape
            assert torch.allclose(found[index], alone[index], atol=1e-4)


def test_the_waste_slot_is_never_given_out():
    slots = Slots(4)
    assert slots.take(3).tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError, match="1 key-value slots wanted, 0 free"):
        slots.take(1)
