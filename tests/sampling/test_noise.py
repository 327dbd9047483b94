"""Keyed noise: the same on every side, uniform, Gumbel, and independent from key to key and from token to token."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ssd import native
from ssd.sampling import Purpose, draw, extend, gumbel, mix, noise_kernel, noise_key, prefix_hash, sample_seed, uniform

WORDS = st.integers(-(1 << 63), (1 << 63) - 1)
COUNT = 20_000
ENOUGH = 1e-4
needs_kernel = pytest.mark.skipif(bool(native.why_unavailable()), reason=native.why_unavailable())


def keys_where(vary: str) -> torch.Tensor:
    """Keys that differ in one thing alone, by as little as can be."""
    steps = torch.arange(COUNT)
    seed, position, prefix = (steps if vary == name else torch.full_like(steps, 5) for name in ("seed", "position", "prefix"))
    return noise_key(seed, Purpose.DRAFT, position, prefix)


@given(st.lists(WORDS, min_size=1, max_size=5))
def test_arrays_and_tensors_are_hashed_alike(words):
    array = np.array(words)
    assert mix(torch.tensor(words)).tolist() == mix(array).tolist()
    assert extend(torch.tensor(words), torch.arange(len(words))).tolist() == extend(array, np.arange(len(words))).tolist()
    for purpose in Purpose:
        one = noise_key(array, purpose, np.arange(len(words)), array[::-1].copy())
        assert noise_key(torch.tensor(words), purpose, torch.arange(len(words)), torch.tensor(words[::-1])).tolist() == one.tolist()


def test_the_hash_is_the_published_one():
    """SplitMix64's first numbers for seed 0 (the reference implementation's)."""
    golden = 0x9E3779B97F4A7C15
    states = [(golden * (i + 1)) % (1 << 64) for i in range(3)]
    signed = np.array([word - (1 << 64) if word >= 1 << 63 else word for word in states])
    assert [int(word) % (1 << 64) for word in mix(signed)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(st.lists(st.integers(0, 200_000), max_size=6), st.lists(st.integers(0, 200_000), max_size=6))
def test_different_texts_have_different_hashes_and_a_hash_grows_by_tokens(one, other):
    assert (prefix_hash(one) == prefix_hash(other)) == (one == other)
    grown = np.array([prefix_hash(one)])
    for token in other:
        grown = extend(grown, np.array([token]))
    assert int(grown[0]) == prefix_hash([*one, *other])


def test_every_part_of_a_key_counts():
    five = torch.tensor([5])
    found = {
        int(noise_key(seed, purpose, position, prefix))
        for seed in (five, five + 1)
        for purpose in Purpose
        for position in (five, five + 1)
        for prefix in (five, five + 1)
    }
    assert len(found) == 2 * len(Purpose) * 2 * 2


@pytest.mark.parametrize("vary", ["seed", "position", "prefix"])
def test_numbers_are_uniform_and_do_not_follow_one_another(vary):
    numbers = uniform(keys_where(vary)).numpy()
    assert numbers.dtype == np.float64
    assert 0 <= numbers.min() <= numbers.max() < 1
    assert stats.kstest(numbers, "uniform").pvalue > ENOUGH
    assert abs(stats.pearsonr(numbers[:-1], numbers[1:]).statistic) < 4 / COUNT**0.5
    squares = np.histogram2d(numbers[:-1], numbers[1:], 8, [[0, 1], [0, 1]])[0]
    assert stats.chisquare(squares.ravel()).pvalue > ENOUGH


def test_numbers_for_different_purposes_do_not_follow_one_another():
    steps = torch.arange(COUNT)
    drawn = [uniform(noise_key(steps, purpose, steps, steps)).numpy() for purpose in Purpose]
    for one, other in pairwise(drawn):
        assert abs(stats.pearsonr(one, other).statistic) < 4 / COUNT**0.5


def test_the_noise_is_gumbel_and_tokens_do_not_follow_one_another():
    noise = gumbel(keys_where("prefix"), 5).numpy()
    assert noise.dtype == np.float32
    for column in noise.T:
        assert stats.kstest(column, "gumbel_r").pvalue > ENOUGH
    flat = gumbel(torch.tensor([3]), COUNT).numpy()[0]
    assert stats.kstest(flat, "gumbel_r").pvalue > ENOUGH
    assert np.abs(np.corrcoef(noise.T) - np.eye(5)).max() < 4 / COUNT**0.5
    assert abs(stats.pearsonr(flat[:-1], flat[1:]).statistic) < 4 / COUNT**0.5


def test_a_draw_has_the_law_that_it_is_drawn_from():
    law = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    found = draw(law.log().expand(COUNT, -1), keys_where("prefix")).bincount(minlength=5).numpy()
    assert found[4] == 0
    assert stats.chisquare(found[:4], law[:4].double().numpy() / law[:4].double().sum().item() * COUNT).pvalue > ENOUGH


def test_noise_is_finite_whatever_the_bits(monkeypatch):
    words = torch.tensor([0, -1, 1, -(1 << 63), (1 << 63) - 1])
    monkeypatch.setattr("ssd.sampling.noise.mix", lambda _: words[None])
    assert gumbel(torch.tensor([1]), 5).isfinite().all()
    assert gumbel(torch.tensor([1]), 5).max() > 40


def exact_noise(keys: list[int], vocab_size: int) -> np.ndarray:
    """The noise in fp64, from words hashed one by one by the published hash."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def word(key: int, token: int) -> int:
        state = (key + (token + 1) * golden) & mask
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        return (state ^ state >> 31) >> 1 | 1

    u = np.array([[word(key, token) for token in range(vocab_size)] for key in keys], dtype=np.float64).reshape(-1, vocab_size)
    return -np.log(-np.log1p(-np.minimum(u * 2.0**-63, 1 - 2.0**-24)))


