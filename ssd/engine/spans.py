"""What a device is busy with, noted as it happens, on the clock that both processes share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic

from sim.timeline import Span

# The latest are kept until they are asked for.
MAX_SPANS = 50_000


@contextmanager
def recorded(spans: deque[Span], device: str, activity: str, round_index: int, request: str) -> Iterator[None]:
    """Append to `spans` how long the block took, also where it is left by an exception."""
    begin = monotonic()
    try:
        yield
    finally:
        spans.append(Span(device, activity, begin, monotonic(), round_index, request))


def on_our_clock(spans: Iterable[Span], ahead: float) -> list[Span]:
    """Return the spans of a host whose clock is so many seconds ahead of ours by our own."""
    return [replace(span, start=span.start - ahead, end=span.end - ahead) for span in spans]
