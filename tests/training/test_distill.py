"""A draft for a target, from the command's options to an engine that decodes with it."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import ssd
from ssd.cli import run
from ssd.models import DRAFT_VOCABULARY, ShortHead, load, locate
from ssd.training.distill import commonest
from ssd.training.evaluation import DraftReport
from tests.plans import hand_typed

DEFAULTS = {"--layers": "1", "--window": "16", "--sample-tokens": "12"}
QUICK = ("--steps", "4", "--batch-size", "2", "--window", "16", "--samples", "12", "--sample-tokens", "12", "--layers", "1")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n".join(f"prompt {index}" for index in range(9)))
    return str(path)


@pytest.fixture(scope="module")
def made(tiny_pair, prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp("distilled") / "out"
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("some text to learn from " * 20)
    assert (
        run(
            [
                "distill",
                "--target",
                tiny_pair[0],
                "--out",
                str(out),
                "--prompts",
                prompts,
                "--text",
                str(text),
                "--vocabulary",
                "40",
                *QUICK,
            ]
        )
        == 0
    )
    return out


def test_the_draft_is_an_ordinary_model_and_the_report_is_beside_it(made, tiny_pair):
    draft = AutoModelForCausalLM.from_pretrained(made / "draft")
    assert draft.config.num_hidden_layers == 1
    assert len(getattr(draft.config, DRAFT_VOCABULARY)) == 40
    assert [one.temperature for one in DraftReport.load(made / "report.json").agreements] == [0.0, 0.7, 1.0]


def test_a_draft_with_a_short_list_computes_no_other_logits_and_these_exactly(made):
    source = locate("draft", str(made / "draft"))
    short, whole = (load(source, torch.device("cpu"), torch.float32, drafts=drafts).module for drafts in (True, False))
    listed = torch.tensor(getattr(source.config, DRAFT_VOCABULARY))
    hidden = torch.randn(2, 3, source.config.hidden_size)
    head = short.get_output_embeddings()
    assert isinstance(head, ShortHead)
    few, every = head(hidden), whole.get_output_embeddings()(hidden)
    assert torch.allclose(few[..., listed], every[..., listed], atol=1e-5)
    others = torch.ones(every.shape[-1], dtype=torch.bool)
    others[listed] = False
    assert torch.isinf(few[..., others]).all()


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_the_engine_decodes_the_targets_tokens_with_it_and_drafts_from_the_list_alone(made, tiny_pair, mode):
    fan_outs = {} if mode == "ssd" else {"fan_out_hit": (), "fan_out_miss": ()}
    plan = hand_typed(tiny_pair[0], str(made / "draft"), mode=mode, **fan_outs)
    if mode == "sd":
        plan = plan.model_copy(update={"placement": ssd.Placement(target=plan.placement.target, draft=plan.placement.target)})
    model = AutoModelForCausalLM.from_pretrained(tiny_pair[0])
    with ssd.Engine.from_plan(plan) as engine:
        output = engine.generate("prompt 3", ssd.SamplingParams(max_tokens=24, ignore_eos=True))[0]
        ids = torch.tensor([output.prompt_token_ids])
        assert engine.health().draft == "ok"
    expected = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)[0, ids.shape[1] :]
    assert list(output.token_ids) == expected.tolist()


def test_the_list_has_the_commonest_tokens_and_is_filled_up():
    streams = [np.array([5, 5, 5, 9], dtype=np.int32), np.array([9, 9, 9, 2, 1, 1], dtype=np.int32)]
    assert commonest(streams, 2, 20).tolist() == [5, 9]
    assert commonest(streams, 3, 20).tolist() == [1, 5, 9]
    assert commonest(streams, 6, 20).tolist() == [0, 1, 2, 3, 5, 9]


def test_it_goes_on_where_it_ended_and_says_the_same(made, tiny_pair, prompts, capsys):
    options = json.loads((made / "recipe.json").read_text())
    words = [
        "distill",
        "--target",
        tiny_pair[0],
        "--out",
        str(made),
        "--prompts",
        prompts,
        "--text",
        options["text"][0],
        "--vocabulary",
        "40",
    ]
    assert run([*words, *QUICK, "--json"]) == 0
    assert DraftReport.model_validate_json(capsys.readouterr().out) == DraftReport.load(made / "report.json")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--layers", "9"), "layers=9: the target has 2, give 1 to 2"),
        (("--hidden", "30"), "hidden=30, heads=4, kv_heads=2: hidden must be a multiple of heads"),
        (("--vocabulary", "9999"), "vocabulary=9999 is more than the 264 tokens of the target: give less, or none"),
        (("--prompts", "nowhere.txt"), "prompts='nowhere.txt' is neither code nor chat nor a readable text file"),
        (("--text", "nowhere.txt"), "--text='nowhere.txt' cannot be read as UTF-8 text"),
        (("--window", "97"), "window=97 is more than the 96 tokens of the target's context: give less"),
        (("--sample-tokens", "96"), "sample_tokens=96 leaves no room for a prompt in the target's 96: give less"),
        (("--steps", "0"), "steps=0: input should be greater than or equal to 1"),
        (("--target", "./nowhere"), "target='./nowhere': no such folder"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_made(tiny_pair, prompts, tmp_path, capsys, words, complaint):
    given = {"--target": tiny_pair[0], "--out": str(tmp_path / "out"), "--prompts": prompts, **DEFAULTS} | dict([words])
    assert run(["distill", *itertools.chain(*given.items())]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert complaint in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("few.txt", "one\ntwo\n", "hold 2 distinct texts: give 8 or more"),
        ("bad.json", "{", "is no JSON"),
        ("bad.json", '["a", 3]', "is not a JSON list of texts"),
    ],
)
def test_prompts_that_do_not_do_are_refused(tiny_pair, tmp_path, capsys, name, content, complaint):
    (tmp_path / name).write_text(content)
    given = {"--target": tiny_pair[0], "--out": str(tmp_path / "out"), "--prompts": str(tmp_path / name), **DEFAULTS}
    words = ["distill", *itertools.chain(*given.items())]
    assert run(words) == 2
    assert complaint in capsys.readouterr().err


def test_a_list_that_does_not_fit_the_draft_is_refused(made, tmp_path):
    shutil.copytree(made / "draft", tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config | {DRAFT_VOCABULARY: [5, 99999]}))
    with pytest.raises(ValueError, match=r"draft_vocabulary of its config\.json must list ids below 264"):
        load(locate("draft", str(tmp_path / "draft")), torch.device("cpu"), torch.float32, drafts=True)
