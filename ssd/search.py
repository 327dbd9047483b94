"""The search by theory: every configuration of a mode at a placement, best first."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from ssd.outcomes import LARGEST_BUDGET, OutcomeModel
from ssd.pace import Pace
from ssd.specs import Backup, Configuration, Mode, Placement
from theory.acceptance import expected_tokens_of
from theory.fanout import optimal, shortened, uniform
from theory.hits import hit_probability
from theory.interruption import interrupted_round_seconds, tokens_built
from theory.speed import sd_seconds_per_token, two_state_seconds_per_token

BUDGETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, LARGEST_BUDGET)
BACKUPS: tuple[Backup, ...] = ("jit", "none")
# A probability this near to an end leaves the two-state chain without a single long-run rate.
CERTAIN = 1e-9


class Search:
    """The outcomes of a pair, and what follows from them at every pace."""

    def __init__(self, outcomes: OutcomeModel) -> None:
        self.lookaheads = range(1, outcomes.longest + 1)
        self.law, self.curves = cache(outcomes.law), cache(outcomes.curves)
        self.fan_outs = cache(self._fan_outs)
        self.hit = cache(self._hit)

    def ranked(self, mode: Mode, pace: Pace) -> list[Configuration]:
        """Return the configurations of `mode` at this pace, those with the fewest seconds a token first."""
        found = {"ar": self._ar, "sd": self._sd, "ssd": self._ssd}[mode](pace)
        return [configuration for _, configuration in sorted(found, key=lambda pair: pair[0])]

    def _ar(self, pace: Pace) -> Iterator[tuple[float, Configuration]]:
        yield pace.round_seconds(0), Configuration(mode="ar", placement=Placement(target=pace.placement.target))

    def _sd(self, pace: Pace) -> Iterator[tuple[float, Configuration]]:
        for K in self.lookaheads:
            seconds = sd_seconds_per_token(pace.round_seconds(K), pace.backup_seconds(K), self._expected(K))
            yield float(seconds), Configuration(mode="sd", num_speculative_tokens=K, placement=pace.placement)

    def _ssd(self, pace: Pace) -> Iterator[tuple[float, Configuration]]:
        for K in self.lookaheads:
            for after_hit, after_miss in dict.fromkeys(lists for budget in BUDGETS for lists in self.fan_outs(K, budget)):
                for backup in BACKUPS:
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

    def _fan_outs(self, K: int, budget: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Lists after a hit and after a miss: the optimal ones where they cache anything, and equal ones."""
        even = uniform(budget, K)
        after_hit, after_miss = (optimal(budget, self.law(K), self.curves(K, state)) for state in (True, False))
        return ((even, even), (after_hit if any(after_hit) else even, after_miss if any(after_miss) else even))

    def _hit(self, K: int, fan_out: tuple[int, ...], after_hit: bool) -> float:
        return hit_probability(self.law(K), fan_out, self.curves(K, after_hit))

    def ssd_seconds_per_token(self, pace: Pace, K: int, after_hit: tuple[int, ...], after_miss: tuple[int, ...], backup: Backup) -> float:
        """Seconds a token of the two-state chain whose rounds last as the interrupted draft makes them."""
        drafted = K if backup == "jit" else 0
        waiting = pace.backup_seconds(drafted)
        of_hit = self._round(pace, K, K, after_hit, waiting, True)
        of_miss = self._round(pace, K, drafted, shortened(after_miss, drafted), waiting, False)
        return float(
            two_state_seconds_per_token(of_hit[0], of_miss[0], of_hit[1:], of_miss[1:], self._expected(K), self._expected(drafted))
        )

    def _round(
        self, pace: Pace, K: int, drafted: int, fan_out: tuple[int, ...], waiting: float, after_hit: bool
    ) -> tuple[float, float, float]:
        """Chance that the outcome of a draft of so many tokens is cached, seconds of the round if it is and if it is not."""
        T_v, single, step = pace.round_seconds(drafted), pace.step(1), max(pace.step(sum(fan_out)), 1e-12)
        hit, _ = interrupted_round_seconds(T_v, K, single, step, single, waiting)
        begun = tokens_built(T_v, K, single, step) > 0
        chance = self.hit(drafted, fan_out, after_hit) if begun else 0.0
        # The step under way is given up between two layers: a miss waits for the backup only.
        return min(max(chance, CERTAIN), 1 - CERTAIN), float(hit), T_v + waiting
