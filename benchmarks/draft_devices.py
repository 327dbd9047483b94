"""What further draft devices hit, the fourth ablation of the paper: workers that each draft for one more outcome at every position.

python -m benchmarks.draft_devices [--workers 1 2 3] [--k 3] [--prompt-set code]: needs two cores, one for the target and one that all
workers take turns on. So that this costs them no hit, the target waits before each verification until their caches can be whole: hit
rates are measured, speeds are not. Beside them stand theory's hit rate, from the ranks that the same texts have in the profile, and that
of the power law fitted to these; the simulator's, of the same texts; and the speed that the simulator gives devices of their own, against
one worker, with the latencies that the profile measured here on one core each. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import numpy as np

import ssd
from sim.latency import Latency
from sim.simulate import simulate
from ssd.bench.run import total
from ssd.devices import available_cores
from ssd.engine.engine import Engine
from ssd.outcomes import LARGEST_BUDGET, OutcomeModel, outcome_model
from ssd.pace import Pace, pace
from ssd.prediction import scenario
from ssd.profiler import TRACE_TOKENS, profile
from ssd.prompts import prompts
from ssd.specs import Configuration, Placement, Plan, Profile, SamplingParams, Workload
from theory.fitting import fit_power_law
from theory.hits import hit_probability, stationary_hit_rate

SIMULATED_TOKENS = 20_000


def placed(workers: int) -> Placement:
    """The target on the first core, all workers on the second."""
    target, draft = (f"cpu:{core}" for core in available_cores()[:2])
    return Placement(target=(target,), draft=(draft,) * workers, draft_workers=workers)


def way(K: int, workers: int) -> Configuration:
    """A branch at every position for each worker."""
    fan_out = (workers,) * (K + 1)
    return Configuration(mode="ssd", num_speculative_tokens=K, fan_out_hit=fan_out, fan_out_miss=fan_out, placement=placed(workers))


def measured(engine: Engine, configuration: Configuration, texts: list[str], tokens: int, pause: float) -> tuple[float, float, int]:
    """Hit rate, its standard error and the rounds, with a target that waits so many seconds, for each worker, before it verifies."""
    engine.configure(configuration)
    target = engine._worker.scheduler.target
    play, seconds = target.round, pause * configuration.placement.draft_workers
    target.round = lambda *given: (time.sleep(seconds), play(*given))[1]
    outputs = [engine.generate(text, SamplingParams(max_tokens=tokens, ignore_eos=True))[0] for text in texts]
    if engine.health().draft != "ok":
        raise SystemExit(f"a worker was lost: {engine.health().reason}")
    found = total(outputs)
    rate = found.cache_hit_rate or 0.0
    return rate, (rate * (1 - rate) / found.num_rounds) ** 0.5, found.num_rounds


def by_theory(model: OutcomeModel, configuration: Configuration) -> float:
    """The long-run hit rate of the lists under the recorded ranks."""
    K, lists = configuration.num_speculative_tokens, (configuration.fan_out_hit, configuration.fan_out_miss)
    hits = (hit_probability(model.law(K), F, model.curves(K, after_hit)) for F, after_hit in zip(lists, (True, False), strict=True))
    return float(stationary_hit_rate(*hits))


def by_power_law(model: OutcomeModel, configuration: Configuration) -> float:
    """The same under the power law of misses fitted to these ranks, all positions together."""
    K = configuration.num_speculative_tokens
    curve = np.average(model.curves(K, True), axis=0, weights=model.law(K))
    F = np.arange(1, LARGEST_BUDGET // 2)
    some = F[curve[F] < 1]
    return float(fit_power_law(some, 1 - curve[some]).hit(configuration.fan_out_hit[0]))


def simulated(model: OutcomeModel, its: Pace, configuration: Configuration, load: Workload) -> tuple[float, float]:
    """Hit rate where every build is whole in time, and tokens a second at the measured pace, each worker on a device of its own."""
    asked = scenario(configuration, its, model.simulated(), load, SIMULATED_TOKENS)
    asked = replace(asked, draft_devices=configuration.placement.draft_workers)
    patient = simulate(replace(asked, verify=Latency.constant(60.0))).metrics
    return patient.cache_hit_rate or 0.0, 1 / (simulate(asked).metrics.time_per_output_token or float("inf"))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--prompt-set", default="code")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--output-tokens", type=int, default=TRACE_TOKENS)
    parser.add_argument("--pause", type=float, default=0.03, help="seconds that the target waits for each worker")
    asked = parser.parse_args()
    if len(available_cores()) < 2:
        sys.exit("draft_devices.py needs two cores")
    hardware, models = ssd.Hardware.local(), ssd.Models()
    load = Workload(prompt_tokens=64, output_tokens=asked.output_tokens, prompt_set=asked.prompt_set)
    ways = [way(asked.k, workers) for workers in asked.workers]
    with Engine.from_plan(Plan.of(max(ways, key=lambda one: one.placement.draft_workers), hardware=hardware, models=models)) as engine:
        texts = prompts(asked.prompt_set, asked.num_prompts, engine.pair.tokenizer)
        found = [measured(engine, configuration, texts, asked.output_tokens, asked.pause) for configuration in ways]
    known: Profile = profile(hardware, models, load, prompts=texts, ignore_eos=True, brief=True)
    model, its = outcome_model(known), pace(known, placed(1), "ssd")
    assert its is not None, "the profile has these cores"
    print("| draft workers | outcomes cached | rounds | hit rate | by theory | by the power law | simulated | simulated speed |")
    print("|---|---|---|---|---|---|---|---|")
    first = None
    for configuration, (rate, error, rounds) in zip(ways, found, strict=True):
        hits, speed = simulated(model, its, configuration, load)
        first = first or speed
        theory, law = by_theory(model, configuration), by_power_law(model, configuration)
        cells = [configuration.placement.draft_workers, sum(configuration.fan_out_hit), rounds, f"{rate:.3f} ±{error:.3f}"]
        print(f"| {' | '.join(map(str, cells))} | {theory:.3f} | {law:.3f} | {hits:.3f} | {speed / first:.2f}x |")


if __name__ == "__main__":
    main()
