"""The paper's curves from the fewest constants: fitted on its batch-1 greedy table and its miss rates, the rest predicted.

python benchmarks/paper.py                # prints the tables of docs/theory.md

Published numbers are read off figures where no table has them (about 2 % reading error). Times are in units of one verification.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq, least_squares

from theory.acceptance import accepted_length_law, expected_tokens
from theory.batch import batched_seconds_per_token
from theory.check import FloatArray
from theory.devices import tokens_per_second_per_device
from theory.fallback import critical_batch
from theory.fanout import geometric, optimal
from theory.fitting import fit_power_law
from theory.hits import PowerLaw, hit_probability, stationary_hit_rate
from theory.speed import blocking_round_seconds, ssd_speedup

# Llama-3.1-70B on 4 H100, Llama-3.2-1B on one more; SD K=6, SSD K=7 F=3.
AR, K_SD, K, F, TARGET_DEVICES = 54.7, 6, 7, 3, 4
GREEDY = {"HumanEval": (176, 283), "UltraFeedback": (138, 215), "Alpaca": (145, 224), "GSM8k": (188, 301)}
QWEN_AR = 88.8
QWEN = {"HumanEval": (146, 222), "UltraFeedback": (122, 174), "Alpaca": (127, 185), "GSM8k": (152, 234)}
SIZES = (2, 4, 8, 16, 32, 64, 128)
MISSES = {  # temperature: after a hit round, after a miss round
    0.0: ((0.231, 0.134, 0.080, 0.053, 0.039, 0.029, 0.025), (0.457, 0.309, 0.202, 0.140, 0.104, 0.080, 0.067)),
    0.7: ((0.319, 0.210, 0.139, 0.092, 0.065, 0.046, 0.035), (0.551, 0.399, 0.284, 0.195, 0.134, 0.095, 0.074)),
    1.0: ((0.406, 0.304, 0.223, 0.170, 0.125, 0.094, 0.073), (0.642, 0.515, 0.402, 0.309, 0.229, 0.179, 0.142)),
}
SWEEP = {  # temperature: SD, SSD uniform, SSD geometric, hit rate uniform, geometric
    0.0: (161, 246, 248, 0.848, 0.861),
    0.3: (150, 222, 226, 0.834, 0.851),
    0.7: (138, 195, 200, 0.783, 0.812),
    1.0: (112, 137, 143, 0.583, 0.633),
}
BATCH = {1: (250, 256, 162, 55), 2: (244, 214, 158, 56), 4: (237, 186, 155, 57), 8: (208, 160, 145, 55), 16: (170, 135, 130, 53)}
COST = {1: 1.26, 2: 1.24, 4: 1.22, 8: 1.15, 16: 1.05}
DEVICES = {1: (170, 544), 2: (197, 525), 4: (216, 432), 8: (226, 301)}
SAGUARO = {1: (0.617, 0.799), 0.5: (0.637, 0.784), 0.08: (0.720, 0.688), 0.03: (0.742, 0.645), 0.01: (0.800, 0.517), 0: (0.805, 0.481)}
REPLICATED = {4: 210.9, 5: 193.6, 6: 175.3, 7: 158.6}  # tokens/s; verification 11.45 ms, step 2.54 ms, 2.83 ms before the first


Pair = tuple[float, float]


def table(title: str, header: str, rows: dict[str, list[Pair]], digits: tuple[int, ...] | None = None) -> None:
    """Print a row of cells `predicted / published (error)` for each name."""
    print(f"\n**{title}**, predicted / published (error)\n\n| {header} |\n|{'---|' * (header.count('|') + 1)}")
    for name, pairs in rows.items():
        places = digits or (0,) * len(pairs)
        cells = [f"{ours:.{n}f} / {theirs:.{n}f} ({ours / theirs - 1:+.1%})" for (ours, theirs), n in zip(pairs, places, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |")


def laws(temperature: float) -> tuple[PowerLaw, PowerLaw]:
    """The fitted curves after a hit and after a miss; between the published temperatures, misses interpolated in their logarithm."""
    known = sorted(MISSES)
    misses = [[np.interp(temperature, known, column) for column in np.log([MISSES[T][state] for T in known]).T] for state in (0, 1)]
    after_hit, after_miss = (fit_power_law(SIZES, np.exp(each)) for each in misses)
    return after_hit, after_miss


def hit_rate(temperature: float, fan_out: float) -> float:
    """Long-run hit rate of the two-state chain, one fan-out at all positions."""
    after_hit, after_miss = laws(temperature)
    return float(stationary_hit_rate(after_hit.hit(fan_out), after_miss.hit(fan_out)))


def fitted() -> tuple[float, dict[str, float]]:
    """Fit T_SD (of 6 draft tokens) and an acceptance for each dataset to the 8 speeds; the hit rate comes from the miss rates."""
    h, names = hit_rate(0.0, F), list(GREEDY)

    def relative_errors(x: FloatArray) -> FloatArray:
        sd, ssd = speeds(x[0], x[1:], h)
        published = np.array(list(GREEDY.values()), float)
        return np.concatenate([sd / published[:, 0], ssd / published[:, 1]]) - 1

    found = least_squares(relative_errors, [0.5, *[0.85] * len(names)], bounds=(0.01, [2.0, *[0.99] * len(names)])).x
    return float(found[0]), dict(zip(names, found[1:].tolist(), strict=True))


def speeds(T_sd: float, alpha: FloatArray, h: float) -> tuple[FloatArray, FloatArray]:
    """Tokens/s of SD with K=6 and of SSD with K=7, the draft as its own backup."""
    E = expected_tokens(alpha, K)
    return AR * expected_tokens(alpha, K_SD) / (1 + T_sd), AR * ssd_speedup(h, E, E, 1.0, T_sd * K / K_SD)


def implied_alpha(tokens: float, length: int) -> float:
    """The acceptance that makes a round of so many draft tokens commit so many on average."""
    return float(brentq(lambda a: float(expected_tokens(a, length)) - tokens, 1e-6, 1 - 1e-9))


def greedy_table() -> tuple[float, float]:
    """The fit itself. Returns T_SD and the acceptance that the mean of the SD speeds implies."""
    T_sd, alphas = fitted()
    h = hit_rate(0.0, F)
    sd, ssd = speeds(T_sd, np.array(list(alphas.values())), h)
    constants = ", ".join(f"{name} {alpha:.3f}" for name, alpha in alphas.items())
    print(
        f"Fitted: T_v = 1/{AR} s; T_SD = {T_sd:.3f} T_v for {K_SD} tokens, {T_sd / AR / K_SD * 1e3:.1f} ms a token; acceptance {constants}."
    )
    print(f"Hit rate from the miss rates: {h:.3f}.")
    rows = {name: [(float(sd[i]), GREEDY[name][0]), (float(ssd[i]), GREEDY[name][1])] for i, name in enumerate(GREEDY)}
    table("Batch 1, greedy: the fit, 8 speeds by 5 constants", "tokens/s | SD | SSD", rows)
    return T_sd, implied_alpha(SWEEP[0.0][0] / AR * (1 + T_sd), K_SD)


def qwen_table(T_sd: float) -> None:
    """The other pair, from its SD speeds alone: the same T_SD and hit rate."""
    h, rows = hit_rate(0.0, F), {}
    for name, (sd, ssd) in QWEN.items():
        alpha = implied_alpha(sd / QWEN_AR * (1 + T_sd), K_SD)
        rows[name] = [(QWEN_AR / AR * float(speeds(T_sd, np.array(alpha), h)[1]), ssd)]
    table("Qwen3-32B/0.6B, SSD from its SD, all else as above", "tokens/s | SSD", rows)


def temperature_sweep(T_sd: float) -> None:
    """Acceptance at each temperature is what the SD speed implies; hits and SSD follow."""
    rows = {}
    for T, (sd, uniform, shaped, hit_uniform, hit_shaped) in SWEEP.items():
        alpha = implied_alpha(sd / AR * (1 + T_sd), K_SD)
        law, F_k = accepted_length_law(alpha, K), geometric(F * (K + 1), K, alpha, laws(T)[0].r)
        h = hit_rate(T, F), float(stationary_hit_rate(*(law @ each.hit(F_k) for each in laws(T))))
        E = expected_tokens(alpha, K)
        speed = [AR * float(ssd_speedup(rate, E, E, 1.0, T_sd * K / K_SD)) for rate in h]
        rows[f"{T:g} (a = {alpha:.2f})"] = list(zip([*h, *speed], [hit_uniform, hit_shaped, uniform, shaped], strict=True))
    header = "temperature | hit rate, uniform | hit rate, geometric | SSD, uniform | SSD, geometric"
    table("Temperature: acceptance from the SD speed, hits from the miss rates", header, rows, (3, 3, 0, 0))
    needed = [f"T={T:g}: {brentq(lambda size, T=T: hit_rate(T, size) - SWEEP[T][3], 1, 64):.1f}" for T in SWEEP]
    print(f"\nFan-out at which the fitted curves give the published hit rate: {', '.join(needed)}.")


@dataclass(frozen=True)
class Batched:
    """What the batch sweep depends on: F=1 hit rate, tokens after a miss with the fast backup, growth of a verification by its tokens."""

    T_sd: float
    alpha: float
    h: float
    E_fast: float
    growth: float

    def verify(self, b: int, length: int) -> float:
        """Seconds of a verification of so many draft tokens for each of b sequences."""
        return (1 + self.growth * b * length) / BATCH[b][3]

    def sd(self, b: int) -> float:
        """Tokens/s of a sequence."""
        return float(expected_tokens(self.alpha, K_SD)) / (self.verify(b, K_SD) + self.T_sd / AR)

    def ssd(self, b: int, jit: bool) -> float:
        """Tokens/s of a sequence, with the backup `jit` or the fast one."""
        T_v, E = self.verify(b, K), float(expected_tokens(self.alpha, K))
        T_b, E_miss = (self.T_sd * K / K_SD / AR, E) if jit else (0.0, self.E_fast)
        return float(1 / batched_seconds_per_token(b, T_v, T_v, T_b, self.h, E, E_miss))


def batch_sweep(T_sd: float, alpha: float) -> None:
    """First with one constant more, E of the fast backup; then also the F=1 hit rate and the growth of a verification."""
    E, (fast, jit, _, ar) = float(expected_tokens(alpha, K)), BATCH[1]
    h = hit_rate(0.0, 1)
    show_batch("the fast backup at b=1", Batched(T_sd, alpha, h, (fast / ar - h * E) / (1 - h), 0.0))
    h = 1 - (E * ar / jit - 1) * AR / ar / (T_sd * K / K_SD)
    growth = (BATCH[16][3] * (float(expected_tokens(alpha, K_SD)) / BATCH[16][2] - T_sd / AR) - 1) / (16 * K_SD)
    # The verification of one sequence grows too, by so little that the two constants fitted at batch 1 hardly move.
    known = Batched(T_sd, alpha, h, (fast / ar - h * E) / (1 - h), growth)
    show_batch("both SSD points of b=1 and SD at b=16", known)
    crossing = float(critical_batch(h, E, E, known.E_fast, T_sd * K / K_SD, 0.0, 1.0))
    print(f"\nCritical batch by the closed form: {crossing:.2f}; published between 1 and 2.")
    devices(known)


def show_batch(fitted_to: str, known: Batched) -> None:
    """Print the sweep and the cost."""
    print(
        f"\nFitted to {fitted_to}: hit rate with F=1 {known.h:.3f}, {known.E_fast:.2f} tokens after a miss with the fast backup"
        f" ({float(expected_tokens(known.alpha, K)):.2f} with `jit`), a verification grows by {known.growth:.2%} a token."
    )
    rows = {}
    for b, (fast, jit, sd, _) in BATCH.items():
        of_fast, of_jit, of_sd = known.ssd(b, False), known.ssd(b, True), known.sd(b)
        per_device = tokens_per_second_per_device([1 / max(of_fast, of_jit), 1 / of_sd], [TARGET_DEVICES + 1, TARGET_DEVICES], b)
        rows[f"{b}"] = [(of_fast, fast), (of_jit, jit), (of_sd, sd), (float(per_device[0] / per_device[1]), COST[b])]
    header = "batch | SSD, fast backup | SSD, `jit` | SD | per GPU, SSD over SD"
    table("Batch, tokens/s of a sequence, and cost", header, rows, (0, 0, 0, 2))


def devices(known: Batched) -> None:
    """Budgets grow with the draft's devices, so does F at batch 16: hits gain on that of one device what the fitted power laws gain."""
    rows, base = {}, hit_rate(0.0, 1)
    for n, (published, each) in DEVICES.items():
        h = 1 - (1 - known.h) * (1 - hit_rate(0.0, n)) / (1 - base)
        speed = replace(known, h=h).ssd(16, False)
        rows[f"{n}"] = [(speed, published), (float(tokens_per_second_per_device(1 / speed, TARGET_DEVICES + n, 16)), each)]
    table("More draft devices at batch 16, constants as in the last table", "draft GPUs | tokens/s of a sequence | tokens/s per GPU", rows)
    print(f"\nIf every round hit: {replace(known, h=1.0).ssd(16, False):.0f} tokens/s.")


