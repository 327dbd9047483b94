"""See target and draft at work together, on the embedded pair: `python timeline.py [TRACE.json]`; open the trace at ui.perfetto.dev."""

import sys

import ssd
from sim.timeline import Span

WIDTH = 72
SIGNS = {"verify": "V", "wait": ".", "prefill": "P", "answer": "A", "build": "B", "idle": "."}


def picture(spans: list[Span], begin: float, end: float) -> str:
    """Draw what each device did between two times, a letter for each activity."""
    lines = []
    for device in ("target", "draft"):
        line = [" "] * WIDTH
        for span in spans:
            if span.device == device and span.start < end and span.end > begin:
                first, last = (round(WIDTH * (min(max(t, begin), end) - begin) / (end - begin)) for t in (span.start, span.end))
                line[first : max(last, first + 1)] = SIGNS[span.activity] * (max(last, first + 1) - first)
        lines.append(f"{device:>6} |{''.join(line[:WIDTH])}|")
    return "\n".join(lines)


hardware = ssd.Hardware.local()
ids = tuple(device.id for device in hardware.devices)
if len(ids) < 2:
    sys.exit("this machine has one device: SSD needs a second one for the draft")
plan = ssd.Plan(
    mode="ssd",
    num_speculative_tokens=3,
    fan_out_hit=(1, 1, 1, 2),
    fan_out_miss=(1, 1, 1, 2),
    placement=ssd.Placement(target=ids[:1], draft=ids[-1:]),
    hardware=hardware,
    models=ssd.Models(),
)
with ssd.Engine.from_plan(plan) as engine:
    engine.generate("warm up", ssd.SamplingParams(max_tokens=16))
    engine.timeline()
    metrics = engine.generate("def fib(n):", ssd.SamplingParams(max_tokens=64, ignore_eos=True))[0].metrics
    timeline = engine.timeline()

rounds = [span for span in timeline.spans if span.activity == "verify"]
middle = rounds[len(rounds) // 2]
following = rounds[len(rounds) // 2 + 1]
print(f"{timeline.overlap():.0%} of the draft's work was done while the target verified.")
speed = f"{1 / metrics.time_per_output_token:.1f} tokens/s"
print(f"hit rate {metrics.cache_hit_rate:.0%}, acceptance {metrics.draft_acceptance_rate:.0%}, {speed}")
print(f"round {middle.round}, {1e3 * (following.start - middle.start):.1f} ms: V verify, B build the cache, A answer, . wait")
print(picture(timeline.spans, middle.start, following.start))
if len(sys.argv) > 1:
    timeline.save(sys.argv[1])
    print(f"trace of all {len(timeline.spans)} spans written to {sys.argv[1]}")
