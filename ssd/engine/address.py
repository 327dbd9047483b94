"""Where an engine is found from other hosts, what they are called, and the secret that they share. Cheap to import."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from ssd.engine.transport import LinkError

SECRET = "SSD_SECRET"


@dataclass(frozen=True, slots=True)
class Address:
    """A host, by name or number, and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, option: str, text: str) -> Address:
        """Read `HOST:PORT` or `[HOST]:PORT`; ValueError names the option."""
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"{option}={text!r}: give HOST:PORT, such as 10.0.0.1:29400")
        if host in ("0.0.0.0", "::", "*"):
            raise ValueError(f"{option}={text!r} is every address at once: give the one by which the hosts reach each other")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def own(self) -> str:
        """Return the address of this machine that faces the other; no packet is sent. LinkError where there is no way."""
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
        except OSError as error:
            raise LinkError(f"there is no way to {self} ({error})") from error


def secret() -> bytes:
    """Return what both sides know; ValueError where it is not set."""
    text = os.environ.get(SECRET, "")
    if not text:
        raise ValueError(f"{SECRET} is not set: give the engine and the drafts of other hosts the same text in this environment variable")
    return text.encode()


def under_torchrun() -> Address | None:
    """Return where torchrun's store is, if this is one of its processes."""
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return None
    return Address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))


def this_host() -> str:
    """Return the name of this host in device ids: torchrun's number of it, as in `node1`, or what it is called."""
    return f"node{os.environ['GROUP_RANK']}" if "GROUP_RANK" in os.environ else socket.gethostname()


def rank() -> int:
    """Return the number of this process among torchrun's, 0 for the engine's and for one that torchrun did not start."""
    return int(os.environ.get("RANK", "0")) if under_torchrun() is not None else 0


def local_rank() -> int:
    """Return the number of this process among torchrun's on this host, 0 for one that torchrun did not start."""
    return int(os.environ.get("LOCAL_RANK", "0")) if under_torchrun() is not None else 0
