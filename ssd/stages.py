"""Long measurements in stages, each kept in a file once it is done, so that a run that was broken off goes on where it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


class Stages:
    """Finished stages of one measurement by name, kept at `path`, or nowhere.

    identity: what is measured, as JSON; a file about anything else, or that cannot be read, is not gone on with but written anew.
    """

    def __init__(self, path: Path | None, identity: Any) -> None:
        self._path, self._identity, self._done = path, identity, dict[str, Any]()
        if path is None:
            return
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            self._done = dict(known["done"]) if known["identity"] == identity else {}
        except (OSError, ValueError, KeyError, TypeError):
            self._done = {}

    def __contains__(self, name: str) -> bool:
        """Whether a stage is finished."""
        return name in self._done

    def once(self, name: str, kind: Any, measure: Callable[[], T]) -> T:
        """Return what stage `name` gave before, else measure it; `kind` is its type."""
        adapter: TypeAdapter[T] = TypeAdapter(kind)
        if name in self._done:
            return adapter.validate_json(json.dumps(self._done[name]))
        found = measure()
        if self._path is not None:
            self._done[name] = json.loads(adapter.dump_json(found))
            self._path.write_text(json.dumps({"identity": self._identity, "done": self._done}), encoding="utf-8")
        return found

    def finish(self) -> None:
        """Forget the stages: the whole is done."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
