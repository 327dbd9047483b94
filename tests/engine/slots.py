"""Random decoders whose weights bf16 holds, and texts that grow as trees over their slots, beside what transformers says of each path."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ssd.engine.decoder import Decoder, SlotDecoder
from ssd.engine.forward import SlotModel
from ssd.engine.kv import ATTENTION
from ssd.engine.linear import fp32_compute_from_bf16
from ssd.engine.queries import Queries
from ssd.models import LoadedModel
from tests.tiny import vary

VOCABULARY = 101
GARBAGE = 1e30
NEAR_TIE = 1e-3
FAMILY = ("llama", "mistral", "qwen2", "qwen3")


def tiny_decoder(kind: str, seed: int = 0, **changes) -> PreTrainedModel:
    """A random fp32 decoder whose every weight is a bf16 number and does something, biases and norms too."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **({"sliding_window": None} if kind == "mistral" else {}),
        **changes,
    }
    if kind == "qwen2":  # It has no head_dim of its own.
        shape["hidden_size"] = shape.pop("head_dim") * shape["num_attention_heads"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape), attn_implementation="sdpa").eval()
    vary(model)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn_like(weight))
            weight.copy_(weight.bfloat16())
    return model


def loaded(model: PreTrainedModel, dtype: torch.dtype = torch.bfloat16, *, int8: bool = False) -> LoadedModel:
    """A copy of a model as the engine has it once it was read from a checkpoint of this type."""
    config = deepcopy(model.config)
    module = type(model)(config).eval()
    module.load_state_dict(model.state_dict())
    module.to(dtype).set_attn_implementation(ATTENTION)
    decoder = Decoder.of(module, int8=int8)
    if decoder is None:
        fp32_compute_from_bf16(module)
    groups = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    return LoadedModel(module, torch.device("cpu"), torch.float32, config.vocab_size, config.max_position_embeddings, groups, decoder)


class Reference:
    """Logits after each token of a text, as a plain forward of transformers gives them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.known = model, {}

    @torch.inference_mode()
    def __call__(self, path: tuple[int, ...]) -> torch.Tensor:
        if path not in self.known:
            found = self.model(torch.tensor([path])).logits[0]
            self.known.update({path[: i + 1]: row for i, row in enumerate(found)})
        return self.known[path]


@dataclass
class Row:
    """A tree of tokens: of each its token, its parent and its slot; a leaf is what may be fed after. Slot 0 is nobody's."""

    slots: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    alive: set[int] = field(default_factory=set)

    def ancestors(self, node: int) -> list[int]:
        """The nodes from the root to `node`."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def path(self, node: int) -> tuple[int, ...]:
        """The tokens from the root to `node`."""
        return tuple(self.tokens[k] for k in self.ancestors(node))

    def free(self) -> list[int]:
        """Slots that no living node holds."""
        taken = {self.places[k] for k in self.alive}
        return [slot for slot in range(1, self.slots) if slot not in taken]

    def add(self, token: int, parent: int, slot: int) -> int:
        """A new node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.places.append(slot)
        self.alive.add(len(self.tokens) - 1)
        return len(self.tokens) - 1

    def queries(self, nodes: list[int], wanted: int | None = None) -> Queries:
        """Some nodes, parents first, as a forward takes them."""
        visible = np.zeros((len(nodes), self.slots), dtype=bool)
        lines = [self.ancestors(node) for node in nodes]
        for seen, line in zip(visible, lines, strict=True):
            seen[[self.places[k] for k in line]] = True
        tokens, places = ([which[node] for node in nodes] for which in (self.tokens, self.places))
        return Queries(torch.tensor(tokens), np.array([len(line) - 1 for line in lines]), np.array(places), visible, wanted)


class Forest:
    """The rows of a slot model, each a tree, grown and cut at random."""

    def __init__(self, model: SlotModel, rows: int, seed: int) -> None:
        self.model, self.rng = model, random.Random(seed)
        self.rows = [Row(model.slots) for _ in range(rows)]
        fill(model, GARBAGE)

    def grow(self, index: int, count: int, shape: str) -> list[int]:
        """Up to `count` new nodes of a row, as a chain, as one more token of many branches, or anywhere; slots are drawn."""
        row, rng = self.rows[index], self.rng
        free = row.free()
        rng.shuffle(free)
        old, new = sorted(row.alive), []
        for slot in free[:count]:
            if not old and not new:
                parent = -1
            elif shape == "chain":
                parent = new[-1] if new else rng.choice(old)
            elif shape == "branches":
                parent = rng.choice(old or new)
            else:
                parent = rng.choice(old + new)
            new.append(row.add(rng.randrange(VOCABULARY), parent, slot))
        return new

    def cut(self, index: int) -> None:
        """Forget a node and what follows it; its slots hold garbage from now on."""
        row = self.rows[index]
        if not row.alive:
            return
        first = self.rng.choice(sorted(row.alive))
        gone = {node for node in row.alive if first in row.ancestors(node)}
        row.alive -= gone
        fill(self.model, self.rng.choice([GARBAGE, -GARBAGE]), index, [row.places[node] for node in gone])

    def copy(self, source: int, index: int) -> None:
        """Let a row be another one's text, in other slots."""
        before, row = self.rows[source], Row(self.model.slots)
        alive = sorted(before.alive)
        slots = self.rng.sample(range(1, row.slots), len(alive))
        own = {-1: -1}
        for node, slot in zip(alive, slots, strict=True):
            own[node] = row.add(before.tokens[node], own[before.parents[node]], slot)
        self.model.cache.copy(
            source, np.array([before.places[node] for node in alive], dtype=np.int64), index, np.array(slots, dtype=np.int64)
        )
        self.rows[index] = row


def fill(model: SlotModel, value: float, row: int | None = None, slots: list[int] | None = None) -> None:
    """Put a number into slots of a row, of all rows where it is not said."""
    cache = model.cache
    assert isinstance(cache, SlotDecoder)
    rows = slice(None) if row is None else slice(row, row + 1)
    at = torch.arange(cache.slots) if slots is None else torch.tensor(slots, dtype=torch.long)
    cache.keys[:, rows, :, at // cache.block, :, at % cache.block] = value
    cache.values[:, rows, :, :, at] = value


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Logits `[n, vocabulary]` are as expected, and so is the likeliest token unless the two best are nearly as good."""
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    scale = expected.abs().amax(-1, keepdim=True)
    assert ((got - expected).abs() <= tolerance * scale).all(), float(((got - expected).abs() / scale).max())
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > NEAR_TIE * scale[:, 0]
    assert torch.equal(got.argmax(-1)[clear], expected.argmax(-1)[clear])


def chained(model: SlotModel, tokens: list[int], sizes: list[int], row: int = 0) -> torch.Tensor:
    """Logits after each token of one text, fed in pieces of these sizes."""
    text, found, begin = Row(model.slots), [], 0
    for token in tokens:
        text.add(token, len(text.tokens) - 1, len(text.tokens) + 1)
    for size in sizes:
        found.append(model.forward({row: text.queries(list(range(begin, begin + size)))})[row])
        begin += size
    assert begin == len(tokens)
    return torch.cat(found)
