"""The shape of a decoder, as far as its speed depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from ssd.tables import read_table

# What transformers' configurations call the number of experts.
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder as far as its speed and memory depend on it; counts of layers, of weights and of numbers, and their source.

    hidden: width, what an all-reduce carries for a token. parameters: all weights. shared: those that every forward reads. expert: those of
    one expert in all layers that have some, of `experts`, `experts_per_token` of which a token goes through; 0 in a dense model.
    kv_values_per_token: numbers cached for a token.
    """

    name: str
    layers: int
    hidden: int
    parameters: int
    shared: int
    kv_values_per_token: int
    source: str
    expert: int = 0
    experts: int = 0
    experts_per_token: int = 0

    def read(self, tokens: float = 1) -> float:
        """Weights that a forward of so many tokens reads: experts that none of them goes through stay unread. [derived]

        Each token's are taken as drawn independently and evenly: n (1 - (1 - k/n)^tokens) of n experts are read.
        """
        if not self.experts:
            return self.shared
        unread = float((1 - self.experts_per_token / self.experts) ** tokens)
        return self.shared + self.expert * self.experts * (1 - unread)

    @property
    def active(self) -> int:
        """Weights that one token is multiplied with."""
        return self.shared + self.experts_per_token * self.expert


def shape(name: str, option: str = "target") -> Shape:
    """Return the shape of the model that option `option` calls `name`: from the catalogue by the end of its hub id, else from its config.

    ValueError, with the remedy, where neither knows it.
    """
    row = _known().get(name.rsplit("/", 1)[-1].lower())
    if row is not None:
        return _from_row(name, row)
    try:
        return _from_config(name, option)
    except ValueError as error:
        raise ValueError(f"{error}; without weights the planner knows {', '.join(catalogue())}") from error


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Return the known shapes: last part of the hub id to dimensions, stated parameters (billions) and source."""
    table = read_table("models.toml")
    return {
        name: table[row["same_as"]] | {"source": f"of the shape of {table[row['same_as']]['source']}"} if "same_as" in row else row
        for name, row in table.items()
    }


@cache
def _known() -> dict[str, dict[str, Any]]:
    return {name.lower(): row for name, row in catalogue().items()}


def _from_row(name: str, row: dict[str, Any]) -> Shape:
    hidden, queries, keys = row["hidden"], row["heads"] * row["head_dim"], row["kv_heads"] * row["head_dim"]
    layers, experts = row["layers"], row.get("experts", 0)
    # Queries and output, keys and values; the gated pair and its way back.
    attention = row.get("attention", 2 * hidden * queries + 2 * hidden * keys)
    gated = 3 * hidden * row["intermediate"]
    mixed = layers - row.get("dense_layers", 0) if experts else 0
    wide = 3 * hidden * row.get("dense_intermediate", row["intermediate"])
    always = layers * attention + (layers - mixed) * wide + mixed * (row.get("shared_experts", 0) * gated + experts * hidden)
    embedding = row["vocab"] * hidden
    shared, expert = always + embedding, mixed * gated
    total = shared + experts * expert + (0 if row["tied"] else embedding)
    return Shape(
        name,
        layers,
        hidden,
        total,
        shared,
        layers * row.get("kv_values", 2 * keys),
        row["source"],
        expert,
        experts,
        row.get("experts_per_token", 0),
    )


def _from_config(name: str, option: str) -> Shape:
    from ssd.models import locate

    found = locate(option, name)
    config, total, in_experts = found.config, found.parameters, found.expert_parameters
    hidden = int(config.hidden_size)
    experts = next((int(count) for key in EXPERT_COUNTS if (count := getattr(config, key, None))), 0) if in_experts else 0
    unread = 0 if config.tie_word_embeddings else found.vocab_size * hidden
    return Shape(
        name,
        int(config.num_hidden_layers),
        hidden,
        total,
        total - in_experts - unread,
        found.kv_values_per_token,
        f"configuration of {name}",
        in_experts // experts if experts else 0,
        experts,
        int(config.num_experts_per_tok) if experts else 0,
    )
