"""Tiny random pairs on disk: a target of a given architecture and a draft that is the target with noise on its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
EOS = "<eos>"
VOCAB = {token: index for index, token in enumerate([*BYTES, EOS])}
CONTEXT = 96

SHAPE = {
    "pad_token_id": 1,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "vocab_size": len(VOCAB) + 7,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}
GROUPED = {**SHAPE, "intermediate_size": 48, "num_key_value_heads": 2}
EXTRA = {
    "gpt2": {
        "vocab_size": SHAPE["vocab_size"],
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "gpt_neox": {**SHAPE, "intermediate_size": 48, "rotary_pct": 0.5},
    "qwen3": {**GROUPED, "head_dim": 16},
    "qwen3_moe": {**GROUPED, "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    "mistral": {**GROUPED, "sliding_window": None},
    "mixtral": {**GROUPED, "num_local_experts": 4, "sliding_window": None},
    "phi3": {**GROUPED, "sliding_window": None},
    "starcoder2": {**GROUPED, "sliding_window": None},
}


def tokenizer(vocabulary: dict[str, int] | None = None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: a token a byte, and an end token."""
    inner = Tokenizer(models.BPE(vocab=vocabulary or VOCAB, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=EOS)


def vary(model: torch.nn.Module) -> None:
    """Draw weights for which greedy text varies and hangs on every token and position before it, not on the last token alone."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.1 if "wte" in name or "wpe" in name else 1.0 if "embed" in name else 1.5 / weight.shape[-1] ** 0.5)


def make_pair(folder: Path, model_type: str = "llama", seed: int = 0, noise: float = 0.3) -> tuple[str, str]:
    """Save a target and a draft under `folder`; return their paths. Weights are wide enough for varied greedy text."""
    torch.manual_seed(seed)
    ends = {"bos_token_id": VOCAB[EOS], "eos_token_id": VOCAB[EOS]}
    config = AutoConfig.for_model(model_type, **{**EXTRA.get(model_type, GROUPED), **ends})
    model = AutoModelForCausalLM.from_config(config)
    vary(model)
    paths = str(folder / f"{model_type}-target"), str(folder / f"{model_type}-draft")
    for path in paths:
        model.save_pretrained(path)
        tokenizer().save_pretrained(path)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(noise * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0)
    return paths
