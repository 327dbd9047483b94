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
import pickle
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Never

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ssd.devices import are_cores, cpu, index, pin, processes, torch_device
from ssd.engine.graphs import Shape
from ssd.engine.kv import Abort
from ssd.engine.transformer import SlotTransformer

if TYPE_CHECKING:
    from ssd.models import LoadedModel, Source

Ids = tuple[str, ...]
# All that most forwards feed goes in one broadcast of this size, its length in front.
FRAME = 1 << 14
COLLECTIVE_SECONDS = 60.0
FOR_EVER = timedelta(days=365)


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
        self.dropped: list[int] = []

    def order(self, kind: str, *arguments: Any) -> None:
        """Tell the others what to do; RuntimeError where one is gone."""
        dropped, self.dropped = self.dropped, []
        body = pickle.dumps((kind, dropped, *arguments), pickle.HIGHEST_PROTOCOL)
        frame = np.zeros(FRAME, dtype=np.uint8)
        frame[:8] = np.frombuffer(len(body).to_bytes(8, "little"), dtype=np.uint8)
        head, rest = body[: FRAME - 8], body[FRAME - 8 :]
        frame[8 : 8 + len(head)] = np.frombuffer(head, dtype=np.uint8)
        with self._lock:
            try:
                self._broadcast(torch.from_numpy(frame))
                if rest:
                    self._broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8))
            except RuntimeError as error:
                raise RuntimeError(f"a process with a share of the target is gone ({str(error).splitlines()[0]})") from error

    def next_order(self) -> tuple[Any, ...]:
        """Wait for what the first process says."""
        frame = torch.zeros(FRAME, dtype=torch.uint8)
        self._broadcast(frame)
        data = frame.numpy().tobytes()
        length = int.from_bytes(data[:8], "little")
        body = data[8 : 8 + length]
        if length > FRAME - 8:
            rest = torch.zeros(length - len(body), dtype=torch.uint8)
            self._broadcast(rest)
            body += rest.numpy().tobytes()
        order: tuple[Any, ...] = pickle.loads(body)
        return order

    def _broadcast(self, tensor: torch.Tensor) -> None:
        work = dist.broadcast(tensor, 0, group=self._orders, async_op=True)
        # Only the others may have to wait long for an order.
        work.wait(timedelta(seconds=COLLECTIVE_SECONDS) if self.rank == 0 else FOR_EVER)

    def load(self, source: Source, target: Ids, dtype: torch.dtype) -> LoadedModel:
        """Let every process load its share."""
        self.order("load", source, target, dtype)
        return replace(_load(source, target, dtype, self), team=self)

    def number(self) -> int:
        """Return a number for a further model over slots."""
        return next(self._numbers)

    def dismiss(self) -> None:
        """Let the others go."""
        # Who is gone already need not be told.
        with suppress(RuntimeError):
            self.order("end")
        dist.destroy_process_group()


@cache
def lead(size: int) -> Team:
    """Return the team of this process, the first of `size`, for as long as it runs; one process leads one team."""
    team = Team(0, size)
    atexit.register(team.dismiss)
    return team


def follow(target: Ids, rank: int, count: int) -> Never:
    """Do in a further process as the first one says, until it ends; then leave with SystemExit."""
    team = Team(rank, count)
    loaded: LoadedModel | None = None
    models: dict[int, SlotTransformer] = {}
    with torch.inference_mode():
        while True:
            kind, dropped, *given = team.next_order()
            for number in dropped:
                models.pop(number, None)
            if kind == "end":
                dist.destroy_process_group()
                raise SystemExit(0)
            if kind == "load":
                models.clear()
                loaded = None
                source, devices, dtype = given
                loaded = _load(source, devices, dtype, team)
            elif kind == "make" and loaded is not None:
                number, rows, slots = given
                models[number] = SlotTransformer(loaded, rows, slots)
            else:
                number, *rest = given
                _obey(models[number], kind, rest)


def _obey(model: SlotTransformer, kind: str, given: list[Any]) -> None:
    if kind == "copy":
        model.copy(*given)
        return
    shape, fixed, tokens, numbers, seen = given
    visible = np.unpackbits(seen, count=shape.rows * shape.width * shape.slots).view(bool).reshape(shape.rows, shape.width, shape.slots)
    model.feed(shape, fixed, torch.from_numpy(tokens).to(model.device), numbers, visible)


def _load(source: Source, target: Ids, dtype: torch.dtype, team: Team) -> LoadedModel:
    from ssd.models import load

    own = share_of(target, team.rank, team.size)
    pin(own)
    return load(source, torch_device(own), dtype, shares=team.size)


class SharedTransformer(SlotTransformer):
    """The first process's part of a model over slots; whatever is done with it, the others do too."""

    def __init__(self, model: LoadedModel, rows: int, slots: int, team: Team) -> None:
        super().__init__(model, rows, slots)
        self.team, self.number = team, team.number()
        team.order("make", self.number, rows, slots)

    def __del__(self) -> None:
        """Let the others drop theirs."""
        # Maybe in the midst of a forward: they are told with what is next.
        self.team.dropped.append(self.number)

    def copy(self, source: int, from_slots: np.ndarray, row: int, to_slots: np.ndarray) -> None:
        """Copy keys and values from some slots of one row into some of another, in every share."""
        self.team.order("copy", self.number, source, from_slots, row, to_slots)
        super().copy(source, from_slots, row, to_slots)

    def feed(
        self, shape: Shape, fixed: bool, tokens: torch.Tensor, numbers: np.ndarray, visible: np.ndarray, abort: Abort | None = None
    ) -> torch.Tensor:
        """Play a forward in every share; it is not given up in its midst."""
        self.team.order("feed", self.number, shape, fixed, tokens.cpu().numpy(), numbers, np.packbits(visible))
        return super().feed(shape, fixed, tokens, numbers, visible)
