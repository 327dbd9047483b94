"""What the draft's own confidence is worth: calibrated while serving, from the outcomes that come back."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ssd.engine.cache import Candidates
from ssd.engine.link import Counts
from ssd.engine.proposer import Proposer
from theory.acceptance import accepted_length_law
from theory.calibration import Calibration

# Half of what is known fades in some 350 outcomes.
MEMORY = 0.998

Kinds = tuple[str, str, str]
GREEDY: Kinds = ("greedy sent", "greedy rejected", "greedy full")


class Confidence:
    """Calibrations by kind: of tokens that were sent, and of bonus candidates after a rejection and after full acceptance.

    Greedy and drawn tokens are told apart, and so are candidates ranked by the noise that they are drawn with.
    """

    def __init__(self, known: Iterable[Counts] = ()) -> None:
        self.calibrations = {kind: Calibration.from_lists(trials, successes) for kind, trials, successes in known}

    def counts(self) -> tuple[Counts, ...]:
        """Return what is known as plain numbers."""
        return tuple((kind, tuple(one.trials.tolist()), tuple(one.successes.tolist())) for kind, one in self.calibrations.items())

    def chances(self, names: Kinds, seen: Candidates) -> np.ndarray:
        """Return the estimated probability of each candidate outcome, [drafted+1, R]: prod_{j<=k} a_j (1 - a_{k+1}) r_k(t). [derived]

        a_j and r_k are calibrated: theory.outcomes.estimated_outcomes with what the confidences have been worth.
        """
        sent, rejected, full = (self._of(kind) for kind in names)
        ends = accepted_length_law(sent.calibrated(seen.confidences), len(seen.confidences))
        r = np.concatenate([rejected.calibrated(seen.chances[:-1]), full.calibrated(seen.chances[-1:])])
        return np.asarray(np.where(seen.chances > 0, ends[:, None] * r, 0.0))

    def learn(self, names: Kinds, seen: Candidates, accepted: int, bonus: int) -> None:
        """Take in the outcome of a draft whose candidates were `seen`."""
        sent, rejected, full = names
        drafted = len(seen.confidences)
        tried = min(accepted + 1, drafted)
        self._update(sent, seen.confidences[:tried], np.arange(tried) < accepted)
        allowed = seen.chances[accepted] > 0
        came = seen.bonus[accepted] == bonus
        self._update(rejected if accepted < drafted else full, seen.chances[accepted][allowed], came[allowed])

    def _of(self, kind: str) -> Calibration:
        return self.calibrations.get(kind) or Calibration.empty()

    def _update(self, kind: str, chances: np.ndarray, came: np.ndarray) -> None:
        if len(chances):
            self.calibrations[kind] = self._of(kind).updated(np.clip(chances, 0, 1), came.astype(float), memory=MEMORY)


def kinds(proposer: Proposer) -> Kinds:
    """Return the kinds of confidence of a request: in tokens sent, in the bonus after a rejection, in the bonus after full acceptance."""
    drawn = "greedy" if proposer.greedy else "coupled" if proposer.coupled else "drawn"
    ranked = drawn if proposer.greedy else f"{drawn} {proposer.ranking}"
    return f"{drawn} sent", f"{ranked} rejected", f"{ranked} full"
