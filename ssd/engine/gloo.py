"""Messages between two hosts: torch.distributed's gloo, point to point in a process group of two.

A message is one frame of a fixed size, its length in front; what does not fit follows as one more tensor. Receives of the next frames are
always posted, so that gloo's own thread takes them from the network while ours computes. What gloo does, seen with torch 2.13 and tested:

- A send is over, and its memory free, only once the other side has posted the receive; so whoever computes for long must have posted some.
- `Work.is_completed` says no until somebody has waited, so whether a frame is there is read from its last bytes, its number, which
  arrive last.
- A wait that runs out of time closes the connection for good, and so does the end of the peer's process, at once.
- A peer that vanishes without a word (its cable pulled) is never noticed. Each side therefore sends an empty frame when it has sent none
  for a second, and gives the other up that has not been heard for ten.
- A wait cannot be broken off from another thread: closing from there takes effect when the wait ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from ssd.engine.transport import LinkError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store, Work  # type: ignore[attr-defined]

# Drafts of a few requests, without laws, fit; on a network of a gigabit a second it takes 33 us.
FRAME = 4096
# Of the length at its beginning, and of the number at its end.
WORD = 8
ROOM = FRAME - 2 * WORD
# A law over a vocabulary of a quarter million for each of a thousand draft tokens; more is a mistake.
LONGEST = 1 << 30
# Receives that are posted, and sends that may be under way.
POSTED = 8
PULSE_SECONDS, SILENCE_SECONDS = 1.0, 10.0
CONNECT_SECONDS = 10.0
FRAMES, RESTS = 0, 1


def join(store: Store, rank: int, address: str) -> GlooTransport:
    """Make the process group of rank 0, the engine, and rank 1, the draft, which both have the store; address: our own, as the other
    reaches it. LinkError where the other does not come."""
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=CONNECT_SECONDS)
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    try:
        return GlooTransport(cast("ProcessGroup", ProcessGroupGloo(store, rank, 2, options)), 1 - rank)
    except RuntimeError as error:
        raise LinkError(f"no connection came about ({_first_line(error)})") from error


class _Frame:
    """Memory for a frame: its length, the bytes, its number."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(FRAME, dtype=torch.uint8)
        self.bytes = self.tensor.numpy()
        self.number = self.bytes[-WORD:].view(np.int64)
        self.length = self.bytes[:WORD].view(np.int64)

    def fill(self, data: bytes, number: int) -> None:
        part = data[:ROOM]
        self.length[0], self.number[0] = len(data), number
        self.bytes[WORD : WORD + len(part)] = np.frombuffer(part, dtype=np.uint8)

    def part(self) -> bytes:
        return self.bytes[WORD : WORD + min(int(self.length[0]), ROOM)].tobytes()


