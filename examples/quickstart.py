"""Plan for this machine and decode as planned: `python quickstart.py [TARGET DRAFT]`, by default with the embedded pair."""

import sys

import ssd

hardware = ssd.Hardware.local()
models = ssd.Models(target=sys.argv[1], draft=sys.argv[2]) if sys.argv[1:] else ssd.Models()
plan = ssd.plan(hardware, models)
print(plan.explain())
with ssd.Engine.from_plan(plan) as engine:
    for chunk in engine.stream("def fib(n):", ssd.SamplingParams(max_tokens=64)):
        print(chunk.text, end="", flush=True)
