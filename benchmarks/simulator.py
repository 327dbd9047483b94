"""How fast the simulator is: rounds a second, the cost of an event, and a day of serving at 5 requests a second.

python benchmarks/simulator.py                # about two minutes of one core
python benchmarks/simulator.py --hours 4      # of the day only so many, half a minute
"""

from __future__ import annotations

import argparse
import time

import simpy

from sim.latency import Latency
from sim.outcomes import IID
from sim.scenario import Scenario
from sim.simulate import Result, simulate
from theory.hits import PowerLaw

CURVE = tuple(PowerLaw(r=0.54, c=0.28).curve(40).tolist())
K, FAN_OUT = 4, (1, 1, 1, 1, 2)
EVENTS = 200_000
DAY, RATE = 86_400, 5
# Of three runs the fastest: others use the machine, too.
TRIES = 3


def scenario(mode: str, **changes: object) -> Scenario:
    """A pair like the paper's: a verification of 6 ms, a draft step of .5 ms."""
    return Scenario(
        **{
            "mode": mode,
            "verify": Latency.of({1: 0.006, 64: 0.008, 320: 0.020}),
            "draft_step": Latency.of({1: 0.0005, 64: 0.001, 320: 0.002}),
            "outcomes": IID(0.8, CURVE),
            "num_speculative_tokens": K,
            "fan_out_hit": FAN_OUT,
            "fan_out_miss": FAN_OUT,
            "interrupt": "moot",
            "draft_layers": 24,
            "output_tokens": 500,
            "num_requests": 100,
            **changes,
        }
    )


def day(hours: float = 24) -> Scenario:
    """The requests of a day or of some hours of it, prompts of 200 and outputs of 64 tokens on average, in batches of at most 32."""
    load = {"output_tokens": (32, 64, 96), "prompt_tokens": (100, 200, 300), "prompt_chunk": 320, "batch_size": 32}
    return scenario("ssd", request_rate=float(RATE), num_requests=round(RATE * DAY * hours / 24), **load)


def timed(which: Scenario, tries: int = TRIES, record: bool = False) -> tuple[float, Result]:
    """Seconds of the fastest run, and what it gave."""
    found = []
    for _ in range(tries):
        begin = time.perf_counter()
        result = simulate(which, record=record)
        found.append(time.perf_counter() - begin)
    return min(found), result


def event_seconds() -> float:
    """What SimPy takes for one event that a process waits for."""
    env = simpy.Environment()

    def process():  # type: ignore[no-untyped-def]
        for _ in range(EVENTS):
            yield env.timeout(1.0)

    env.process(process())
    begin = time.perf_counter()
    env.run()
    return (time.perf_counter() - begin) / EVENTS


def main() -> None:
    """Print the tables of docs/simulator.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=24, help="how much of the day is played")
    hours = parser.parse_args().hours
    print("| | rounds a second | with rounds and spans kept |\n|---|---|---|")
    for name, which in (
        ("AR, batch 1", scenario("ar")),
        ("SD, batch 1", scenario("sd")),
        ("SSD, batch 1", scenario("ssd")),
        ("SSD, batch 8, of each row", scenario("ssd", batch_size=8)),
    ):
        speeds = [result.metrics.num_rounds / seconds for seconds, result in (timed(which), timed(which, record=True))]
        print(f"| {name} | {speeds[0]:,.0f} | {speeds[1]:,.0f} |")
    event = min(event_seconds() for _ in range(TRIES))
    print(f"\nAn event of SimPy: {event * 1e6:.2f} microseconds; a run takes one wherever there is nobody to serve until a request comes.")
    seconds, result = timed(day(hours), tries=1)
    metrics = result.metrics
    print(
        f"{hours:g} hours at {RATE} requests/s: {seconds:.0f} s for {metrics.num_requests:,} requests and {metrics.num_rounds:,} rounds of"
        f" their rows; {metrics.output_tokens_per_second:.0f} tokens/s, the target busy {result.busy_share('target'):.0%} of the time."
    )


if __name__ == "__main__":
    main()
