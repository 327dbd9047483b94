"""The simulator in batches: rounds worked out by hand, the closed forms where they are exact, and what must hold under any load."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from sim.latency import Latency
from sim.outcomes import IID, NEVER, Replay, TwoState
from sim.scenario import Scenario
from sim.simulate import simulate
from theory.acceptance import accepted_length_law, expected_tokens
from theory.batch import batched_seconds_per_token, per_row_seconds_per_token
from theory.hits import PowerLaw, hit_probability, stationary_hit_rate
from theory.speed import sd_seconds_per_token, ssd_seconds_per_token

CURVE = tuple(PowerLaw(r=0.5, c=0.5).curve(40).tolist())
BATCHES = (1, 2, 3, 5, 8)
K = 2
# Two tokens, then the bonus; the cache holds the draft's first candidate everywhere.
BY_HAND = Scenario(
    "ssd",
    verify=Latency.of({1: 10.0, 11: 20.0}),
    draft_step=Latency.of({1: 1.0, 11: 2.0}),
    outcomes=Replay(((K, 1),), lookahead=K),
    num_speculative_tokens=K,
    fan_out_hit=(1, 1, 1),
    fan_out_miss=(1, 1, 1),
    output_tokens=7,
    num_requests=2,
    batch_size=2,
    target_prefill_seconds=20.0,
    draft_prefill_seconds=3.0,
)
# The second request comes while the first one's prompt is fed.
STAGGERED = dataclasses.replace(BY_HAND, arrival_seconds=(0.0, 1.0))


def spans(result, device, activity):
    return [
        (s.start, pytest.approx(s.end), s.request.replace("request-", ""))
        for s in result.timeline.spans
        if (s.device, s.activity) == (device, activity)
    ]


def by_request(result):
    return {served.request: served for served in result.requests}


# Rounds by hand


def test_prompts_that_wait_while_nobody_decodes_are_fed_together():
    result = simulate(BY_HAND)
    # Two prompts of 20 s, then in each round two drafts of 3 tokens: 15 s.
    assert spans(result, "target", "prefill") == [(0, 40, "0, 1")]
    assert spans(result, "target", "verify") == [(40, 55, "0, 1"), (55, 70, "0, 1")]
    assert [served.token_seconds for served in result.requests] == [(40, 55, 70)] * 2
    # Both are fed by the draft, too, which then drafts for what may follow either.
    assert [r.hit for r in result.rounds] == [True] * 4


def test_rows_are_verified_in_one_forward_and_a_prompt_is_fed_beside_running_ones():
    result = simulate(STAGGERED)
    # The prompt of request-1 takes 20 s beside the draft of request-0, 3 tokens in 12 s; then both, 6 tokens, take 15 s.
    assert spans(result, "target", "prefill") == [(0, 20, "0")]
    assert spans(result, "target", "verify") == [(20, 52, "0"), (52, 67, "0, 1"), (67, 79, "1")]
    served = by_request(result)
    assert served["request-0"].token_seconds == (20, 52, 67)
    assert served["request-1"].token_seconds == (52, 67, 79)
    assert (result.metrics.num_output_tokens, result.metrics.total_seconds) == (14, 79)


def test_all_branches_of_all_rows_grow_in_one_forward():
    result = simulate(STAGGERED)
    # At 20: the prompt of request-1 (3 s), then 3 steps of 6 branches (1.5 s), the last of which feeds their last tokens: nothing is
    # left to catch up with. At 52: as many. At 67: one row; 3 steps of 3 branches (1.2 s).
    assert spans(result, "draft", "prefill") == [(0, 3, "0"), (20, 23, "1")]
    assert spans(result, "draft", "build") == [(3, 3 + 3 * 1.2, "0"), (23, 27.5, "0, 1"), (52, 56.5, "0, 1"), (67, 67 + 3 * 1.2, "1")]


def test_rows_that_miss_are_drafted_for_together_and_the_batch_waits():
    # Request-0 hits after its prompt and never again; so does request-1.
    result = simulate(dataclasses.replace(STAGGERED, outcomes=TwoState(Replay(((K, 2),), K), Replay(((K, 1),), K))))
    assert [(r.request[-1], r.hit) for r in result.rounds] == [("0", True), ("0", False), ("1", True), ("1", False)]
    # At 52 request-0 misses and request-1, whose prompt ended, hits: two steps for one row alone, and both wait.
    assert [(r.wait_seconds, r.drafter) for r in result.rounds] == [(0, "cache"), (2, "jit"), (2, "cache"), (2, "jit")]


def test_the_backup_is_drafted_in_forwards_of_as_many_rows_as_miss():
    never = dataclasses.replace(STAGGERED, outcomes=Replay(((K, NEVER),), K), draft_alone=Latency.of({1: 5.0, 2: 7.0}), output_tokens=10)
    # A prompt hits, as the shorter draft of a record. Then request-0 misses, both, and request-1.
    assert [r.wait_seconds for r in simulate(never).rounds] == [0, 10, 10, 14, 14, 10]


def test_misses_with_lookup_or_without_a_backup_cost_no_time():
    missing = dataclasses.replace(STAGGERED, outcomes=Replay(((0, NEVER),), 0), output_tokens=9)
    empty = simulate(dataclasses.replace(missing, backup="none"))
    assert {(r.drafted, r.committed, r.wait_seconds, r.drafter) for r in empty.rounds} == {(0, 1, 0, "none")}
    looked_up = dataclasses.replace(missing, backup="ngram", ngram_outcomes=Replay(((1, NEVER),), K))
    found = simulate(looked_up)
    assert {(r.drafted, r.committed, r.wait_seconds, r.drafter) for r in found.rounds} == {(2, 2, 0, "ngram")}
    nothing = simulate(dataclasses.replace(looked_up, ngram_found=0.0))
    assert nothing.rounds == empty.rounds
    many = simulate(dataclasses.replace(looked_up, ngram_found=0.3, output_tokens=4000))
    assert np.mean([r.drafted > 0 for r in many.rounds]) == pytest.approx(0.3, abs=0.03)


def test_a_prompt_is_fed_in_pieces_beside_running_rows_and_its_last_one_gives_the_first_token():
    pieces = dataclasses.replace(
        BY_HAND,
        prompt_tokens=11,
        prompt_chunk=4,
        target_prefill_seconds=0.0,
        draft_prefill_seconds=0.0,
        overhead_seconds=0.5,
        output_tokens=10,
    )
    result = simulate(pieces)
    # Pieces of 4, 4 and 3 tokens of the first prompt, and one of the second: 13 s each; then 4, 4 and 2 of the second beside 3 tokens of
    # the other row: 16, 16 and 14 s.
    assert spans(result, "target", "prefill") == [(0, 13, "0"), (13.5, 26.5, "0"), (27, 40, "0, 1")]
    assert spans(result, "target", "verify")[:4] == [(40.5, 56.5, "0"), (57, 73, "0"), (73.5, 87.5, "0"), (88, 100, "1")]
    served = by_request(result)
    assert served["request-0"].token_seconds == (40.5, 57, 73.5, 88)
    assert served["request-1"].token_seconds[0] == 88
    # The draft feeds the same pieces, 1.3, 1.3, 1.2 and 1 s.
    assert [s[:2] for s in spans(result, "draft", "prefill")][:4] == [(0, 1.3), (13.5, 14.8), (27, 28.2), (28.2, 29.2)]


def test_requests_join_as_others_leave():
    result = simulate(dataclasses.replace(BY_HAND, num_requests=4, output_tokens=4))
    # Each decodes once after its prompt, two at a time: 40 and 15 s.
    assert [served.arrival for served in result.requests] == [0, 0, 55, 55]
    assert [len(served.token_seconds) for served in result.requests] == [2] * 4


def test_a_step_is_finished_for_the_true_branch_of_any_row():
    # Steps of 8 s: caught up 8 s after the start of a verification of 20 s, one token at 16 s, the second under way when it ends.
    slow = dataclasses.replace(
        BY_HAND,
        verify=Latency.constant(20.0),
        draft_step=Latency.constant(8.0),
        target_prefill_seconds=100.0,
        interrupt="moot",
        draft_layers=1000,
        backup="none",
        output_tokens=100,
    )
    streams = TwoState(after_hit=IID(1.0, (0.0, 0.5)), after_miss=IID(1.0, (0.0, 0.5)))
    rounds = simulate(dataclasses.replace(slow, outcomes=streams), seed=3).rounds
    batches = [[r for r in rounds if r.start == start] for start in sorted({r.start for r in rounds})]
    waits = {(sum(r.hit for r in batch), round(batch[0].wait_seconds, 1)) for batch in batches[2:] if len(batch) == 2}
    assert waits == {(0, 0.0), (1, 4.0), (2, 4.0)}


def test_a_scenario_without_a_draft_serves_batches_too():
    ar = Scenario("ar", Latency.of({1: 10.0, 2: 11.0}), output_tokens=5, num_requests=2, batch_size=2)
    result = simulate(ar)
    assert [served.token_seconds for served in result.requests] == [(0, 11, 22, 33, 44)] * 2
    assert result.busy_share("target") == 1


# Theory


def steady(batch, alpha, length, F):
    """A batch that stays full; constant latencies, and verdicts as independent as theory takes them."""
    return Scenario(
        "ssd",
        verify=Latency.constant(10.0),
        draft_step=Latency.constant(1.0),
        draft_alone=Latency.of({1: 0.8, 8: 1.5}),
        outcomes=IID(alpha, CURVE),
        num_speculative_tokens=length,
        fan_out_hit=(F,) * (length + 1),
        fan_out_miss=(F,) * (length + 1),
        output_tokens=2000,
        num_requests=batch,
        batch_size=batch,
    )


def off_by(scenario, expected, seed, parts=25):
    """How far simulated seconds a token of one sequence are from theory's, in half-widths of the 95 % interval (batch means)."""
    result = simulate(scenario, seed)
    rows, end = scenario.batch_size, min(served.token_seconds[-1] for served in result.requests)
    full = [r for r in result.rounds if r.start > 0 and r.start + r.wait_seconds + r.verify_seconds <= end]
    starts = sorted({r.start for r in full})[rows + 1 :]
    tokens = dict.fromkeys(starts, 0)
    for r in full:
        if r.start in tokens:
            tokens[r.start] += r.committed
    blocks = np.array_split(np.array(starts), parts)
    seconds = np.array([after[0] - before[0] for before, after in pairwise(blocks)])
    counts = np.array([sum(tokens[start] for start in block) for block in blocks[:-1]]) / rows
    ratio = seconds.sum() / counts.sum()
    error = np.std(seconds - ratio * counts, ddof=1) / np.sqrt(parts - 1) / counts.mean()
    return abs(ratio - float(expected)) / (student.ppf(0.975, parts - 2) * error)


