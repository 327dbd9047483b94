"""Serve mixed requests for long, with cancellations and, if asked for, a draft that is killed or stopped again and again.

Every output is held against the one that the target alone gave for the same request: greedy ones and seeded ones at any temperature are
determined. Memory, file handles and threads are read once a minute.

    python benchmarks/soak.py --minutes 60
    python benchmarks/soak.py --kills 200 --stops 200
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import statistics
import threading
import time
from dataclasses import dataclass, field

import ssd
from ssd.engine import peer as peer_module
from ssd.prompts import prompts
from ssd.specs import Configuration, Models, Placement, Plan, SamplingParams

KINDS = (
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "seed": 2},
    {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.1, "seed": 3},
    {"stop": ("\n\n",), "logprobs": 1},
)


@dataclass
class Tally:
    """What came of the requests and of the draft."""

    served: int = 0
    cancelled: int = 0
    wrong: int = 0
    failed: int = 0
    tokens: int = 0
    recoveries: dict[str, list[float]] = field(default_factory=lambda: {"kill": [], "stop": []})


def main() -> None:
    """Soak, then say what was seen."""
    options = arguments()
    # A draft that fails all the time would otherwise be started ever less often.
    if options.kills or options.stops:
        peer_module.LONGEST_BACK_OFF = peer_module.FIRST_BACK_OFF
    logging.getLogger("ssd.engine.peer").setLevel(logging.ERROR)
    hardware = ssd.Hardware.local()
    cores = [device.id for device in hardware.devices if device.kind == "cpu"]
    plan = Plan(
        mode="ssd",
        num_speculative_tokens=4,
        budget=6,
        building="anytime",
        backup=options.backup,
        placement=Placement(target=(cores[0],), draft=(cores[1],)),
        hardware=hardware,
        models=Models(target=options.target, draft=options.draft) if options.target else Models(),
    )
    with ssd.Engine.from_plan(plan, max_num_seqs=options.batch, deadline=options.deadline) as engine:
        asked = requests(engine, options)
        engine.configure(Configuration(mode="ar", placement=Placement(target=(cores[0],))))
        expected = [output.token_ids for output in engine.generate([p for p, _ in asked], [q for _, q in asked])]
        engine.configure(plan)
        tally = Tally()
        asyncio.run(soak(engine, asked, expected, tally, options))
        report(engine, tally)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long, where nothing is killed")
    parser.add_argument("--kills", type=int, default=0, help="how often the draft is killed")
    parser.add_argument("--stops", type=int, default=0, help="how often it is stopped")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--backup", default="jit")
    parser.add_argument("--deadline", type=float, default=0.5, help="seconds that a silent draft is waited for")
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def requests(engine: ssd.Engine, options: argparse.Namespace) -> list[tuple[str, SamplingParams]]:
    """Requests of several kinds and lengths, some with prompts that begin alike."""
    texts = prompts("code" if options.target else "library", 12, engine.pair.tokenizer)
    texts += [texts[0] + text for text in texts[1:4]]
    chance = random.Random(options.seed)
    return [
        (text, SamplingParams(max_tokens=chance.choice([8, 24, 64]), ignore_eos=bool(place % 2), **kind))
        for place, text in enumerate(texts)
        for kind in KINDS
    ]


async def soak(engine: ssd.Engine, asked: list, expected: list, tally: Tally, options: argparse.Namespace) -> None:
    """Keep several clients busy until the time is over or every blow is dealt."""
    over = asyncio.Event()
    clients = [asyncio.create_task(client(engine, asked, expected, tally, over, options.seed + n)) for n in range(options.clients)]
    if options.kills or options.stops:
        await blows(engine, tally, options)
    else:
        await watch(engine, tally, 60 * options.minutes)
    over.set()
    await asyncio.gather(*clients)


async def client(engine: ssd.Engine, asked: list, expected: list, tally: Tally, over: asyncio.Event, seed: int) -> None:
    """Ask one thing after another; leave one in five early."""
    chance = random.Random(seed)
    while not over.is_set():
        place = chance.randrange(len(asked))
        prompt, params = asked[place]
        leaves = chance.randrange(1, 8) if chance.random() < 0.2 else None
        tokens: list[int] = []
        stream = engine.astream(prompt, params)
        try:
            async for chunk in stream:
                tokens += chunk.token_ids
                if leaves is not None and len(tokens) >= leaves:
                    break
        except Exception as error:
            tally.failed += 1
            print("failed:", repr(error), flush=True)
            continue
        finally:
            await stream.aclose()
        whole = leaves is None or len(tokens) < leaves
        tally.served += whole
        tally.cancelled += not whole
        tally.tokens += len(tokens)
        right = tuple(tokens) == expected[place] if whole else tuple(tokens) == expected[place][: len(tokens)]
        if not right:
            tally.wrong += 1
            print(f"wrong: request {place} {params}: {tokens} instead of {expected[place]}", flush=True)


async def blows(engine: ssd.Engine, tally: Tally, options: argparse.Namespace) -> None:
    """Kill or stop the draft at random moments, each time once it is at work again; note how long it was away."""
    chance = random.Random(options.seed)
    kinds = ["kill"] * options.kills + ["stop"] * options.stops
    chance.shuffle(kinds)
    for number, kind in enumerate(kinds):
        await asyncio.sleep(chance.expovariate(1 / 0.3))
        restarts, begin = engine.health().restarts, time.monotonic()
        os.kill(engine.peer.process.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        while engine.health().restarts == restarts:
            await asyncio.sleep(0.01)
            if time.monotonic() - begin > 300:
                raise SystemExit(f"the draft did not come back from {kind} {number}: {engine.health()}")
        tally.recoveries[kind].append(time.monotonic() - begin)
        if number % 20 == 19:
            print(f"{number + 1} of {len(kinds)}: {tally.served} served, {tally.wrong} wrong, {tally.failed} failed", flush=True)


async def watch(engine: ssd.Engine, tally: Tally, seconds: float) -> None:
    """Read memory, handles and threads of both processes now and then."""
    begin = time.monotonic()
    print("| minute | requests | cancelled | tokens | target MiB | draft MiB | handles | draft's handles | threads |")
    print("|---|---|---|---|---|---|---|---|---|")
    while (passed := time.monotonic() - begin) < seconds:
        ours, theirs = os.getpid(), engine.peer.process.pid
        counts = tally.served, tally.cancelled, tally.tokens
        sizes = f"{memory(ours):.0f} | {memory(theirs):.0f} | {handles(ours)} | {handles(theirs)} | {threading.active_count()}"
        print(f"| {passed / 60:.0f} | {' | '.join(map(str, counts))} | {sizes} |", flush=True)
        await asyncio.sleep(min(60.0, seconds - passed))


def memory(pid: int) -> float:
    """MiB resident that are a process's own; none of one that is gone."""
    if not os.path.exists(f"/proc/{pid}/smaps_rollup"):
        return 0.0
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) / 1024


def handles(pid: int) -> int:
    """Open file handles."""
    return len(os.listdir(f"/proc/{pid}/fd")) if os.path.exists(f"/proc/{pid}/fd") else 0


def report(engine: ssd.Engine, tally: Tally) -> None:
    """Print what the requests and the draft came to."""
    metrics, health = engine.metrics(), engine.health()
    ends = f"{tally.served} served whole, {tally.cancelled} left early, {tally.wrong} wrong, {tally.failed} failed"
    print(f"\n{ends}; {tally.tokens} tokens")
    rates = f"hit rate {metrics.cache_hit_rate or 0:.3f}, acceptance {metrics.draft_acceptance_rate or 0:.3f}"
    print(f"{rates}; draft {health.draft}, started again {health.restarts} times")
    for kind, seconds in tally.recoveries.items():
        if seconds:
            tenths = statistics.quantiles(seconds, n=20)
            spread = f"median {statistics.median(seconds):.2f} s, 5-95 % {tenths[0]:.2f}-{tenths[-1]:.2f} s, longest {max(seconds):.2f} s"
            print(f"{len(seconds)} {kind}s; from the blow until it is at work again: {spread}")


if __name__ == "__main__":
    main()
