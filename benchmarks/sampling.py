"""Acceptance, hits and speed of every way to sample, on one pair: rejection by q or with shared noise, coupling, Saguaro's factor.

python benchmarks/sampling.py [--target T --draft D] [--k 3 --fan-out 3,3,3,3 --backup none] [--prompt-sets code,chat] [--num-prompts 8]

All ways decode every prompt in turn in one run; speed is the median over prompts of the ratio to AR on the same prompt. Sampled texts
differ, so acceptance and hits are sums over all prompts; the hit rate's standard error stands beside it.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product

from ssd.bench.measure import run_once
from ssd.bench.run import Run, median_speed, total
from ssd.engine.engine import Engine
from ssd.prompts import prompts
from ssd.specs import Configuration, Hardware, Models, Placement, Plan, SamplingParams

AR, SD = "AR", "SD, rejection"


def ways(K: int, fan_out: tuple[int, ...], backup: str, placement: Placement) -> dict[str, Configuration]:
    """Return every configuration to compare."""
    alone = Placement(target=placement.target, draft=placement.target)
    base = {
        "mode": "ssd",
        "num_speculative_tokens": K,
        "fan_out_hit": fan_out,
        "fan_out_miss": fan_out,
        "backup": backup,
        "placement": placement,
    }
    found = {
        AR: Configuration(mode="ar", placement=Placement(target=placement.target)),
        SD: Configuration(mode="sd", num_speculative_tokens=K, placement=alone),
        "rejection, by q": Configuration(**base, ranking="probability"),
        "rejection, shared noise": Configuration(**base),
        "coupled": Configuration(**base, verification="coupled"),
    }
    return found | {f"Saguaro C={C}, by q": Configuration(**base, ranking="probability", saguaro=C) for C in (0.7, 0.3)}


@contextmanager
def weighed(engine: Engine) -> Iterator[list[int]]:
    """The bytes of each draft that comes in the meantime."""
    sizes: list[int] = []
    peer = engine.peer
    assert peer is not None
    receive = peer.drafts

    def drafts():
        found = receive()
        sizes.extend(len(pickle.dumps(draft, pickle.HIGHEST_PROTOCOL)) for draft in found.values())
        return found

    peer.drafts = drafts
    yield sizes
    peer.drafts = receive


def measure(engine: Engine, found: dict[str, Configuration], texts: Sequence[str], T: float, tokens: int) -> tuple[dict, dict]:
    """Return every way's runs, and the bytes of its drafts."""
    runs: dict[str, list[Run]] = {name: [] for name in found}
    sizes: dict[str, list[int]] = {name: [] for name in found}
    names = list(found)
    for place, text in enumerate(["def warm_up():", *texts]):
        turn = place % len(names)
        for name in [*names[turn:], *names[:turn]]:
            scheme = "coupled" if name == "coupled" else "rejection"
            params = SamplingParams(max_tokens=tokens if place else 8, temperature=T, ignore_eos=True, seed=place, verification=scheme)
            with weighed(engine) as bytes_now:
                run = run_once(engine, found[name], text, params)
            if place:
                runs[name].append(run)
                sizes[name] += bytes_now
    return runs, sizes


def row(name: str, runs: dict[str, list[Run]], sizes: dict[str, list[int]]) -> str:
    """Return a line of the table."""
    ratios = [run.tokens_per_second / ar.tokens_per_second for run, ar in zip(runs[name], runs[AR], strict=True)]
    quarter = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    totals = total(runs[name])
    hit = totals.cache_hit_rate
    error = (hit * (1 - hit) / (totals.num_cache_hits + totals.num_cache_misses)) ** 0.5 if hit is not None else 0.0
    cells = [
        name,
        f"{totals.draft_acceptance_rate:.3f}" if totals.draft_acceptance_rate is not None else "",
        f"{totals.mean_acceptance_length:.2f}" if totals.mean_acceptance_length is not None else "1",
        f"{hit:.3f} ± {error:.3f}" if hit is not None else "",
        f"{median_speed(runs[name]):.1f}",
        f"{statistics.median(ratios):.2f} ({quarter[0]:.2f}-{quarter[2]:.2f})",
        f"{statistics.fmean(sizes[name]):,.0f}" if sizes[name] else "",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print a table for each prompt set and temperature."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--fan-out", default="3,3,3,3")
    parser.add_argument("--backup", choices=["jit", "none"], default="none")
    parser.add_argument("--prompt-sets", default="code,chat")
    parser.add_argument("--temperatures", default="0.7,1")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=64)
    asked = parser.parse_args()
    hardware = Hardware.local()
    ids = tuple(device.id for device in hardware.devices)
    if len(ids) < 2:
        parser.error("needs two devices")
    fan_out = tuple(int(part) for part in asked.fan_out.split(","))
    found = ways(asked.k, fan_out, asked.backup, Placement(target=ids[:1], draft=ids[-1:]))
    models = Models(target=asked.target, draft=asked.draft) if asked.target else Models()
    with Engine.from_plan(Plan.of(found["rejection, shared noise"], hardware=hardware, models=models)) as engine:
        for kind, T in product(asked.prompt_sets.split(","), map(float, asked.temperatures.split(","))):
            runs, sizes = measure(engine, found, prompts(kind, asked.num_prompts), T, asked.output_tokens)
            print(f"\n{kind}, T = {T}\n")
            print("| way | acceptance | length | hit rate | tokens/s | against AR (quartiles) | bytes a round |")
            print("|---|---|---|---|---|---|---|")
            for name in found:
                print(row(name, runs, sizes), flush=True)


if __name__ == "__main__":
    main()