def cases(count=20):
    rng = np.random.default_rng(8)
    for case in range(count):
        yield case, BATCHES[case % len(BATCHES)], rng.uniform(0.4, 0.95), int(rng.integers(1, 6)), int(rng.integers(1, 5))


def within(distances):
    """A 95 % interval leaves out one in twenty, and nothing by far: four or more of twenty are one chance in sixty."""
    assert sum(distance > 1 for distance in distances) <= 3
    assert max(distances) < 2


def test_with_jit_a_row_takes_what_theory_says():
    found = []
    for seed, batch, alpha, length, F in cases():
        scenario = steady(batch, alpha, length, F)
        h, E = (
            hit_probability(accepted_length_law(alpha, length), scenario.fan_out_hit, [CURVE] * (length + 1)),
            expected_tokens(alpha, length),
        )
        waits = [0.0, *(length * scenario.draft_alone(rows) for rows in range(1, batch + 1))]
        found.append(off_by(scenario, per_row_seconds_per_token(batch, 10.0, 1.0 + length, waits, h, E, E), seed))
    within(found)


def test_where_any_miss_costs_the_same_this_is_corollary_16_and_of_one_row_theorem_7():
    found = []
    for seed, batch, alpha, length, F in cases():
        scenario = dataclasses.replace(steady(batch, alpha, length, F), draft_alone=Latency.constant(1.0))
        h, E = (
            hit_probability(accepted_length_law(alpha, length), scenario.fan_out_hit, [CURVE] * (length + 1)),
            expected_tokens(alpha, length),
        )
        expected = batched_seconds_per_token(batch, 10.0, 1.0 + length, float(length), h, E, E)
        if batch == 1:
            assert expected == pytest.approx(float(ssd_seconds_per_token(10.0, 1.0 + length, float(length), h, E, E)))
        found.append(off_by(scenario, expected, seed))
    within(found)


