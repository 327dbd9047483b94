"""Computed latencies against published ones: what the roofline was calibrated on, and what it was not.

python benchmarks/roofline.py             # prints the table of docs/planning.md
"""

from __future__ import annotations

from dataclasses import dataclass

from ssd.roofline import Forward
from ssd.shapes import shape
from ssd.specs import Hardware

PAPER, REPLICATION, GPT_FAST = "arXiv 2603.03251", "its replication", "gpt-fast README"
CONTEXT = {PAPER: 384, REPLICATION: 384, GPT_FAST: 100}


@dataclass(frozen=True, slots=True)
class Anchor:
    """A published duration of a forward of so many tokens on so many devices, and what in the roofline was set by it."""

    source: str
    model: str
    devices: str
    tokens: int
    milliseconds: float
    calibrates: str = ""

    def computed(self) -> float:
        """Milliseconds by the roofline."""
        devices = Hardware.named(self.devices).devices
        return 1e3 * Forward(shape(self.model), 2, CONTEXT[self.source]).seconds(devices, self.tokens)

    @property
    def error(self) -> float:
        """Computed over published, less 1."""
        return self.computed() / self.milliseconds - 1


ANCHORS = (
    Anchor(PAPER, "Llama-3.1-70B-Instruct", "4xH100-SXM", 1, 1e3 / 54.7, "memory, layer, all-reduce"),
    Anchor(PAPER, "Llama-3.2-1B-Instruct", "1xH100-SXM", 1, 1.7, "memory, layer"),
    Anchor(REPLICATION, "Qwen3-0.6B", "1xH100-SXM", 18, 2.54, "a token more"),
    Anchor(GPT_FAST, "Mixtral-8x7B-Instruct-v0.1", "4xA100-80GB", 1, 1e3 / 118.23, "experts' memory"),
    Anchor(PAPER, "Qwen3-32B", "4xH100-SXM", 1, 1e3 / 88.8),
    Anchor(REPLICATION, "Qwen3-32B", "4xH100-SXM", 1, 1e3 / 97.4),
    Anchor(REPLICATION, "Qwen3-32B", "4xH100-SXM", 6, 11.45),
    Anchor(GPT_FAST, "Llama-2-7b-chat-hf", "1xA100-80GB", 1, 1e3 / 104.9),
    Anchor(GPT_FAST, "Llama-2-7b-chat-hf", "2xA100-80GB", 1, 1e3 / 168.84),
    Anchor(GPT_FAST, "Llama-2-7b-chat-hf", "4xA100-80GB", 1, 1e3 / 254.02),
    Anchor(GPT_FAST, "Llama-2-7b-chat-hf", "8xA100-80GB", 1, 1e3 / 328.43),
    Anchor(GPT_FAST, "Llama-2-70b-chat-hf", "2xA100-80GB", 1, 1e3 / 21.32),
    Anchor(GPT_FAST, "Llama-2-70b-chat-hf", "4xA100-80GB", 1, 1e3 / 38.01),
    Anchor(GPT_FAST, "Llama-2-70b-chat-hf", "8xA100-80GB", 1, 1e3 / 62.50),
    Anchor(GPT_FAST, "Mixtral-8x7B-Instruct-v0.1", "2xA100-80GB", 1, 1e3 / 78.75),
    Anchor(GPT_FAST, "Mixtral-8x7B-Instruct-v0.1", "8xA100-80GB", 1, 1e3 / 203.69),
)


def main() -> None:
    """Print the table, and the mean error of what was not used."""
    print("| forward | devices | tokens | published ms | computed ms | error | calibrates | source |\n|---|---|---|---|---|---|---|---|")
    for a in ANCHORS:
        numbers = f"{a.milliseconds:.2f} | {a.computed():.2f} | {a.error:+.1%}"
        print(f"| {a.model} | {a.devices} | {a.tokens} | {numbers} | {a.calibrates} | {a.source} |")
    checks = [abs(a.error) for a in ANCHORS if not a.calibrates]
    print(f"\nOf the {len(checks)} that nothing was calibrated on: mean error {sum(checks) / len(checks):.1%}, worst {max(checks):.1%}.")


if __name__ == "__main__":
    main()
