"""The search by theory: every configuration of a mode at a placement, best first, and what is expected of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from ssd.lookup import Recorded
from ssd.outcomes import LARGEST_BUDGET, OutcomeModel, Rounds
from ssd.pace import Pace
from ssd.specs import Backup, Configuration, Mode, Placement
from theory.acceptance import expected_tokens_of, tokens_cut_off
from theory.batch import per_row_seconds_per_token
from theory.check import FloatArray
from theory.fallback import first_ahead
from theory.fanout import optimal, shortened, uniform
from theory.hits import hit_probability, stationary_hit_rate
from theory.interruption import interrupted_round_seconds, tokens_built
from theory.speed import sd_seconds_per_token, two_state_seconds_per_token

BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, LARGEST_BUDGET)
# A probability this near to an end leaves the two-state chain without a single long-run rate.
CERTAIN = 1e-9
# Latencies are trusted up to this multiple of the largest forward in the table.
TRUSTED = 2
LARGEST_BATCH = 256

Lists = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """What theory expects of a configuration: seconds a token of one request without end, rates as ssd.specs.Prediction has them.

    tokens_cut_off: of a request's last round, past its end.
    """

    seconds_per_token: float
    hit_rate: float | None = None
    draft_acceptance_rate: float | None = None
    mean_acceptance_length: float = 1.0
    tokens_cut_off: float = 0.0


class Search:
    """The outcomes of a pair for a batch of so many rows, and what follows from them at every pace.

    recorded: texts with what prompt lookup was worth; without them the backup `ngram` is not offered.
    """

    def __init__(self, outcomes: OutcomeModel, batch_size: int = 1, recorded: Recorded | None = None) -> None:
        self.outcomes, self.rows, self.recorded = outcomes, batch_size, recorded
        self.backups: tuple[Backup, ...] = ("jit", "none") if recorded is None else ("jit", "none", "ngram")
        self.lookaheads = range(1, outcomes.longest + 1)
        self.law, self.curves = cache(outcomes.law), cache(outcomes.curves)
        self.fan_outs = cache(self._fan_outs)
        self.hit, self.rounds = cache(self._hit), cache(self._rounds)
        self.waits = cache(self._waits)

    def of(self, outcomes: OutcomeModel) -> Search:
        """The same search, were these the outcomes."""
        return Search(outcomes, self.rows, self.recorded)

    def scored(self, mode: Mode, pace: Pace) -> list[tuple[float, Configuration]]:
        """Return seconds a token and configuration of `mode` at this pace, the fastest first."""
        return sorted({"ar": self._ar, "sd": self._sd, "ssd": self._ssd}[mode](pace), key=lambda pair: pair[0])

    def ranked(self, mode: Mode, pace: Pace) -> list[Configuration]:
        """Return the configurations of `mode` at this pace, those with the fewest seconds a token first."""
        return [configuration for _, configuration in self.scored(mode, pace)]

    def seconds_per_token(self, configuration: Configuration, pace: Pace) -> float:
        """Return the expected seconds between the tokens of a request; infinite for longer drafts than the outcomes tell of."""
        K = configuration.num_speculative_tokens
        if self.lookaheads[-1] < K:
            return float("inf")
        if configuration.mode == "ar":
            return pace.round_seconds(0, self.rows)
        if configuration.mode == "sd":
            return self._sd_seconds_per_token(pace, K)
        return self.ssd_seconds_per_token(pace.planning(configuration), K, *self.lists(configuration), configuration.backup)

    def expected(self, configuration: Configuration, pace: Pace) -> Expected:
        """Return what theory expects of one of them."""
        K, lists = configuration.num_speculative_tokens, self.lists(configuration)
        seconds = self.seconds_per_token(configuration, pace)
        if configuration.mode == "ar":
            return Expected(seconds)
        if configuration.mode == "sd":
            return _rates(seconds, None, self.law(K), K)
        rounds = self.rounds(K, *lists, configuration.backup)
        share = self._share(pace.planning(configuration), K, *lists, configuration.backup, self.rows)
        of_hit, of_miss = (np.pad(law, (0, K + 1 - law.size)) for law in rounds.laws)
        return _rates(seconds, share, share * of_hit + (1 - share) * of_miss, rounds.mean(share, rounds.drafted))

    def lists(self, configuration: Configuration) -> tuple[Lists, Lists]:
        """Its fan-outs after a hit and after a miss; of outcomes that are chosen anew each round, those that are likeliest on average."""
        if configuration.budget:
            return self.fan_outs(configuration.num_speculative_tokens, configuration.budget)[1]
        return configuration.fan_out_hit, configuration.fan_out_miss

    def critical_batch_size(self, configuration: Configuration, pace: Pace) -> int | None:
        """The batch size from which on the fast backup is ahead of `jit`, all else as in this configuration of mode ssd.

        The fast one is `ngram` where prompt lookup was measured, else `none`. Where a build that outgrows the verification lets them
        change places more than once, the crossing next to the batch. None if there is none, as far as the latency tables are trusted.
        """
        K, lists, pace = configuration.num_speculative_tokens, self.lists(configuration), pace.planning(configuration)
        trusted = TRUSTED * min(pace.verify.sizes[-1] / (1 + K), pace.alone.sizes[-1], pace.step.sizes[-1] / max(map(sum, lists)))
        sizes = np.arange(1, min(max(int(trusted), self.rows), LARGEST_BATCH) + 1)
        slow, fast = (
            np.asarray([self.ssd_seconds_per_token(pace, K, *lists, which, rows) for rows in sizes.tolist()])
            for which in ("jit", self.backups[-1])
        )
        later = sizes[(sizes >= self.rows) & (fast < slow)]
        if not later.size:
            return None
        return int(later[0]) if later[0] > self.rows else int(first_ahead(*(values[: self.rows] for values in (sizes, slow, fast))))

    def _ar(self, pace: Pace) -> Iterator[tuple[float, Configuration]]:
        yield pace.round_seconds(0, self.rows), Configuration(mode="ar", placement=Placement(target=pace.placement.target))

    def _sd(self, pace: Pace) -> Iterator[tuple[float, Configuration]]:
        for K in self.lookaheads:
            yield self._sd_seconds_per_token(pace, K), Configuration(mode="sd", num_speculative_tokens=K, placement=pace.placement)

    def _sd_seconds_per_token(self, pace: Pace, K: int) -> float:
        return float(sd_seconds_per_token(pace.round_seconds(K, self.rows), pace.backup_seconds(K, self.rows), self._expected(K)))

    def _ssd(self, pace: Pace) -> Iterator[tuple[float, Configuration]]:
        for K in self.lookaheads:
            for after_hit, after_miss in dict.fromkeys(lists for budget in BUDGETS for lists in self.fan_outs(K, budget)):
                for backup in self.backups:
                    seconds = self.ssd_seconds_per_token(pace, K, after_hit, after_miss, backup)
                    yield (
                        seconds,
                        Configuration(
                            mode="ssd",
                            num_speculative_tokens=K,
                            fan_out_hit=after_hit,
                            fan_out_miss=after_miss,
                            backup=backup,
                            placement=pace.placement,
                        ),
                    )

    def _expected(self, K: int) -> float:
        return float(expected_tokens_of(self.law(K)))

    def _fan_outs(self, K: int, budget: int) -> tuple[tuple[Lists, Lists], ...]:
        """Lists after a hit and after a miss: the optimal ones where they cache anything, and equal ones."""
        even = uniform(budget, K)
        after_hit, after_miss = (optimal(budget, self.law(K), self.curves(K, state)) for state in (True, False))
        return ((even, even), (after_hit if any(after_hit) else even, after_miss if any(after_miss) else even))

    def _hit(self, K: int, fan_out: Lists, after_hit: bool) -> float:
        return hit_probability(self.law(K), fan_out, self.curves(K, after_hit))

    def _rounds(self, K: int, after_hit: Lists, after_miss: Lists, backup: Backup) -> Rounds:
        of_hit = self.hit(K, after_hit, True)
        if backup != "ngram":
            drafted = K if backup == "jit" else 0
            hits = of_hit, self.hit(drafted, shortened(after_miss, drafted), False)
            return Rounds(hits, (self.law(K), self.law(drafted)), (K, drafted))
        if self.recorded is None:
            raise ValueError("backup='ngram' needs what prompt lookup is accepted for, which the profile lacks: profile again")
        counted = self.recorded.rounds(K, after_hit, after_miss)
        if counted.hits[1] > 0:
            return counted
        # No round came after a hit.
        return Rounds((of_hit, 0.0), (self.law(K), counted.laws[1]), (K, counted.drafted[1]))

    def ssd_seconds_per_token(
        self, pace: Pace, K: int, after_hit: Lists, after_miss: Lists, backup: Backup, rows: int | None = None
    ) -> float:
        """Seconds between the tokens of one of `rows` rows, by default the batch: one alone is the exact two-state chain."""
        rows = self.rows if rows is None else rows
        if rows > 1:
            return self._of_batch(pace, K, after_hit, after_miss, backup, rows)
        return self._of_one(pace, K, after_hit, after_miss, backup)

    def _of_one(self, pace: Pace, K: int, after_hit: Lists, after_miss: Lists, backup: Backup) -> float:
        """The two-state chain whose rounds last as the interrupted draft makes them."""
        rounds = self.rounds(K, after_hit, after_miss, backup)
        waiting = pace.backup_seconds(K) if backup == "jit" else 0.0
        of_hit, of_miss = (
            self._round(pace, K, drafted, sum(fan_out), waiting, chance)
            for drafted, fan_out, chance in zip(rounds.drafted, (after_hit, after_miss), rounds.hits, strict=True)
        )
        return float(two_state_seconds_per_token(of_hit[0], of_miss[0], of_hit[1:], of_miss[1:], *rounds.tokens))

    def _round(self, pace: Pace, K: int, drafted: float, budget: int, waiting: float, chance: float) -> tuple[float, float, float]:
        """Chance that the outcome of a draft of so many tokens is cached, seconds of the round if it is and if it is not."""
        T_v, catch_up, step = pace.round_seconds(drafted), pace.catch_up_seconds(), max(pace.step(budget), 1e-12)
        hit, miss = interrupted_round_seconds(T_v, K, catch_up, step, pace.step(1), waiting)
        begun = _begins(K, T_v, catch_up, step)
        # Where the step under way is given up between two layers, a miss waits for the backup only.
        return _uncertain(chance if begun else 0.0), float(hit), T_v + waiting if pace.draft_layers > 1 else float(miss)

    def _of_batch(self, pace: Pace, K: int, after_hit: Lists, after_miss: Lists, backup: Backup, rows: int) -> float:
        """Independent rows, each a two-state chain; they are verified together, and all wait for those that `jit` drafts for.

        A round has the mean number of drafted tokens and of branches. A build that does not fit is ended for the rows that hit.
        """
        rounds = self.rounds(K, after_hit, after_miss, backup)
        share = self._share(pace, K, after_hit, after_miss, backup, rows)
        T_v, catch_up, step = _of_rows(pace, rounds, (sum(after_hit), sum(after_miss)), share, rows)
        hit, _ = interrupted_round_seconds(T_v, K, catch_up, step, pace.alone(rows), 0.0)
        waits = self.waits(pace, K)[: rows + 1] if backup == "jit" else np.zeros(rows + 1)
        return float(per_row_seconds_per_token(rows, T_v, hit, waits, share, *rounds.tokens))

    def _share(self, pace: Pace, K: int, after_hit: Lists, after_miss: Lists, backup: Backup, rows: int) -> float:
        """Share of rounds that hit in the long run; next to none where the outcomes come before the build has begun."""
        rounds, budgets = self.rounds(K, after_hit, after_miss, backup), (sum(after_hit), sum(after_miss))
        if rows == 1:
            states = zip(rounds.drafted, budgets, rounds.hits, strict=True)
            chances = [self._round(pace, K, drafted, budget, 0.0, chance)[0] for drafted, budget, chance in states]
            return float(stationary_hit_rate(*chances))
        share = float(stationary_hit_rate(*map(_uncertain, rounds.hits)))
        return share if _begins(K, *_of_rows(pace, rounds, budgets, share, rows)) else CERTAIN

    def _waits(self, pace: Pace, K: int) -> FloatArray:
        """Seconds of the backup for 0..LARGEST_BATCH rows that miss."""
        return np.asarray([0.0, *(pace.backup_seconds(K, rows) for rows in range(1, LARGEST_BATCH + 1))])


def _rates(seconds: float, hit_rate: float | None, law: FloatArray, drafted: float) -> Expected:
    """From the law of accepted lengths over all rounds, [K+1], and the mean tokens drafted for one."""
    tokens = float(expected_tokens_of(law))
    return Expected(seconds, hit_rate, (tokens - 1) / drafted, tokens, float(tokens_cut_off(law)))


def _of_rows(pace: Pace, rounds: Rounds, budgets: tuple[int, int], share: float, rows: int) -> tuple[float, float, float]:
    """Seconds of a verification, of what a build begins with and of a step of all branches, `share` of the rows having hit before."""
    drafted, budget = rounds.mean(share, rounds.drafted), rounds.mean(share, budgets)
    return pace.round_seconds(drafted, rows), pace.catch_up_seconds(rows), max(pace.step(rows * budget), 1e-12)


def _begins(K: int, T_v: float, catch_up: float, step: float) -> bool:
    """Whether the branches have a token when the outcome comes."""
    return bool(tokens_built(T_v, K, catch_up, step) > 0)


def _uncertain(chance: float) -> float:
    return min(max(chance, CERTAIN), 1 - CERTAIN)
