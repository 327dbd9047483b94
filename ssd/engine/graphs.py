"""Functions of tensors in fixed shapes, captured once as CUDA graphs and replayed: a whole forward is then one launch, and nothing in it
waits for the host.

What a forward feeds changes its size from step to step, so it is filled up to the nearest of a few sizes (`bucket`) with queries that
write into the waste slot and that nobody reads. Beyond the largest sizes, and past MOST_GRAPHS, it is played as it is. Elsewhere than on
CUDA `Graphs` plays the same functions on the same static inputs without capturing them; it is how the shapes are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from typing import Any, TypeVar

import torch

from ssd.devices import has_graphs
from ssd.engine.queries import Fed

QUERIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SLOTS = tuple(256 << power for power in range(12))
# Each keeps its inputs and outputs; what is between them they share.
MOST_GRAPHS = 128
# Libraries set up their workspaces at a first call, which a graph may not hold.
WARM_UPS = 2

T = TypeVar("T")
Made = Callable[[], Any]
Make = Callable[[Callable[[], Any]], Made]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a forward: rows `first..first+rows` of the slots are read up to `slots`, `queries` tokens are fed, at most `width` in a
    row, and logits are made after `wanted` of them."""

    first: int
    rows: int
    queries: int
    width: int
    wanted: int
    slots: int


def bucket(fed: Fed, rows: int, slots: int) -> Shape | None:
    """Return the smallest of the sizes that holds what is fed to a cache of so many rows and slots; None if there is none."""
    queries = _least(QUERIES, len(fed.slots))
    read = _least((*(size for size in ROWS if size < rows), rows), fed.rows[-1].index + 1)
    if queries is None or read is None:
        return None
    width = queries if read == 1 else _least(QUERIES, max(row.count for row in fed.rows))
    wanted = _least(QUERIES, max(1, len(fed.wanted)))
    limit = _least((*(size for size in SLOTS if size < slots), slots), max(row.limit for row in fed.rows))
    if width is None or wanted is None or limit is None:
        return None
    return Shape(0, read, queries, width, min(wanted, queries), limit)


def _least(sizes: Sequence[int], needed: int) -> int | None:
    return next((size for size in sizes if size >= needed), None)


class Graphs:
    """Plays functions of tensors on a device, each captured when it is first met with arguments of its sizes and kinds.

    make: turns a function of no arguments, whose inputs stay where they are, into one that is played from then on.
    """

    def __init__(self, device: torch.device, make: Make) -> None:
        self._device, self._make = device, make
        self._known: dict[Hashable, tuple[list[torch.Tensor], Made]] = {}

    @classmethod
    def on(cls, device: torch.device) -> Graphs | None:
        """Return an empty set for a device, or None where there are no graphs."""
        return cls(device, Capture(device)) if has_graphs(device) else None

    def __len__(self) -> int:
        return len(self._known)

    def play(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return `function(*arguments)`; its tensors stand until it is played again with arguments of the same sizes.

        arguments: tensors, on the device or ready to be sent there, and dataclasses and named tuples of them; all else is a part of the
        key that a graph is known by, as are the sizes.
        """
        given: list[torch.Tensor] = []
        parts = tuple(_parted(argument, given) for argument in arguments)
        key = function, parts
        if key not in self._known:
            inputs = [tensor.to(self._device, copy=True) for tensor in given]
            play = partial(_call, function, parts, inputs)
            if len(self._known) >= MOST_GRAPHS:
                return play()
            self._known[key] = inputs, self._make(play)
        inputs, made = self._known[key]
        for static, tensor in zip(inputs, given, strict=True):
            static.copy_(tensor, non_blocking=True)
        found: T = made()
        return found


@cache
def sampling_graphs(device: torch.device) -> Graphs | None:
    """Return the graphs of laws, draws and verifications, which know no model: one set for a process."""
    return Graphs.on(device)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor's sizes and type."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Node:
    """A dataclass or named tuple of what is in `parts`."""

    made: Callable[..., Any]
    parts: tuple[Any, ...]


def _parted(value: Any, leaves: list[torch.Tensor]) -> Any:
    """Put the tensors in `value` to `leaves` and return what it is without them."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return Leaf(tuple(value.shape), value.dtype)
    if is_dataclass(value) and not isinstance(value, Shape):
        return Node(type(value), tuple(_parted(getattr(value, field.name), leaves) for field in fields(value)))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Node(type(value), tuple(_parted(part, leaves) for part in value))
    return value


def _joined(part: Any, leaves: Iterator[torch.Tensor]) -> Any:
    if isinstance(part, Leaf):
        return next(leaves)
    return part.made(*(_joined(inner, leaves) for inner in part.parts)) if isinstance(part, Node) else part


def _call(function: Callable[..., T], parts: Sequence[Any], inputs: Sequence[torch.Tensor]) -> T:
    leaves = iter(inputs)
    return function(*[_joined(part, leaves) for part in parts])


class Capture:
    """Captures functions as CUDA graphs, which share the memory between their inputs and outputs: they are replayed one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, play: Callable[[], Any]) -> Made:
        """Play it a few times, so that its libraries set themselves up, then capture it."""
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                play()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may be loading a model meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outputs = play()

        def replay() -> Any:
            graph.replay()
            return outputs

        return replay


def as_it_is(play: Callable[[], Any]) -> Made:
    """Play a function without a graph on its inputs that stay where they are: for tests where there are no graphs."""
    return play
