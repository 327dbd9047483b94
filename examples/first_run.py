"""The whole way once, without a download: make a pair, plan for this machine, stream as planned, compare AR, SD and SSD.

`python first_run.py [FOLDER]` keeps the pair of examples/tiny_pair.py in FOLDER (default: out/demo-pair). Its weights are random: the
text is noise, the speeds are real.
"""

import sys
from pathlib import Path

from rich.console import Console
from tiny_pair import make_pair
from transformers.utils.logging import disable_progress_bar

import ssd
from ssd.bench import bench
from ssd.bench.tables import report
from ssd.prompts import prompts

disable_progress_bar()
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out/demo-pair")
target, draft = make_pair(folder)
hardware, models = ssd.Hardware.local(), ssd.Models(target=target, draft=draft)
workload = ssd.Workload(prompt_tokens=128, output_tokens=64)

print("Profiling this machine ...", flush=True)
plan = ssd.plan(hardware, models, workload)
print(plan.explain(), end="\n\n")

with ssd.Engine.from_plan(plan) as engine:
    for chunk in engine.stream("def fib(n):", ssd.SamplingParams(max_tokens=128)):
        print(chunk.text, end="", flush=True)
    print(f"\n\n{1 / chunk.output.metrics.time_per_output_token:.1f} tokens/s in mode {plan.mode}\n")

console = Console(highlight=False)
console.width = max(console.width, 175)
console.print(report(bench(plan, prompts=prompts("code", 6, engine.pair.tokenizer), output_tokens=workload.output_tokens)))
