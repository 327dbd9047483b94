"""The embedded pair's recipe on a small library: from sources to a pair that the engine serves."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssd.training.fit import Schedule
from ssd.training.pair import LlamaShape, PairRecipe, recipe_for, train_pair

SHAPE = {"hidden": 32, "intermediate": 48, "heads": 2, "kv_heads": 1}
RECIPE = PairRecipe(
    vocab_size=320,
    target=LlamaShape(layers=3, **SHAPE),
    draft=LlamaShape(layers=1, **SHAPE),
    target_schedule=Schedule(steps=6, batch_size=2, window=48),
    draft_schedule=Schedule(steps=4, batch_size=2, window=48),
    samples=5,
)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    body = "\n".join(
        f'def function_{index}(number):\n    """Add {index} to the number."""\n    return number + {index}\n' for index in range(40)
    )
    for name in ("heapq", "other", "test_other", "third"):
        (folder / f"{name}.py").write_text(body.replace("function", name))
    return folder


def make(out, library, recipe=RECIPE, tell=lambda *_: None):
    return train_pair(out, recipe, tell, library=library)


@pytest.fixture(scope="module")
def made(tmp_path_factory, library):
    out = tmp_path_factory.mktemp("made") / "pair"
    return out, make(out, library)


def test_it_makes_two_ordinary_transformers_folders_in_bfloat16_with_one_tokenizer(made):
    out, _ = made
    for role, layers in (("target", 3), ("draft", 1)):
        model = AutoModelForCausalLM.from_pretrained(out / role)
        assert (model.dtype, model.config.num_hidden_layers, model.config.vocab_size) == (torch.bfloat16, layers, 320)
        tokenizer = AutoTokenizer.from_pretrained(out / role)
        assert tokenizer.decode(tokenizer("def other_1(number):\n    'é'")["input_ids"]) == "def other_1(number):\n    'é'"
        assert model.config.eos_token_id == tokenizer.eos_token_id


def test_the_card_says_what_was_done_and_what_came_of_it(made):
    out, report = made
    card = (out / "README.md").read_text()
    assert report.table() in card
    assert "6 steps of 2 x 48 tokens" in card
    assert f"KL {report.divergence:.3f}, loss" in card
    assert "heapq" in card


def test_it_goes_on_from_what_is_there_and_then_has_nothing_left_to_do(tmp_path, library, made):
    class BrokenOffError(Exception):
        pass

    def give_up(what, share):
        if what.startswith("samples"):
            raise BrokenOffError

    with pytest.raises(BrokenOffError):
        make(tmp_path / "pair", library, tell=give_up)
    trained = (tmp_path / "pair" / "target" / "model.safetensors").read_bytes()
    assert make(tmp_path / "pair", library) == made[1]
    assert (tmp_path / "pair" / "target" / "model.safetensors").read_bytes() == trained
    assert make(tmp_path / "pair", library) == made[1]


def test_another_recipe_in_a_folder_that_was_begun_is_refused_and_so_is_a_folder_with_other_things(made, tmp_path, library):
    out, _ = made
    with pytest.raises(ValueError, match=r"out='.*pair' was begun with samples='5', now it is '6': give the same, or another folder"):
        make(out, library, RECIPE.model_copy(update={"samples": 6}))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not a training that was broken off"):
        make(tmp_path, library)


def test_options_change_the_recipe_and_nothing_else():
    assert recipe_for(None, None, None, 0) == PairRecipe()
    changed = recipe_for(7, 8, 9, 3)
    assert (changed.target_schedule.steps, changed.draft_schedule.steps, changed.samples) == (7, 8, 9)
    assert changed.target_schedule.seed == changed.draft_schedule.seed == 3
    assert changed.target_schedule.learning_rate == PairRecipe().target_schedule.learning_rate
    assert json.loads(changed.model_dump_json())["draft"] == json.loads(PairRecipe().model_dump_json())["draft"]
