"""What a request may ask for, through the two real processes: seeds, samples, stops, log-probabilities, text."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import ssd
from ssd.engine.resolve import resolved
from ssd.engine.text import Text
from ssd.models import locate
from ssd.specs import EMBEDDED_TARGET, SamplingParams
from tests import handmade
from tests.engine.inprocess import recorded
from tests.engine.short_texts import drawn as drawn_texts
from tests.engine.short_texts import exact_law, p_value, ways
from tests.plans import CORES, hand_typed
from tests.tiny import tokenizer

PROMPT = "hello, world"
SD = handmade.sd()
SSD = handmade.SSD.model_copy(update={"fan_out_hit": (2, 2, 2, 2), "fan_out_miss": (2, 2, 2, 2)})
ADAPTIVE = SSD.model_copy(update={"fan_out_hit": (), "fan_out_miss": (), "budget": 4, "building": "anytime", "backup": "ngram"})
MODES = [handmade.AR, SD, SSD, SSD.model_copy(update={"backup": "none"}), ADAPTIVE]

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def drawn(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "temperature": 0.9, "seed": 5, "ignore_eos": True, **changes})


@pytest.fixture(scope="module")
def engine(tiny_pair):
    with ssd.Engine.from_plan(hand_typed(*tiny_pair), max_num_seqs=3) as running:
        yield running


@pytest.fixture(autouse=True)
def _back_to_ssd(request):
    yield
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").configure(SSD)


ASKED = [
    {},
    {"temperature": 0.3, "top_k": 5},
    {"top_p": 0.8, "min_p": 0.05},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {97: 4.0}, "bad_words": "e"},
]


@pytest.mark.parametrize("asked", ASKED)
def test_a_seed_gives_the_same_text_in_every_mode(engine, asked):
    outputs = []
    for mode in MODES:
        engine.configure(mode)
        outputs.append(engine.generate(PROMPT, drawn(**asked))[0].token_ids)
    assert len(set(outputs)) == 1
    assert engine.health().draft == "ok"


@pytest.mark.parametrize("asked", ASKED)
def test_rejection_in_ssd_gives_the_tokens_of_sd(engine, asked):
    outputs = []
    for mode in (SD, SSD):
        engine.configure(mode)
        outputs.append(engine.generate(PROMPT, drawn(**asked, verification="rejection"))[0].token_ids)
    assert outputs[0] == outputs[1]


def test_without_a_seed_outputs_differ_and_the_plan_says_how_they_are_verified(engine):
    one, other = (engine.generate(PROMPT, drawn(seed=None))[0].token_ids for _ in range(2))
    assert one != other
    for planned in ("rejection", "coupled"):
        engine.configure(SSD.model_copy(update={"verification": planned}))
        with recorded(engine.peer) as sent:
            engine.generate(PROMPT, drawn(seed=None))
        assert any(draft.laws is not None for draft in sent) == (planned == "rejection")


def test_n_outputs_of_a_prompt_come_in_order_each_with_its_own_noise_and_the_first_is_that_of_one(engine):
    outputs = engine.generate([PROMPT, "other"], drawn(n=3))
    assert [output.index for output in outputs] == [0, 1, 2, 0, 1, 2]
    assert [output.prompt for output in outputs] == [PROMPT] * 3 + ["other"] * 3
    assert len({output.token_ids for output in outputs}) == 6
    assert outputs[0].token_ids == engine.generate(PROMPT, drawn())[0].token_ids
    assert len({output.request_id for output in outputs}) == 6
    with pytest.raises(ValueError, match="n=3: a stream is one output"):
        engine.stream(PROMPT, drawn(n=3))


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_string_ends_text_tokens_and_logprobs_at_one_place_wherever_it_falls_in_a_block(engine, mode):
    engine.configure(mode)
    free, looked = engine.generate([7, 8, 9], drawn(logprobs=0))[0], 0
    for place in range(3, len(free.token_ids) - 3):
        # One byte a token: the stop string is what these two tokens say, where they are characters of their own.
        piece = tokenizer().decode(free.token_ids[place : place + 2])
        if "\ufffd" in piece or len(piece) != 2:
            continue
        found = engine.generate([7, 8, 9], drawn(stop=("never there", piece), logprobs=0))[0]
        assert found.finish_reason == "stop"
        assert found.stop_reason == piece
        assert found.token_ids == free.token_ids[: len(found.token_ids)]
        assert len(found.token_ids) <= place + 2
        assert piece not in found.text
        assert free.text.startswith(found.text + piece)
        assert [known.keys() for known in found.logprobs] == [known.keys() for known in free.logprobs[: len(found.token_ids)]]
        assert found.metrics.num_output_tokens == len(found.token_ids)
        looked += 1
    assert looked > 2


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_with_stop_strings_never_shows_what_is_taken_back(engine, mode):
    engine.configure(mode)
    free = engine.generate([7, 8, 9], drawn())[0]
    piece = next(free.text[i : i + 3] for i in range(5, len(free.text)) if "\ufffd" not in free.text[i : i + 3])
    chunks = list(engine.stream([7, 8, 9], drawn(stop=piece)))
    output = chunks[-1].output
    assert output.stop_reason == piece
    assert "".join(chunk.text for chunk in chunks) == output.text == free.text[: free.text.index(piece)]
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == output.token_ids


def test_no_end_comes_before_min_tokens(engine):
    ends = engine.pair.end_ids
    params = drawn(ignore_eos=False, stop_token_ids=tuple(range(200)), logit_bias={ends[0]: 30.0}, min_tokens=6, seed=1)
    output = engine.generate(PROMPT, params)[0]
    assert output.finish_reason == "stop"
    assert len(output.token_ids) >= 7
    assert not {*ends, *range(200)} & set(output.token_ids[:6])
    early = engine.generate(PROMPT, params.model_copy(update={"min_tokens": 0}))[0]
    assert len(early.token_ids) == 1
    assert early.stop_reason == early.token_ids[-1]


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_are_the_targets_own(engine, tiny_pair, mode):
    engine.configure(mode)
    output = engine.generate([7, 8, 9], drawn(logprobs=3))[0]
    model = AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32)
    with torch.no_grad():
        law = torch.log_softmax(model(torch.tensor([[7, 8, 9, *output.token_ids]])).logits[0, 2:-1], -1)
    assert len(output.logprobs) == len(output.token_ids)
    for place, (token, known) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert known[token] == pytest.approx(float(law[place, token]), abs=1e-3)
        best = law[place].topk(3)
        assert {int(t) for t in best.indices} <= set(known)
        assert len(known) in (3, 4)
    assert engine.generate([7, 8, 9], drawn())[0].logprobs is None


def test_an_end_token_that_completes_a_stop_string_leaves_none_of_it(engine):
    free = engine.generate([7, 8, 9], drawn())[0]
    place = next(i for i in range(3, 20) if "\ufffd" not in tokenizer().decode(free.token_ids[i : i + 2]))
    piece, last = tokenizer().decode(free.token_ids[place : place + 2]), free.token_ids[place + 1]
    found = engine.generate([7, 8, 9], drawn(stop=piece, stop_token_ids=(last,)))[0]
    assert found.finish_reason == "stop"
    assert piece not in found.text


def test_bad_words_that_begin_with_a_space_are_barred_as_they_are():
    real = embedded_tokenizer()
    pair = SimpleNamespace(target=SimpleNamespace(vocab_size=4096), tokenizer=real)
    barred = resolved(SamplingParams(bad_words=("\n", "foo")), pair, (), "rejection")[0].bad_words_token_ids
    assert [real.decode(list(ids)) for ids in barred] == ["\n", "foo", " foo"]


def test_bad_words_do_not_come(engine):
    free = engine.generate(PROMPT, drawn(max_tokens=60))[0].text
    common = max(set(free) - {"\ufffd"}, key=free.count)
    assert common not in engine.generate(PROMPT, drawn(max_tokens=60, bad_words=common))[0].text


def test_the_output_survives_json(engine):
    output = engine.generate(PROMPT, drawn(logprobs=2, n=1))[0]
    assert type(output).model_validate_json(output.model_dump_json()) == output


@pytest.fixture(scope="module")
def exact(tiny_pair):
    return exact_law(AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32))


@pytest.mark.parametrize("way", ways())
def test_short_texts_have_the_targets_law(engine, exact, way):
    """Four tokens of three each, 81 texts; a p-value below this would be no chance where a handful of them are looked at."""
    assert p_value(exact, drawn_texts(engine, ways()[way], 300)) > 1e-4


# --- the text itself ---


@given(st.text(max_size=40), st.data())
def test_pieces_make_the_whole_and_are_never_half_a_character(text, data):
    real = embedded_tokenizer()
    ids = real(text, add_special_tokens=False)["input_ids"]
    growing, shown = Text(real), ""
    while ids:
        count = data.draw(st.integers(1, 4))
        growing.add(*ids[:count])
        ids = ids[count:]
        assert growing.shown().startswith(shown)
        assert not growing.shown()[len(shown) :].endswith("\ufffd") or "\ufffd" in text
        shown = growing.shown()
    assert growing.finish() == text


def test_a_stop_string_before_half_a_character_is_seen_at_once():
    """Vocabularies of bytes have tokens that end a word and begin a character."""
    words = {1: b"x", 2: b"ab\xe2", 3: b"\x98\x83"}
    fake = SimpleNamespace(decode=lambda ids, **_: b"".join(words[i] for i in ids).decode(errors="replace"))
    growing = Text(fake, ["ab"])
    assert growing.add(1) is None
    assert growing.add(2) == "ab"
    assert growing.finish() == "x"
    whole = Text(fake)
    for token in (1, 2):
        whole.add(token)
    assert whole.shown() == "xab"
    whole.add(3)
    assert whole.finish() == "xab\u2603"


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_first_stop_string_ends_the_text_and_nothing_is_shown_too_early(text, stops):
    growing, found = Text(tokenizer(), stops), None
    for token in tokenizer()(text)["input_ids"]:
        found = growing.add(token)
        assert text.startswith(growing.shown())
        if found:
            break
    places = [text.find(stop) for stop in stops if stop in text]
    assert (found is None) == (not places)
    if found:
        ends = min(text.find(stop) + len(stop) for stop in stops if stop in text)
        first = min(text[:ends].find(stop) for stop in stops if stop in text[:ends])
        assert growing.finish() == text[:first]
    else:
        assert growing.finish() == text


@lru_cache
def embedded_tokenizer():
    return locate("target", EMBEDDED_TARGET).tokenizer()
