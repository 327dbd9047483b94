"""A forward over key-value slots against what the machine allows: bytes of weights over bandwidth, operations over rate.

    taskset -c 0 python benchmarks/forward.py [MODEL...] [--draft] [--context 256] [--json FILE]

One thread on one core. For each number of tokens: milliseconds (medians of interleaved forwards), times one token's, and the bound, the
larger of both quotients. Bandwidth (a loop of vector additions over a gibibyte) and rate (a loop of fused multiply-adds in registers) are
measured in the same run. --draft keeps matrices in a byte a weight, as large drafts are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from ssd import native
from ssd.engine.forward import SlotModel, chain
from ssd.engine.kv import Trunk
from ssd.models import load, locate, weight_bytes
from ssd.native import I64, LONGS, Code, ir
from ssd.specs import EMBEDDED_DRAFT, EMBEDDED_TARGET

TOKENS = (1, 2, 3, 4, 5, 6, 8, 12)
CPU = torch.device("cpu")


def loop(build: Any) -> native.Kernel:
    """A kernel that adds to twelve sums, `build(code, sums, first, i)`, its second argument times."""
    vectors = native.host_vectors()
    if vectors is None:
        raise SystemExit(native.why_unavailable())
    module = ir.Module()
    code = Code(module, "loop", [LONGS, I64, I64, I64], vectors.lanes)
    first, count, out, _ = code.longs(code.args[0], 4)
    sums = code.variables(12, code.constant(0.0))
    with code.loop(0, count) as i:
        build(code, sums, code.pointer(first), i)
    for place, variable in enumerate(sums):
        code.store(code.b.load(variable), code.at(code.pointer(out), place * vectors.lanes))
    code.b.ret_void()
    return native.kernel(module, code.function, 3)


def best_seconds(kernel: native.Kernel, data: torch.Tensor, count: int) -> float:
    """The least seconds of some runs."""
    out = torch.zeros(12 * 16)
    arguments = native.integers((data.data_ptr(), count, out.data_ptr(), 1))
    seconds = []
    for _ in range(7):
        begin = time.perf_counter()
        kernel.run(arguments)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def machine() -> tuple[float, float]:
    """Bytes and operations a second of this core."""
    lanes = native.host_vectors().lanes  # type: ignore[union-attr]
    data = torch.ones(1 << 28)
    part = len(data) // 4
    steps = part // (3 * lanes)

    def read(code: Code, sums: list[Any], first: Any, i: Any) -> None:
        for place, variable in enumerate(sums):
            # Several streams at once, as the kernels read weights: one alone is slower.
            at = code.at(first, code.product(place // 3, part), code.product(i, 3 * code.lanes), place % 3 * code.lanes)
            code.b.store(code.b.fadd(code.load(at), code.b.load(variable)), variable)

    def multiply(code: Code, sums: list[Any], first: Any, i: Any) -> None:
        for variable in sums:
            code.b.store(code.fma(code.load(first), code.load(first), code.b.load(variable)), variable)

    bandwidth = steps * 12 * lanes * 4 / best_seconds(loop(read), data, steps)
    return bandwidth, 1_000_000 * 12 * lanes * 2 / best_seconds(loop(multiply), torch.full((16,), 1e-3), 1_000_000)


def measure(name: str, context: int, int8: bool, repeats: int) -> dict[int, float]:
    """Median seconds of a forward by its tokens, after `context` tokens."""
    model = SlotModel(load(locate("target", name), CPU, torch.float32, int8=int8), 1, context + 64)
    trunk = Trunk(model.slots)
    prompt = chain(trunk, [5 + place % 1000 for place in range(context)], 1, CPU)
    model.forward({0: prompt})
    trunk.add(prompt.slots)
    seconds: dict[int, list[float]] = {tokens: [] for tokens in TOKENS}
    for _ in range(repeats):
        for tokens in TOKENS:
            queries = chain(trunk, list(range(7, 7 + tokens)), tokens, CPU)
            begin = time.perf_counter()
            model.forward({0: queries})
            seconds[tokens].append(time.perf_counter() - begin)
            trunk.slots.release(queries.slots)
    return {tokens: statistics.median(found[2:]) for tokens, found in seconds.items()}


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[EMBEDDED_TARGET, EMBEDDED_DRAFT])
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    bandwidth, rate = machine()
    print(f"one core: {bandwidth / 1e9:.1f} GB/s read, {rate / 1e9:.0f} GFLOP/s fp32")
    found = []
    for name in given.models:
        source = locate("target", name)
        seconds = measure(name, given.context, given.draft, given.repeats)
        embedding = source.vocab_size * source.config.hidden_size
        tied = getattr(source.config, "tie_word_embeddings", False)
        # The embedding is looked up; a tied head is a copy of it, and read.
        read = weight_bytes(source, torch.float32, CPU, int8=given.draft) - 2 * embedding
        weights = source.parameters - (0 if tied else embedding)
        print(f"\n{name}: {weights / 1e6:.0f} M weights, {read / 1e6:.0f} MB read a forward, context {given.context}")
        print(f"{'tokens':>6} {'ms':>8} {'times one':>9} {'bytes ms':>9} {'operations ms':>13} {'over bound':>10}")
        for tokens, median in seconds.items():
            bounds = read / bandwidth, 2 * weights * tokens / rate
            row = f"{median * 1e3:>8.2f} {median / seconds[1]:>9.2f} {bounds[0] * 1e3:>9.2f} {bounds[1] * 1e3:>13.2f}"
            print(f"{tokens:>6} {row} {median / max(bounds):>10.2f}", flush=True)
        found.append({"model": name, "int8": given.draft, "read_bytes": read, "weights": weights, "seconds": seconds})
    if given.json:
        given.json.write_text(json.dumps({"bytes_per_second": bandwidth, "operations_per_second": rate, "models": found}, indent=2))


if __name__ == "__main__":
    main()
