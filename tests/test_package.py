"""The package as a whole: cheap to import, its arrows one way."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import ssd


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_ssd_brings_no_heavy_library():
    heavy = "{'torch', 'transformers', 'scipy', 'llvmlite', 'rich', 'typer'}"
    assert run(f"import sys, ssd, ssd.specs; print(sorted({heavy} & set(sys.modules)))").strip() == "[]"


def test_importing_ssd_takes_under_half_a_second():
    bare = min(elapsed("pass") for _ in range(3))
    assert min(elapsed("import ssd; ssd.Hardware, ssd.SamplingParams") for _ in range(3)) - bare < 0.5


def elapsed(code: str) -> float:
    begin = time.perf_counter()
    run(code)
    return time.perf_counter() - begin


def test_every_public_name_is_there_and_an_unknown_one_is_an_attribute_error():
    for name in ssd.__all__:
        assert getattr(ssd, name) is not None
    assert set(ssd.__all__) <= set(dir(ssd))
    with pytest.raises(AttributeError, match="no attribute 'Egnine'"):
        ssd.Egnine  # noqa: B018


def test_the_arrows_point_from_ssd_to_sim_to_theory():
    result = subprocess.run([Path(sys.executable).parent / "lint-imports"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
