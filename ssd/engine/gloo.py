"""Messages between two hosts: torch.distributed's gloo, point to point in a process group of two.

A message is one frame of a fixed size, its length in front; what does not fit follows as one more tensor. The next frame's receive is
always posted, so that gloo's own thread takes it from the network while ours computes. What gloo does, seen with torch 2.13 and tested:

- `Work.is_completed` says no until somebody has waited, so whether a frame is there is read from its last bytes, its number, which
  arrive last.
- A wait that runs out of time closes the connection for good, and so does the end of the peer's process, at once.
- A peer that vanishes without a word (its cable pulled) is never noticed. Each side therefore sends an empty frame when it has sent none
  for a second, and gives the other up that has not been heard for ten.
- A wait cannot be broken off from another thread: closing from there takes effect when the wait ends.
"""

from __future__ import annotations

import struct
import threading
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ssd.engine.transport import LinkError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

# Drafts of a few requests, without laws, fit; on a network of a gigabit a second it takes 33 us.
FRAME = 4096
LENGTH = struct.Struct("<q")
ROOM = FRAME - 2 * LENGTH.size
# A law over a vocabulary of a quarter million for each of a thousand draft tokens; more is a mistake.
LONGEST = 1 << 30
PULSE_SECONDS, SILENCE_SECONDS = 1.0, 10.0
CONNECT_SECONDS = 10.0
FRAMES, RESTS = 0, 1


def join(store: Store, rank: int, address: str) -> GlooTransport:
    """Make the process group of rank 0, the engine, and rank 1, the draft, which both have the store; address: our own, as the other
    reaches it. LinkError where the other does not come."""
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=CONNECT_SECONDS)
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    try:
        return GlooTransport(ProcessGroupGloo(store, rank, 2, options), 1 - rank)
    except RuntimeError as error:
        raise LinkError(f"no connection came about ({_first_line(error)})") from error


class GlooTransport:
    """One end of a process group of two; see ssd.engine.transport.Transport, and above for what a deadline that passes does."""

    def __init__(self, group: ProcessGroup, peer: int) -> None:
        self._group: ProcessGroup | None = group
        self._peer = peer
        self._patience = timedelta(seconds=SILENCE_SECONDS)
        self._frame = torch.zeros(FRAME, dtype=torch.uint8)
        self._bytes = self._frame.numpy()
        self._number = self._bytes[-LENGTH.size :].view(np.int64)
        self._received = self._sent = 0
        self._heard = self._spoke = monotonic()
        self._leaving: list[tuple[Any, torch.Tensor]] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._awaited = self._post(self._frame, FRAMES)
        threading.Thread(target=self._pulse, name="ssd-link-pulse", daemon=True).start()

    def send(self, data: bytes) -> None:  # noqa: D102
        with self._lock:
            self._send(data)

    def ready(self) -> bool:  # noqa: D102
        while self._number[0] == self._received + 1:
            if LENGTH.unpack_from(self._bytes)[0]:
                return True
            self._wait(self._awaited, self._patience)
            self._take()
        return monotonic() - self._heard > SILENCE_SECONDS

    def receive(self, deadline: float | None) -> bytes:  # noqa: D102
        end = None if deadline is None else monotonic() + deadline
        while True:
            left = SILENCE_SECONDS if end is None else min(SILENCE_SECONDS, max(1e-3, end - monotonic()))
            self._wait(self._awaited, timedelta(seconds=left))
            if data := self._take():
                return data

    def give_up_after(self, seconds: float) -> None:  # noqa: D102
        self._patience = timedelta(seconds=max(1e-3, min(seconds, SILENCE_SECONDS)))

    def watch(self, seconds: float) -> None:
        """Do nothing: the message comes through gloo's own thread, which needs the core."""

    def close(self) -> None:  # noqa: D102
        self._closed.set()
        with self._lock:
            # The last references to the group are its works'.
            self._group, self._awaited, self._leaving = None, None, []

    def _send(self, data: bytes) -> None:
        self._flush()
        frame = np.zeros(FRAME, dtype=np.uint8)
        part = data[:ROOM]
        LENGTH.pack_into(frame, 0, len(data))
        frame[LENGTH.size : LENGTH.size + len(part)] = np.frombuffer(part, dtype=np.uint8)
        self._sent += 1
        LENGTH.pack_into(frame, FRAME - LENGTH.size, self._sent)
        self._start(torch.from_numpy(frame), FRAMES)
        if len(data) > ROOM:
            self._start(torch.frombuffer(bytearray(data[ROOM:]), dtype=torch.uint8), RESTS)
        self._spoke = monotonic()

    def _start(self, tensor: torch.Tensor, tag: int) -> None:
        self._leaving.append((self._work(lambda group: group.send([tensor], self._peer, tag)), tensor))

    def _flush(self) -> None:
        """Wait until what was sent is with the system, which as a rule it is at once."""
        for work, _ in self._leaving:
            self._wait(work, self._patience)
        self._leaving.clear()

    def _post(self, tensor: torch.Tensor, tag: int) -> Any:
        return self._work(lambda group: group.recv([tensor], self._peer, tag))

    def _work(self, begin: Any) -> Any:
        if self._group is None:
            raise LinkError("the link is closed")
        try:
            return begin(self._group)
        except RuntimeError as error:
            raise LinkError(f"the peer is gone ({_first_line(error)})") from error

    def _wait(self, work: Any, patience: timedelta) -> None:
        if work is None:
            raise LinkError("the link is closed")
        try:
            work.wait(patience)
        except RuntimeError as error:
            if "Timed out" in str(error):
                raise LinkError(f"no message within {patience.total_seconds():g} s") from error
            raise LinkError(f"the peer is gone ({_first_line(error)})") from error

    def _take(self) -> bytes:
        """Return the message whose frame has come, none of an empty one, and let the next come."""
        self._received += 1
        self._heard = monotonic()
        length = LENGTH.unpack_from(self._bytes)[0]
        if not 0 <= length <= LONGEST:
            raise LinkError(f"a message of {length} bytes")
        data = self._bytes[LENGTH.size : LENGTH.size + min(length, ROOM)].tobytes()
        rest = torch.empty(length - ROOM, dtype=torch.uint8) if length > ROOM else None
        coming = None if rest is None else self._post(rest, RESTS)
        self._awaited = self._post(self._frame, FRAMES)
        if rest is not None:
            self._wait(coming, self._patience)
            data += rest.numpy().tobytes()
        return data

    def _pulse(self) -> None:
        with suppress(LinkError):
            while not self._closed.wait(PULSE_SECONDS):
                # Whoever is sending just now is heard anyway.
                if monotonic() - self._spoke >= PULSE_SECONDS and self._lock.acquire(blocking=False):
                    try:
                        self._send(b"")
                    finally:
                        self._lock.release()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rpartition("] ")[2][:200] if str(error) else type(error).__name__
