import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import expit, logit

from theory.calibration import BINS, CENTRES, EDGES, LEAST, Calibration, bins_of

chances = hnp.arrays(np.float64, st.integers(0, 30), elements=st.floats(0, 1))
outcomes = chances.flatmap(lambda some: st.tuples(st.just(some), hnp.arrays(np.float64, some.shape, elements=st.floats(0, 1))))


@st.composite
def calibrations(draw):
    trials = draw(hnp.arrays(np.float64, BINS, elements=st.floats(0, 1e6)))
    return Calibration(trials, trials * draw(hnp.arrays(np.float64, BINS, elements=st.floats(0, 1))))


def same(one: Calibration, other: Calibration) -> None:
    np.testing.assert_allclose(one.trials, other.trials, rtol=1e-12)
    np.testing.assert_allclose(one.successes, other.successes, rtol=1e-12, atol=1e-12)


def test_every_chance_falls_into_the_bin_around_it():
    assert bins_of(CENTRES).tolist() == list(range(BINS))
    assert bins_of([0, 1e-9, 1 - 1e-12, 1]).tolist() == [0, 0, BINS - 1, BINS - 1]
    assert bins_of([[1e-4, 0.0999], [0.5, 0.1]]).tolist() == [[1, 6], [10, 7]]
    assert np.all(np.diff(EDGES) > 0)


@given(chances)
def test_without_data_the_calibrated_chance_is_the_confidence(some):
    # Beyond the outer centres, so less than a bin away, it is the centre.
    np.testing.assert_allclose(Calibration.empty().calibrated(some), np.clip(some, CENTRES[0], CENTRES[-1]), rtol=1e-9)
    np.testing.assert_allclose(Calibration.empty().curve(), CENTRES)


@given(calibrations(), chances, st.floats(1e-3, 1e3))
def test_the_calibrated_chance_never_falls_as_the_confidence_grows(calibration, some, prior):
    calibrated = calibration.calibrated(np.sort(some), prior)
    assert np.all(np.diff(calibrated) >= -1e-12)
    assert np.all(np.diff(calibration.curve(prior)) >= 0)


@given(calibrations(), chances, st.floats(1e-3, 1e3))
def test_no_outcome_is_taken_for_certain(calibration, some, prior):
    calibrated = calibration.calibrated(np.append(some, [0, 1]), prior)
    assert np.all((calibrated >= LEAST * (1 - 1e-9)) & (calibrated <= 1 - LEAST * (1 - 1e-9)))
    assert np.all((calibration.curve(prior) >= 0) & (calibration.curve(prior) <= 1))


@given(calibrations(), st.integers(0, BINS - 2), st.floats(0, 1))
def test_no_jump_between_the_centres(calibration, i, part):
    low, high = calibration.calibrated(CENTRES[i : i + 2])
    between = expit((1 - part) * logit(CENTRES[i]) + part * logit(CENTRES[i + 1]))
    assert logit(calibration.calibrated(between)) == pytest.approx((1 - part) * logit(low) + part * logit(high), abs=1e-6)
    np.testing.assert_allclose([low, high], np.clip(calibration.curve()[i : i + 2], LEAST, 1 - LEAST), rtol=1e-6)


@given(outcomes, outcomes, calibrations())
def test_merging_is_updating_with_all_outcomes(one, other, before):
    together = before.updated(*(np.concatenate(parts) for parts in zip(one, other, strict=True)))
    same(together, before.updated(*one).updated(*other))
    same(together, before.merged(Calibration.empty().updated(*one)).merged(Calibration.empty().updated(*other)))


def test_each_outcome_is_one_trial_in_its_bin():
    calibration = Calibration.empty().updated([[0.05, 0.06], [0.5, 1.0]], [[1, 0], [0.25, True]])
    tried, seen = (dict(enumerate(counts)) for counts in calibration.to_lists())
    assert {i: (n, seen[i]) for i, n in tried.items() if n} == {6: (2, 1), 10: (1, 0.25), BINS - 1: (1, 1)}


@given(calibrations(), outcomes, st.floats(0, 1))
def test_memory_fades_what_was_counted_before_and_not_what_is_new(before, new, memory):
    kept = Calibration(memory * before.trials, memory * before.successes)
    same(before.updated(*new, memory=memory), kept.merged(Calibration.empty().updated(*new)))


def test_with_memory_the_chance_follows_a_change():
    fading = steady = Calibration.empty()
    for came in (1, 0):
        for _ in range(200):
            fading, steady = fading.updated([0.75] * 5, [came] * 5, memory=0.95), steady.updated([0.75] * 5, [came] * 5)
    assert steady.calibrated(0.75) == pytest.approx(0.5, abs=0.1)
    assert fading.calibrated(0.75) < 0.15


