"""The shape of a decoder, as far as its speed depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from ssd.tables import read_table


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's layers, weights, weights that a forward reads and numbers that it caches a token (counts), and their source."""

    name: str
    layers: int
    parameters: int
    parameters_read: int
    kv_values_per_token: int
    source: str


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
    return read_table("models.toml")


@cache
def _known() -> dict[str, dict[str, Any]]:
    return {name.lower(): row for name, row in catalogue().items()}


def _from_row(name: str, row: dict[str, Any]) -> Shape:
    hidden, queries, keys = row["hidden"], row["heads"] * row["head_dim"], row["kv_heads"] * row["head_dim"]
    # Queries and output, keys and values, the gated pair and its way back.
    layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * row["intermediate"]
    embedding = row["vocab"] * hidden
    read = row["layers"] * layer + embedding
    total = read if row["tied"] else read + embedding
    return Shape(name, row["layers"], total, read, 2 * row["layers"] * keys, row["source"])


def _from_config(name: str, option: str) -> Shape:
    from ssd.models import locate

    found = locate(option, name)
    embedding = 0 if found.config.tie_word_embeddings else found.vocab_size * int(found.config.hidden_size)
    layers = int(found.config.num_hidden_layers)
    return Shape(name, layers, found.parameters, found.parameters - embedding, found.kv_values_per_token, f"configuration of {name}")
