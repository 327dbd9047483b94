"""The process that owns the draft model: started by the engine, driven through the link, gone when the engine is."""

from __future__ import annotations

import gc
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from ssd import python
from ssd.engine.link import (
    BackUp,
    Boot,
    Failed,
    Link,
    LinkError,
    Outcomes,
    Ping,
    Ready,
    Rehearse,
    Rehearsed,
    Score,
    Scored,
    Sent,
    Setup,
    Shutdown,
    Spans,
    Start,
    Stop,
    TakeSpans,
)
from ssd.engine.transport import LocalTransport

if TYPE_CHECKING:
    from ssd.engine.draft import Drafter
    from ssd.models import LoadedModel

logger = logging.getLogger(__name__)

ORPHAN_CHECK_SECONDS = 0.5
# Of a draft's environment. Its threads sleep once a forward is done: with a core shared, the target's turn has come.
DEFAULTS = {"OMP_WAIT_POLICY": "passive"}


class Process(Protocol):
    """What is asked of the process of a draft, as of a subprocess.Popen."""

    @property
    def pid(self) -> int | None:
        """Its number on this host."""

    def kill(self) -> None:
        """End it."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""


def spawn(boot: Boot) -> tuple[subprocess.Popen[bytes], Link]:
    """Start the draft's process in a session of its own (Ctrl-C is the engine's to handle) and return it with our end of the link."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = python.start(
            "ssd.engine.draft_process",
            str(theirs.fileno()),
            str(os.getpid()),
            defaults=DEFAULTS,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    link = Link(LocalTransport(Connection(ours.detach())))
    try:
        link.send(boot)
    except LinkError:
        end(process, link)
        raise
    return process, link


def end(process: Process, link: Link) -> None:
    """End a draft's process, whatever it is doing."""
    with suppress(OSError):
        process.kill()
    process.wait()
    link.close()


def serve(link: Link, load: Callable[[Boot], LoadedModel]) -> None:
    """Load what the first message asks for, then obey messages until told to leave."""
    boot = link.expect(Boot)
    try:
        drafter = _drafter(boot, link, load)
    except Exception as error:
        link.send(Failed(f"the draft did not load: {type(error).__name__}: {error}"))
        # The engine says why; a traceback of this process would only bury it.
        raise SystemExit(1) from error
    link.send(Ready())
    try:
        run(drafter, link)
    except LinkError:
        raise
    except Exception as error:
        link.send(Failed(f"the draft failed: {type(error).__name__}: {error}"))
        raise


def run(drafter: Drafter, link: Link) -> None:
    """Obey messages until told to leave, and work ahead while none is there."""
    while True:
        if link.peek() is None and drafter.work():
            continue
        message = link.receive()
        if isinstance(message, Shutdown):
            return
        obey(drafter, link, message)


def _drafter(boot: Boot, link: Link, load: Callable[[Boot], LoadedModel]) -> Drafter:
    from ssd.engine.draft import Drafter

    return Drafter(load(boot), link, boot.rows, boot.max_model_len, boot.vocab_size)


def load_draft(boot: Boot) -> LoadedModel:
    """Load the draft where it is to run; ValueError where this host has no such device or model."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from ssd.devices import check_present, pin, torch_device
    from ssd.models import load, locate

    disable_progress_bar()  # type: ignore[no-untyped-call]
    check_present("placement.draft", boot.placement.draft)
    pin(boot.placement.draft)
    source, device = locate("draft", boot.draft), torch_device(boot.placement.draft)
    loaded = load(source, device, getattr(torch, boot.dtype), drafts=True, int8=boot.int8)
    # What is loaded stays; looking through it for garbage would take some 40 ms now and then, in the midst of a round.
    gc.freeze()
    return loaded


def obey(drafter: Drafter, link: Link, message: object) -> None:
    """Do what one message says."""
    from ssd.devices import pin
    from ssd.engine.confidence import Confidence
    from ssd.engine.rehearsal import rank_tokens, rehearse

    match message:
        case Setup():
            pin(message.placement.draft)
            link.stay_awake(message.placement)
            drafter.configure(message)
            link.send(Ready())
        case Start():
            drafter.start(message)
        case Outcomes():
            drafter.answer(message)
        case BackUp():
            drafter.back_up(message)
        case Sent():
            drafter.follow(message)
        case Stop():
            drafter.stop(message.request)
        case Rehearse():
            again = (lambda done: done < message.repeats) if message.repeats else (lambda done: link.peek() is None)
            link.send(Rehearsed(tuple(rehearse(drafter.loaded, message.tokens, message.context, again))))
        case Score():
            confidence = Confidence()
            ranks = rank_tokens(drafter.loaded, message.tokens, message.start, confidence)
            link.send(Scored(tuple(ranks), confidence.counts()))
        case TakeSpans():
            link.send(Spans(tuple(drafter.spans)))
            drafter.spans.clear()
        case Ping():
            link.send(Ping(monotonic()))
        case _:
            raise LinkError(f"{type(message).__name__} is no message for a draft")


def leave_with(parent: int) -> None:
    """End this process soon after its parent has ended, even in the middle of a forward."""
    while os.getppid() == parent:
        threading.Event().wait(ORPHAN_CHECK_SECONDS)
    os._exit(1)


def main() -> None:
    """Serve the link whose file descriptor, with the parent's process id, stands on the command line."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=leave_with, args=(parent,), daemon=True).start()
    link = Link(LocalTransport(Connection(descriptor)))
    try:
        serve(link, load_draft)
    except LinkError as error:
        logger.info("leaving: %s", error)


if __name__ == "__main__":
    main()
