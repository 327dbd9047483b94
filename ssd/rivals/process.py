"""The process of another program: loads what its first line asks for, then decodes what each further line holds.

`python -m ssd.rivals.process`: JSON lines in on stdin and out on what was stdout; it leaves when stdin ends.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from time import monotonic
from typing import Protocol

from ssd.devices import cores as cores_among
from ssd.rivals.messages import Decode, Decoded, Failed, Load, Loaded
from ssd.specs import Spec


class Decoder(Protocol):
    """Whatever decodes prompts."""

    def decode(self, asked: Decode) -> Decoded:
        """Decode prompts together."""
        ...


def keep_to(cores: tuple[int, ...]) -> None:
    """Keep to these cores, if there are any, from before the first thread is started: threads run where they are born."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def load(asked: Load, threads: int) -> Decoder:
    """Load the models."""
    if asked.program == "llama.cpp":
        from ssd.rivals.llama_cpp import LlamaCpp

        return LlamaCpp(asked, threads)
    from ssd.rivals.hf import Transformers

    return Transformers(asked, threads)


def serve(asked: Load, lines: Callable[[], Iterator[str]]) -> Iterator[Spec]:
    """Load, then yield an answer for every line."""
    begin, cores = monotonic(), cores_among(asked.devices)
    try:
        keep_to(cores)
        further = lines()
        decoder = load(asked, len(cores))
    except Exception as error:
        yield Failed(reason=f"{type(error).__name__}: {error}")
        return
    yield Loaded(seconds=monotonic() - begin)
    for line in further:
        try:
            yield decoder.decode(Decode.model_validate_json(line))
        except Exception as error:
            yield Failed(reason=f"{type(error).__name__}: {error}")


def _lines() -> Iterator[str]:
    """Return the lines of stdin as they come; its end, as when the parent is gone, ends this process whatever it is doing."""
    came: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            came.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return iter(came.get, "")


def main() -> None:
    """Serve; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for answer in serve(Load.model_validate_json(sys.stdin.readline()), _lines):
        print(answer.model_dump_json(), file=answers, flush=True)


if __name__ == "__main__":
    main()
