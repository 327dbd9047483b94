"""A target in shares: transformers splits it by its own plan of tensor parallelism over processes that torchrun started, one a device.

The first process leads: engine, scheduler and link are there. The others, inside their own `Engine.from_plan`, follow: what every forward
feeds is broadcast to them, and they play it on their share of the weights, with slots for their share of the key-value heads. Between
forwards they wait, as long as it may be; within one, a process that is silent for COLLECTIVE_SECONDS is given up, and the engine fails by
name.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Never

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ssd.devices import are_cores, cpu, index, pin, processes, torch_device
from ssd.engine.encoding import Array, Encoding
from ssd.engine.graphs import Shape
from ssd.engine.kv import Abort
from ssd.engine.transformer import SlotTransformer

if TYPE_CHECKING:
    from ssd.models import LoadedModel, Source

Ids = tuple[str, ...]
# All that most forwards feed goes in one broadcast of this size, its length in front.
FRAME = 1 << 14
WORD = 8
COLLECTIVE_SECONDS = 60.0
FOR_EVER = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Load:
    """Load your share of a target, known by its name, in place of what you have; devices are those of all shares."""

    target: str
    devices: Ids
    dtype: str


@dataclass(frozen=True, slots=True)
class Make:
    """Make model `number` over slots."""

    number: int
    rows: int
    slots: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy keys and values of model `number`, as SlotTransformer.copy does."""

    number: int
    source: int
    from_slots: Array
    row: int
    to_slots: Array


@dataclass(frozen=True, slots=True)
class Feed:
    """Play a forward of model `number`, as SlotTransformer.feed does; seen: `visible`, eight to a byte."""

    number: int
    shape: Shape
    fixed: bool
    tokens: Array
    numbers: Array
    seen: Array


@dataclass(frozen=True, slots=True)
class Drop:
    """Let these models over slots go."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """Leave."""


ORDERS = Encoding(Load, Make, Copy, Feed, Drop, End)


def shares(target: Ids) -> int:
    """Return over how many processes a target on these devices is split: one for each accelerator, and on cores as many as torchrun started
    here. ValueError where it did not start enough."""
    here = processes()
    if are_cores(target):
        return min(here, len(target))
    if here < len(target):
        raise ValueError(
            f"placement.target={target} needs a process for each device, and there are {here}: start with torchrun "
            f"--nproc-per-node {len(target)}, or give one device"
        )
    if len(target) > 1 and [index(name) for name in target] != list(range(len(target))):
        raise ValueError(f"placement.target={target}: torchrun's process i has device i; give the first {len(target)} in order")
    return len(target)


def share_of(target: Ids, rank: int, count: int) -> Ids:
    """Return the devices of one share."""
    size = len(target) // count
    return target[rank * size : (rank + 1) * size]


def leaders(target: Ids) -> Ids:
    """Return the devices of the first process's share, all where there is but one."""
    return share_of(target, 0, shares(target))


