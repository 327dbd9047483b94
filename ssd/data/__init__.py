"""Tables of published figures, read from the TOML files beside this module."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any


def read_table(name: str) -> dict[str, dict[str, Any]]:
    """Return the table in file `name` of this package: row name to its columns."""
    return tomllib.loads(files(__name__).joinpath(name).read_text(encoding="utf-8"))
