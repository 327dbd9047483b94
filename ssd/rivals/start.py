"""Which rivals can be measured beside a pair, and starting them; what cannot be is refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import get_args

from ssd.devices import are_cores, torch_device
from ssd.models import Source, compute_dtype, locate
from ssd.rivals.child import Child
from ssd.rivals.messages import Load, Program, Rival, Way
from ssd.specs import Models, Placement

WHEEL = "cyllama"


def check(programs: Sequence[str], models: Models, devices: Sequence[str]) -> None:
    """Refuse programs that are unknown or not installed, or that cannot decode these models on these devices; ValueError."""
    for program in programs:
        if program not in get_args(Program):
            raise ValueError(f"against={program!r} is unknown: use {' or '.join(get_args(Program))}")
        if program == "llama.cpp":
            _check_llama_cpp(models, devices)
    if len(set(programs)) < len(programs):
        raise ValueError(f"against={list(programs)} names one twice: give each once")


def _check_llama_cpp(models: Models, devices: Sequence[str]) -> None:
    if not models.target.endswith(".gguf"):
        raise ValueError(f"against='llama.cpp': target={models.target!r} is no .gguf file, and llama.cpp reads nothing else: give one")
    if not are_cores(tuple(devices)):
        raise ValueError(f"against='llama.cpp': it is measured on CPU cores, not on {', '.join(devices)}: leave it out")
    if find_spec(WHEEL) is None:
        raise ValueError(f"against='llama.cpp': the wheel that carries it is not installed: pip install {WHEEL}, or leave it out")


def rivals(programs: Sequence[Program], models: Models, devices: tuple[str, ...]) -> dict[Rival, Program]:
    """Return the ways in which the programs decode, all on all devices, or on the first one where these are accelerators."""
    place = Placement(target=devices if are_cores(devices) else devices[:1])
    found: dict[Rival, Program] = {}
    for program in programs:
        ways: list[Way] = ["llama.cpp"] if program == "llama.cpp" else ["transformers"]
        if program == "transformers" and models.draft is not None:
            ways.append("transformers assisted")
        weights = stored(locate("target", models.target)) if program == "llama.cpp" else _dtype(models, place)
        found |= {Rival(mode=way, weights=weights, placement=place): program for way in ways}
    return found


def start(program: Program, models: Models, place: Placement, rows: int, length: int) -> Child:
    """Start a program's process and wait until it has loaded; RuntimeError where it cannot."""
    target = locate("target", models.target)
    draft = locate("draft", models.draft) if program == "transformers" and models.draft is not None else None
    return Child(
        Load(
            program=program,
            target=(target.folder, target.gguf_file),
            draft=None if draft is None else (draft.folder, draft.gguf_file),
            dtype=_dtype(models, place),
            devices=place.target,
            rows=rows,
            length=length,
        )
    )


def _dtype(models: Models, place: Placement) -> str:
    return str(compute_dtype(models, torch_device(place.target))).removeprefix("torch.")


def stored(source: Source) -> str:
    """Return what a checkpoint holds: the quantisation of a .gguf file, such as Q4_K_M, or else a type of torch's."""
    if source.gguf_file is None:
        return str(source.config.dtype).removeprefix("torch.")
    from pathlib import Path

    from gguf import GGUFReader, LlamaFileType

    field = GGUFReader(Path(source.folder) / source.gguf_file).get_field("general.file_type")
    return "unknown" if field is None else str(LlamaFileType(int(field.contents())).name.removeprefix("MOSTLY_"))
