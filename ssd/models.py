"""Find, check and load a target and a draft: hub id, local transformers folder, GGUF file or the embedded pair.

Everything that can be refused is refused before a weight is loaded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed.configuration_utils import DistributedConfig

from ssd.devices import has_graphs, host, is_cpu, torch_device
from ssd.engine.graph_memory import Size, graph_bytes
from ssd.specs import EMBEDDED, EMBEDDED_DRAFT, EMBEDDED_TARGET, Hardware, Models, Placement

if TYPE_CHECKING:
    from ssd.engine.decoder import Decoder
    from ssd.engine.shares import Team

logger = logging.getLogger(__name__)

# Decoders whose keys and values roll back by mask alone, each held to its own plain forward by a test.
ARCHITECTURES = (
    "gpt2",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "starcoder2",
)
DEFAULT_MAX_MODEL_LEN = 4096
# Weights of a draft from which on reading them is most of a step, no cache holding them.
WORTH_ROUNDING = 100_000_000
# The key in a draft's config.json for the ids that it may propose; without it, all.
DRAFT_VOCABULARY = "draft_vocabulary"
# The key in a config.json for a model to be measured, not used: it has no weights, and gets random ones where it is to run.
RANDOM_WEIGHTS = "random_weights"


@dataclass(frozen=True)
class Source:
    """Where a model lies, with its configuration read and no weight loaded."""

    name: str
    folder: str
    gguf_file: str | None
    config: PreTrainedConfig

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments that every `from_pretrained` needs for it."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padding included."""
        return int(self.config.vocab_size)

    @property
    def max_positions(self) -> int:
        """Longest context in tokens."""
        return int(getattr(self.config, "max_position_embeddings", DEFAULT_MAX_MODEL_LEN))

    @property
    def parameters(self) -> int:
        """Number of weights, counted without allocating them."""
        return sum(count for _, count in self._weights)

    @property
    def expert_parameters(self) -> int:
        """Number of those that belong to experts of which a token takes some; 0 in a dense model."""
        return sum(count for name, count in self._weights if ".experts." in name)

    @cached_property
    def _weights(self) -> list[tuple[str, int]]:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(self.config)  # type: ignore[no-untyped-call]
        return [(name, weight.numel()) for name, weight in module.named_parameters()]

    @property
    def query_groups(self) -> int:
        """Query heads for each key-value head."""
        return int(self.config.num_attention_heads) // _kv_heads(self.config)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers kept in the key-value cache for one token."""
        config, heads = self.config, _kv_heads(self.config)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        return 2 * int(config.num_hidden_layers) * heads * width

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer."""
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.folder, **self.arguments)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.name!r} has no tokenizer that transformers can read: put its tokenizer files beside the weights"
            ) from error
        return tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A decoder on its device, with what the engine must know of it."""

    module: torch.nn.Module
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_positions: int
    query_groups: int
    # Its weights as the engine's own kernels play them; `module` is then empty.
    decoder: Decoder | None = None
    # The processes that hold it together, where it is split.
    team: Team | None = None


@dataclass(frozen=True)
class Pair:
    """A checked target and draft, their common tokenizer and the context length to serve."""

    target: Source
    draft: Source | None
    tokenizer: PreTrainedTokenizerBase
    end_ids: tuple[int, ...]
    max_model_len: int


def _kv_heads(config: PreTrainedConfig) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def locate(option: str, name: str) -> Source:
    """Find the model that option `option` calls `name` and read its configuration."""
    if name.startswith(EMBEDDED):
        return _embedded(option, name)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"{option}={name!r}: no such GGUF file")
        return Source(name, str(path.parent), path.name, _config(option, name, str(path.parent), path.name))
    if path.is_dir():
        return Source(name, str(path), None, _config(option, name, str(path), None))
    if name.count("/") > 1 or name.startswith((".", "~", "/")):
        raise ValueError(
            f"{option}={name!r}: no such folder; give a folder with a config.json, a .gguf file or a hub id such as 'org/name'"
        )
    return Source(name, name, None, _config(option, name, name, None))


