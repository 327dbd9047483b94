"""The options that commands share, and what was given for them. Cheap to import: `ssd --help` needs it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

SHARED: dict[str, Any] = {
    "target": Annotated[str | None, typer.Option(help="Model whose text is wanted: hub id, folder or .gguf. [default: the embedded pair]")],
    "draft": Annotated[
        list[str] | None, typer.Option(help="Model that proposes tokens; none for AR only. Given several times, the best is chosen.")
    ],
    "hardware": Annotated[str | None, typer.Option(help="local, a name such as 5xH100-SXM, or a .json file. [default: local]")],
    "mode": Annotated[str | None, typer.Option(help="Force ar, sd or ssd. [default: the planner's choice]")],
    "max_model_len": Annotated[int | None, typer.Option(help="Prompt and output together, tokens.")],
    "dtype": Annotated[str | None, typer.Option(help="auto, float32 or bfloat16. [default: auto]")],
    "draft_weights": Annotated[
        str | None, typer.Option(help="A draft's matrices on a CPU: checkpoint, or int8, which is faster. [default: int8 for large ones]")
    ],
    "prompt_tokens": Annotated[int | None, typer.Option(help="Length of a prompt to plan for, tokens.")],
    "output_tokens": Annotated[int | None, typer.Option(help="Length of an output, tokens.")],
    "batch_size": Annotated[int | None, typer.Option(help="Requests to plan for that are decoded together. [default: 1]")],
    "temperature": Annotated[float | None, typer.Option(help="Sampling temperature to plan for. [default: 0]")],
    "max_seconds_per_token": Annotated[
        float | None,
        typer.Option(
            help="Bearable seconds between a request's tokens, for --objective throughput or cost: plan as many requests together."
        ),
    ],
    "prompt_set": Annotated[str | None, typer.Option(help="Prompts to measure on: code, chat or library. [default: code]")],
    "objective": Annotated[str | None, typer.Option(help="latency, throughput or cost. [default: latency]")],
    "profile": Annotated[Path | None, typer.Option(help="Measured latency and acceptance, from `ssd profile`.", show_default=False)],
    "plan": Annotated[Path | None, typer.Option(help="A saved plan to use instead of planning.", show_default=False)],
    "num_speculative_tokens": Annotated[
        int | None, typer.Option("--num-speculative-tokens", "--k", help="Lookahead K, typed by hand instead of planned (with --mode).")
    ],
    "fan_out": Annotated[str | None, typer.Option(help="F_0,...,F_K, typed by hand, such as 1,1,1,2.")],
    "budget": Annotated[int | None, typer.Option(help="Outcomes cached a request, chosen anew each round, instead of --fan-out.")],
    "building": Annotated[str | None, typer.Option(help="fixed, or anytime: build on while there is time. [default: fixed]")],
    "draft_workers": Annotated[
        int | None, typer.Option(help="Draft processes that share the cached outcomes, a device each, typed by hand. [default: 1]")
    ],
    "backup": Annotated[str | None, typer.Option(help="Who drafts on a miss: jit, ngram or none, typed by hand. [default: jit]")],
}
# How to draft, typed by hand.
TYPED = ("num_speculative_tokens", "fan_out", "budget", "building", "draft_workers", "backup")
PLANNING = tuple(name for name in SHARED if name not in TYPED)
# A profile has lists of temperatures and prompt sets of its own.
MEASURING = ("target", "draft", "hardware", "max_model_len", "dtype", "draft_weights", "prompt_tokens", "output_tokens", "batch_size")
# What generates decodes one request at a time, at the temperature that it is given.
RUNNING = tuple(name for name in SHARED if name not in ("batch_size", "temperature", "max_seconds_per_token"))
# A benchmark has lists of these of its own.
AXES = ("prompt_tokens", "batch_size", "temperature", "num_speculative_tokens", "budget")
BENCHING = tuple(name for name in SHARED if name not in AXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options that commands share, None where one was not given."""

    target: str | None = None
    draft: list[str] | None = None
    hardware: str | None = None
    mode: str | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    draft_weights: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    batch_size: int | None = None
    temperature: float | None = None
    max_seconds_per_token: float | None = None
    prompt_set: str | None = None
    objective: str | None = None
    profile: Path | None = None
    plan: Path | None = None
    num_speculative_tokens: int | None = None
    fan_out: str | None = None
    budget: int | None = None
    building: str | None = None
    draft_workers: int | None = None
    backup: str | None = None


def takes(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the shared options `names`, which it gets together as its first argument."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            asked = Asked(**{name: given.pop(name) for name in names})
            command(asked, **given)

        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        shared = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=SHARED[name]) for name in names]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own] + shared
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate
