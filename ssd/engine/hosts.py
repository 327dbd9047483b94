"""Where an engine meets the drafts of other hosts: a torch.distributed store that the engine listens at, or torchrun's own.

A draft's worker that comes takes a number under its host's name, and waits until the engine calls that number; both then make a process
group of their own and prove to each other that they know the secret. A worker that is lost comes again under another number, so that
nothing of an old connection is ever met again. Requests cross the network as they are, unencrypted: it has to be one that is yours.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from datetime import timedelta
from time import monotonic, sleep
from typing import TYPE_CHECKING

from ssd.engine.address import SECRET, Address, secret, under_torchrun
from ssd.engine.gloo import CONNECT_SECONDS, GlooTransport, join
from ssd.engine.link import Boot, Link, LinkError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

# Longer than any answer of a store takes, but for one that is gone.
STORE_SECONDS = 10.0
LOOK_SECONDS = 0.1
# A worker that waits to be called looks every LOOK_SECONDS.
CALL_SECONDS = 2.0
NONCE = 32


def prove(transport: GlooTransport, known: bytes, we: str, they: str) -> Link:
    """Prove that we know the secret and see that the other does, neither of which tells it; LinkError, and the end, otherwise."""
    try:
        ours = secrets.token_bytes(NONCE)
        transport.send(ours)
        theirs = transport.receive(CONNECT_SECONDS)
        transport.send(hmac.digest(known, we.encode() + ours + theirs, "sha256"))
        proof = hmac.digest(known, they.encode() + theirs + ours, "sha256")
        if not hmac.compare_digest(transport.receive(CONNECT_SECONDS), proof):
            raise LinkError(f"the other does not know the secret: {SECRET} must be the same on both hosts")
    except LinkError:
        transport.close()
        raise
    return Link(transport)


class Meeting:
    """The engine's side. name: of a host, as device ids have it before the slash."""

    def __init__(self, listen: str | None) -> None:
        """Listen at HOST:PORT, port 0 for any, or have torchrun's store in one of its processes; ValueError where neither can be."""
        self._secret = secret()
        self._closed = threading.Event()
        self._called: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        of_torchrun = under_torchrun()
        self._store: Store | None
        if listen is not None:
            self.address, self._store = _listening(Address.parse("listen", listen))
        elif of_torchrun is not None:
            self.address, self._store = of_torchrun, _reached(of_torchrun)
        else:
            raise ValueError(
                "placement.draft is on another host: give listen='HOST:PORT', an address of this one, for its worker to connect to"
            )

    def await_draft(self, name: str, deadline: float) -> Link:
        """Return a link to a worker of host `name`, which is to be booted; LinkError where none comes within `deadline` seconds."""
        end, refused = monotonic() + deadline, ""
        while True:
            number = self._next(name)
            if number is not None:
                try:
                    return self._call(name, number)
                except LinkError as error:
                    refused = f"; the last that came was turned away: {error}"
            elif monotonic() > end:
                raise LinkError(
                    f"no draft came from {name!r} to {self.address} within {deadline:g} s: start `ssd draft --connect {self.address} "
                    f"--name {name}` there{refused}"
                )
            else:
                self._closed.wait(LOOK_SECONDS)

    def close(self) -> None:
        """Wait for nobody any more, and let who waits for us know."""
        self._closed.set()
        self._store = None

    @property
    def _open(self) -> Store:
        if self._store is None:
            raise LinkError("the engine was closed")
        return self._store

    def _next(self, name: str) -> int | None:
        """Return the latest number that has not been called, and let nobody else call it."""
        with self._lock:
            latest = self._open.add(_arrivals(name), 0)
            number = next((n for n in range(latest, 0, -1) if (name, n) not in self._called), None)
            if number is not None:
                self._called.add((name, number))
            return number

    def _call(self, name: str, number: int) -> Link:
        store = self._open
        store.set(_key("called", name, number), "")
        if not _appears(store, _key("coming", name, number), CALL_SECONDS, self._closed):
            raise LinkError("it has gone again")
        return prove(join(_pair(store, name, number), 0, self.address.own()), self._secret, "engine", "draft")


class Elsewhere:
    """In place of the process of a draft on another host, which is not ours to end: closing the link lets it go."""

    pid = None

    def kill(self) -> None:
        """Do nothing."""

    def wait(self, timeout: float | None = None) -> int:
        """Return at once."""
        return 0


def await_draft(meeting: Meeting, name: str, boot: Boot, deadline: float) -> tuple[Elsewhere, Link]:
    """Wait for a worker of host `name` and tell it what to load, as ssd.engine.draft_process.spawn does with one of this host."""
    link = meeting.await_draft(name, deadline)
    try:
        link.send(boot)
    except LinkError:
        link.close()
        raise
    return Elsewhere(), link


def visit(address: Address, name: str) -> Link:
    """Go to an engine as a draft's worker of host `name` and return the link once it calls; LinkError where it is gone."""
    known, store = secret(), _reached(address)
    try:
        number = store.add(_arrivals(name), 1)
        while not store.check([_key("called", name, number)]):
            sleep(LOOK_SECONDS)
        store.set(_key("coming", name, number), "")
    except RuntimeError as error:
        raise LinkError(f"the engine at {address} is gone") from error
    return prove(join(_pair(store, name, number), 1, address.own()), known, "draft", "engine")


def _listening(address: Address) -> tuple[Address, Store]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        # Made here, so that it listens at this address alone, where a TCPStore would at all.
        listener = socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise ValueError(
            f"listen={address}: this machine cannot listen there ({error}); give an address of its own and a free port"
        ) from error
    bound = Address(address.host, listener.getsockname()[1])
    seconds = timedelta(seconds=STORE_SECONDS)
    store = TCPStore(bound.host, bound.port, is_master=True, wait_for_workers=False, timeout=seconds, master_listen_fd=listener.detach())
    return bound, store


def _reached(address: Address) -> Store:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        # Whether anybody is there: a TCPStore tells at length, on stderr, that nobody is.
        socket.create_connection((address.host, address.port), STORE_SECONDS).close()
        return TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
    except (OSError, RuntimeError) as error:
        raise LinkError(f"there is no engine at {address} ({type(error).__name__})") from error


def _appears(store: Store, key: str, seconds: float, closed: threading.Event) -> bool:
    end = monotonic() + seconds
    while not (there := store.check([key])) and monotonic() < end and not closed.is_set():
        closed.wait(LOOK_SECONDS / 2)
    return there


def _arrivals(name: str) -> str:
    return f"ssd/{name}/arrivals"


def _key(what: str, name: str, number: int) -> str:
    return f"ssd/{name}/{number}/{what}"


def _pair(store: Store, name: str, number: int) -> Store:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(_key("pair", name, number), store)
