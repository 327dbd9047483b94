"""What each policy of the speculation cache is worth, measured on one pair: tables, and with --plots pictures.

    python benchmarks/ablations.py outcomes [--target T --draft D] [--k 4 --budget 10]   # adaptive, geometric, uniform lists
    python benchmarks/ablations.py temperature                                           # geometric and uniform lists by temperature
    python benchmarks/ablations.py saguaro                                               # one factor C, and one for each place
    python benchmarks/ablations.py backups                                               # jit, ngram, none by batch, b* beside it
    python benchmarks/ablations.py redraft                                               # only rows that missed, or the whole batch
    python benchmarks/ablations.py anytime                                               # the draft's core shared by 1, 2 and 4
    python benchmarks/ablations.py all --plots docs/plots

All ways decode the same prompts in turn in one run. Speed is the median over prompts (or batches) of the ratio to the first way on the same
prompt; hit rate and acceptance are sums over all, hits with their standard error.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sim.metrics import Metrics, Round
from ssd.bench.run import total
from ssd.engine.engine import Engine
from ssd.prompts import prompts
from ssd.specs import Configuration, Hardware, Models, Placement, Plan, SamplingParams
from theory.fallback import critical_batch, first_ahead
from theory.fanout import geometric, rounded, uniform

# Exponent of the power law of misses, as published for temperature 0.
R = 0.54


@dataclass(frozen=True)
class Done:
    """A batch decoded in one way: counts and rates of its requests, and its tokens a second while all were decoding."""

    metrics: Metrics
    tokens_per_second: float
    rounds: tuple[Round, ...] = ()


Table = list[tuple[str, list[Done]]]


class Bench:
    """One engine and the ways to compare on it."""

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self.engine, self.options = engine, options
        self.place = engine.plan.placement

    def ssd(self, **changes: object) -> Configuration:
        """An SSD configuration; without lists and budget, the options' budget spread evenly."""
        K = self.options.k
        fields = {"mode": "ssd", "num_speculative_tokens": K, "placement": self.place, **changes}
        if "budget" not in fields and "fan_out_hit" not in fields:
            fields |= lists(uniform(self.options.budget, K))
        return Configuration.model_validate(fields)

    @property
    def ar(self) -> Configuration:
        """The target alone."""
        return Configuration(mode="ar", placement=Placement(target=self.place.target))

    @property
    def sd(self) -> Configuration:
        """Drafts made while the target waits, on the target's core."""
        return Configuration(
            mode="sd", num_speculative_tokens=self.options.k, placement=Placement(target=self.place.target, draft=self.place.target)
        )

    def run(
        self, ways: dict[str, Configuration], kind: str, temperature: float, batch: int = 1, prepare: Callable = lambda _: None
    ) -> Table:
        """Decode the prompts of a set, `batch` at a time, each in every way in turn."""
        texts = prompts(kind, self.options.num_prompts, self.engine.pair.tokenizer)
        batches = [texts[i : i + batch] for i in range(0, len(texts) - batch + 1, batch)] if batch > 1 else [[text] for text in texts]
        done: dict[str, list[Done]] = {name: [] for name in ways}
        names = list(ways)
        for name in names:
            self.once(ways[name], batches[0], temperature, 0, 8, name, prepare)
        for number, group in enumerate(batches):
            turn = number % len(names)
            for name in [*names[turn:], *names[:turn]]:
                done[name].append(self.once(ways[name], group, temperature, number, self.options.output_tokens, name, prepare))
        return [(name, done[name]) for name in names]

    def once(
        self, way: Configuration, texts: Sequence[str], temperature: float, seed: int, tokens: int, name: str, prepare: Callable
    ) -> Done:
        """Decode one batch in one way."""
        self.engine.configure(way)
        prepare(name)
        self.engine.timeline()
        params = [
            SamplingParams(
                max_tokens=tokens,
                temperature=temperature,
                ignore_eos=True,
                seed=1000 * seed + place,
                verification=self.options.verification,
            )
            for place in range(len(texts))
        ]
        outputs = self.engine.generate(list(texts), params)
        if self.engine.health().draft == "lost":
            raise SystemExit(f"the draft was lost: {self.engine.health().reason}")
        metrics = total(outputs)
        together = sum(1 / (output.metrics.time_per_output_token or float("inf")) for output in outputs)
        return Done(metrics, together, tuple(entry for output in outputs for entry in output.rounds))


