"""How bytes get from one process to another: what every way offers, and the local socket."""

from __future__ import annotations

import os
import select
import socket
import struct
from multiprocessing.connection import Connection
from time import monotonic
from typing import Protocol

# A wait is so many short ones. Of what passes while this process itself stands still, as the whole machine may, one of them is counted:
# the peer, which stood still too, has the rest of its deadline.
PARTS = 10


class LinkError(Exception):
    """The peer is gone, silent past the deadline, or talks nonsense."""


class Transport(Protocol):
    """One end of a way for bytes, in order; every call raises LinkError once the peer is gone."""

    def send(self, data: bytes) -> None:
        """Send `data`, without waiting for the peer to look at it."""

    def ready(self) -> bool:
        """Whether something is there; a peer that is gone counts. Asking costs a microsecond or two."""

    def receive(self, deadline: float | None) -> bytes:
        """Return what was sent next; LinkError if nothing comes within `deadline` seconds (None: wait for ever), after which the transport
        may be of no more use."""

    def give_up_after(self, seconds: float) -> None:
        """Let a peer that stops reading, or stops in the middle of a message, be a LinkError after `seconds`."""

    def watch(self, seconds: float) -> None:
        """Look out for so many seconds with open eyes, before falling asleep, where that makes waking up quicker."""

    def close(self) -> None:
        """Close this end; the peer finds out."""


class LocalTransport:
    """A socket between two processes of one machine."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # Asked between any two layers of a forward: one call to the system, where `Connection.poll` makes five.
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)

    def give_up_after(self, seconds: float) -> None:  # noqa: D102
        limit = struct.pack("@ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def send(self, data: bytes) -> None:  # noqa: D102
        try:
            self._connection.send_bytes(data)
        except (OSError, ValueError) as error:
            raise LinkError(f"the peer is gone ({error})") from error

    def receive(self, deadline: float | None) -> bytes:  # noqa: D102
        try:
            if deadline is not None and not any(self._poll.poll(1000 * deadline / PARTS) for _ in range(PARTS)):
                raise LinkError(f"no message within {deadline:g} s")
            return self._connection.recv_bytes()
        except LinkError:
            raise
        except Exception as error:
            raise LinkError(f"the peer is gone ({type(error).__name__})") from error

    def ready(self) -> bool:  # noqa: D102
        return bool(self._poll.poll(0))

    def watch(self, seconds: float) -> None:  # noqa: D102
        end = monotonic() + seconds
        while not self._poll.poll(0) and monotonic() < end:
            pass

    def close(self) -> None:  # noqa: D102
        self._connection.close()
