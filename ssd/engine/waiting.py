"""Requests that wait for a row: whoever asks for much does not keep out whoever asks for little."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class WaitingRoom(Generic[T]):
    """A queue for each caller, first come first served within it; callers take turns."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, caller: int, item: T) -> None:
        """Let `item` of `caller` wait."""
        self._queues.setdefault(caller, deque()).append(item)

    def next(self) -> T:
        """Return the first of the caller whose turn it is; the caller then goes to the end of the row. LookupError if nobody waits."""
        caller = next(iter(self._queues), None)
        if caller is None:
            raise LookupError("nobody waits")
        queue = self._queues.pop(caller)
        item = queue.popleft()
        if queue:
            self._queues[caller] = queue
        return item

    def remove(self, item: T) -> bool:
        """Let `item` wait no longer; whether it did."""
        for caller, queue in self._queues.items():
            if item in queue:
                queue.remove(item)
                if not queue:
                    del self._queues[caller]
                return True
        return False