@pytest.mark.parametrize("verify", [10.0, 3.3])
def test_without_a_backup_rows_are_two_state_chains_and_a_hit_makes_all_wait_for_a_long_build(verify):
    found = []
    for seed, batch, alpha, length, F in cases():
        scenario = dataclasses.replace(
            steady(batch, alpha, length, F),
            verify=Latency.constant(verify),
            draft_alone=Latency.constant(1.0),
            backup="none",
            interrupt="moot",
            draft_layers=10_000,
        )
        h, E = (
            hit_probability(accepted_length_law(alpha, length), scenario.fan_out_hit, [CURVE] * (length + 1)),
            expected_tokens(alpha, length),
        )
        share = stationary_hit_rate(h, CURVE[F * (length + 1)])
        found.append(off_by(scenario, per_row_seconds_per_token(batch, verify, 1.0 + length, np.zeros(batch + 1), share, E, 1.0), seed))
    within(found)


def test_sd_drafts_for_all_rows_and_verifies_all():
    found = []
    for seed, batch, alpha, length, F in cases():
        scenario = dataclasses.replace(steady(batch, alpha, length, F), mode="sd", verify=Latency.of({1: 10.0, 48: 30.0}))
        seconds = scenario.verify(batch * (1 + length)), length * scenario.draft_alone(batch)
        found.append(off_by(scenario, sd_seconds_per_token(*seconds, expected_tokens(alpha, length)), seed))
    within(found)