def drawn(truth, n, seed):
    """n confidences, most of them near 0 or 1, whose events come with chance truth(confidence)."""
    rng = np.random.default_rng(seed)
    said = expit(rng.uniform(logit(1e-4), logit(0.9995), n))
    return said, rng.random(n) < truth(said)


DISTORTIONS = {
    "under-confident": lambda said: expit(0.6 * logit(said) + 1),
    "over-confident": lambda said: 0.7 * said**1.5,
    "right": lambda said: said,
    "blind": lambda said: np.full_like(said, 0.3),
}


@pytest.mark.parametrize("truth", DISTORTIONS.values(), ids=DISTORTIONS)
def test_with_many_outcomes_the_calibrated_chance_is_the_true_one(truth):
    calibration = Calibration.empty().updated(*drawn(truth, 200_000, seed=1))
    asked = expit(np.linspace(logit(2e-4), logit(0.999), 200))
    np.testing.assert_allclose(calibration.calibrated(asked), truth(asked), atol=0.03)


@pytest.mark.parametrize("truth", DISTORTIONS.values(), ids=DISTORTIONS)
def test_some_outcomes_already_help_and_none_are_made_worse(truth):
    fitted, fresh = (Calibration.empty().updated(*drawn(truth, n, seed)) for n, seed in ((300, 2), (100_000, 3)))
    raw, calibrated = fresh.expected_calibration_error(), fresh.expected_calibration_error(fitted.curve())
    assert calibrated < max(0.7 * raw, 0.05)


def test_noise_of_rare_bins_does_not_turn_the_order():
    calibration = Calibration.empty().updated([0.3] * 100 + [0.4] * 2, [1] * 60 + [0] * 42)
    low, high = calibration.calibrated([0.3, 0.4])
    assert 0.5 < low <= high
    assert calibration.curve()[bins_of(0.3)] == pytest.approx(calibration.curve()[bins_of(0.4)])


def test_error_and_bias_are_means_over_the_outcomes():
    counted = Calibration.empty().updated([0.55] * 30 + [0.1] * 10, [1] * 24 + [0] * 6 + [0] * 10)
    said = np.where(np.arange(BINS) == bins_of(0.55), 0.6, 0.1)
    assert counted.bias(said) == pytest.approx((30 * (0.6 - 0.8) + 10 * 0.1) / 40)
    assert counted.expected_calibration_error(said) == pytest.approx((30 * 0.2 + 10 * 0.1) / 40)
    assert counted.bias() == pytest.approx((30 * (CENTRES[10] - 0.8) + 10 * CENTRES[7]) / 40)


@given(calibrations())
def test_counts_come_back_from_plain_numbers_and_from_a_pickle(calibration):
    for back in (Calibration.from_lists(*calibration.to_lists()), pickle.loads(pickle.dumps(calibration))):
        np.testing.assert_array_equal(back.trials, calibration.trials)
        np.testing.assert_array_equal(back.successes, calibration.successes)


def test_counts_cannot_be_changed_from_outside():
    trials = np.ones(BINS)
    calibration = Calibration(trials, np.zeros(BINS))
    trials[0] = -1
    assert calibration.trials[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        calibration.successes[0] = 2


ONES, EMPTY = np.ones(BINS), Calibration.empty()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Calibration(ONES, 2 * ONES), "exceed trials"),
        (lambda: Calibration(ONES, -ONES), "(?s)successes=.*not negative"),
        (lambda: Calibration(ONES * np.inf, ONES), "(?s)trials=.*finite"),
        (lambda: Calibration.from_lists([1.0], [1.0]), rf"trials has shape \(1,\): pass one count for each of the {BINS} bins"),
        (lambda: bins_of(50), "chance=50"),
        (lambda: EMPTY.updated([1.5], [1]), r"chances=\[1.5\]"),
        (lambda: EMPTY.updated([0.5], [2]), r"came=\[2\]"),
        (lambda: EMPTY.updated([0.5, 0.5], [1]), "one outcome for each chance"),
        (lambda: EMPTY.updated([0.5], [1], memory=1.1), "memory=1.1"),
        (lambda: EMPTY.curve(0), "prior=0"),
        (lambda: EMPTY.calibrated(-1), "chances=-1"),
        (lambda: EMPTY.bias(), "nothing was tried"),
        (lambda: Calibration(ONES, ONES).expected_calibration_error([0.5]), r"predicted has shape \(1,\)"),
        (lambda: Calibration(ONES, ONES).bias(2 * ONES), "predicted="),
    ],
)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
