"""What a simulated run says in numbers, and how sure they are: means and 95 % intervals over independent replications."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from joblib import Parallel, delayed
from scipy.stats import t as student

from sim.load import LATENCIES
from sim.scenario import Scenario
from sim.simulate import Result, simulate
from theory import check

# What is being done, and the share done, 0..1.
Tell = Callable[[str, float], None]
Numbers = dict[str, float | None]

PERCENTILES = (50, 90, 99)


def summary(result: Result) -> Numbers:
    """The numbers of a run by name: seconds, ratios, tokens and tokens a second; None for what there is none of."""
    metrics = result.metrics
    named: Numbers = {
        name: getattr(metrics, name)
        for name in (
            *("output_tokens_per_second", "time_to_first_token", "time_per_output_token", "mean_acceptance_length"),
            *("draft_acceptance_rate", "cache_hit_rate", "num_requests", "num_rounds", "num_output_tokens", "total_seconds"),
        )
    }
    for latency in LATENCIES:
        named |= {f"{latency}_p{percent}": result.percentile(latency, percent) for percent in PERCENTILES}
    named |= {f"{device}_busy": result.busy_share(device) for device in result.spent}
    return named | {f"share_{what}": share for what, share in result.shares.items()}


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean over replications and its 95 % interval by Student's t; of a single one, no interval."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """From one value a replication."""
        mean = float(np.mean(values))
        if len(values) < 2:
            return cls(mean, None, None)
        half = float(student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
        return cls(mean, mean - half, mean + half)


def replicate(
    scenario: Scenario, replications: int, seed: int = 0, *, jobs: int = 1, tell: Tell | None = None
) -> dict[str, Interval | None]:
    """Simulate with the seeds `seed`, `seed` + 1, ...; the numbers of `summary` over those replications in which they exist.

    jobs: processes, as joblib counts them (-1: as many as there are cores).
    """
    check.count("replications", replications, 1)
    return over([numbers for _, numbers in played([scenario], replications, seed, jobs, tell)])


def over(runs: Sequence[Numbers]) -> dict[str, Interval | None]:
    """Means and intervals of the numbers of several runs."""
    found = {name: [run[name] for run in runs] for name in runs[0]}
    return {name: Interval.of(known) if (known := [v for v in values if v is not None]) else None for name, values in found.items()}


def played(scenarios: Sequence[Scenario], replications: int, seed: int, jobs: int, tell: Tell | None) -> Iterator[tuple[int, Numbers]]:
    """Play every scenario so many times, in parallel; yield its place and the numbers of each run, in order."""
    tasks = [(place, scenario, seed + again) for place, scenario in enumerate(scenarios) for again in range(replications)]
    runs = Parallel(n_jobs=jobs, return_as="generator")(delayed(_numbers)(scenario, its) for _, scenario, its in tasks)
    for done, ((place, _, _), numbers) in enumerate(zip(tasks, runs, strict=True), 1):
        yield place, numbers
        if tell is not None:
            tell(f"run {done} of {len(tasks)}", done / len(tasks))


def _numbers(scenario: Scenario, seed: int) -> Numbers:
    return summary(simulate(scenario, seed, record=False))
