"""The paper's sweeps, simulated with constants fitted on its batch-1 greedy rows alone.

python benchmarks/paper_simulated.py      # prints the tables of docs/simulator.md, in half a minute

Fitted (benchmarks/paper.py): seconds of a verification and of a draft step, an acceptance, the published miss rates' curves, tokens after a
miss with the fast backup at batch 1. At each temperature acceptance is what the SD speed implies. All else is predicted.
"""

from __future__ import annotations

from statistics import fmean

import numpy as np
from paper import AR, BATCH, DEVICES, K_SD, SWEEP, TARGET_DEVICES, F, K, Pair, fitted, hit_rate, implied_alpha, laws, table

from sim.latency import Latency
from sim.metrics import Metrics
from sim.outcomes import IID, TwoState
from sim.scenario import Scenario
from sim.simulate import simulate
from theory.acceptance import expected_tokens
from theory.fanout import geometric

LONGEST = 64
TOKENS = 512
REQUESTS = 64


def pair(alpha: float, temperature: float) -> TwoState:
    """Outcomes with the fitted curves after a hit and after a miss."""
    after_hit, after_miss = (IID(alpha, tuple(law.curve(LONGEST).tolist())) for law in laws(temperature))
    return TwoState(after_hit, after_miss)


def scenario(T_sd: float, alpha: float, temperature: float = 0.0, **changes: object) -> Scenario:
    """The published set-up: constant latencies, a draft step of T_SD / 6 whatever its branches."""
    step = Latency.constant(T_sd / AR / K_SD)
    options: dict[str, object] = {
        "mode": "ssd",
        "verify": Latency.constant(1 / AR),
        "draft_step": step,
        "outcomes": pair(alpha, temperature),
        "num_speculative_tokens": K,
        "fan_out_hit": (F,) * (K + 1),
        "fan_out_miss": (F,) * (K + 1),
        "interrupt": "moot",
        "draft_layers": 16,
        "output_tokens": TOKENS,
        "num_requests": REQUESTS,
        **changes,
    }
    return Scenario(**options)


def played(which: Scenario) -> Metrics:
    """The metrics of a long run."""
    return simulate(which, record=False).metrics


def speed(which: Scenario) -> float:
    """Tokens a second of a sequence after its first."""
    return 1 / (played(which).time_per_output_token or float("inf"))


def sd(T_sd: float, alpha: float, **changes: object) -> Scenario:
    """SD with its own K."""
    return scenario(T_sd, alpha, mode="sd", num_speculative_tokens=K_SD, fan_out_hit=(), fan_out_miss=(), **changes)


def temperatures(T_sd: float) -> list[Pair]:
    """The sweep over temperatures; returns the pairs of speeds."""
    rows, speeds = {}, []
    for T, (of_sd, uniform, shaped, hit_uniform, hit_shaped) in SWEEP.items():
        alpha = implied_alpha(of_sd / AR * (1 + T_sd), K_SD)
        whole = np.diff(np.round(np.cumsum([0, *geometric(F * (K + 1), K, alpha, laws(T)[0].r)]))).astype(int)
        lists = {name: tuple(whole.tolist()) for name in ("fan_out_hit", "fan_out_miss")}
        found = [played(which) for which in (scenario(T_sd, alpha, T), scenario(T_sd, alpha, T, **lists))]
        hits = [(m.cache_hit_rate or 0.0, published) for m, published in zip(found, (hit_uniform, hit_shaped), strict=True)]
        speeds += [(1 / (m.time_per_output_token or 1.0), published) for m, published in zip(found, (uniform, shaped), strict=True)]
        rows[f"{T:g} (a = {alpha:.2f})"] = [*hits, *speeds[-2:]]
    header = "temperature | hit rate, uniform | hit rate, geometric | SSD, uniform | SSD, geometric"
    table("Temperature, simulated", header, rows, (3, 3, 0, 0))
    return speeds


