"""Messages come back from their bytes as they were, and no bytes do more than make a message or an error."""

from __future__ import annotations

import pickle
from dataclasses import is_dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.timeline import Span
from ssd.engine import link as messages
from ssd.engine.link import MESSAGES, Boot, Draft, Drafts, Outcome, Outcomes, Ping, Scored, Setup, Spans, Start, Stop
from ssd.engine.packed import Laws
from ssd.specs import Placement, SamplingParams
from tests.strategies import several

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TOKENS = st.lists(st.integers(0, 1 << 40), max_size=5).map(tuple)
PLACES = st.builds(Placement, target=st.just(("cpu:0", "cpu:1")), draft=st.sampled_from([(), ("node1/cuda:0",)]))
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 1e6),
    seed=st.none() | st.integers(0, (1 << 63) - 1),
    logit_bias=st.dictionaries(st.integers(0, 300), st.floats(-100, 100), max_size=3),
    stop=st.lists(st.text(min_size=1), max_size=2).map(tuple),
    bad_words_token_ids=st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=3).map(tuple), max_size=2).map(tuple),
)
COUNTS = st.lists(st.tuples(st.text(), st.lists(FLOATS).map(tuple), st.lists(FLOATS).map(tuple)), max_size=2).map(tuple)
SEVERAL = {
    "drafts": st.builds(
        Drafts,
        st.integers(0),
        st.lists(st.builds(Draft, st.text(), TOKENS, st.none() | st.booleans(), st.booleans()), max_size=3).map(tuple),
        COUNTS,
    ),
    "outcomes": st.builds(
        Outcomes, st.integers(0), st.lists(st.builds(Outcome, st.text(), st.integers(0), st.integers(0)), max_size=3).map(tuple)
    ),
    "start": st.builds(Start, st.text(), TOKENS, TOKENS, PARAMS, TOKENS),
    "setup": st.builds(Setup, st.integers(0), TOKENS, TOKENS, st.text(), PLACES, saguaro=st.tuples(FLOATS), calibration=COUNTS),
    "boot": st.builds(Boot, st.text(), st.text(), PLACES, st.integers(), st.integers(), st.integers(), st.booleans()),
    "spans": st.builds(Spans, st.just((Span("draft", "build", 1.0, 1.5, 3, "a, b"),))),
    "ping": st.builds(Ping, FLOATS),
    "scored": st.builds(Scored, TOKENS, COUNTS),
    "stop": st.builds(Stop, st.text()),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_a_message_comes_back_as_it_was(kind):
    @several(40)
    @given(SEVERAL[kind])
    def law(message):
        assert MESSAGES.decode(MESSAGES.encode(message)) == message

    law()


def test_every_message_of_the_link_is_known():
    """Those that travel inside others, and the counts of what travelled, are none."""
    inside = {"Outcome", "Draft", "Traffic"}
    known = {kind.__name__ for kind in MESSAGES._kinds}
    assert known == {name for name, kind in vars(messages).items() if is_dataclass(kind) and kind.__module__ == messages.__name__} - inside


@pytest.mark.parametrize("ids", [None, np.arange(4, dtype=np.int32)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_laws_come_back_to_the_last_bit(ids, dtype):
    rng = np.random.default_rng(0)
    rows = [Laws(7, rng.random(size).astype(dtype), ids, None if ids is None else np.array([2, 2], np.int32)) for size in (4, 7, 0, 21)]
    sent = Drafts(3, tuple(Draft(str(row), (1, 2), False, True, law) for row, law in enumerate(rows)))
    back = MESSAGES.decode(MESSAGES.encode(sent))
    for ours, theirs in zip(rows, back.drafts, strict=True):
        for name in ("values", "ids", "counts"):
            before, after = getattr(ours, name), getattr(theirs.laws, name)
            assert (before is None) is (after is None)
            if before is not None:
                assert after.dtype == before.dtype
                assert after.tobytes() == before.tobytes()
                assert after.flags.writeable


class Mischief:
    done = False

    def __reduce__(self):
        return setattr, (Mischief, "done", True)


def test_nothing_that_comes_in_is_executed():
    for junk in (pickle.dumps(Mischief()), MESSAGES.encode(Stop("x"))[:5] + pickle.dumps(Mischief())):
        with pytest.raises(ValueError, match=r"."):
            MESSAGES.decode(junk)
    assert not Mischief.done


def test_bytes_make_a_message_or_an_error():
    @several(300)
    @given(st.integers(0, len(MESSAGES._kinds)), st.binary(max_size=20), st.integers(0, 30))
    def law(kind, text, length):
        try:
            MESSAGES.decode(bytes([kind]) + length.to_bytes(4, "little") + text)
        except (ValueError, TypeError):
            return
        assert kind < len(MESSAGES._kinds)

    law()


@pytest.mark.parametrize(
    "place", ['["|O",0,1]', '["<U1",0,1]', '["|S2",0,1]', '["<f4",0,99]', '["<f4",-8,1]', '["<f4",0,-1]', '["U9",0,1]', '"abcd"', "7", "[]"]
)
def test_an_array_that_is_not_there_or_not_of_numbers_is_an_error(place):
    law = b'{"width":7,"values":' + place.encode() + b',"ids":null,"counts":null}'
    text = b'{"round":1,"drafts":[{"request":"r","tokens":[1],"hit":null,"backup":false,"laws":' + law + b'}],"calibration":[]}'
    head = MESSAGES.encode(Drafts(1, ()))[:1] + len(text).to_bytes(4, "little")
    with pytest.raises((ValueError, TypeError)):
        MESSAGES.decode(head + text + bytes(16))


@pytest.mark.parametrize("size", range(5))
def test_less_than_a_head_is_no_message(size):
    with pytest.raises(ValueError, match=f"{size} bytes are no message"):
        MESSAGES.decode(bytes(size))


def test_a_number_that_no_message_has_is_an_error():
    with pytest.raises(ValueError, match="there is no message"):
        MESSAGES.decode(bytes([len(MESSAGES._kinds)]) + bytes(4))


def test_what_is_no_message_is_not_sent():
    with pytest.raises(ValueError, match="int is no message"):
        MESSAGES.encode(7)
