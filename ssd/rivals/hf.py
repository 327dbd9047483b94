"""transformers as its user runs it: its own loader, `generate`, and `generate(assistant_model=...)`."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import disable_progress_bar

from ssd.devices import torch_device
from ssd.rivals.messages import Decode, Decoded, Load


class Transformers:
    """A target and, for assisted generation, a draft."""

    def __init__(self, asked: Load, threads: int) -> None:
        if threads:
            torch.set_num_threads(threads)
        disable_progress_bar()  # type: ignore[no-untyped-call]
        self.device, dtype = torch_device(asked.devices), getattr(torch, asked.dtype)
        self.target = _load(asked.target, dtype, self.device)
        self.draft = _load(asked.draft, dtype, self.device) if asked.draft is not None else None

    @torch.inference_mode()
    def decode(self, asked: Decode) -> Decoded:
        """Decode prompts together, padded on the left."""
        ids, mask = _padded(asked.prompts, self.device)
        helper = {"assistant_model": self.draft} if asked.way == "transformers assisted" else {}
        torch.manual_seed(asked.seed)
        clock = _Clock()
        out: torch.Tensor = self.target.generate(  # type: ignore[operator]
            ids, attention_mask=mask, max_new_tokens=asked.output_tokens, streamer=clock, **_law(asked.temperature), **helper
        )
        return Decoded(tokens=out[:, ids.shape[1] :].tolist(), bursts=tuple(clock.bursts))


def _load(place: tuple[str, str | None], dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    folder, gguf_file = place
    extra = {} if gguf_file is None else {"gguf_file": gguf_file}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": device}, **extra).eval()  # type: ignore[no-untyped-call]
    # No end token, and no penalty that the checkpoint's own generation config asks for: every output has its length and is the model's.
    model.generation_config = GenerationConfig(pad_token_id=0)  # type: ignore[no-untyped-call]
    return model


def _law(temperature: float) -> dict[str, Any]:
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask, both `[prompts, longest]`."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


class _Clock(BaseStreamer):
    """Notes when tokens come; the first that are put are the prompt."""

    def __init__(self) -> None:
        self.bursts: list[tuple[float, int]] = []
        self._begin = monotonic()
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Note tokens: `[prompts]`, or `[1, tokens]` where a draft was verified."""
        if not self._prompt:
            self.bursts.append((monotonic() - self._begin, value.shape[-1] if value.dim() > 1 else 1))
        self._prompt = False

    def end(self) -> None:
        """Nothing is left to note."""
