"""What properties are tried on: settings and strategies that several tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st


def several(examples: int) -> settings:
    """So many examples, the same ones each time, however long they take to make."""
    return settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))


def fan_outs(K: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Lists F_0..F_K of up to three that cache something."""
    return st.lists(st.integers(0, 3), min_size=K + 1, max_size=K + 1).filter(any).map(tuple)
