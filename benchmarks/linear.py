"""All linear layers of a Qwen2.5 model, one pass: torch in fp32 beside the packed bf16 kernel.

    taskset -c 1 python benchmarks/linear.py [threads]

Random weights of the models' shapes. Milliseconds are medians of interleaved passes; GB/s counts the kernel's own two bytes
a weight and GFLOP/s two operations a multiply-add.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ssd.engine.linear import FastLinear

TOKENS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
PASSES = 5
# hidden, key/value and intermediate size, layers
MODELS = {"Qwen2.5-0.5B": (896, 128, 4864, 24), "Qwen2.5-1.5B": (1536, 256, 8960, 28)}
VOCABULARY = 151936


def shapes(hidden: int, keys: int, intermediate: int) -> list[tuple[int, int]]:
    """(out, in) of the linear layers of one block."""
    attention = [(hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)]
    return [*attention, (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]


def seconds(layers: Sequence[nn.Module], tokens: int) -> float:
    """Seconds of one pass of `tokens` tokens through all layers."""
    inputs = {layer.in_features: torch.randn(1, tokens, layer.in_features) for layer in layers}
    start = time.perf_counter()
    for layer in layers:
        layer(inputs[layer.in_features])
    return time.perf_counter() - start


def build(hidden: int, keys: int, intermediate: int, count: int, make: Callable[[torch.Tensor], nn.Module]) -> list[nn.Module]:
    """One model's linear layers, the head last."""
    all_shapes = shapes(hidden, keys, intermediate) * count + [(VOCABULARY, hidden)]
    return [make(torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)) for shape in all_shapes]


def fp32(weight: torch.Tensor) -> nn.Linear:
    """Torch's layer on the same numbers."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(weight.float(), requires_grad=False)
    layer.out_features, layer.in_features = weight.shape
    return layer


def main() -> None:
    """Print one table per model."""
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    for name, sizes in MODELS.items():
        ours, torchs = build(*sizes, FastLinear), build(*sizes, fp32)
        weights = sum(layer.in_features * layer.out_features for layer in ours)
        print(f"{name}: {len(ours)} linear layers, {weights / 1e6:.0f} M weights, {torch.get_num_threads()} thread(s)")
        print(f"{'tokens':>6} {'torch fp32 ms':>14} {'packed bf16 ms':>15} {'ratio':>6} {'GB/s':>6} {'GFLOP/s':>8}")
        for tokens in TOKENS:
            times = [(seconds(torchs, tokens), seconds(ours, tokens)) for _ in range(PASSES + 1)][1:]
            slow, fast = (statistics.median(column) for column in zip(*times, strict=True))
            rates = f"{2 * weights / fast / 1e9:>6.1f} {2 * weights * tokens / fast / 1e9:>8.0f}"
            print(f"{tokens:>6} {slow * 1e3:>14.1f} {fast * 1e3:>15.1f} {slow / fast:>6.1f} {rates}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
