"""Serve several callers at once on the embedded pair: `python serving.py [TRACE.json]`; open the trace at ui.perfetto.dev."""

import asyncio
import sys
import time

import ssd

PROMPTS = [
    "def fibonacci(n):\n",
    "class Stack:\n    ",
    "import os\n\ndef walk(top):\n",
    "def quicksort(items):\n",
    "def gcd(a, b):\n",
    "with open(",
]

hardware = ssd.Hardware.local()
ids = tuple(device.id for device in hardware.devices)
if len(ids) < 2:
    sys.exit("this machine has one device: SSD needs a second one for the draft")
plan = ssd.Plan(
    mode="ssd",
    num_speculative_tokens=3,
    budget=5,  # outcomes cached for a request, on average: each round the most probable ones of all requests
    building="anytime",
    placement=ssd.Placement(target=ids[:1], draft=ids[-1:]),
    hardware=hardware,
    models=ssd.Models(),
)


async def caller(engine: ssd.Engine, name: int, prompt: str) -> int:
    """Ask for one text, each caller with a temperature and a seed of its own, and say when it began and ended."""
    params = ssd.SamplingParams(max_tokens=64, temperature=0.2 * name, seed=name)
    begin = time.monotonic()
    async for chunk in engine.astream(prompt, params):
        if chunk.output is not None:
            metrics = chunk.output.metrics
            first = f"{1e3 * metrics.time_to_first_token:.0f} ms to the first"
            print(f"caller {name}: {metrics.num_output_tokens} tokens in {time.monotonic() - begin:.2f} s, {first}")
            print(f"    {chunk.output.text[:60]!r}")
            return metrics.num_output_tokens
    return 0


async def main() -> None:
    """Let all callers ask at once, then look at what came of it."""
    with ssd.Engine.from_plan(plan, max_num_seqs=4) as engine:
        await engine.agenerate("warm up", ssd.SamplingParams(max_tokens=16))
        engine.timeline()
        begin = time.monotonic()
        tokens = sum(await asyncio.gather(*(caller(engine, name, prompt) for name, prompt in enumerate(PROMPTS))))
        metrics, health = engine.metrics(), engine.health()
        print(f"{tokens / (time.monotonic() - begin):.0f} tokens/s together; hit rate {metrics.cache_hit_rate:.0%}, ", end="")
        print(f"acceptance {metrics.draft_acceptance_rate:.0%}, draft {health.draft}")
        if len(sys.argv) > 1:
            engine.timeline().save(sys.argv[1])
            print(f"trace written to {sys.argv[1]}")


asyncio.run(main())