class Team:
    """The processes that hold the shares, as one of them sees it."""

    def __init__(self, rank: int, size: int) -> None:
        """Wait until all have come."""
        store, _, _ = next(rendezvous("env://", rank=rank, world_size=int(os.environ["WORLD_SIZE"])))
        self.rank, self.size = rank, size
        # The group that transformers finds and splits a model over: of these processes alone, whatever else torchrun started.
        dist.init_process_group(
            store=PrefixStore("ssd/target", store), rank=rank, world_size=size, timeout=timedelta(seconds=COLLECTIVE_SECONDS)
        )
        self._orders = dist.new_group(backend=dist.get_default_backend_for_device(cpu()), timeout=FOR_EVER)
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._broken = False
        # Models over slots that are gone here, and not yet there.
        self.dropped: list[int] = []

    def order(self, order: object) -> None:
        """Tell the others what to do; RuntimeError where one is gone."""
        with self._lock, self.together():
            dropped, self.dropped = self.dropped, []
            if dropped:
                self._send(ORDERS.encode(Drop(tuple(dropped))))
            self._send(ORDERS.encode(order))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Say by name what ends the block where another process is gone or silent; nothing is then asked of the others any more."""
        if self._broken:
            raise RuntimeError("a process with a share of the target was lost: start torchrun again")
        try:
            yield
        except RuntimeError as error:
            # gloo's errors are no class of their own; each names the file of its transport.
            if not isinstance(error, dist.DistError) and "/transport/" not in str(error):
                raise
            self._broken = True
            told = f"a process with a share of the target is gone, or silent for {COLLECTIVE_SECONDS:g} s"
            raise RuntimeError(f"{told} ({str(error).splitlines()[0]})") from error

    def next_order(self) -> object:
        """Wait for what the first process says."""
        frame = torch.zeros(FRAME, dtype=torch.uint8)
        self._broadcast(frame)
        data = frame.numpy().tobytes()
        length = int.from_bytes(data[:WORD], "little")
        body = data[WORD : WORD + length]
        if length > len(body):
            rest = torch.zeros(length - len(body), dtype=torch.uint8)
            self._broadcast(rest)
            body += rest.numpy().tobytes()
        return ORDERS.decode(body)

    def _send(self, body: bytes) -> None:
        head, rest = body[: FRAME - WORD], body[FRAME - WORD :]
        self._broadcast(_tensor(len(body).to_bytes(WORD, "little") + head.ljust(FRAME - WORD)))
        if rest:
            self._broadcast(_tensor(rest))

    def _broadcast(self, tensor: torch.Tensor) -> None:
        work = dist.broadcast(tensor, 0, group=self._orders, async_op=True)
        # Only the others may have to wait long for an order.
        work.wait(timedelta(seconds=COLLECTIVE_SECONDS) if self.rank == 0 else FOR_EVER)

    def load(self, source: Source, target: Ids, dtype: torch.dtype) -> LoadedModel:
        """Let every process load its share."""
        self.order(Load(source.name, target, str(dtype).removeprefix("torch.")))
        with self.together():
            return replace(_load(source, target, dtype, self), team=self)

    def number(self) -> int:
        """Return a number for a further model over slots."""
        return next(self._numbers)

    def dismiss(self) -> None:
        """Let the others go."""
        # Who is gone already need not be told.
        with suppress(RuntimeError):
            self.order(End())
        dist.destroy_process_group()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@cache
def lead(size: int) -> Team:
    """Return the team of this process, the first of `size`, for as long as it runs; one process leads one team."""
    team = Team(0, size)
    atexit.register(team.dismiss)
    return team


def follow(target: Ids, rank: int, count: int) -> Never:
    """Do in a further process as the first one says, until it ends; then leave with SystemExit."""
    follower = Follower(Team(rank, count))
    with torch.inference_mode():
        while not isinstance(order := follower.team.next_order(), End):
            follower.obey(order)
    dist.destroy_process_group()
    raise SystemExit(0)


class Follower:
    """A further process's share, and its models over slots by their numbers."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._loaded: LoadedModel | None = None
        self._models: dict[int, SlotTransformer] = {}

    def obey(self, order: object) -> None:
        """Do what one order says."""
        match order:
            case Load():
                from ssd.models import locate

                # Both need not fit.
                self._models.clear()
                self._loaded = None
                self._loaded = _load(locate("target", order.target), order.devices, getattr(torch, order.dtype), self.team)
            case Make() if self._loaded is not None:
                self._models[order.number] = SlotTransformer(self._loaded, order.rows, order.slots)
            case Copy():
                self._models[order.number].copy(order.source, order.from_slots, order.row, order.to_slots)
            case Feed():
                self._feed(order)
            case Drop():
                for number in order.numbers:
                    self._models.pop(number, None)
            case _:
                raise RuntimeError(f"{type(order).__name__} came out of turn")

    def _feed(self, order: Feed) -> None:
        model, shape = self._models[order.number], order.shape
        size = shape.rows, shape.width, shape.slots
        visible = np.unpackbits(order.seen, count=int(np.prod(size))).view(bool).reshape(size)
        model.feed(shape, order.fixed, torch.from_numpy(order.tokens).to(model.device), order.numbers, visible)


def _load(source: Source, target: Ids, dtype: torch.dtype, team: Team) -> LoadedModel:
    from ssd.models import load

    own = share_of(target, team.rank, team.size)
    pin(own)
    return load(source, torch_device(own), dtype, shares=team.size)


class SharedTransformer(SlotTransformer):
    """The first process's part of a model over slots; whatever is done with it, the others do too."""

    def __init__(self, model: LoadedModel, rows: int, slots: int, team: Team) -> None:
        self.team, self.number = team, team.number()
        super().__init__(model, rows, slots)
        team.order(Make(self.number, rows, slots))

    def __del__(self) -> None:
        """Let the others drop theirs."""
        # Maybe in the midst of a forward: they are told with what is next.
        self.team.dropped.append(self.number)

    def copy(self, source: int, from_slots: np.ndarray, row: int, to_slots: np.ndarray) -> None:
        """Copy keys and values from some slots of one row into some of another, in every share."""
        self.team.order(Copy(self.number, source, from_slots, row, to_slots))
        super().copy(source, from_slots, row, to_slots)

    def feed(
        self, shape: Shape, fixed: bool, tokens: torch.Tensor, numbers: np.ndarray, visible: np.ndarray, abort: Abort | None = None
    ) -> torch.Tensor:
        """Play a forward in every share; it is not given up in its midst. RuntimeError where a process is gone or silent."""
        self.team.order(Feed(self.number, shape, fixed, tokens.cpu().numpy(), numbers, np.packbits(visible)))
        with self.team.together():
            return super().feed(shape, fixed, tokens, numbers, visible)
