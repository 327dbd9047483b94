"""Make a demonstration pair in a folder, without any download: `python tiny_pair.py FOLDER`.

The weights are random, so the text is noise; the speeds are real. The target is a Llama of 10 layers; the draft is its first 2 layers with
the same embeddings and head. The target's later layers are turned down until they change few of its choices: draft and target then agree
on about four tokens in five, as trained pairs do, and a step of the target costs about four steps of the draft.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

LAYERS, DRAFT_LAYERS, HIDDEN, CONTEXT = 10, 2, 512, 1024
# How much the later layers still say; a larger number lowers acceptance.
VOICE = 0.09
END = "<eos>"
VOCABULARY = {token: index for index, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), END])}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer: a token a byte, and an end token."""
    inner = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END)


def config(layers: int) -> LlamaConfig:
    """Return the shape of a model of so many layers."""
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=VOCABULARY[END],
        eos_token_id=VOCABULARY[END],
    )


@torch.no_grad()
def make_target(voice: float = VOICE, seed: int = 0) -> LlamaForCausalLM:
    """Return a random target whose later layers add only `voice` times as much as the first ones."""
    torch.manual_seed(seed)
    target = LlamaForCausalLM(config(LAYERS))
    for name, weight in target.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0, 1.0 if "embed" in name else weight.shape[-1] ** -0.5)
    for layer in target.model.layers[DRAFT_LAYERS:]:
        layer.self_attn.o_proj.weight *= voice
        layer.mlp.down_proj.weight *= voice
    # An end token would cut demonstrations short.
    target.lm_head.weight[VOCABULARY[END]] = 0
    return target.to(torch.bfloat16)


def make_draft(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return the target's first layers with its embeddings and head."""
    draft = LlamaForCausalLM(config(DRAFT_LAYERS)).to(torch.bfloat16)
    draft.load_state_dict(target.state_dict(), strict=False)
    return draft


def make_pair(folder: Path) -> tuple[str, str]:
    """Save the pair under `folder` and return the two paths."""
    target = make_target()
    paths = str(folder / "target"), str(folder / "draft")
    for path, model in zip(paths, (target, make_draft(target)), strict=True):
        model.save_pretrained(path)
        tokenizer().save_pretrained(path)
    return paths


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tiny_pair.py FOLDER")
    disable_progress_bar()
    print(*make_pair(Path(sys.argv[1])))