def replication() -> None:
    """One constant, the acceptance, fitted at K=4; every round lasts max(T_v, T_p), a miss the backup longer."""
    T_v, step, before = 11.45e-3, 2.54e-3, 2.83e-3
    h = hit_rate(0.0, F)

    def speed(alpha: float, K: int, exact: bool) -> float:
        E, T_p, T_b = float(expected_tokens(alpha, K)), before + K * step, K * step
        hit, miss = blocking_round_seconds(T_v, T_p, T_b)
        return E / (h * float(hit) + (1 - h) * float(miss if exact else T_v + T_b))

    alphas = [float(brentq(lambda a, exact=exact: speed(a, 4, exact) - REPLICATED[4], 0.1, 0.999)) for exact in (True, False)]
    rows = {
        f"{K}": [(speed(a, K, exact), published) for a, exact in zip(alphas, (True, False), strict=True)]
        for K, published in REPLICATED.items()
    }
    header = f"K | a miss finds the draft busy until T_p (a = {alphas[0]:.3f}) | Theorem 7 (a = {alphas[1]:.3f})"
    table(f"Replication on Qwen3-32B/0.6B, acceptance fitted at K=4, hit rate {h:.2f}, tokens/s", header, rows, (1, 1))


def assumptions(T_sd: float) -> None:
    """The numbers of the section on assumptions."""
    print("\n**Assumptions**\n")
    F_grid = np.array(SIZES, float)
    for T, states in MISSES.items():
        for name, miss in zip(("hit", "miss"), states, strict=True):
            r = float(-(np.log(F_grid) @ np.log(miss)) / (np.log(F_grid) @ np.log(F_grid)))
            law = fit_power_law(SIZES, miss)
            unit, free = (np.abs(np.array(curve) - miss) for curve in (F_grid**-r, law.c * F_grid**-law.r))
            print(
                f"- T={T:g} after a {name}: c=1 best r={r:.2f}, worst error {unit.max():.3f} at F={SIZES[int(unit.argmax())]};"
                f" c={law.c:.2f} r={law.r:.2f}, worst error {free.max():.3f}"
            )
    for T in MISSES:
        after_hit, after_miss = (float(law.hit(F)) for law in laws(T))
        chain, T_b = hit_rate(T, F), T_sd * K / K_SD
        too_fast = (1 + (1 - chain) * T_b) / (1 + (1 - after_hit) * T_b) - 1
        rates = f"{after_hit:.3f} after a hit, {after_miss:.3f} after a miss, {chain:.3f} in the long run"
        print(f"- T={T:g}, F={F}: hits {rates}; taking the first for all rounds: {too_fast:+.1%} speed")
    for K_ in (2, 4, 6, 7):
        by_C = [
            AR * float(ssd_speedup(h, expected_tokens(a, K_), expected_tokens(a, K_), 1.0, T_sd * K_ / K_SD)) for h, a in SAGUARO.values()
        ]
        print(f"- K={K_}: tokens/s at C = {', '.join(f'{C:g}: {speed:.0f}' for C, speed in zip(SAGUARO, by_C, strict=True))}")
    alpha = 0.8
    for budget in (8, 16, 32):
        law, unit = accepted_length_law(alpha, K), PowerLaw(0.54)
        true = [laws(0.0)[0].curve(budget)] * (K + 1)
        by_unit, by_true = (optimal(budget, law, curves) for curves in ([unit.curve(budget)] * (K + 1), true))
        rates = [hit_probability(law, fan_out, true) for fan_out in (by_unit, by_true)]
        print(f"- a={alpha}, K={K}, B={budget}: fan-outs chosen with c=1 {by_unit} hit {rates[0]:.3f}, with c=.28 {by_true} {rates[1]:.3f}")


def main() -> None:
    """Fit, predict, print."""
    T_sd, alpha = greedy_table()
    qwen_table(T_sd)
    temperature_sweep(T_sd)
    batch_sweep(T_sd, alpha)
    replication()
    assumptions(T_sd)


if __name__ == "__main__":
    main()