def with_torch(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The noise as it is made where there is no kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise_kernel, "available", lambda _: False)
        return gumbel(keys, vocab_size)


@needs_kernel
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("times", [4, 8, 12])
def test_the_kernels_noise_is_exact_for_any_vocabulary_and_torchs_is_the_same(monkeypatch, lanes, times):
    monkeypatch.setattr(native, "host_vectors", lambda: native.VECTORS[lanes])
    keys = torch.tensor([0, -1, 1, -(1 << 63), (1 << 63) - 1, 77, 12345678901234567])
    for vocab_size in range(max(4 * lanes, lanes * times - 2), lanes * times + 3):
        assert noise_kernel.available(vocab_size)
        noise, exact = gumbel(keys, vocab_size), exact_noise(keys.tolist(), vocab_size)
        # fp32 rounds u itself, which shows where u is all but 1 and the noise is far below 0.
        assert np.abs(noise.numpy() - exact)[exact > -1].max() < 1e-6 * (1 + np.abs(exact[exact > -1]).max())
        assert np.abs(noise.numpy() - exact).max() < 1e-2
        assert torch.equal(noise.argmax(-1), torch.from_numpy(exact.argmax(-1)))
        assert torch.allclose(noise, with_torch(keys, vocab_size), rtol=1e-5, atol=1e-6)
    assert not noise_kernel.available(4 * lanes - 1)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_kernel_takes_keys_however_they_lie_and_however_many(monkeypatch, threads):
    monkeypatch.setattr(native, "team_size", lambda: threads)
    monkeypatch.setattr(noise_kernel, "MIN_TEAM_WORK", 1)
    keys = torch.arange(40) * 987654321987
    whole = gumbel(keys, 500)
    assert torch.equal(gumbel(keys[::3], 500), whole[::3])
    assert torch.equal(gumbel(keys[7:8].expand(4), 500), whole[7:8].expand(4, -1))
    assert torch.equal(gumbel(keys.view(5, 8)[:, 2], 500), whole[2::8])
    assert gumbel(keys[:0], 500).shape == (0, 500)
    assert torch.equal(gumbel(keys, 311), whole[:, :311])


@needs_kernel
@pytest.mark.parametrize("vocab_size", [64, 100])
def test_the_kernels_noise_is_gumbel_and_finite(vocab_size):
    noise = gumbel(keys_where("seed"), vocab_size)
    assert noise.isfinite().all()
    for column in (0, vocab_size // 2, vocab_size - 1):
        assert stats.kstest(noise[:, column].numpy(), "gumbel_r").pvalue > ENOUGH
    assert (noise - with_torch(keys_where("seed"), vocab_size)).abs().max() < 1e-4


@needs_kernel
@pytest.mark.parametrize(
    "word", [0, 1, 2, 1 << 20, (1 << 39) - 1, 1 << 40, 1 << 62, (1 << 64) - (1 << 41), (1 << 64) - (1 << 40), (1 << 64) - 1]
)
def test_the_kernels_logarithms_are_right_for_the_rarest_words(word):
    found = gumbel_of_word(word)
    u = min((word >> 1 | 1) * 2.0**-63, 1 - 2.0**-24)
    exact = -np.log(-np.log1p(-u))
    assert np.isfinite(found)
    assert abs(found - exact) < 1e-5 * max(1, abs(exact))


def gumbel_of_word(word: int) -> float:
    """The kernel's noise for a word: for the key whose first token has this hash."""
    mask = (1 << 64) - 1

    def unshift(value: int, places: int) -> int:
        found = value
        for _ in range(64 // places + 1):
            found = value ^ found >> places
        return found

    state = unshift(word, 31)
    state = unshift(state * pow(0x94D049BB133111EB, -1, 1 << 64) & mask, 27)
    state = unshift(state * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask, 30)
    key = (state - 0x9E3779B97F4A7C15) & mask
    return float(gumbel(torch.tensor([key - (1 << 64) if key >> 63 else key]), 100)[0, 0])


def test_samples_of_a_request_have_seeds_of_their_own_and_the_first_keeps_the_requests():
    seeds = [sample_seed(11, index) for index in range(100)]
    assert seeds[0] == 11
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_accelerator_draws_the_same_bits():
    keys = keys_where("position")
    there = keys.to("cuda")
    assert torch.equal(uniform(there).cpu(), uniform(keys))
    assert torch.allclose(gumbel(there[:50], 1000).cpu(), gumbel(keys[:50], 1000), rtol=1e-5, atol=1e-5)
