"""Where the time of a round goes, on the target's side and on the draft's: measured from inside, and drawn.

    python benchmarks/rounds.py --out rounds.json [--target T --draft D] [--k 3] [--fan-out 1,1,1,1] [--temperature 0]
    python benchmarks/rounds.py --plot rounds.svg before.json after.json

Runs AR and SSD (typed by hand, so that versions may be compared) on one prompt set, the two models on a core each, and takes the medians of
what a round spends in the target's forward, in the rest of the verification (sampling, rows), in waiting for the draft and in all else
(scheduler, link, text); and of a step of the draft, by the draft's own spans.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sim.metrics import Round
from sim.timeline import Span
from ssd.asked import Asked
from ssd.engine import forward, scheduler, target
from ssd.engine.engine import Engine
from ssd.models import inspect
from ssd.options import plan_to_run
from ssd.prompts import prompts
from ssd.specs import Configuration, Placement, SamplingParams

PARTS = ("target forward", "rest of verification", "wait for the draft", "all else")
COLOURS = ("#4269d0", "#6cc5b0", "#ff725c", "#9c6b4e")


def watch(kind: Any, name: str, seconds: dict[str, list[float]], label: str) -> None:
    """Note how long each call of a method takes."""
    method: Callable[..., Any] = getattr(kind, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds[label].append(time.perf_counter() - begin)

    setattr(kind, name, timed)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds by mode and part."""
    seconds: dict[str, list[float]] = defaultdict(list)
    watch(forward.SlotModel, "forward", seconds, "forward")
    watch(target.Target, "round", seconds, "round")
    watch(scheduler.Scheduler, "step", seconds, "step")
    typed = {"num_speculative_tokens": given.k, "fan_out": given.fan_out, "backup": given.backup, "prompt_set": given.prompt_set}
    plan = plan_to_run(Asked(target=given.target, draft=[given.draft] if given.draft else None, mode="ssd", **typed), lambda *_: None)
    texts = prompts(given.prompt_set, given.num_prompts + 1, inspect(plan.models).tokenizer)
    params = SamplingParams(max_tokens=given.output_tokens, temperature=given.temperature, seed=1 if given.temperature else None)
    alone = Configuration(mode="ar", placement=Placement(target=plan.placement.target))
    found: dict[str, Any] = {}
    with Engine.from_plan(plan) as engine:
        for mode, configuration in (("ar", alone), ("ssd", plan)):
            engine.configure(configuration)
            engine.generate(texts[0], params)
            engine.timeline()
            seconds.clear()
            rounds = [one for text in texts[1:] for output in engine.generate(text, params) for one in output.rounds]
            found[mode] = _parts(seconds, rounds, engine.timeline().spans)
    return found


def _parts(seconds: dict[str, list[float]], rounds: Sequence[Round], spans: Sequence[Span]) -> dict[str, Any]:
    parts = {name: statistics.median(values) for name, values in seconds.items()}
    wait = statistics.median([one.wait_seconds for one in rounds])
    values = parts["forward"], parts["round"] - parts["forward"], wait, max(0.0, parts["step"] - parts["round"] - wait)
    steps = [span.end - span.start for span in spans if (span.device, span.activity) == ("draft", "build")]
    return {
        "parts_ms": {name: 1e3 * value for name, value in zip(PARTS, values, strict=True)},
        "draft_step_ms": 1e3 * statistics.median(steps) if steps else None,
        "committed": statistics.mean(one.committed for one in rounds),
    }


def show(found: dict[str, Any]) -> None:
    """Print a table."""
    for mode, one in found.items():
        parts = ", ".join(f"{name} {value:.2f} ms" for name, value in one["parts_ms"].items())
        step = "" if one["draft_step_ms"] is None else f"; a draft step {one['draft_step_ms']:.2f} ms"
        print(f"{mode.upper()}: {parts}{step}; {one['committed']:.2f} tokens a round")


def plot(files: list[Path], out: Path) -> None:
    """Draw the rounds of several files, a bar each."""
    import matplotlib.pyplot as plt

    bars = [(f"{mode.upper()}, {file.stem}", json.loads(file.read_text())[mode]["parts_ms"]) for mode in ("ar", "ssd") for file in files]
    figure, axes = plt.subplots(figsize=(9, 0.6 * len(bars) + 1.2))
    left = [0.0] * len(bars)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        widths = [parts[part] for _, parts in bars]
        axes.barh([name for name, _ in bars], widths, left=left, label=part, color=colour, height=0.6)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:.1f}", va="center")
    axes.invert_yaxis()
    axes.set_xlabel("ms a round")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False)
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--prompt-set", default="code")
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--fan-out", default="1,1,1,1")
    parser.add_argument("--backup", default="jit")
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    if given.plot:
        plot(given.files, given.plot)
        return
    found = measure(given)
    show(found)
    if given.out:
        given.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
