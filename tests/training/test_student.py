"""A student is the target cut down: its own weights where the widths allow."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from ssd.training.student import StudentShape, layers_for, make_student, spread_layers, student_config
from tests import tiny

ALL = tuple(range(4))


@pytest.fixture(params=["llama", "gpt2", "qwen3"])
def target(request):
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **{**tiny.EXTRA.get(request.param, tiny.GROUPED), "num_hidden_layers": 4})
    return AutoModelForCausalLM.from_config(config).eval()


IDS = torch.tensor([[5, 9, 2, 77, 30]])


@torch.no_grad()
def test_a_student_of_every_layer_is_the_target(target):
    student, copied = make_student(target, StudentShape(layers=ALL))
    assert copied == len(target.state_dict())
    assert torch.equal(student.eval()(IDS).logits, target(IDS).logits)


@torch.no_grad()
def test_a_student_has_the_layers_that_were_chosen_in_their_order(target):
    student, _ = make_student(target, StudentShape(layers=(1, 3)))
    blocks = getattr(target, target.base_model_prefix)
    blocks = blocks.h if hasattr(blocks, "h") else blocks.layers
    kept = torch.nn.ModuleList([blocks[1], blocks[3]])
    for ours, theirs in zip(_blocks(student).parameters(), kept.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert student.config.num_hidden_layers == 2


def _blocks(model):
    inner = getattr(model, model.base_model_prefix)
    return inner.h if hasattr(inner, "h") else inner.layers


@torch.no_grad()
def test_what_has_another_width_is_random_and_the_rest_is_copied(target):
    narrow, copied = make_student(
        target, StudentShape(layers=(0,), hidden=16, heads=2, kv_heads=None if "gpt2" in str(type(target)).lower() else 1)
    )
    assert copied < len(narrow.state_dict())
    assert narrow.eval()(IDS).logits.shape == target(IDS).logits.shape
    assert narrow.config.hidden_size == 16


@given(st.integers(1, 40), st.integers(1, 40))
def test_layers_are_spread_from_the_first_to_the_last(count, available):
    if count > available:
        with pytest.raises(ValueError, match=f"layers={count}: the target has {available}"):
            spread_layers(count, available)
        return
    layers = spread_layers(count, available)
    assert len(set(layers)) == count
    assert layers[0] == 0
    assert count == 1 or layers[-1] == available - 1


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        (StudentShape(layers=(0, 4)), "layers=0,4: the target has no layer 4, only 0 to 3"),
        (StudentShape(layers=(0,), hidden=30), "hidden=30, heads=4, kv_heads=2: hidden must be a multiple of heads"),
        (StudentShape(layers=(0,), heads=4, kv_heads=3), "heads=4, kv_heads=3: .* and heads of kv_heads"),
    ],
)
def test_widths_that_do_not_fit_are_refused(shape, complaint):
    with pytest.raises(ValueError, match=complaint):
        student_config(AutoConfig.for_model("llama", **{**tiny.GROUPED, "num_hidden_layers": 4}), shape)


def test_layers_are_typed_as_a_count_or_a_list(tiny_pair):
    assert layers_for("2", tiny_pair[0]) == (0, 1)
    assert layers_for("1,0", tiny_pair[0]) == (1, 0)
    with pytest.raises(ValueError, match="layers='two' is neither a count nor a list"):
        layers_for("two", tiny_pair[0])
