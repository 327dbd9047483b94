"""A byte-level BPE tokenizer, trained on text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ssd.training.corpus import Document

END = "<|endoftext|>"


def train_tokenizer(documents: Sequence[Document], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of `vocab_size` tokens, all 256 bytes and an end token among them, so that any text comes back as it was."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    inner.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner, eos_token=END, bos_token=END, model_max_length=context, clean_up_tokenization_spaces=False
    )