def _embedded(option: str, name: str) -> Source:
    folder = resources.files("ssd") / "data" / "pair" / name.removeprefix(EMBEDDED)
    if name not in (EMBEDDED_TARGET, EMBEDDED_DRAFT):
        raise ValueError(f"{option}={name!r} is not in the package: it has {EMBEDDED_TARGET} and {EMBEDDED_DRAFT}")
    return Source(name, str(folder), None, _config(option, name, str(folder), None))


def _config(option: str, name: str, folder: str, gguf_file: str | None) -> PreTrainedConfig:
    extra = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, **extra)
    except (OSError, ValueError, KeyError) as error:
        local = Path(folder).is_dir()
        remedy = (
            "it needs a config.json of a transformers model"
            if local
            else "check the name and the network, or give a local folder or .gguf file"
        )
        raise ValueError(f"{option}={name!r} cannot be read: {remedy} ({str(error).splitlines()[0]})") from error
    return config


def check_architecture(option: str, source: Source, max_model_len: int) -> None:
    """Refuse what is not decoder-only or cannot be rolled back by a mask."""
    config, kind = source.config, source.config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{option}={source.name!r} is an encoder-decoder ({kind}): give a decoder-only language model")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{option}={source.name!r} has architecture {kind!r}, whose cache is not known to roll back exactly: "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    other = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise ValueError(
            f"{option}={source.name!r} has layers of type {', '.join(sorted(other))}, which cannot be rolled back: "
            "use a full-attention model"
        )
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ("sliding_attention",))
    if sliding and window is not None and window < max_model_len and getattr(config, "use_sliding_window", True):
        raise ValueError(f"{option}={source.name!r} attends to the last {window} tokens only: set max_model_len to {window} or less")


