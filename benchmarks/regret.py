"""What is lost by trusting the planner: the measured speed of its plan over the best measured in a grid of configurations.

python benchmarks/regret.py --out regret.json                                  # the embedded pair
python benchmarks/regret.py --target TARGET --draft DRAFT --out regret-qwen.json

Each case is a prompt set, a temperature and a batch size: profile, plan, then measure the plan among the grid. Successive halving: in each
round all that are left decode the same prompts, one after another in an order that turns, and the slower half leaves; the plan stays.
The last few are then measured again on prompts that had no part in choosing them, and only these tell. A run that was broken off goes on
after the last case that is in the file; --table prints what is in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import ssd
from ssd.bench.measure import run_once
from ssd.placements import placements
from ssd.planner import plan as planned
from ssd.prompts import prompts
from ssd.report import describe
from ssd.specs import Configuration, Placement, Plan, SamplingParams, Workload
from theory.fanout import uniform

FINALISTS = 4


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the embedded pair")
    parser.add_argument("--draft")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--out", type=Path, required=True, help="results as JSON, read again to go on")
    parser.add_argument("--prompt-sets", default="code,chat")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--batch-sizes", default="1,4")
    parser.add_argument("--lookaheads", default="1,2,3,4,6,8", help="K of SD and SSD")
    parser.add_argument("--budgets", default="0,1,2", help="cached outcomes of SSD, times K + 1; 0: a single one")
    parser.add_argument("--ways", default="lists,budget,anytime", help="how outcomes are chosen and the cache is built")
    parser.add_argument("--backups", default="jit,none,ngram")
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--first-tokens", type=int, help="of the first round, doubled in each that follows up to --output-tokens (default)")
    parser.add_argument("--final-batches", type=int, default=6, help="batches of prompts that the finalists are measured on")
    parser.add_argument("--table", action="store_true", help="print what --out holds and measure nothing")
    return parser.parse_args(arguments)


def grid(asked: argparse.Namespace, hardware: ssd.Hardware) -> list[Configuration]:
    """Every configuration that is measured beside the plan: AR and SD wherever they may run, SSD by K, fan-outs or budget, and backup."""
    lookaheads = [int(K) for K in asked.lookaheads.split(",")]
    return [each for place in placements(hardware) for each in _at(asked, place, lookaheads)]


def _at(asked: argparse.Namespace, place: Placement, lookaheads: Sequence[int]) -> Iterator[Configuration]:
    if place.overlaps:
        yield Configuration(mode="ar", placement=Placement(target=place.target))
        for K in lookaheads:
            yield Configuration(mode="sd", num_speculative_tokens=K, placement=place)
        return
    times = [int(each) for each in asked.budgets.split(",")]
    for K, way, each, backup in product(lookaheads, asked.ways.split(","), times, asked.backups.split(",")):
        budget = max(1, each * (K + 1))
        lists = {"fan_out_hit": uniform(budget, K), "fan_out_miss": uniform(budget, K)}
        fields = lists if way == "lists" else {"budget": budget, "building": "anytime" if way == "anytime" else "fixed"}
        yield Configuration(mode="ssd", num_speculative_tokens=K, placement=place, backup=backup, **fields)


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt set, temperature and batch size."""

    prompt_set: str
    temperature: float
    batch_size: int

    @property
    def name(self) -> str:
        """How it is called in the file."""
        return f"{self.prompt_set}, T={self.temperature:g}, batch {self.batch_size}"


