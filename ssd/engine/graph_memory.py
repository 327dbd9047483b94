"""What CUDA graphs keep in memory beside weights and slots: an estimate from shapes, which no card has confirmed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from ssd.engine.graphs import QUERIES

# Of a layer, for each query: the residual stream, its norms and sums, in widths; what a gated product makes; queries, keys and values
# before and after their turn.
STREAMS, GATED, TURNED = 6, 3, 2
# Of laws and draws, for each logit: itself and its copy, the law and its probabilities, and noise, whose words have 64 bits, in steps.
SAMPLING_BYTES = 36


@dataclass(frozen=True, slots=True)
class Size:
    """Of a model over slots: its rows, the slots of each, and after how many tokens a forward wants logits at the most."""

    rows: int
    slots: int
    wanted: int


def graph_bytes(config: PreTrainedConfig, dtype: torch.dtype, size: Size) -> int:
    """Return the bytes that the graphs of one process take: of forwards, and of laws and draws.

    All graphs of a pool share what is between their inputs and outputs, so the largest forward counts once: its masks, the activations of
    one layer, its logits. Each keeps its own output, logits in fp32; their sizes are powers of two, which come to twice the largest in all.
    """
    queries, width = QUERIES[-1], dtype.itemsize
    wanted = min(queries, 1 << (max(1, size.wanted) - 1).bit_length())
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    hidden, vocab_size = int(config.hidden_size), int(config.vocab_size)
    head = int(getattr(config, "head_dim", None) or hidden // heads)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden) * int(getattr(config, "num_experts_per_tok", None) or 1)
    # Who sees what, as it comes, and added to the scores of each query head of a group.
    masks = size.rows * queries * size.slots * (1 + width * (1 + heads // kv_heads))
    layer = queries * width * (STREAMS * hidden + GATED * inner + TURNED * (heads + 2 * kv_heads) * head)
    logits = wanted * vocab_size * (width + 2 * torch.float32.itemsize)
    return masks + layer + logits + wanted * vocab_size * SAMPLING_BYTES