def check_rotary(option: str, source: Source, max_model_len: int) -> None:
    """Refuse rotary positions that change with the length: keys in the slots were turned for the length when they were fed."""
    rope = getattr(source.config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    limit = rope.get("original_max_position_embeddings") or getattr(source.config, "original_max_position_embeddings", None)
    if kind in ("longrope", "dynamic") and limit is not None and limit < max_model_len:
        raise ValueError(
            f"{option}={source.name!r} turns its keys otherwise past {limit} tokens (rope_type {kind!r}): "
            f"set max_model_len to {limit} or less"
        )


def check_lookahead(pair: Pair, num_speculative_tokens: int) -> None:
    """Refuse a lookahead for which the draft never has room."""
    most = 0 if pair.draft is None else max(1, (pair.draft.max_positions - 3) // 2)
    if num_speculative_tokens > most:
        raise ValueError(
            f"num_speculative_tokens={num_speculative_tokens} leaves the draft no room in the {2 * most + 3} tokens of its context: "
            f"give {most} or less"
        )


def check_vocabularies(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Refuse a draft whose token-to-id map differs from the target's; the first differing id is named."""
    ours = {index: token for token, index in target.get_vocab().items()}
    theirs = {index: token for token, index in draft.get_vocab().items()}
    different = sorted(index for index in ours.keys() | theirs.keys() if ours.get(index) != theirs.get(index))
    if different:
        first = different[0]
        raise ValueError(
            f"target and draft vocabularies differ in {len(different)} ids, first at id {first}: "
            f"{ours.get(first)!r} against {theirs.get(first)!r}; "
            "give a draft that was trained with the target's tokenizer"
        )


def inspect(models: Models) -> Pair:
    """Find and check both models; ValueError with the remedy where they cannot be used together."""
    target = locate("target", models.target)
    max_model_len = models.max_model_len or min(target.max_positions, DEFAULT_MAX_MODEL_LEN)
    if max_model_len > target.max_positions:
        raise ValueError(
            f"max_model_len={max_model_len} is more than the {target.max_positions} tokens of target {models.target!r}: lower it"
        )
    check_architecture("target", target, max_model_len)
    check_rotary("target", target, max_model_len)
    tokenizer = target.tokenizer()
    draft = None
    if models.draft is not None:
        draft = locate("draft", models.draft)
        check_architecture("draft", draft, min(max_model_len, draft.max_positions))
        check_vocabularies(tokenizer, draft.tokenizer())
    return Pair(target, draft, tokenizer, end_ids(target, tokenizer), max_model_len)


def end_ids(source: Source, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end an output: the generation config's, else the model's, else the tokenizer's."""
    try:
        generation = GenerationConfig.from_pretrained(source.folder).eos_token_id
    except OSError:
        generation = None
    for found in (generation, source.config.eos_token_id, tokenizer.eos_token_id):
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return ()


def compute_dtype(models: Models, device: torch.device) -> torch.dtype:
    """Return the type computed in: as asked, else fp32 on a CPU and bf16 elsewhere."""
    if models.dtype == "auto":
        return torch.float32 if is_cpu(device) else torch.bfloat16
    return torch.float32 if models.dtype == "float32" else torch.bfloat16


def keeps_int8(models: Models, draft: Source, device: torch.device) -> bool:
    """Return whether the draft's matrices are rounded to a byte a number; ValueError where that was asked for and cannot be."""
    fits = is_cpu(device) and compute_dtype(models, device) == torch.float32
    if models.draft_weights == "int8" and not fits:
        raise ValueError("draft_weights='int8' is for a draft that computes in float32 on a CPU: leave it out, or place the draft there")
    return models.draft_weights == "int8" or (models.draft_weights == "auto" and fits and draft.parameters >= WORTH_ROUNDING)


def weight_bytes(source: Source, dtype: torch.dtype, device: torch.device, *, int8: bool = False) -> int:
    """Return the bytes its weights take: on a CPU, bf16 checkpoints stay bf16 also where fp32 is computed, a tied head as a copy.

    int8: matrices take a byte a weight, but for the embedding.
    """
    if int8:
        embedding = source.vocab_size * int(source.config.hidden_size)
        tied = getattr(source.config, "tie_word_embeddings", False)
        width = 2 if source.config.dtype == torch.bfloat16 else 4
        return source.parameters - embedding + embedding * width + (embedding if tied else 0)
    if not is_cpu(device) or source.config.dtype != torch.bfloat16:
        return source.parameters * dtype.itemsize
    head = source.vocab_size * int(source.config.hidden_size) if getattr(source.config, "tie_word_embeddings", False) else 0
    return (source.parameters + head) * torch.bfloat16.itemsize


def memory_bytes(models: Models, source: Source, device: torch.device, size: Size, *, drafts: bool = False, shares: int = 1) -> int:
    """Return the bytes of a model's weights, of its keys and values and, where there are graphs, of these, on each of so many devices that
    share it."""
    dtype = compute_dtype(models, device)
    weights = weight_bytes(source, dtype, device, int8=drafts and keeps_int8(models, source, device))
    shared = weights + size.rows * size.slots * source.kv_values_per_token * dtype.itemsize
    return -(-shared // shares) + (graph_bytes(source.config, dtype, size) if has_graphs(device) else 0)


def check_memory(pair: Pair, models: Models, hardware: Hardware, placement: Placement, sizes: tuple[Size, Size]) -> None:
    """Refuse a pair of which weights, key-value slots and graphs (`sizes` of target and draft) exceed the memory of where they stand."""
    needs: dict[str, int] = {}
    room: dict[str, int] = {}
    drafts_on = [(True, pair.draft, ids, sizes[1]) for ids in placement.workers]
    for drafts, source, ids, size in ((False, pair.target, placement.target, sizes[0]), *drafts_on):
        if source is None or not ids:
            continue
        one = hardware.draws_on_one_memory(ids)
        # A target is split over its accelerators; a draft stands whole on each.
        taken = memory_bytes(models, source, torch_device(ids), size, drafts=drafts, shares=1 if one or drafts else len(ids))
        for device in hardware.select(ids[:1] if one else ids):
            pool = (host(ids) or "memory") if one else device.id
            needs[pool] = needs.get(pool, 0) + taken
            room[pool] = device.memory_bytes
    for pool, bytes_needed in needs.items():
        if bytes_needed > room[pool]:
            raise ValueError(
                f"target {models.target!r} and draft {models.draft!r} need {bytes_needed / 2**30:.1f} GiB on {pool}, "
                f"which has {room[pool] / 2**30:.1f}: "
                f"lower max_model_len (now {pair.max_model_len}), num_speculative_tokens or the fan-outs, "
                "use smaller models or more devices"
            )


class ShortHead(torch.nn.Module):
    """A draft's head that computes the logits of the tokens `ids` `[n]` alone; the others are -inf. `weight` is `[vocabulary, width]`."""

    ids: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor) -> None:
        super().__init__()
        self.vocab_size = len(weight)
        self.register_buffer("ids", ids)
        self.rows = torch.nn.Linear(weight.shape[1], len(ids), bias=bias is not None, device="meta")
        self.rows.weight = torch.nn.Parameter(weight.detach()[ids], requires_grad=False)
        if bias is not None:
            self.rows.bias = torch.nn.Parameter(bias.detach()[ids], requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits `[..., vocabulary]` of activations `[..., width]`."""
        few = self.rows(x)
        every: torch.Tensor = few.new_full((*few.shape[:-1], self.vocab_size), float("-inf"))
        return every.index_copy_(-1, self.ids, few)


def _shorten_head(source: Source, module: PreTrainedModel) -> None:
    """Let a draft compute only the logits that its configuration says it may propose."""
    listed = getattr(source.config, DRAFT_VOCABULARY, None)
    if listed is None:
        return
    head = module.get_output_embeddings()  # type: ignore[no-untyped-call]
    ids = torch.tensor(listed, device=head.weight.device)
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= len(head.weight):
        raise ValueError(f"draft={source.name!r}: {DRAFT_VOCABULARY} of its config.json must list ids below {len(head.weight)}")
    module.set_output_embeddings(ShortHead(head.weight, getattr(head, "bias", None), ids))  # type: ignore[no-untyped-call]


def check_shares(option: str, source: Source, shares: int) -> None:
    """Refuse a model that transformers has no plan to split over so many processes, or whose heads do not come out even."""
    config = source.config
    if shares == 1:
        return
    drawn = getattr(config, RANDOM_WEIGHTS, False)
    if not getattr(config, "base_model_tp_plan", None) or source.gguf_file is not None or drawn:
        other = "of random weights" if drawn else f"of architecture {config.model_type!r}"
        kind = "a GGUF file" if source.gguf_file is not None else other
        raise ValueError(f"{option}={source.name!r} is {kind}, which transformers does not split over {shares} devices: place it on one")
    heads = _kv_heads(config)
    if heads % shares:
        raise ValueError(
            f"{option}={source.name!r} has {heads} key-value heads, which {shares} devices do not share evenly: place it on fewer"
        )


def load(
    source: Source, device: torch.device, dtype: torch.dtype, *, drafts: bool = False, int8: bool = False, shares: int = 1
) -> LoadedModel:
    """Load the weights onto `device` for computing in `dtype`, attending over key-value slots.

    drafts: whether it only proposes; a draft whose configuration lists `draft_vocabulary` then proposes nothing else. int8: whether its
    matrices are rounded to a byte a number, where it computes in fp32 on a CPU. shares: over how many processes of torch.distributed's
    default group it is split; each loads its own share.
    """
    from ssd.engine.decoder import Decoder
    from ssd.engine.kv import ATTENTION
    from ssd.engine.linear import fp32_compute_from_bf16

    if getattr(source.config, RANDOM_WEIGHTS, False):
        return _random(source, device, dtype)
    packs = is_cpu(device) and dtype == torch.float32 and shares == 1
    placed = {"device_map": {"": device}} if shares == 1 else {"distributed_config": DistributedConfig(tp_size=shares, tp_plan="auto")}
    try:
        module = AutoModelForCausalLM.from_pretrained(
            source.folder, dtype="auto" if packs else dtype, attn_implementation=ATTENTION, **placed, **source.arguments
        ).eval()  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"the weights of {source.name!r} cannot be read ({str(error).splitlines()[0]}): fetch or save them again"
        ) from error
    if drafts:
        _shorten_head(source, module)
    decoder = None
    if packs:
        decoder = Decoder.of(module, int8=int8)
        if decoder is None:
            fp32_compute_from_bf16(module, int8=int8)
    return LoadedModel(module, device, dtype, source.vocab_size, source.max_positions, source.query_groups, decoder)


def _random(source: Source, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Make a model of this shape, its weights drawn on the device itself."""
    from ssd.engine.kv import ATTENTION

    with device:
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(source.config, dtype=dtype, attn_implementation=ATTENTION).eval()  # type: ignore[no-untyped-call]
    return LoadedModel(module, device, dtype, source.vocab_size, source.max_positions, source.query_groups)
