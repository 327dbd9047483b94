"""How fast the two devices go just now, measured as they go: what the draft, the engine's or a simulated one, plans its cache by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

import numpy as np

from theory.acceptance import expected_tokens

# What a new measurement counts for, and how fast old ones fade.
WEIGHT = 0.2
MEMORY = 0.98
# Measurements before a line through them is believed.
ENOUGH = 6
# What takes so many times as long as it mostly does stood still: its process was put to sleep, or something was made ready at first.
STILL = 4
# A step that was found not worth its time is tried anew once verifications alone have taken so many steps' time.
PATIENCE = 100
# Tokens accepted and tried that are taken for granted at first.
PRIOR = (3.0, 4.0)


class Tempo:
    """Seconds of a draft step by its tokens, seconds of a verification, and the share of draft tokens that are accepted.

    clock: seconds, from whenever.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self.verification: float | None = None
        self._steps = np.zeros(5)
        self._count = 0
        self._accepted, self._tried = PRIOR
        self._sent: float | None = None
        # Seconds of verifications since a step was measured or tried.
        self._unmeasured = 0.0

    def sent(self) -> None:
        """Note that drafts have left: the target is at work."""
        self._sent = self._clock()

    def heard(self) -> None:
        """Note that outcomes have come."""
        if self._sent is not None:
            seconds, self._sent = self._clock() - self._sent, None
            # One long wait, for a prompt to be fed or a process to wake up, is not how long a verification takes.
            before = seconds if self.verification is None else self.verification
            seconds = min(seconds, STILL * before)
            self.verification = before + WEIGHT * (seconds - before)
            self._unmeasured += seconds

    def left(self) -> float | None:
        """Return the seconds until outcomes are due; None while nothing is known of them."""
        if self.verification is None or self._sent is None:
            return None
        return self.verification - (self._clock() - self._sent)

    def stepped(self, tokens: int, seconds: float) -> None:
        """Note a draft step. One that stood still is no slow step, and as none is quicker than it can be, a quick one shows which did."""
        n, x, _, y, _ = self._steps
        if y:
            # What lines through the mean say of so many tokens, from one that is flat to one through the origin.
            least, most = sorted((y / n, y / x * tokens))
            seconds = min(seconds, STILL * most)
            self._steps[3:] *= min(1.0, STILL * seconds / least)
        self._unmeasured = 0.0
        self._steps = MEMORY * self._steps + np.array([1.0, tokens, tokens**2, seconds, tokens * seconds])
        self._count += 1

    def step(self, tokens: np.ndarray | int) -> np.ndarray | None:
        """Return the seconds of a step of so many tokens, by a straight line through what was measured; None while that is too little."""
        if self._count < ENOUGH:
            return None
        n, x, xx, y, xy = self._steps
        spread = n * xx - x * x
        # More tokens never take less time, and no tokens never less than none.
        slope = min(max(0.0, (n * xy - x * y) / spread), y / x) if spread > 1e-9 else 0.0
        return np.asarray((y - slope * x) / n + slope * np.asarray(tokens))

    def in_time(self, tokens: int) -> bool:
        """Whether a step of so many tokens, were it begun now, is likely to end before outcomes come; True while too little is known."""
        step, left = self.step(tokens), self.left()
        return step is None or left is None or float(step) <= left

    def best_width(self, chances: np.ndarray, K: int) -> int:
        """Return for how many outcomes, the likeliest first, to draft up to K tokens together: those that are worth most in time.

        chances: of each outcome, falling. Worth: the chance that one of them comes true, times the tokens that will then be there.
        """
        widths = np.arange(1, len(chances) + 1)
        step, left = self.step(widths), self.left()
        if step is None or left is None:
            return len(chances)
        steps = np.minimum(K, np.maximum(left, step[0]) // step)
        return int(widths[np.argmax(np.cumsum(chances) * (1 - self.acceptance**steps))])

    def worthwhile(self, drafted: Sequence[int], short: Sequence[int], tokens: int) -> bool:
        """Whether one more token for each row that is short speeds the round up: expected tokens over seconds, with it and without.

        drafted: draft tokens of every row so far, short: of those that are short; tokens: what the step feeds. It hangs on what is settled:
        lengths of drafts, and seconds and acceptance of rounds gone by. Where no step has been measured for long, one is tried once.
        """
        step, a = self.step(tokens), self.acceptance
        if step is None or self.verification is None:
            return True
        expected = float(expected_tokens(a, list(drafted)).sum())
        more = sum(a ** (count + 1) for count in short)
        worth = more * self.verification > expected * float(step)
        if not worth and self._unmeasured > PATIENCE * float(step):
            worth, self._unmeasured = True, 0.0
        return worth

    def rest(self) -> None:
        """Note that nothing is under way: what comes next is no outcome that was waited for."""
        self._sent = None

    def verified(self, accepted: int, drafted: int) -> None:
        """Note an outcome."""
        self._accepted = MEMORY * self._accepted + accepted
        self._tried = MEMORY * self._tried + min(accepted + 1, drafted)

    @property
    def acceptance(self) -> float:
        """The chance that a draft token is accepted, given those before it were."""
        return min(max(self._accepted / max(self._tried, 1e-9), 0.05), 0.99)
