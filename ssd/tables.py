"""Tables of published figures, read from TOML files in the package's data folder."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any


def read_table(name: str) -> dict[str, dict[str, Any]]:
    """Return the table in data file `name`: row name to its columns."""
    return tomllib.loads(files("ssd").joinpath("data", name).read_text(encoding="utf-8"))
