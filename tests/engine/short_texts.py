"""The law of whole short texts, drawn through the two real processes, against the exact one: chi-square, by mode and backup.

`python -m tests.engine.short_texts` prints the table of p-values with 1,000 texts each.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

import ssd
from ssd.specs import Configuration, SamplingParams, Verification
from tests import handmade
from tests.plans import hand_typed
from tests.tiny import make_pair

PROMPT = [5, 6]
TOKENS, TOP_K = 4, 3
Law = dict[tuple[int, ...], float]


def ways() -> dict[str, Configuration]:
    """Every mode, backup and way to choose outcomes, to build, to verify and to rank."""
    ones = (1, 1, 1)
    base = {"mode": "ssd", "num_speculative_tokens": 2, "fan_out_hit": ones, "fan_out_miss": ones, "placement": handmade.SSD.placement}
    adaptive = {**base, "fan_out_hit": (), "fan_out_miss": (), "budget": 3}
    return {
        "AR": handmade.AR,
        "SD": handmade.sd(2),
        "SSD, `jit`": Configuration(**base),
        "SSD, `none`": Configuration(**base, backup="none"),
        "SSD, `ngram`": Configuration(**base, backup="ngram"),
        "SSD, `none`, B = 3": Configuration(**adaptive, backup="none"),
        "SSD, `ngram`, B = 3, anytime": Configuration(**adaptive, backup="ngram", building="anytime"),
        "SSD, `none`, ranked by q": Configuration(**base, backup="none", ranking="probability"),
        "SSD, `none`, C = .3": Configuration(**base, backup="none", ranking="probability", saguaro=0.3),
        "SSD, `none`, coupled": Configuration(**base, backup="none", verification="coupled"),
    }


def exact_law(model: torch.nn.Module) -> Law:
    """The law of the first tokens after the prompt, from the model's own plain forward."""
    law: Law = {(): 1.0}
    for _ in range(TOKENS):
        grown: Law = {}
        for text, chance in law.items():
            with torch.no_grad():
                best = model(torch.tensor([[*PROMPT, *text]])).logits[0, -1].double().topk(TOP_K)
            for token, part in zip(best.indices.tolist(), torch.softmax(best.values, -1).tolist(), strict=True):
                grown[*text, token] = chance * part
        law = grown
    return law


def p_value(law: Law, outputs: list[tuple[int, ...]]) -> float:
    """Chi-square of the outputs against the law; texts that are expected less than five times are one class."""
    counts, expected = Counter(outputs), {text: chance * len(outputs) for text, chance in law.items()}
    if not set(counts) <= set(law):
        return 0.0
    common = [text for text, number in expected.items() if number >= 5]
    rare = [text for text in law if text not in set(common)]
    pairs = [(counts[text], expected[text]) for text in common]
    if rare:
        pairs.append((sum(counts[text] for text in rare), sum(expected[text] for text in rare)))
    found, wanted = np.array(pairs).T
    return float(stats.chisquare(found, wanted).pvalue)


def drawn(engine: ssd.Engine, configuration: Configuration, count: int) -> list[tuple[int, ...]]:
    """So many texts, each with a seed of its own."""
    engine.configure(configuration)
    scheme: Verification = configuration.verification
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, top_k=TOP_K, n=count, seed=1, verification=scheme, ignore_eos=True)
    return [output.token_ids for output in engine.generate([PROMPT], params)]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = make_pair(Path(folder), "llama", seed=1, noise=0.1)
        law = exact_law(AutoModelForCausalLM.from_pretrained(paths[0], dtype=torch.float32))
        print("| mode | texts | hit rate | acceptance | p |\n|---|---|---|---|---|")
        for name, configuration in ways().items():
            with ssd.Engine.from_plan(hand_typed(*paths), max_num_seqs=4) as engine:
                outputs = drawn(engine, configuration, 1000)
                done = engine.metrics()
            rates = [f"{rate:.2f}" if rate is not None else "" for rate in (done.cache_hit_rate, done.draft_acceptance_rate)]
            print(f"| {name} | {len(outputs):,} | {' | '.join(rates)} | {p_value(law, outputs):.3f} |", flush=True)


if __name__ == "__main__":
    main()
