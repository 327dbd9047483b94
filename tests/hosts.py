"""Another host on this machine: a network namespace at the far end of a virtual link, which can be pulled out and made slow."""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

NUMBERS = count()
# Of the networks that are set aside for tests between networks (RFC 2544).
NETWORK = "198.18"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Host:
    """A namespace; `here` and `there` are the two ends' addresses, `device` what this end of the link is called."""

    name: str
    device: str
    here: str
    there: str

    def start(self, *words: str, secret: str = "a secret", log: Path | None = None, **more: object) -> subprocess.Popen:
        """Run a command of this Python over there."""
        root = str(Path(__file__).parents[1])
        env = {**os.environ, "PYTHONPATH": root, "SSD_SECRET": secret, "TRANSFORMERS_VERBOSITY": "error"}
        out = subprocess.DEVNULL if log is None else log.open("ab")
        command = ["ip", "netns", "exec", self.name, sys.executable, *words]
        return subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, **more)

    def pull(self) -> None:
        """Pull the cable out."""
        _ip("link", "set", self.device, "down")

    def plug(self) -> None:
        """Put it in again."""
        _ip("link", "set", self.device, "up")


@contextmanager
def another_host(delay: float | None = None) -> Iterator[Host]:
    """A host behind a link of `delay` seconds one way; None: a link as quick as the kernel's. OSError where this may not be had."""
    number = (os.getpid() + next(NUMBERS)) % 60000
    host = Host(f"ssd{number}", f"ssdv{number}", *(f"{NETWORK}.{number // 250}.{4 * (number % 60) + end}" for end in (1, 2)))
    _ip("netns", "add", host.name)
    try:
        with _joined(host, delay):
            for where, device, address in (((), host.device, host.here), (("-n", host.name), f"{host.device}t", host.there)):
                _ip(*where, "addr", "add", f"{address}/30", "dev", device)
                _ip(*where, "link", "set", device, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
            yield host
    finally:
        _ip("netns", "del", host.name)


@contextmanager
def _joined(host: Host, delay: float | None) -> Iterator[None]:
    if delay is None:
        _ip("link", "add", host.device, "type", "veth", "peer", "name", f"{host.device}t", "netns", host.name)
        yield
        return
    # A kernel without netem has no slow links: two ends of our own, and the delay between them in a process of its own.
    ends = [_tun(name) for name in (host.device, f"{host.device}t")]
    _ip("link", "set", f"{host.device}t", "netns", host.name)
    carrier = subprocess.Popen([sys.executable, __file__, *map(str, ends), str(delay)], pass_fds=ends)
    try:
        yield
    finally:
        carrier.kill()
        carrier.wait()
        for end in ends:
            os.close(end)


def _tun(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return end


def _carry(a: int, b: int, delay: float) -> None:
    """Hand packets on, each `delay` seconds after it came."""
    other, under_way, order = {a: b, b: a}, [], count()
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select([a, b], [], [], wait)[0]:
            with suppress(BlockingIOError):
                while packet := os.read(end, 1 << 16):
                    heapq.heappush(under_way, (time.monotonic() + delay, next(order), other[end], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            *_, end, packet = heapq.heappop(under_way)
            # An end that is down takes nothing, as a cable that is out.
            with suppress(OSError):
                os.write(end, packet)


def why_not() -> str | None:
    """Why there can be no other host here, None where there can."""
    try:
        with another_host():
            return None
    except OSError as error:
        return str(error)


if __name__ == "__main__":
    _carry(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
