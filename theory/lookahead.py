"""How many tokens to draft ahead, and for how many branches, when both must fit beside a verification."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from theory import check
from theory.acceptance import accepted_length_law, expected_tokens_of
from theory.devices import build_seconds
from theory.fanout import best_hit_rates, optimal
from theory.speed import blocking_round_seconds


class Lookahead(NamedTuple):
    """A lookahead with its best fan-outs: seconds T_p of the build, hit probability h, seconds a token."""

    K: int
    fan_out: tuple[int, ...]
    T_p: float
    h: float
    seconds_per_token: float


def lookaheads(
    T_v: ArrayLike,
    catch_up: float,
    step: ArrayLike,
    acceptance: ArrayLike,
    rejected_curve: ArrayLike,
    accepted_curve: ArrayLike,
    devices: int = 1,
) -> tuple[Lookahead, ...]:
    """Every lookahead K = 1..n with the fan-outs that make it fastest, the fastest K first. [derived]

    T_v: seconds of a verification, one number or [n] for K = 1..n draft tokens; catch_up, step: seconds before the first step of a build
    and the step table of theory.devices, on each of `devices` draft devices; acceptance: [n] rate of position k given that all before were
    accepted; rejected_curve, accepted_curve: cumulative hit curves after a rejection and after full acceptance. The backup is `jit`, K
    steps of one branch. Every budget on the table is tried, also one whose build overruns the verification (T_p > T_v): all rounds
    are longer then, theory.speed.blocking_round_seconds. Two calls with other `devices` tell what a draft device is worth.
    """
    rates, table = check.probability("acceptance", acceptance), check.table("step", step)
    if rates.ndim != 1 or rates.size == 0:
        raise ValueError(f"acceptance={acceptance!r} must be a list of rates, one for each position that may be drafted")
    verify = np.broadcast_to(check.positive("T_v", T_v), rates.shape)
    budgets = np.arange(check.count("devices", devices, 1) * (table.size - 1) + 1)
    found = []
    for K in range(1, rates.size + 1):
        law, curves = accepted_length_law(rates[:K], K), [rejected_curve] * K + [accepted_curve]
        h, T_p = best_hit_rates(int(budgets[-1]), law, curves), build_seconds(K, budgets, catch_up, table, devices)
        hit, miss = blocking_round_seconds(verify[K - 1], T_p, K * table[1])
        seconds = (h * hit + (1 - h) * miss) / expected_tokens_of(law)
        B = int(np.argmin(seconds))
        found.append(Lookahead(K, optimal(B, law, curves), float(T_p[B]), float(h[B]), float(seconds[B])))
    return tuple(sorted(found, key=lambda each: each.seconds_per_token))