def test_one_request_that_arrives_at_random_waits_as_the_formula_of_pollaczek_and_khinchine_says():
    distances = []
    for seed, load in enumerate((0.2, 0.4, 0.5, 0.6, 0.7, 0.8)):
        queue = Scenario("ar", Latency.constant(1.0), output_tokens=1, num_requests=6000, target_prefill_seconds=2.0, request_rate=load / 2)
        result = simulate(queue, seed)
        waited = np.array([served.ttft - 2.0 for served in result.requests])
        means = np.array([part.mean() for part in np.array_split(waited, 20)])
        error = student.ppf(0.975, 19) * means.std(ddof=1) / np.sqrt(20)
        distances.append(abs(waited.mean() - load * 2.0 / (2 * (1 - load))) / error)
        assert result.busy_share("target") == pytest.approx(load, rel=0.04)
    within(distances)


# Any load

lengths = st.one_of(st.integers(1, 12), st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple))
whole = st.fixed_dictionaries({"target_prefill_seconds": st.floats(0, 5), "draft_prefill_seconds": st.floats(0, 9)})
chunked = st.fixed_dictionaries({"prompt_tokens": lengths, "prompt_chunk": st.integers(1, 8)})
prompts = st.one_of(whole, chunked)
arrivals = st.one_of(
    st.just({}),
    st.builds(lambda rate: {"request_rate": rate}, st.floats(0.01, 2)),
    st.builds(lambda times: {"arrival_seconds": tuple(sorted(times))}, st.lists(st.floats(0, 200), min_size=9, max_size=9)),
)
scenarios = st.builds(
    lambda prompt, arrival, **options: dataclasses.replace(
        BY_HAND, **{"num_requests": 9, "target_prefill_seconds": 0.0, "draft_prefill_seconds": 0.0, **prompt, **arrival, **options}
    ),
    prompts,
    arrivals,
    mode=st.sampled_from(["ar", "sd", "ssd"]),
    batch_size=st.integers(1, 5),
    output_tokens=lengths,
    outcomes=st.builds(IID, st.floats(0, 1), st.just(CURVE)),
    ngram_outcomes=st.builds(IID, st.floats(0, 1), st.just(CURVE)),
    ngram_found=st.floats(0, 1),
    backup=st.sampled_from(["jit", "ngram", "none"]),
    interrupt=st.sampled_from(["step", "layer", "moot"]),
    draft_layers=st.integers(1, 4),
    draft_step=st.builds(Latency.constant, st.floats(0.1, 9)),
    link_seconds=st.floats(0, 2),
    overhead_seconds=st.floats(0, 2),
    noise=st.sampled_from([0.0, 0.2]),
)


