"""Who asks for what and when, and when it was served."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.random import Generator as Random

from sim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Request:
    """One request; arrival in seconds from the start, None in a closed loop: as soon as there is room for it."""

    name: str
    prompt_tokens: int
    output_tokens: int
    arrival: float | None


@dataclass(frozen=True, slots=True)
class Served:
    """When a request arrived, and when its tokens left the target: one entry a round, the first token by itself. Seconds from the start."""

    request: str
    prompt_tokens: int
    output_tokens: int
    arrival: float
    token_seconds: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Time to first token, waiting for room included."""
        return self.token_seconds[0] - self.arrival

    @property
    def e2e(self) -> float:
        """From arrival to the last token."""
        return self.token_seconds[-1] - self.arrival

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, None where there is none."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> tuple[float, ...]:
        """Inter-token latencies as a stream shows them: from one round's tokens to the next round's, however many come at once."""
        return tuple([after - before for before, after in pairwise(self.token_seconds)])


LATENCIES: dict[str, Callable[[Served], tuple[float | None, ...]]] = {
    "ttft": lambda served: (served.ttft,),
    "tpot": lambda served: (served.tpot,),
    "itl": lambda served: served.itl,
    "e2e": lambda served: (served.e2e,),
}


def requests(scenario: Scenario, rng: Random) -> list[Request]:
    """The requests of a scenario, in the order of their arrival."""
    if scenario.trace:
        return [Request(f"request-{i}", prompt, output, arrival) for i, (arrival, prompt, output) in enumerate(scenario.trace)]
    count = scenario.num_requests
    prompts, outputs = _lengths(scenario, rng)
    arrivals: list[float] | list[None] = [None] * count
    if scenario.arrival_seconds:
        arrivals = list(scenario.arrival_seconds)
    elif scenario.request_rate:
        arrivals = np.cumsum(rng.exponential(1 / scenario.request_rate, count)).tolist()
    return [Request(f"request-{i}", *asked) for i, asked in enumerate(zip(prompts, outputs, arrivals, strict=True))]


def _lengths(scenario: Scenario, rng: Random) -> tuple[list[int], list[int]]:
    """Tokens of every prompt and output. Two lists of one length are pairs, which stay together."""
    count, given = scenario.num_requests, (scenario.prompt_tokens, scenario.output_tokens)
    prompts, outputs = (np.atleast_1d(np.asarray(lengths)) for lengths in given)
    of_prompt = rng.integers(prompts.size, size=count)
    of_output = of_prompt if prompts.size == outputs.size else rng.integers(outputs.size, size=count)
    return prompts[of_prompt].tolist(), outputs[of_output].tolist()