def lists(fan_out: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The same list after hits and after misses."""
    return {"fan_out_hit": tuple(fan_out), "fan_out_miss": tuple(fan_out)}


def show(title: str, table: Table, against: str | None = None) -> None:
    """Print a table; ratios are to the way `against`, by default the first."""
    print(f"\n{title}\n\n| way | hit rate | acceptance | tokens a round | tokens/s | ratio (quartiles) |\n|---|---|---|---|---|---|")
    base = dict(table)[against or table[0][0]]
    for name, runs in table:
        totals = total(runs)
        hit, judged = totals.cache_hit_rate, totals.num_cache_hits + totals.num_cache_misses
        ratios = [run.tokens_per_second / other.tokens_per_second for run, other in zip(runs, base, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        cells = (
            name,
            f"{hit:.3f} ± {(hit * (1 - hit) / judged) ** 0.5:.3f}" if hit is not None else "",
            f"{totals.draft_acceptance_rate:.3f}" if totals.draft_acceptance_rate is not None else "",
            f"{1 + totals.num_accepted_tokens / totals.num_rounds:.2f}",
            f"{statistics.median(run.tokens_per_second for run in runs):.1f}",
            f"{statistics.median(ratios):.3f} ({low:.3f}-{high:.3f})",
        )
        print("| " + " | ".join(cells) + " |", flush=True)


def rate(runs: Sequence[Done]) -> float:
    """Hit rate over all runs."""
    return total(runs).cache_hit_rate or 0.0


def speed(runs: Sequence[Done]) -> float:
    """Median tokens a second."""
    return statistics.median(run.tokens_per_second for run in runs)


def acceptance(bench: Bench, kind: str, temperature: float) -> float:
    """The pair's acceptance rate on a prompt set, by SD."""
    ((_, runs),) = bench.run({"sd": bench.sd}, kind, temperature)
    return float(total(runs).draft_acceptance_rate or 0.5)


def choices(bench: Bench, kind: str, temperature: float) -> dict[str, Configuration]:
    """Uniform and geometric lists (Theorem 12 at the measured acceptance) and the adaptive choice, of one budget."""
    K, B = bench.options.k, bench.options.budget
    alpha = min(acceptance(bench, kind, temperature), 0.99)
    shaped = rounded(geometric(B, K, alpha, R))
    print(f"\n{kind}, T = {temperature:g}: acceptance {alpha:.3f}, geometric {shaped}, uniform {uniform(B, K)}")
    found = {"uniform": bench.ssd(), "geometric": bench.ssd(**lists(shaped)), "adaptive": bench.ssd(budget=B)}
    if temperature == 0:
        return found
    by_q = {name: way.model_copy(update={"ranking": "probability"}) for name, way in found.items()}
    return by_q | {f"{name}, shared noise": way for name, way in found.items()}


def outcomes(bench: Bench) -> None:
    """Which outcomes to cache."""
    for kind in bench.options.prompt_sets.split(","):
        for temperature in (0.0, 1.0):
            ways = {"AR": bench.ar} | choices(bench, kind, temperature)
            show(f"Outcomes, {kind}, T = {temperature:g}, B = {bench.options.budget}", bench.run(ways, kind, temperature))


def temperature(bench: Bench) -> None:
    """Geometric against uniform lists by temperature."""
    kind, temperatures, curves = bench.options.prompt_sets.split(",")[0], (0.0, 0.3, 0.7, 1.0), {}
    for T in temperatures:
        ways = {name: way for name, way in choices(bench, kind, T).items() if "shared" not in name}
        table = bench.run({"AR": bench.ar} | ways, kind, T)
        show(f"Lists by temperature, {kind}, T = {T:g}", table)
        for name in ways:
            curves.setdefault(name, []).append(rate(dict(table)[name]))
    plot(bench, "temperature", "temperature", "hit rate", temperatures, curves)


def saguaro(bench: Bench) -> None:
    """Saguaro's factor: one C for all places, and C_k that press the places of a narrow cache more."""
    kind, factors = bench.options.prompt_sets.split(",")[0], (1.0, 0.5, 0.1, 0.03, 0.0)
    K, base = bench.options.k, bench.ssd(ranking="probability")
    ways = {"AR": bench.ar} | {f"C = {C:g}": base.model_copy(update={"saguaro": (C,) * K}) for C in factors}
    ways["C_k = .3 .5 .7 .9"] = base.model_copy(update={"saguaro": tuple(min(1.0, 0.3 + 0.2 * k) for k in range(K))})
    ways["C_k = .9 .7 .5 .3"] = base.model_copy(update={"saguaro": tuple(max(0.0, 0.9 - 0.2 * k) for k in range(K))})
    table = bench.run(ways, kind, 1.0)
    show(f"Saguaro, {kind}, T = 1", table, "C = 1")
    found = [dict(table)[f"C = {C:g}"] for C in factors]
    totals = [total(runs) for runs in found]
    curves = {"hit rate": [m.cache_hit_rate or 0 for m in totals], "acceptance": [m.draft_acceptance_rate or 0 for m in totals]}
    curves["speed, C = 1 is 1"] = [speed(runs) / speed(found[0]) for runs in found]
    plot(bench, "saguaro", "C", "share", factors, curves)


def backups(bench: Bench) -> None:
    """The backup by batch size, and where theory says that the fast one overtakes."""
    kind, curves, measured = bench.options.prompt_sets.split(",")[0], {}, None
    sizes = [size for size in (1, 2, 4, 8) if size <= bench.engine.max_num_seqs]
    for size in sizes:
        ways = {"AR": bench.ar, "SD": bench.sd} | {name: bench.ssd(backup=name) for name in ("jit", "ngram", "none")}
        table = bench.run(ways, kind, bench.options.temperature, size)
        show(f"Backups, {kind}, T = {bench.options.temperature:g}, batch {size}", table)
        found = dict(table)
        for name in ways:
            curves.setdefault(name, []).append(speed(found[name]) / size)
        if size == 1:
            measured = {name: found[name] for name in ("jit", "none")}
    if measured is not None:
        slow, *fast = ([1 / value for value in curves[name]] for name in ("jit", "none", "ngram"))
        ahead = [f"{name} from {first_ahead(sizes, slow, times):g}" for name, times in zip(("none", "ngram"), fast, strict=True)]
        print(f"\nAhead of jit at the sizes measured: {', '.join(ahead)}. Critical batch size {crossing(measured)}")
    plot(bench, "backups", "batch", "tokens/s of a request", sizes, curves)


def crossing(measured: dict[str, list[Done]]) -> str:
    """Theorem 17 with what batch 1 measured: hits, tokens a round, and how much longer a miss waits than a hit, over a verification."""
    jit, none = (total(measured[name]) for name in ("jit", "none"))
    T_v = jit.verify_seconds / jit.num_rounds
    waits = {kind: [entry.wait_seconds for run in measured["jit"] for entry in run.rounds if entry.hit is kind] for kind in (True, False)}
    waited = max(0.0, statistics.fmean(waits[False] or [0.0]) - statistics.fmean(waits[True] or [0.0]))
    h, hit, slow = jit.cache_hit_rate or 0.0, jit.mean_acceptance_length_on_hit or 1.0, jit.mean_acceptance_length_on_miss or 1.0
    fast = none.mean_acceptance_length_on_miss or 1.0
    said = f"h = {h:.3f}, tokens after a hit {hit:.2f}, after a miss {slow:.2f} (jit) and {fast:.2f} (none), T_b = {waited / T_v:.2f} T_v"
    found = float(critical_batch(h=h, E_hit=hit, E_slow=max(slow, fast), E_fast=fast, T_slow=waited / T_v, T_fast=0.0, T_p=1.0))
    return f"{found:.1f} by Theorem 17 ({said})"


def redraft(bench: Bench) -> None:
    """Misses by row, against the whole batch drafted anew when one row misses, as the paper's code does."""
    kind, size = bench.options.prompt_sets.split(",")[0], min(4, bench.engine.max_num_seqs)
    ways = {"whole batch": bench.ssd(), "rows that missed": bench.ssd()}

    def prepare(name: str) -> None:
        peer = bench.engine.peer
        if peer is not None and peer._setup is not None:
            bench.engine._worker.call(lambda: peer.configure(replace(peer._setup, redraft_all=name == "whole batch")))
            # What is configured next is told to the draft, whatever it was told before.
            bench.engine._setup = None

    show(
        f"Redraft, {kind}, batch {size}, T = {bench.options.temperature:g}", bench.run(ways, kind, bench.options.temperature, size, prepare)
    )


def anytime(bench: Bench) -> None:
    """A cache that is built as far as time allows, against one of fixed extent, with the draft on a core that it shares with others."""
    kind, K, B = bench.options.prompt_sets.split(",")[0], bench.options.k, bench.options.budget
    for others in (0, 1, 3):
        with crowded(bench.place.draft[0], others):
            ways = {
                "AR": bench.ar,
                "fixed, lists": bench.ssd(),
                "fixed, adaptive": bench.ssd(budget=B),
                "anytime, adaptive": bench.ssd(budget=B, building="anytime"),
                "anytime, adaptive, none": bench.ssd(budget=B, building="anytime", backup="none"),
            }
            show(f"Anytime, {kind}, K = {K}, the draft {1 + others} times slower", bench.run(ways, kind, bench.options.temperature))


@contextmanager
def crowded(device: str, others: int) -> Iterator[None]:
    """Let so many other processes be busy on a core."""
    program = f"import os; os.sched_setaffinity(0, [{device.split(':')[1]}])\nwhile True: pass"
    crowd = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(others)]
    try:
        yield
    finally:
        for process in crowd:
            process.kill()
            process.wait()


