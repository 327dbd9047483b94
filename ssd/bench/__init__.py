"""Compare configurations on this machine: run them in turn on the same prompts."""

from ssd.bench.measure import bench
from ssd.bench.result import BenchResult, BenchRow

__all__ = ["BenchResult", "BenchRow", "bench"]