def batches(T_sd: float, alpha: float, fast: float, verify: Latency) -> list[Pair]:
    """The sweep over batch sizes, F=1; fast: acceptance of the fast backup's tokens."""
    rows, pairs = {}, []
    for b, (of_fast, of_jit, of_sd, _) in BATCH.items():
        ours = [
            scenario(T_sd, alpha, verify=verify, **batch(b), **backup)
            for backup in ({"backup": "ngram", "ngram_outcomes": after_miss(fast)}, {})
        ]
        found = [speed(which) for which in (*ours, sd(T_sd, alpha, verify=verify, batch_size=b, num_requests=max(REQUESTS, 4 * b)))]
        rows[f"{b}"] = list(zip(found, (of_fast, of_jit, of_sd), strict=True))
        pairs += rows[f"{b}"]
    table("Batch, simulated, tokens/s of a sequence", "batch | SSD, fast backup | SSD, `jit` | SD", rows)
    return pairs


def devices(T_sd: float, alpha: float, fast: float, verify: Latency) -> list[Pair]:
    """More draft devices at batch 16: as many times the branches, shared out."""
    rows, pairs = {}, []
    for n, (of_sequence, of_device) in DEVICES.items():
        lists = dict.fromkeys(("fan_out_hit", "fan_out_miss"), (n,) * (K + 1))
        options = {**batch(16), **lists, "verify": verify, "draft_devices": n, "backup": "ngram", "ngram_outcomes": after_miss(fast)}
        found = speed(scenario(T_sd, alpha, **options))
        rows[f"{n}"] = [(found, of_sequence), (16 * found / (TARGET_DEVICES + n), of_device)]
        pairs.append(rows[f"{n}"][0])
    table("Draft devices at batch 16, simulated", "draft GPUs | tokens/s of a sequence | tokens/s per GPU", rows)
    return pairs


def batch(b: int) -> dict[str, object]:
    """A full batch with one branch a position."""
    ones = (1,) * (K + 1)
    return {"batch_size": b, "num_requests": max(REQUESTS, 4 * b), "fan_out_hit": ones, "fan_out_miss": ones}


def after_miss(fast: float) -> IID:
    """What the fast backup's tokens are worth; the bonus is ranked as after any miss."""
    return IID(fast, tuple(laws(0.0)[1].curve(LONGEST).tolist()))


def fast_acceptance(T_sd: float, alpha: float) -> float:
    """Acceptance of the fast backup's tokens from the speed of SSD at batch 1 with it."""
    E, h = float(expected_tokens(alpha, K)), hit_rate(0.0, 1)
    return implied_alpha((BATCH[1][0] / BATCH[1][3] - h * E) / (1 - h), K)


def growth(T_sd: float, alpha: float) -> float:
    """What a token adds to a verification, as a share of one without: from the speed of SD at batch 16."""
    verify = float(expected_tokens(alpha, K_SD)) / BATCH[16][2] - T_sd / AR
    return (verify * AR - 1) / (16 * (1 + K_SD))


def main() -> None:
    """Fit, simulate, print."""
    T_sd, _ = fitted()
    alpha = implied_alpha(SWEEP[0.0][0] / AR * (1 + T_sd), K_SD)
    fast = fast_acceptance(T_sd, alpha)
    print(f"T_v {1e3 / AR:.1f} ms, a draft step {T_sd / AR / K_SD * 1e3:.2f} ms, acceptance {alpha:.3f}, of the fast backup {fast:.3f}.")
    told("temperature", temperatures(T_sd))
    for what, more in (("constant", 0.0), ("growing, fitted to SD at batch 16", growth(T_sd, alpha))):
        print(f"\nVerification {what}: {more:.2%} a token.")
        verify = Latency.of({0: 1 / AR, 1000: (1 + 1000 * more) / AR})
        told("batch", batches(T_sd, alpha, fast, verify))
        told("devices", devices(T_sd, alpha, fast, verify))


def told(name: str, pairs: list[Pair]) -> None:
    """Print how far the speeds of a sweep are off."""
    errors = [abs(ours / theirs - 1) for ours, theirs in pairs]
    print(f"\nSpeeds over {name}: mean absolute error {fmean(errors):.1%}, worst {max(errors):.1%}.")


if __name__ == "__main__":
    main()
