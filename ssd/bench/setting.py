"""What is decoded: so many prompts together, how long, at which temperature. And by whom."""

from __future__ import annotations

from pydantic import Field

from ssd.rivals.messages import Rival
from ssd.specs import Configuration, Spec

# Who decodes: a configuration of the engine, or another program.
Who = Configuration | Rival


class Setting(Spec):
    """A point on the axes of a benchmark; speeds are compared within one."""

    batch_size: int = Field(1, ge=1, description="prompts decoded together (count)")
    prompt_tokens: int | None = Field(None, ge=1, description="length to which every prompt is cut or filled; none leaves them, tokens")
    temperature: float = Field(0.0, ge=0, description="sampling temperature (no unit); 0 is greedy")

    def __str__(self) -> str:
        """Name it in a few words."""
        batch = "one prompt at a time" if self.batch_size == 1 else f"batches of {self.batch_size}"
        length = "" if self.prompt_tokens is None else f", prompts of {self.prompt_tokens} tokens"
        return f"{batch}{length}, {'greedy' if self.temperature == 0 else f'T={self.temperature:g}'}"