@settings(max_examples=80, deadline=None)
@given(scenarios, st.integers(0, 99))
def test_whatever_the_load_nothing_is_lost_and_every_second_is_accounted_for(scenario, seed):
    result = simulate(scenario, seed)
    total, overhead = result.metrics.total_seconds, scenario.overhead_seconds
    assert sorted(served.request for served in result.requests) == [f"request-{i}" for i in range(9)]
    for served in result.requests:
        its = [r for r in result.rounds if r.request == served.request]
        assert 1 + sum(r.committed for r in its) == served.output_tokens
        assert len(served.token_seconds) == 1 + len(its)
        assert 0 <= served.arrival <= served.token_seconds[0]
        # From its first token to its last a request is in every forward.
        assert sum(r.wait_seconds + r.verify_seconds + overhead for r in its) == pytest.approx(served.e2e - served.ttft, abs=1e-6)
    for device in ("target", "draft"):
        spans = [s for s in result.timeline.spans if s.device == device]
        assert all(before.end <= after.start + 1e-9 for before, after in pairwise(spans))
        assert 0 <= result.busy_share(device) <= 1
    for start in {r.start for r in result.rounds}:
        assert len([r for r in result.rounds if r.start == start]) <= scenario.batch_size
    forwards = len({r.start for r in result.rounds})
    rest = result.timeline.busy("target", ["wait", "idle"]) + forwards * overhead
    if not scenario.prompt_chunk:  # Pieces of a prompt that is fed alone have the host's work behind them, too.
        assert result.busy_share("target") * total + rest == pytest.approx(total, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(scenarios, st.integers(0, 99))
def test_in_a_closed_loop_a_request_joins_when_another_leaves(scenario, seed):
    result = simulate(dataclasses.replace(scenario, request_rate=None, arrival_seconds=()), seed)
    arrivals = sorted(served.arrival for served in result.requests)
    left = sorted(served.token_seconds[-1] for served in result.requests)
    assert arrivals == [0.0] * scenario.batch_size + left[: 9 - scenario.batch_size]


@settings(max_examples=30, deadline=None)
@given(scenarios, st.integers(0, 99))
def test_the_same_seed_gives_the_same_batches(scenario, seed):
    first, second = simulate(scenario, seed), simulate(scenario, seed)
    assert (first.rounds, first.requests, first.metrics) == (second.rounds, second.requests, second.metrics)


def test_the_row_that_was_alone_meets_the_same_outcomes_in_a_batch():
    alone, together = (
        simulate(dataclasses.replace(BY_HAND, outcomes=IID(0.6, CURVE), output_tokens=300, batch_size=b, num_requests=b)) for b in (1, 3)
    )
    accepted = [[r.accepted for r in result.rounds if r.request == "request-0"] for result in (alone, together)]
    assert accepted[0] == accepted[1]


# The load


def test_requests_are_served_as_they_come_and_the_target_rests_in_between():
    times = dataclasses.replace(BY_HAND, arrival_seconds=(5.0, 200.0), output_tokens=4)
    result = simulate(times)
    assert spans(result, "target", "idle") == [(0, 5, ""), (37, 200, "")]
    assert [(served.arrival, served.ttft, served.e2e) for served in result.requests] == [(5, 20, 32), (200, 20, 32)]
    assert result.busy_share("target") == pytest.approx(64 / 232)


def test_poisson_arrivals_come_at_their_rate():
    calls = Scenario("ar", Latency.constant(0.0), output_tokens=1, num_requests=20_000, request_rate=4.0)
    gaps = np.diff([served.arrival for served in simulate(calls, 1).requests])
    assert (gaps.mean(), gaps.std()) == (pytest.approx(0.25, rel=0.02), pytest.approx(0.25, rel=0.02))


def test_lengths_are_drawn_from_lists_and_lists_of_one_length_are_pairs():
    drawn = Scenario("ar", Latency.constant(1.0), output_tokens=(2, 9), prompt_tokens=(4, 7), prompt_chunk=8, num_requests=400)
    pairs = [(served.prompt_tokens, served.output_tokens) for served in simulate(drawn).requests]
    assert set(pairs) == {(4, 2), (7, 9)}
    assert pairs.count((4, 2)) == pytest.approx(200, abs=40)
    apart = dataclasses.replace(drawn, output_tokens=(2, 9, 9))
    assert {(served.prompt_tokens, served.output_tokens) for served in simulate(apart).requests} == {(4, 2), (7, 9), (4, 9), (7, 2)}


def test_percentiles_are_over_requests_and_over_gaps_between_rounds():
    result = simulate(STAGGERED)  # request-0: 20, 52, 67; request-1: 52, 67, 79
    assert [result.percentile("ttft", p) for p in (0, 50, 100)] == [20, 35.5, 51]
    assert [result.percentile("e2e", p) for p in (0, 100)] == [67, 78]
    assert [result.percentile("itl", p) for p in (0, 50, 100)] == [12, 15, 32]
    assert [result.percentile("tpot", p) for p in (0, 100)] == [27 / 6, 47 / 6]
    assert (result.metrics.time_to_first_token, result.metrics.time_per_output_token) == (35.5, 74 / 12)
    assert simulate(dataclasses.replace(BY_HAND, output_tokens=1)).percentile("tpot", 50) is None


def test_an_unknown_latency_is_refused():
    with pytest.raises(ValueError, match=r"latency='ttt' is unknown: use one of .*'ttft'"):
        simulate(BY_HAND).percentile("ttt", 50)
    with pytest.raises(ValueError, match="percent=101 must lie between 0 and 100"):
        simulate(BY_HAND).percentile("ttft", 101)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
        ({"output_tokens": ()}, r"output_tokens=\(\) leaves nothing to draw from: give a number"),
        ({"output_tokens": (3, 0)}, "output_tokens=0 must be a whole number"),
        ({"prompt_tokens": 5}, "prompt_tokens=5 is read with prompt_chunk alone: set it, or use target_prefill_seconds"),
        ({"prompt_chunk": 4, "target_prefill_seconds": 0.0, "draft_prefill_seconds": 0.0}, "prompt_tokens=0 must be"),
        ({"prompt_chunk": 4, "prompt_tokens": 5}, r"target_prefill_seconds=20\.0 is of prompts fed whole: leave it out, or prompt_chunk=4"),
        ({"prompt_chunk": -1}, "prompt_chunk=-1"),
        ({"request_rate": 0.0}, r"request_rate=0\.0 must be greater than 0"),
        ({"request_rate": 1.0, "arrival_seconds": (0.0, 1.0)}, r"request_rate=1\.0 and arrival_seconds are two loads: leave one"),
        ({"arrival_seconds": (1.0,)}, "arrival_seconds has 1 entries: num_requests=2 needs as many"),
        ({"arrival_seconds": (2.0, 1.0)}, r"arrival_seconds=\(2\.0, 1\.0\) must not fall: sort them"),
        ({"backup": "ngram"}, "ngram_outcomes=None with backup='ngram': say what its drafts are worth, or use backup='none'"),
        ({"ngram_found": 2.0}, r"ngram_found=2\.0 must lie between 0 and 1"),
    ],
)
def test_nonsense_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BY_HAND, **changes)
