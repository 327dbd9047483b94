"""An accelerator made up on the CPU: its tensors say that they are elsewhere, and whatever makes the host wait for it is noted."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("xpu", 0)
PACKAGE = Path(__file__).parents[2] / "ssd"
# What brings numbers to the host, or needs them there to know a size.
WAITS = {
    getattr(torch.Tensor, name)
    for name in ("tolist", "item", "cpu", "numpy", "nonzero", "masked_select", "__bool__", "__int__", "__float__", "__index__", "equal")
} | {torch.nonzero, torch.masked_select, torch.equal, torch.unique}
TO = torch.Tensor.to
INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


@dataclass
class Notes:
    """What was noted, each time with the thread and the place in the package: waits for the device, what went there as it should (pinned
    and without waiting), and what went there otherwise."""

    waits: list[tuple[str, str]] = field(default_factory=list)
    uploads: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


NOTES = Notes()


def place() -> str:
    """Return where in the package we are."""
    frames = [frame for frame in traceback.extract_stack() if PACKAGE in Path(frame.filename).parents]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-4:]))


class Pinned(torch.Tensor):
    """Memory of the host that the device can read by itself."""


class Far(torch.Tensor):
    """A tensor of the device."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:
            return DEVICE
        if func == torch.Tensor.is_cpu.__get__:
            return False
        if func == TO:
            where = [*args[1:], *kwargs.values()]
            args, kwargs = (args[0], *(one for one in args[1:] if not _is_device(one))), _without_device(kwargs)
            if any(_is_device(one) and torch.device(one).type == "cpu" for one in where):
                func = torch.Tensor.cpu
            elif len(args) == 1 and not set(kwargs) - {"non_blocking", "copy"}:
                return args[0].clone() if kwargs.get("copy") else args[0]
        if func in WAITS:
            NOTES.waits.append((threading.current_thread().name, f"{func.__name__} at {place()}"))
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **kwargs)
                return found.as_subclass(torch.Tensor) if isinstance(found, torch.Tensor) else found
        given = [args[:2], args[2:]] if func in INDEXED else [(), args]
        for leaf in tree_leaves([given, list(kwargs.values())]):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Far) and leaf.dim():
                NOTES.wrong.append(f"{func.__name__} mixes in a tensor of the host at {place()}")
        if func in INDEXED:
            _check_index(args[1])
        return super().__torch_function__(func, types, args, _without_device(kwargs))


def _check_index(index: object) -> None:
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, list | np.ndarray):
            NOTES.wrong.append(f"indexed by numbers of the host at {place()}")
        elif isinstance(part, torch.Tensor) and part.dtype == torch.bool:
            NOTES.waits.append((threading.current_thread().name, f"indexed by a mask at {place()}"))


def _is_device(one: object) -> bool:
    return isinstance(one, torch.device | str)


def _without_device(kwargs: dict) -> dict:
    return {name: value for name, value in kwargs.items() if name != "device"}


def module_there(module: torch.nn.Module) -> torch.nn.Module:
    """Put weights and buffers of a module onto the device."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = torch.nn.Parameter(weight.detach().as_subclass(Far), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.as_subclass(Far)
    return module


@contextmanager
def accelerator(patch) -> Iterator[Notes]:
    """Let there be the device; yield what is noted."""

    def sent(tensor, *args, **kwargs):
        where = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.device)), None)
        if isinstance(tensor, Far) or where != DEVICE:
            return TO(tensor, *args, **kwargs)
        if isinstance(tensor, Pinned) and kwargs.get("non_blocking"):
            NOTES.uploads[threading.current_thread().name] += 1
        else:
            NOTES.wrong.append(f"sent so that the host waits at {place()}")
        return tensor.detach().clone().as_subclass(Far)

    def made(function, is_sent):
        def make(*args, **kwargs):
            if kwargs.get("device") != DEVICE:
                return function(*args, **kwargs)
            if is_sent:
                NOTES.wrong.append(f"sent so that the host waits at {place()}")
            return function(*args, **_without_device(kwargs)).as_subclass(Far)

        return make

    for name in ("arange", "zeros", "ones", "full", "empty", "tensor", "as_tensor"):
        patch.setattr(torch, name, made(getattr(torch, name), name in ("tensor", "as_tensor")))
    patch.setattr(torch.Tensor, "to", sent)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.as_subclass(Pinned))
    NOTES.waits.clear()
    NOTES.uploads.clear()
    NOTES.wrong.clear()
    yield NOTES
