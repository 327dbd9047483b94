"""The draft's worker on another host than the engine's: it goes to the engine, serves it, and comes again whatever parted them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from ssd import python
from ssd.engine.address import Address, secret
from ssd.engine.draft_process import DEFAULTS, leave_with, load_draft, serve
from ssd.engine.link import Boot, Link
from ssd.engine.transport import LinkError

if TYPE_CHECKING:
    from ssd.models import LoadedModel

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0


class Kept:
    """Loads what an engine asks for, and keeps it for the next that asks for the same."""

    def __init__(self) -> None:
        self._what: tuple[object, ...] = ()
        self._loaded: LoadedModel | None = None

    def __call__(self, boot: Boot) -> LoadedModel:
        """Return the model; it is loaded only if another was asked for before."""
        from ssd.devices import pin

        what = boot.draft, boot.dtype, boot.placement.draft, boot.int8
        if self._loaded is None or what != self._what:
            # Two would not fit.
            self._loaded, self._what = None, ()
            self._loaded, self._what = load_draft(boot), what
        pin(boot.placement.draft)
        return self._loaded


def serve_engines(address: Address, name: str, *, once: bool = False) -> None:
    """Serve the engine at `address`, and after it the next, as a worker of host `name`; once: return when the first says farewell."""
    from ssd.devices import available_cores, pin_to
    from ssd.engine.hosts import visit

    kept, cores, told = Kept(), available_cores(), ""
    while True:
        # The network's thread begins here, and has no business on the draft's cores alone.
        pin_to(cores)
        try:
            link = visit(address, name)
            logger.info("serving the engine at %s", address)
            told = _parted(link, kept)
            if once and not told:
                return
            logger.info("done with the engine at %s: %s", address, told or "it said farewell")
        except LinkError as error:
            if str(error) != told:
                told = str(error)
                logger.warning("%s; trying again every %g s", told, AGAIN_SECONDS)
        time.sleep(AGAIN_SECONDS)


def _parted(link: Link, kept: Kept) -> str:
    """Serve, and return why that ended, nothing where the engine said farewell."""
    try:
        serve(link, kept)
    except LinkError as error:
        return str(error)
    except SystemExit as end:
        return str(end.__cause__)
    except Exception as error:
        logger.exception("the draft failed")
        return f"{type(error).__name__}: {error}"
    finally:
        link.close()
    return ""


def supervise(address: Address, name: str) -> None:
    """Keep a process that serves the engines at `address`, and start another whenever it dies. ValueError if there is no secret."""
    secret()
    while True:
        process = python.start("ssd.engine.draft_host", str(address), name, str(os.getpid()), defaults=DEFAULTS, stdin=subprocess.DEVNULL)
        try:
            code = process.wait()
        finally:
            process.kill()
        logger.warning("the draft's process ended (%d); another is started in %g s", code, AGAIN_SECONDS)
        time.sleep(AGAIN_SECONDS)


def main() -> None:
    """Serve engines; the command line has their address, the name of this host and the process id of the parent."""
    address, name, parent = Address.parse("connect", sys.argv[1]), sys.argv[2], int(sys.argv[3])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    threading.Thread(target=leave_with, args=(parent,), daemon=True).start()
    try:
        serve_engines(address, name)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
