"""The pair that comes with the package: small, real, and what `Models()` means."""

from pathlib import Path

import pytest
import torch

import ssd
from ssd.models import inspect, locate
from ssd.prompts import prompts
from ssd.specs import EMBEDDED_DRAFT, EMBEDDED_TARGET, Models
from ssd.training.evaluation import agreement
from tests.plans import hand_typed

PAIR = Path(ssd.__file__).parent / "data" / "pair"


@pytest.fixture(scope="module")
def models():
    from transformers import AutoModelForCausalLM

    return [AutoModelForCausalLM.from_pretrained(PAIR / role, dtype=torch.float32).eval() for role in ("target", "draft")]


def test_it_is_what_models_are_without_a_name():
    assert Models() == Models(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT)
    assert Models(draft=None) == Models(target=EMBEDDED_TARGET)
    assert Models(target="other").draft is None
    assert Models.model_validate_json(Models(dtype="float32").model_dump_json()) == Models(dtype="float32")


def test_it_is_found_wherever_the_package_lies_and_nothing_else_is_embedded():
    assert locate("target", EMBEDDED_TARGET).folder == str(PAIR / "target")
    with pytest.raises(ValueError, match="target='embedded/other' is not in the package: it has embedded/target and embedded/draft"):
        locate("target", "embedded/other")


def test_it_is_small_and_has_a_card():
    files = [path for path in PAIR.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 25e6
    card = (PAIR / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "| T | acceptance |" in card


def test_target_and_draft_fit_together():
    pair = inspect(Models())
    assert pair.draft is not None
    assert pair.target.parameters > 5 * pair.draft.parameters
    assert pair.max_model_len == 1024


def test_a_third_of_the_cards_acceptance_could_not_be_chance(models):
    """Half of the greedy tokens at least, on functions that neither has read; a draft of another text would have a few in a hundred."""
    tokenizer = locate("target", EMBEDDED_TARGET).tokenizer()
    ids = [tokenizer(text)["input_ids"] for text in prompts("library", 8)]
    assert agreement(*models, ids, 32, 0.0, tokenizer.eos_token_id, 0).acceptance > 0.5


@torch.no_grad()
def test_the_target_knows_python_better_than_chance(models):
    tokenizer = locate("target", EMBEDDED_TARGET).tokenizer()
    ids = torch.tensor([tokenizer("import os\n\n\ndef exists(path):\n    try:\n        os.stat(path)\n    except OSError:\n")["input_ids"]])
    assert float(models[0](ids, labels=ids).loss) < 4.5


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_the_engine_gives_transformers_tokens_on_real_text(models, mode):
    plan = hand_typed(EMBEDDED_TARGET, EMBEDDED_DRAFT)
    shared = {"fan_out_hit": (), "fan_out_miss": ()}
    here = ssd.Placement(target=plan.placement.target, draft=plan.placement.target)
    changes = {
        "ar": {**shared, "num_speculative_tokens": 0, "placement": ssd.Placement(target=here.target)},
        "sd": {**shared, "placement": here},
        "ssd": {},
    }
    plan = hand_typed(EMBEDDED_TARGET, EMBEDDED_DRAFT, mode=mode, **changes[mode])
    with ssd.Engine.from_plan(plan) as engine:
        for prompt in prompts("library", 3):
            output = engine.generate(prompt, ssd.SamplingParams(max_tokens=40, ignore_eos=True))[0]
            ids = torch.tensor([output.prompt_token_ids])
            expected = models[0].generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
            assert list(output.token_ids) == expected[0, ids.shape[1] :].tolist()


def test_the_library_prompts_are_many_and_distinct():
    texts = prompts("library", None)
    assert len(set(texts)) == len(texts) >= 32
    assert all(text.startswith("def ") for text in texts)