class Race:
    """The plan and the grid on one engine, over batches of prompts."""

    def __init__(self, engine: ssd.Engine, case: Case, texts: Sequence[str], output_tokens: int, first_tokens: int | None = None) -> None:
        self.engine, self.case, self.output_tokens, self.first_tokens = engine, case, output_tokens, first_tokens or output_tokens
        size = case.batch_size
        self.batches = [texts[i : i + size] for i in range(0, len(texts) - size + 1, size)]
        self.speeds: dict[Configuration, list[float]] = {}

    def speed(self, configuration: Configuration, number: int) -> float:
        """Tokens a second of a batch, the first token of each request apart."""
        params = [
            SamplingParams(
                max_tokens=min(self.output_tokens, self.first_tokens << number),
                temperature=self.case.temperature,
                ignore_eos=True,
                seed=1000 * number + row,
                verification=configuration.verification,
            )
            for row in range(self.case.batch_size)
        ]
        run = run_once(self.engine, configuration, self.batches[number % len(self.batches)], params)
        return sum(1 / (output.metrics.time_per_output_token or float("inf")) for output in run.outputs)

    def round(self, configurations: Sequence[Configuration], number: int) -> dict[Configuration, float]:
        """The speed of each on one batch, in an order that turns."""
        turn = number % len(configurations)
        return {each: self.speed(each, number) for each in [*configurations[turn:], *configurations[:turn]]}

    def finalists(self, plan: Configuration, rivals: Sequence[Configuration]) -> tuple[list[Configuration], int]:
        """Halve until few are left, the plan always; return them and how many rounds it took."""
        left, number, totals = [plan, *rivals], 0, dict.fromkeys([plan, *rivals], 0.0)
        while len(left) > FINALISTS:
            found = self.round(left, number)
            for each, speed in found.items():
                # A mean over prompts of speed over that of the plan on the same.
                totals[each] += speed / found[plan]
            number += 1
            ranked = sorted((each for each in left if each != plan), key=lambda each: -totals[each])
            left = [plan, *ranked[: max(FINALISTS - 1, len(left) // 2 - 1)]]
        return left, number


def measure(
    asked: argparse.Namespace, hardware: ssd.Hardware, models: ssd.Models, case: Case, known: dict[str, object]
) -> dict[str, object]:
    """Profile, plan and race one case."""
    load = Workload(batch_size=case.batch_size, output_tokens=asked.output_tokens, temperature=case.temperature, prompt_set=case.prompt_set)
    profile = ssd.Profile.model_validate(known["profile"]) if "profile" in known else ssd.profile(hardware, models, load)
    known["profile"] = profile.model_dump(mode="json")
    plan = planned(hardware, models, load, profile=profile)
    chosen = plan.unpredicted()
    rivals = [each for each in grid(asked, hardware) if each != chosen]
    with ssd.Engine.from_plan(_widest(plan, rivals), max_num_seqs=case.batch_size) as engine:
        # Its profile begins with the same prompts: these are others as far as there are so many.
        texts = prompts(case.prompt_set, 32, engine.pair.tokenizer)
        race = Race(engine, case, texts, asked.output_tokens, asked.first_tokens)
        race.round([chosen], 0)
        left, rounds = race.finalists(chosen, rivals)
        found = [race.round(left, rounds + number) for number in range(asked.final_batches)]
    ratios = {each: statistics.median(one[each] / one[chosen] for one in found) for each in left}
    best = max(ratios, key=lambda each: ratios[each])
    return {
        "plan": describe(chosen),
        "predicted": plan.predicted.tokens_per_second if plan.predicted else None,
        "measured": statistics.median(one[chosen] for one in found),
        "best": describe(best),
        "best_measured": statistics.median(one[best] for one in found),
        "plan_over_best": 1 / ratios[best],
        "configurations": 1 + len(rivals),
        "finalists": {describe(each): ratio for each, ratio in ratios.items()},
    }


def _widest(plan: Plan, rivals: Sequence[Configuration]) -> Plan:
    """What to start the engine from: a plan with a draft, and the most slots."""
    return plan.with_configuration(max(rivals, key=lambda each: (each.mode == "ssd", each.num_speculative_tokens)))


def table(cases: dict[str, dict[str, object]]) -> str:
    """The results as docs/planning.md has them."""
    lines = ["| case | plan | predicted | measured | best measured | its tokens/s | plan over best |", "|---|---|---|---|---|---|---|"]
    for name, each in cases.items():
        if "plan_over_best" in each:
            speeds = [f"{each[key]:.1f}" for key in ("predicted", "measured")]
            cells = [name, each["plan"], *speeds, each["best"], f"{each['best_measured']:.1f}", f"{each['plan_over_best']:.3f}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not yet in the file, and print it all."""
    asked = options(arguments)
    cases: dict[str, dict[str, object]] = json.loads(asked.out.read_text())["cases"] if asked.out.exists() else {}
    if not asked.table:
        hardware = ssd.Hardware.local()
        given = {"target": asked.target, "draft": asked.draft, "max_model_len": asked.max_model_len}
        models = ssd.Models.model_validate({name: value for name, value in given.items() if value is not None})
        axes = asked.prompt_sets.split(","), map(float, asked.temperatures.split(",")), map(int, asked.batch_sizes.split(","))
        for case in (Case(*each) for each in product(*axes)):
            known = cases.setdefault(case.name, {})
            if "plan_over_best" not in known:
                known |= measure(asked, hardware, models, case, known)
                asked.out.write_text(json.dumps({"models": models.model_dump(), "hardware": hardware.name, "cases": cases}, indent=1))
    print(table(cases))


if __name__ == "__main__":
    main()
