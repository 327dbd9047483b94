"""How the draft speaks for one request: the law of each draft token, its draw with keyed noise, and the ranking of outcomes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ssd.devices import upload
from ssd.engine.graphs import sampling_graphs
from ssd.engine.link import Setup, Start
from ssd.sampling import Before, Parameters, Purpose, draw, log_law, noise_key, outcome_scores, press, processed


class Step(NamedTuple):
    """The draft's next tokens of B columns: processed logits and log q, [B, vocabulary] each (log q none where greedy), and tokens [B]."""

    scores: torch.Tensor
    log_q: torch.Tensor | None
    tokens: torch.Tensor


class Proposer:
    """The request's parameters as the draft applies them."""

    def __init__(self, start: Start, setup: Setup, vocab_size: int, device: torch.device) -> None:
        params = start.params
        self.parameters = Parameters.of([params], [len(start.prompt)], [start.end_ids], vocab_size, device)
        self.seed = upload(np.array([params.seed or 0], dtype=np.int64), device)
        self.greedy, self.coupled = params.temperature == 0, params.verification == "coupled"
        # Whether its tokens are the largest logits, whatever stands before.
        self.plain = self.greedy and self.parameters.bare
        self.ranking = setup.ranking
        # Without lists, what the budget comes to at a place on average.
        even = (max(1, round(setup.budget / (setup.num_speculative_tokens + 1))),) * (setup.num_speculative_tokens + 1)
        lists = setup.fan_out_miss or even, setup.fan_out_hit or even
        # For drafts after a miss and after a hit: factor and count at each place.
        self.pressing = [list(zip(setup.saguaro, fan_out, strict=False)) for fan_out in lists]

    @property
    def reads_prefix(self) -> bool:
        """Whether a law hangs on which tokens came before."""
        return self.parameters.reads_prefix

    @property
    def sends_q(self) -> bool:
        """Whether the target needs the laws to verify: a greedy draft is a point mass, and coupling compares tokens."""
        return not self.greedy and not self.coupled

    def step(self, logits: torch.Tensor, before: Before, prefix: torch.Tensor, place: int, after_hit: bool) -> Step:
        """Draw the token at `place` 0.. of a draft for each column. logits [B, vocabulary], prefix [B] hashes of what stands before."""
        pressing = self.pressing[after_hit]
        pressed = None if self.coupled or place >= len(pressing) else pressing[place]
        purpose = Purpose.TARGET if self.coupled else Purpose.DRAFT
        arguments = logits, self.parameters, before, pressed, purpose, self.seed, prefix
        # What reads the whole text is of another size each time.
        graphs = None if self.reads_prefix else sampling_graphs(logits.device)
        if graphs is None:
            return _step(*arguments)
        scores, log_q, tokens = graphs.play(_step, *arguments)
        # The next step of these sizes writes over them.
        return Step(scores.clone(), None if log_q is None else log_q.clone(), tokens.clone())

    def rank(self, scores: torch.Tensor, length: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
        """Return what bonus tokens are ranked by at n places, [n, vocabulary]; length and prefix [n] of what stands before each.

        The law is taken as it is before Saguaro's factor: the tokens that were pressed down are those to cache.
        """
        if self.greedy:
            return scores
        keys = noise_key(self.seed, Purpose.TARGET, length, prefix) if self.ranking == "shared_noise" else None
        return outcome_scores(scores, log_law(scores, self.parameters), keys)


def _step(
    logits: torch.Tensor,
    parameters: Parameters,
    before: Before,
    pressed: tuple[float, int] | None,
    purpose: Purpose,
    seed: torch.Tensor,
    prefix: torch.Tensor,
) -> Step:
    """Draw a token for each column from its law, of which Saguaro has `pressed` some down: factor and count."""
    scores = processed(logits, parameters, before)
    if scores is not logits:
        # Where the request bars all that this draft can say, any law is as right: what it says is rejected.
        scores = torch.where((scores > -torch.inf).any(-1, keepdim=True), scores, logits)
    if parameters.greedy:
        return Step(scores, None, scores.argmax(-1))
    log_q = log_law(scores, parameters)
    if pressed is not None:
        log_q = press(log_q, *pressed)
    return Step(scores, log_q, draw(log_q, noise_key(seed, purpose, before.length, prefix)))
