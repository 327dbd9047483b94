"""Planned from data sheets alone against published speeds: Llama-3.1-70B/1B and Qwen3-32B/0.6B on 4+1 H100.

python benchmarks/datasheet.py            # prints the tables of docs/planning.md

Latencies are the roofline's, hits the published miss rates. Acceptance is on no data sheet: it is taken from one other measurement of
each pair, never from the rows that are predicted. For Llama that is the SD of the temperature sweep at temperature 0 (a figure, 161
tokens/s; the same set-up as the row's, so that its SD is no test), for Qwen the SD of the independent replication (141.4), both with 6
draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from scipy.optimize import brentq

from ssd.pace import Pace, pace
from ssd.placements import placements
from ssd.planner import plan
from ssd.roofline import roofline_profile
from ssd.specs import Configuration, Hardware, Models, Plan, Profile, Workload
from theory.acceptance import expected_tokens

HARDWARE = Hardware.named("5xH100-SXM")
LOAD = Workload(prompt_tokens=128, output_tokens=512)
SD_TOKENS = 6


@dataclass(frozen=True, slots=True)
class Pair:
    """A pair, the SD speed that its acceptance is taken from, and what is to be predicted: mean AR, SD and SSD, tokens a second."""

    models: Models
    acceptance_from: float
    published: tuple[float, float, float]
    by_prompts: dict[str, float]


PAIRS = (
    Pair(
        Models(target="meta-llama/Llama-3.1-70B-Instruct", draft="meta-llama/Llama-3.2-1B-Instruct"),
        161,
        (54.7, 161.8, 255.8),
        {"code": 176, "chat": 141.5},
    ),
    Pair(Models(target="Qwen/Qwen3-32B", draft="Qwen/Qwen3-0.6B"), 141.4, (88.8, 136.8, 203.8), {"code": 146, "chat": 124.5}),
)


def sd_pace(profile: Profile) -> Pace:
    """SD on the four devices of the target."""
    place = next(place for place in placements(HARDWARE) if place.overlaps and len(place.target) == 4)
    found = pace(profile, place, "sd")
    assert found is not None
    return found


def implied_acceptance(profile: Profile, tokens_per_second: float) -> float:
    """The acceptance at which SD with 6 draft tokens has this speed."""
    its = sd_pace(profile)
    tokens = tokens_per_second * (its.round_seconds(SD_TOKENS) + its.backup_seconds(SD_TOKENS))
    return float(brentq(lambda a: float(expected_tokens(a, SD_TOKENS)) - tokens, 0.05, 0.999))


def planned(pair: Pair) -> Plan:
    """The plan with the acceptance of the other measurement."""
    profile = roofline_profile(HARDWARE, pair.models, LOAD)
    alpha = implied_acceptance(profile, pair.acceptance_from)
    texts = profile.texts[0].model_copy(update={"draft_acceptance_rate": alpha})
    return plan(HARDWARE, pair.models, LOAD, profile=profile.model_copy(update={"texts": (texts,)}))


def best(found: Plan, mode: str) -> Configuration:
    """The fastest of a mode with the target on four devices and one more at most."""
    known = [c for c in (found, *found.alternatives) if c.mode == mode and len(c.placement.target) == 4 and len(c.placement.devices) <= 5]
    return max(known, key=lambda c: c.predicted.tokens_per_second if c.predicted else 0.0)


def main() -> None:
    """Print predicted beside published, what was chosen, and the acceptances of ssd/data/acceptance.toml."""
    print("| pair | acceptance | AR | SD | SSD | SSD chosen |\n|---|---|---|---|---|---|")
    for pair in PAIRS:
        found = planned(pair)
        assert found.profile is not None
        cells = []
        for mode, published in zip(("ar", "sd", "ssd"), pair.published, strict=True):
            predicted = best(found, mode).predicted
            speed = predicted.tokens_per_second if predicted else 0.0
            cells.append(f"{speed:.1f} / {published} ({speed / published - 1:+.1%})")
        chosen = best(found, "ssd")
        alpha = found.profile.texts[0].draft_acceptance_rate
        choice = f"K={chosen.num_speculative_tokens}, B={sum(chosen.fan_out_hit)}, {chosen.backup}"
        print(f"| {pair.models.target.split('/')[1]} | {alpha:.3f} | {' | '.join(cells)} | {choice} |")
    print("\nAcceptance by prompts, as ssd/data/acceptance.toml has it:\n")
    for pair in PAIRS:
        profile = roofline_profile(HARDWARE, pair.models, LOAD)
        by_prompts = ", ".join(f"{kind} {implied_acceptance(profile, sd):.3f}" for kind, sd in pair.by_prompts.items())
        print(f"- {pair.models.target}: {by_prompts}")


if __name__ == "__main__":
    main()