class GlooTransport:
    """One end of a process group of two; see ssd.engine.transport.Transport, and above for what a deadline that passes does."""

    def __init__(self, group: ProcessGroup, peer: int) -> None:
        self._group: ProcessGroup | None = group
        self._peer = peer
        self._patience = SILENCE_SECONDS
        self._received = self._sent = 0
        self._heard = self._spoke = monotonic()
        self._frames = [_Frame() for _ in range(POSTED)]
        self._awaited: list[Work] = [self._post(frame.tensor, FRAMES) for frame in self._frames]
        self._leaving: deque[tuple[Work, torch.Tensor]] = deque()
        # What came while nobody asked.
        self._inbox: deque[bytes] = deque()
        self._sending, self._reading = threading.Lock(), threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._pulse, name="ssd-link-pulse", daemon=True).start()

    def send(self, data: bytes) -> None:  # noqa: D102
        with self._sending:
            self._send(data)

    def ready(self) -> bool:  # noqa: D102
        with self._reading:
            self._drain(1)
        return bool(self._inbox) or monotonic() - self._heard > SILENCE_SECONDS

    def receive(self, deadline: float | None) -> bytes:  # noqa: D102
        end = None if deadline is None else monotonic() + deadline
        with self._reading:
            while not self._inbox:
                left = SILENCE_SECONDS if end is None else min(SILENCE_SECONDS, end - monotonic())
                self._take(left, deadline if left < SILENCE_SECONDS else None)
            return self._inbox.popleft()

    def give_up_after(self, seconds: float) -> None:  # noqa: D102
        self._patience = min(seconds, SILENCE_SECONDS)

    def watch(self, seconds: float) -> None:
        """Do nothing: the message comes through gloo's own thread, which needs the core."""

    def close(self) -> None:  # noqa: D102
        self._closed.set()
        # The last references to the group are its works'; a thread that waits for one lets go when the wait ends.
        self._group = None
        self._awaited = []
        self._leaving.clear()

    def _send(self, data: bytes) -> None:
        while len(self._leaving) >= POSTED:
            self._wait(self._leaving[0][0], self._patience)
            self._leaving.popleft()
        frame = _Frame()
        self._sent += 1
        frame.fill(data, self._sent)
        self._start(frame.tensor, FRAMES)
        if len(data) > ROOM:
            self._start(torch.frombuffer(bytearray(data[ROOM:]), dtype=torch.uint8), RESTS)
        self._spoke = monotonic()

    def _start(self, tensor: torch.Tensor, tag: int) -> None:
        self._leaving.append((self._begun(lambda group: group.send([tensor], self._peer, tag)), tensor))

    def _post(self, tensor: torch.Tensor, tag: int) -> Work:
        return self._begun(lambda group: group.recv([tensor], self._peer, tag))

    def _begun(self, begin: Callable[[ProcessGroup], Work]) -> Work:
        group = self._group
        if group is None:
            raise LinkError("the link is closed")
        try:
            return begin(group)
        except RuntimeError as error:
            raise LinkError(f"the peer is gone ({_first_line(error)})") from error

    def _wait(self, work: Work, seconds: float, told: float | None = None) -> None:
        """Wait for so many seconds, which are told of as `told`."""
        try:
            work.wait(timedelta(seconds=max(1e-3, seconds)))
        except RuntimeError as error:
            if "Timed out" in str(error):
                raise LinkError(f"no message within {seconds if told is None else told:g} s") from error
            raise LinkError(f"the peer is gone ({_first_line(error)})") from error

    def _drain(self, enough: float) -> None:
        """Take what is there, until so many messages wait to be asked for."""
        while len(self._inbox) < enough and self._frames[self._received % POSTED].number[0] == self._received + 1:
            self._take(SILENCE_SECONDS)

    def _take(self, seconds: float, told: float | None = None) -> None:
        """Wait so long for the next frame, put what it brings into the inbox, unless it is empty, and post its memory again."""
        place = self._received % POSTED
        if not self._awaited:
            raise LinkError("the link is closed")
        self._wait(self._awaited[place], seconds, told)
        frame = self._frames[place]
        length, data = int(frame.length[0]), frame.part()
        self._received += 1
        self._heard = monotonic()
        if not 0 <= length <= LONGEST or frame.number[0] != self._received:
            raise LinkError(f"a message of {length} bytes, the {frame.number[0]}th, came as the {self._received}th")
        if length > ROOM:
            rest = torch.empty(length - ROOM, dtype=torch.uint8)
            self._wait(self._post(rest, RESTS), self._patience)
            data += rest.numpy().tobytes()
        self._awaited[place] = self._post(frame.tensor, FRAMES)
        if data:
            self._inbox.append(data)

    def _pulse(self) -> None:
        """Show every second that we are there, and take what came, so that the peer's sends come to an end."""
        # Whoever finds the link broken or closed here leaves it to those who want something of it to be told.
        with suppress(LinkError, IndexError):
            while not self._closed.wait(PULSE_SECONDS):
                with _if_free(self._sending) as free:
                    if free and monotonic() - self._spoke >= PULSE_SECONDS:
                        self._send(b"")
                with _if_free(self._reading) as free:
                    if free:
                        self._drain(inf)


@contextmanager
def _if_free(lock: threading.Lock) -> Iterator[bool]:
    """Take a lock for the block if nobody has it: whoever is sending, or reading, just now does it anyway."""
    free = lock.acquire(blocking=False)
    try:
        yield free
    finally:
        if free:
            lock.release()


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rpartition("] ")[2][:200] if str(error) else type(error).__name__
