"""The whole way once, without a download: plan the embedded pair for this machine, stream as planned, compare AR, SD and SSD."""

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

import ssd
from ssd.bench import bench
from ssd.bench.tables import report
from ssd.prompts import prompts

PROMPT = """def mean(numbers):
    \"\"\"Return the arithmetic mean of a sequence of numbers.\"\"\""""

disable_progress_bar()
hardware, models = ssd.Hardware.local(), ssd.Models()
workload = ssd.Workload(prompt_tokens=64, output_tokens=96, prompt_set="library")

print("Profiling this machine ...", flush=True)
plan = ssd.plan(hardware, models, workload)
print(plan.explain(), end="\n\n")

with ssd.Engine.from_plan(plan) as engine:
    print(PROMPT, end="")
    for chunk in engine.stream(PROMPT, ssd.SamplingParams(max_tokens=128)):
        print(chunk.text, end="", flush=True)
    print(f"\n\n{1 / chunk.output.metrics.time_per_output_token:.1f} tokens/s in mode {plan.mode}\n")

console = Console(highlight=False)
console.width = max(console.width, 120)
console.print(report(bench(plan, prompts=prompts("library", 6), output_tokens=workload.output_tokens)))
