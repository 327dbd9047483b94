"""A smaller model of a target's kind, which begins with the target's own weights where the widths allow."""

from __future__ import annotations

import copy
import re

import torch
from pydantic import Field
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ssd.models import locate
from ssd.specs import Spec


class StudentShape(Spec):
    """The size of a student; what is none is the target's."""

    layers: tuple[int, ...] = Field(min_length=1, description="the target's layers that it begins with, one for each of its own (indices)")
    hidden: int | None = Field(None, ge=8, description="width (count)")
    intermediate: int | None = Field(None, ge=8, description="width inside the feed-forward part (count)")
    heads: int | None = Field(None, ge=1, description="query heads (count)")
    kv_heads: int | None = Field(None, ge=1, description="key-value heads (count)")


def spread_layers(count: int, available: int) -> tuple[int, ...]:
    """Return `count` of the layers 0..available-1, first and last among them, evenly spread; ValueError where there are fewer."""
    if not 1 <= count <= available:
        raise ValueError(f"layers={count}: the target has {available}, give 1 to {available}")
    return (0,) if count == 1 else tuple(round(place * (available - 1) / (count - 1)) for place in range(count))


def layers_for(text: str, target: str) -> tuple[int, ...]:
    """Return the layers that `text` asks for: a count, to be spread over the target's, or a list of indices."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"layers={text!r} is neither a count nor a list: give 4, or indices such as 0,10,29") from None
    if len(numbers) > 1:
        return numbers
    return spread_layers(numbers[0], int(locate("target", target).config.num_hidden_layers))


def student_config(target: PreTrainedConfig, shape: StudentShape) -> PreTrainedConfig:
    """Return the student's configuration; ValueError where the widths do not fit together."""
    available = int(target.num_hidden_layers)
    for layer in shape.layers:
        if not 0 <= layer < available:
            raise ValueError(f"layers={','.join(map(str, shape.layers))}: the target has no layer {layer}, only 0 to {available - 1}")
    config = copy.deepcopy(target)
    config.num_hidden_layers = len(shape.layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [target.layer_types[layer] for layer in shape.layers]
    given = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
    }
    for name, value in given.items():
        if value is not None:
            setattr(config, name, value)
    heads, kv_heads = int(config.num_attention_heads), int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    if config.hidden_size % heads or heads % kv_heads:
        raise ValueError(
            f"hidden={config.hidden_size}, heads={heads}, kv_heads={kv_heads}: hidden must be a multiple of heads, and heads of kv_heads"
        )
    if (shape.hidden or shape.heads) and getattr(target, "head_dim", None) is not None:
        config.head_dim = config.hidden_size // heads
    return config


def make_student(target: PreTrainedModel, shape: StudentShape) -> tuple[PreTrainedModel, int]:
    """Return a student in fp32, and how many of its tensors are copies of the target's; the others are random."""
    config = student_config(target.config, shape)
    student: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    theirs = target.state_dict()
    copied = {}
    for name, tensor in student.state_dict().items():
        source = theirs.get(_name_in_target(name, shape.layers))
        if source is not None and source.shape == tensor.shape:
            copied[name] = source.to(tensor.dtype)
    student.load_state_dict(copied, strict=False)
    return student, len(copied)


def _name_in_target(name: str, layers: tuple[int, ...]) -> str:
    """Return the target's name of the student's tensor: `model.layers.1.mlp.up_proj.weight` comes from layer `layers[1]`."""
    found = re.search(r"\.(\d+)\.", name)
    return name if found is None else name[: found.start(1)] + str(layers[int(found[1])]) + name[found.end(1) :]
