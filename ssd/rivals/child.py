"""Our end of a rival's process: started by command, asked over pipes, ended with the benchmark."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from typing import Self, TypeVar

from ssd import python
from ssd.rivals.messages import Decode, Decoded, Failed, Load, Loaded
from ssd.specs import Spec

T = TypeVar("T", bound=Spec)


class RefusedError(RuntimeError):
    """The program said that it cannot."""


class Child:
    """A process that has loaded what was asked. Use as a context manager. RuntimeError where it could not, or is gone."""

    def __init__(self, asked: Load) -> None:
        self.program = asked.program
        quiet = {"TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
        self.process = python.start("ssd.rivals.process", defaults=quiet, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.load_seconds = self._ask(asked, Loaded).seconds
        except BaseException:
            self.close()
            raise

    def decode(self, asked: Decode) -> Decoded:
        """Decode prompts together; RefusedError where the program cannot."""
        return self._ask(asked, Decoded)

    def _ask(self, asked: Spec, kind: type[T]) -> T:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            print(asked.model_dump_json(), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of {self.program} is gone (exit code {self.process.wait()})")
        if answer.startswith('{"reason"'):
            raise RefusedError(f"{self.program}: {Failed.model_validate_json(answer).reason}")
        return kind.model_validate_json(answer)

    def close(self) -> None:
        """End the process; harmless when called twice."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
