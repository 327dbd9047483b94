"""What is said to a rival's process and what it answers, a JSON object a line."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ssd.specs import Placement, Spec

Program = Literal["transformers", "llama.cpp"]
Way = Literal["transformers", "transformers assisted", "llama.cpp"]


class Rival(Spec):
    """One way in which another program decodes."""

    mode: Way = Field(description="plain or assisted generation of transformers, or llama.cpp (no unit)")
    weights: str = Field(description="what it computes with, such as float32 or Q4_K_M (no unit)")
    placement: Placement = Field(description="its devices; assisted generation takes turns on them (no unit)")


class Load(Spec):
    """What to load and where; the first message."""

    program: Program = Field(description="who decodes (no unit)")
    target: tuple[str, str | None] = Field(description="folder or hub id of the target, and the .gguf file in it if it is one (no unit)")
    draft: tuple[str, str | None] | None = Field(None, description="likewise the draft, for assisted generation (no unit)")
    dtype: str = Field(description="torch's name of the type computed in (no unit)")
    devices: tuple[str, ...] = Field(min_length=1, description="device ids; of CPU cores, one thread each (no unit)")
    rows: int = Field(1, ge=1, description="most prompts decoded together (count)")
    length: int = Field(ge=1, description="longest prompt and output together, tokens")


class Loaded(Spec):
    """The models are there."""

    seconds: float = Field(ge=0, description="from the first import to the last weight, seconds")


class Decode(Spec):
    """Prompts to decode together, to a given length whatever the end tokens."""

    way: Way = Field(description="how (no unit)")
    prompts: tuple[tuple[int, ...], ...] = Field(min_length=1, description="their token ids")
    output_tokens: int = Field(ge=1, description="tokens of every output")
    temperature: float = Field(0.0, ge=0, description="0 is greedy; above, the model's own law is drawn from (no unit)")
    seed: int = Field(0, ge=0, description="of what is drawn (no unit)")


class Decoded(Spec):
    """The outputs, and when they came."""

    tokens: tuple[tuple[int, ...], ...] = Field(description="the outputs' token ids")
    bursts: tuple[tuple[float, int], ...] = Field(
        min_length=1, description="when tokens came, seconds from the call, and how many in each output (count)"
    )


class Failed(Spec):
    """It cannot be done."""

    reason: str = Field(description="why, in words (no unit)")
