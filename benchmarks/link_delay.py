"""What the link's delay costs when the draft is on another host: predicted and measured, the embedded pair, a core a model.

python -m benchmarks.link_delay [--delays 0 1 5] [--repeats N]: needs Linux, two cores and the right to make network namespaces. The
other host is such a namespace behind a virtual link; where it has a delay (ms, one way), a process hands packets on after it, on cores
that the two models use as well. Prints a Markdown table. Predicted is what the simulator says with a profile of this machine, its link
slower by as much as the engine measured the latency to be.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import ssd
from ssd.devices import available_cores
from ssd.engine.engine import Engine
from ssd.outcomes import outcome_model
from ssd.pace import pace
from ssd.prediction import play
from ssd.profiler import profile
from ssd.prompts import prompts
from ssd.specs import Configuration, Placement, Plan, Profile, SamplingParams, Workload
from tests.hosts import another_host

SECRET, NAME = "of this run", "far"
TOKENS, PROMPTS = 128, 4


def ways(place: Placement) -> dict[str, Configuration]:
    """The modes that are compared."""
    lists = {"fan_out_hit": (1, 1, 1, 2), "fan_out_miss": (1, 1, 1, 2)}
    return {
        "ar": Configuration(mode="ar", placement=Placement(target=place.target)),
        "sd": Configuration(mode="sd", num_speculative_tokens=3, placement=place),
        "ssd": Configuration(mode="ssd", num_speculative_tokens=3, placement=place, **lists),
    }


@contextmanager
def running(plan: Plan, delay: float | None) -> Iterator[Engine]:
    """An engine whose draft is on another host behind such a delay, seconds; None: on this one."""
    if delay is None:
        with Engine.from_plan(plan) as engine:
            yield engine
        return
    with another_host(delay or None) as host:
        with socket.create_server((host.here, 0)) as probe:
            address = f"{host.here}:{probe.getsockname()[1]}"
        worker = host.start("-m", "ssd.cli", "draft", "--connect", address, "--name", NAME, secret=SECRET)
        try:
            with Engine.from_plan(plan.with_draft_on(NAME), listen=address) as engine:
                yield engine
        finally:
            worker.kill()
            worker.wait()


def measured(engine: Engine, repeats: int) -> dict[str, tuple[float, float | None, float | None]]:
    """Of each mode: tokens a second after the first of a request, hit rate, and bytes a round on the link."""
    texts = prompts("code", PROMPTS, engine.pair.tokenizer)
    found = {}
    for mode, configuration in ways(engine.plan.placement).items():
        engine.configure(configuration)
        engine.generate(texts[0], SamplingParams(max_tokens=16, ignore_eos=True))
        before = engine.metrics()
        outputs = [engine.generate(text, SamplingParams(max_tokens=TOKENS, ignore_eos=True))[0] for _ in range(repeats) for text in texts]
        if engine.health().draft == "lost":
            raise RuntimeError(f"the draft was lost: {engine.health().reason}")
        after = engine.metrics()
        rounds = after.num_rounds - before.num_rounds
        each = [output.metrics for output in outputs]
        hits, misses = (sum(getattr(m, f"num_cache_{kind}") for m in each) for kind in ("hits", "misses"))
        moved = (after.link_bytes or 0) - (before.link_bytes or 0)
        seconds = statistics.mean(m.time_per_output_token or 0.0 for m in each)
        found[mode] = 1 / seconds, hits / (hits + misses) if mode == "ssd" else None, moved / rounds if mode != "ar" else None
    return found


def predicted(known: Profile, place: Placement, link_seconds: float) -> dict[str, float]:
    """Tokens a second of each mode, by the simulator, with a link that takes so much longer than the profile's as it does."""
    found, there = {}, known.model_copy(update={"link_seconds": max(known.link_seconds, link_seconds)})
    shared = known.round_cost("sd", Placement(target=place.target, draft=place.target))
    if shared is not None:
        # Rounds of SD are watched where both models share a core; apart they do the same beyond their forwards.
        there = there.model_copy(update={"rounds": (*there.rounds, shared.model_copy(update={"placement": place}))})
    for mode, configuration in ways(place).items():
        speed = pace(there, configuration.placement, configuration.mode)
        assert speed is not None, "the profile has these cores"
        load = Workload(output_tokens=TOKENS, prompt_tokens=64)
        found[mode] = play(configuration, speed, outcome_model(known).simulated(), load).tokens_per_second
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays", type=float, nargs="*", default=[0.0, 1.0, 5.0])
    parser.add_argument("--repeats", type=int, default=2)
    asked = parser.parse_args()
    cores = available_cores()
    if len(cores) < 2:
        sys.exit("link_delay.py needs two cores")
    os.environ["SSD_SECRET"] = SECRET
    hardware = ssd.Hardware.local()
    place = Placement(target=tuple(f"cpu:{core}" for core in cores[:-1]), draft=(f"cpu:{cores[-1]}",))
    known = profile(hardware, ssd.Models(), Workload(prompt_tokens=64, output_tokens=TOKENS))
    fields = {name: getattr(ways(place)["ssd"], name) for name in Configuration.model_fields}
    plan = Plan(**fields, hardware=hardware, models=ssd.Models())
    print("| draft | link one way, ms | mode | tokens/s | predicted | against AR | predicted | hit rate | bytes a round |")
    print("|---|---|---|---|---|---|---|---|---|")
    for delay in (None, *asked.delays):
        with running(plan, None if delay is None else delay / 1e3) as engine:
            found, link = measured(engine, asked.repeats), engine.metrics().link_seconds or 0.0
        told = predicted(known, place, link)
        where = "on this host" if delay is None else f"{delay:g} ms away"
        for mode, (speed, hits, size) in found.items():
            cells = [where, f"{1e3 * link:.2f}", mode.upper(), f"{speed:.0f}", f"{told[mode]:.0f}"]
            cells += [f"{speed / found['ar'][0]:.2f}", f"{told[mode] / told['ar']:.2f}"]
            cells += ["" if hits is None else f"{hits:.2f}", "" if size is None else f"{size:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