def plot(bench: Bench, name: str, across: str, up: str, xs: Sequence[float], curves: dict[str, list[float]]) -> None:
    """Draw curves into the folder that was asked for."""
    if bench.options.plots is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for label, values in curves.items():
        axes.plot(range(len(xs)), values, marker="o", label=label)
    axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
    axes.set(xlabel=across, ylabel=up, ylim=(0, None))
    axes.legend()
    bench.options.plots.mkdir(parents=True, exist_ok=True)
    figure.savefig(bench.options.plots / f"{name}.png", dpi=120)


PARTS = {part.__name__: part for part in (outcomes, temperature, saguaro, backups, redraft, anytime)}


def main() -> None:
    """Run the parts that are asked for on one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "all"])
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--budget", type=int, default=10)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--verification", choices=["auto", "rejection", "coupled"], default="rejection")
    parser.add_argument("--prompt-sets", default="library,chat")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="largest batch")
    parser.add_argument("--plots", type=Path)
    options = parser.parse_args()
    hardware = Hardware.local()
    ids = tuple(device.id for device in hardware.devices)
    if len(ids) < 2:
        parser.error("needs two devices")
    models = Models(target=options.target, draft=options.draft) if options.target else Models()
    place = Placement(target=ids[:1], draft=ids[-1:])
    plan = Plan(mode="ssd", num_speculative_tokens=options.k, budget=options.budget, placement=place, hardware=hardware, models=models)
    with Engine.from_plan(plan, max_num_seqs=options.batch) as engine:
        for name in PARTS if "all" in options.parts else options.parts:
            PARTS[name](Bench(engine, options))


if __name__ == "__main__":
    main()
