"""The law of whole rounds, by exact enumeration of all noise through the engine's own code: it is the target's, to 1e-12."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sampling.cells import gumbel_cells, uniform_cells
from tests.sampling.tables import pairs, table
from tests.sampling.world import PROMPT, Path, Play, World, enumerated, exact_law, law_of_texts
from tests.strategies import several
from theory.coupling import coupled_acceptance_rate

EXACT = 1e-12
WARPS = ({}, {}, {"temperature": 0.7}, {"top_k": 2}, {"top_p": 0.6}, {"temperature": 1.5, "top_k": 3, "top_p": 0.9})


def error(world: World) -> float:
    """The greatest difference between the law of what is emitted and the target's own."""
    played = Play(world).run()
    assert abs(sum(one.weight for one in played) - 1) < EXACT
    return float(np.abs(law_of_texts(world, played) - exact_law(world)).max())


@st.composite
def worlds(draw, sizes, rounds=1, backups=("none",)):
    vocab_size, K = draw(st.sampled_from(sizes))
    p, q = draw(pairs(vocab_size))
    verification = draw(st.sampled_from(["rejection", "rejection", "rejection", "coupled"]))
    factors = () if verification == "coupled" else draw(st.sampled_from([(), (), (0.0,), (0.3,), (1.0,)])) * K
    return World(
        p,
        q,
        vocab_size,
        K,
        params=draw(st.sampled_from(WARPS)),
        draft_params=draw(st.sampled_from([None, *WARPS])),
        verification=verification,
        fan_out=draw(st.integers(1, 2)),
        saguaro=factors,
        ranking=draw(st.sampled_from(["shared_noise", "probability"])),
        backup=draw(st.sampled_from(backups)),
        rounds=rounds,
    )


@several(150)
@given(worlds([(2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (2, 3)]))
def test_a_round_emits_the_targets_law(world):
    assert error(world) < EXACT


@pytest.mark.slow
@several(40)
@given(worlds([(4, 2), (3, 3), (4, 3)]))
def test_a_long_round_emits_the_targets_law(world):
    assert error(world) < EXACT


@several(50)
@given(worlds([(2, 1), (2, 2), (3, 1)], rounds=2, backups=("none", "jit", "ngram")))
def test_two_rounds_with_a_cache_between_them_emit_the_targets_law(world):
    assert error(world) < EXACT


def greedy_about_noise(tokens, noise):
    """Cache whatever may come after a rejection, if the noise at the last place favours token 0: a rule that looks as far as it can."""
    return {(k, t) for k in range(len(tokens) + 1) for t in range(noise.shape[1])} if noise[-1].argmax() == 0 else set()


def looks_at_everything(tokens, noise):
    """Cache the winners of the noise alone, the more the likelier the draft's first token won by luck."""
    return {(k, int(row.argmax())) for k, row in enumerate(noise) if (k + sum(tokens)) % 2 == int(noise[-1].argmax()) % 2}


@pytest.mark.parametrize("rule", [greedy_about_noise, looks_at_everything])
@pytest.mark.parametrize("backup", ["none", "jit", "ngram"])
@pytest.mark.parametrize(("vocab_size", "K"), [(2, 1), (2, 2)])
def test_a_cache_that_looks_at_all_draws_leaves_the_law_alone(rule, backup, vocab_size, K):
    for seed in range(5 - K * K):
        p, q = (table(2 * seed + side, "dense", vocab_size) for side in range(2))
        assert error(World(p, q, vocab_size, K, backup=backup, rounds=2, rule=rule)) < EXACT


def test_both_hits_and_misses_are_played():
    """After one round that is not the last, a path knows whether its outcome was cached."""
    p, q = (table(side, "dense", 2) for side in range(2))
    play, weights = Play(World(p, q, 2, 1, rounds=2)), Counter()
    with enumerated(play.noise):
        for path in play._round([Path(PROMPT, True, {}, 1.0)], last=False):
            weights[path.speaks] += path.weight
    assert min(weights[True], weights[False]) > 0.1


# --- the enumeration itself ---


@several(40)
@given(st.integers(2, 4), st.integers(0, 1000), st.integers(1, 3))
def test_cells_are_what_gumbel_noise_does(size, seed, count):
    """Each token wins with its probability, under every law at once."""
    rng = np.random.default_rng(seed)
    laws = rng.dirichlet(np.ones(size), count)
    cells = gumbel_cells(laws, laws[:1], size)
    assert sum(weight for _, weight in cells) == pytest.approx(1, abs=1e-13)
    for law in laws:
        won = np.zeros(size)
        for noise, weight in cells:
            won[(np.log(law) + noise).argmax()] += weight
        assert won == pytest.approx(law, abs=1e-12)


def test_uniform_cells_are_intervals_and_hold_zero():
    cells = uniform_cells([0.2, 0.5, 1.3, 0.2])
    assert [float(number) for number, _ in cells] == pytest.approx([0, 0.35, 0.75])
    assert [weight for _, weight in cells] == pytest.approx([0.2, 0.3, 0.5])


@pytest.mark.parametrize("seed", range(3))
def test_coupling_accepts_as_often_as_theory_says(seed):
    p, q = (table(2 * seed + side, "dense", 3) for side in range(2))
    world = World(p, q, 3, 1, verification="coupled")
    both = sum(one.weight for one in Play(world).run() if len(one.text) == 3)
    assert both == pytest.approx(float(coupled_acceptance_rate(p(PROMPT), q(PROMPT))), abs=EXACT)
