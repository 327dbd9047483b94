import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from theory.fitting import fit_power_law, fit_rank_counts
from theory.hits import PowerLaw

FAN_OUTS = [2, 4, 8, 16, 32, 64, 128]
MEASURED = {  # miss rates read from the paper's figure -> (c, r)
    (0.231, 0.134, 0.080, 0.053, 0.039, 0.029, 0.025): (0.28, 0.54),
    (0.457, 0.309, 0.202, 0.140, 0.104, 0.080, 0.067): (0.57, 0.47),
    (0.319, 0.210, 0.139, 0.092, 0.065, 0.046, 0.035): (0.44, 0.54),
    (0.551, 0.399, 0.284, 0.195, 0.134, 0.095, 0.074): (0.78, 0.50),
    (0.406, 0.304, 0.223, 0.170, 0.125, 0.094, 0.073): (0.54, 0.42),
    (0.642, 0.515, 0.402, 0.309, 0.229, 0.179, 0.142): (0.85, 0.37),
}


@pytest.mark.parametrize(("miss", "expected"), MEASURED.items())
def test_fit_finds_the_constants_of_the_measured_curves(miss, expected):
    law = fit_power_law(FAN_OUTS, miss)
    assert (round(law.c, 2), round(law.r, 2)) == expected


@given(st.floats(0.05, 2), st.floats(0.05, 1))
def test_fit_recovers_an_exact_law(r, c):
    law = fit_power_law(FAN_OUTS, c * np.array(FAN_OUTS, float) ** -r)
    assert (law.r, law.c) == pytest.approx((r, c))


def chances(law: PowerLaw, largest: int) -> np.ndarray:
    """Chances of the ranks 1..largest and of more."""
    return np.diff(np.append(law.curve(largest), 1.0))


def log_likelihood(law: PowerLaw, counts, beyond) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.nansum(np.append(counts, beyond) * np.log(chances(law, len(counts)))))


@given(st.floats(0.2, 1.5), st.floats(0.2, 0.8), st.floats(0.02, 0.2))
@settings(max_examples=20)
def test_expected_counts_give_back_the_law(r, c, floor):
    counts = 1e6 * chances(PowerLaw(r, c, floor), 32)
    law = fit_rank_counts(counts[:-1], round(counts[-1])).law
    assert (law.r, law.c, law.floor) == pytest.approx((r, c, floor), rel=1e-3, abs=1e-3)
    without = 1e6 * chances(PowerLaw(r, c), 32)
    law = fit_rank_counts(without[:-1], round(without[-1]), floor=False).law
    assert (law.r, law.c, law.floor) == pytest.approx((r, c, 0), rel=1e-3)


@pytest.mark.parametrize("floor", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_no_general_optimiser_finds_a_likelier_law(seed, floor):
    rng = np.random.default_rng(seed)
    seen = rng.multinomial(300, chances(PowerLaw(0.6, 0.5, 0.03), 16))
    fit = fit_rank_counts(seen[:-1], int(seen[-1]), floor)

    def loss(x):
        r, c, f = np.exp(x[0]), *(np.exp([*x[1:], 0]) / np.exp([*x[1:], 0]).sum())[:2]
        return -log_likelihood(PowerLaw(float(r), float(c), float(f) if floor else 0.0), seen[:-1], seen[-1])

    best = min(minimize(loss, start, method="Nelder-Mead", options={"maxiter": 4000}).fun for start in ([-1, 0, -2], [0.5, 0, -5]))
    assert -log_likelihood(fit.law, seen[:-1], seen[-1]) <= best + 1e-6


def test_an_interval_ends_where_the_best_law_with_that_constant_is_no_longer_credible():
    seen = np.random.default_rng(1).multinomial(400, chances(PowerLaw(0.7, 0.5, 0.05), 16))
    fit = fit_rank_counts(seen[:-1], int(seen[-1]), confidence=0.9)
    best = log_likelihood(fit.law, seen[:-1], seen[-1])
    rs, cs, floors = np.exp(np.linspace(np.log(0.1), np.log(6), 120)), np.linspace(0.05, 0.9, 120), np.linspace(0, 0.15, 120)
    r, c, f, F = rs[:, None, None], cs[:, None], floors, np.arange(1, 17)
    with np.errstate(invalid="ignore", divide="ignore"):
        table = seen[0] * np.log(1 - c - f) + seen[-1] * np.log(f + c * 16.0**-r) + seen[1:-1].sum() * np.log(c)
    table = np.nan_to_num(table, nan=-np.inf) + (np.log(-np.diff(F ** -rs[:, None])) @ seen[1:-1])[:, None, None]
    for axes, grid, (low, high) in (((1, 2), rs, fit.r), ((0, 2), cs, fit.c), ((0, 1), floors, fit.floor)):
        credible = grid[table.max(axis=axes) >= best - 2.7055 / 2]
        step = np.diff(grid).max()
        assert (credible[0], credible[-1]) == pytest.approx((low, high), abs=1.5 * step)


def test_the_intervals_hold_the_truth_about_as_often_as_they_say():
    rng, truth, held = np.random.default_rng(2), PowerLaw(0.6, 0.5, 0.05), np.zeros(3)
    runs = 100
    for seen in rng.multinomial(500, chances(truth, 24), size=runs):
        fit = fit_rank_counts(seen[:-1], int(seen[-1]), confidence=0.8)
        held += [low <= value <= high for value, (low, high) in ((truth.r, fit.r), (truth.c, fit.c), (truth.floor, fit.floor))]
    # Standard error .04.
    assert np.all(np.abs(held / runs - 0.8) < 0.13)


def test_more_counts_narrow_the_interval_as_their_root():
    seen = np.round(4000 * chances(PowerLaw(0.6, 0.5), 24))
    few, many = (fit_rank_counts(seen[:-1] * n, int(seen[-1] * n), floor=False) for n in (1, 16))
    assert (few.r[1] - few.r[0]) / (many.r[1] - many.r[0]) == pytest.approx(4, rel=0.1)


def test_counts_that_bound_the_exponent_on_one_side_only_say_so():
    fit = fit_rank_counts([50, 3, 0, 0], 0)
    assert fit.r[1] == np.inf
    assert fit.floor[0] == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit_power_law([1, 2], [0.1, 0.2]), "does not fall"),
        (lambda: fit_power_law([2, 2], [0.1, 0.2]), "two different"),
        (lambda: fit_rank_counts([5, 1], 1), "counts=.*at least 3"),
        (lambda: fit_rank_counts([5, 0, 0], 1), "a rank above 1"),
        (lambda: fit_rank_counts([5, 1, 1], -1), "beyond=-1"),
        (lambda: fit_rank_counts([5, 1, 1], 0, confidence=95), "confidence=95"),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
