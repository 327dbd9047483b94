"""Saguaro sampling on a real pair: one C for all positions against one C_k per position, by Theorem 7.

python benchmarks/saguaro.py --target MODEL --draft MODEL [--temperature 1] [--fan-out 2 2 2 2 3] [--save pairs.npz]
python benchmarks/saguaro.py --arrays pairs.npz             # p and q, [positions, vocabulary] each, saved before or elsewhere

The target draws texts on the prompts; p and q are both models' laws at every drawn token. Every position of a round is given the same
pairs, so the C_k differ only by F_k and by what the position is worth to the round. Exact means over the tokens sent. Times are in units of
one verification. Each pair takes some milliseconds for every factor and fan-out, in proportion to the vocabulary.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import chain

import numpy as np

from ssd.prompts import prompts
from theory.check import FloatArray
from theory.saguaro import SaguaroCurves, SaguaroRound, best_factors, best_single_factor, saguaro_curves, saguaro_round
from theory.sampling import sampling_law

FACTORS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.0)
PAIRS_AT_ONCE = 16

Pairs = Iterator[tuple[FloatArray, FloatArray]]


def drawn(args: argparse.Namespace) -> Pairs:
    """Yield both models' laws at the tokens of each text, drawn by the target."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    from transformers import AutoModelForCausalLM

    from ssd.models import locate

    sources = [locate("target", args.target), locate("draft", args.draft)]
    tokenizer = sources[0].tokenizer()
    models = [AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32).eval() for source in sources]
    torch.manual_seed(args.seed)
    sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    if args.temperature == 0:
        sampling = {"do_sample": False, "repetition_penalty": 1.0}
    for text in prompts(args.prompt_set, args.num_prompts, tokenizer):
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = models[0].generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=args.output_tokens, **sampling)
            logits = [model(out).logits[0, ids.shape[1] - 1 : -1].numpy() for model in models]
        shared = min(each.shape[-1] for each in logits)
        p, q = (sampling_law(each[:, :shared], args.temperature) for each in logits)
        yield p, q


def stored(path: str) -> Pairs:
    """Yield the arrays p and q of a file."""
    arrays = np.load(path)
    yield arrays["p"], arrays["q"]


def measured(pairs: Pairs, fan_out: list[int]) -> tuple[SaguaroCurves, int]:
    """Return the curves of all factors and fan-outs, means over all pairs, and how many pairs there were."""
    total, count = [np.zeros(1)] * 3, 0
    for p, q in pairs:
        for begin in range(0, len(p), PAIRS_AT_ONCE):
            part = slice(begin, begin + PAIRS_AT_ONCE)
            size = len(p[part])
            total = [sum_ + size * mean for sum_, mean in zip(total, saguaro_curves(p[part], q[part], FACTORS, fan_out), strict=True)]
            count += size
    return SaguaroCurves(*(sum_ / count for sum_ in total)), count


def show(curves: SaguaroCurves, sizes: list[int], fan_out: list[int], T_p: float, T_b: float) -> None:
    """Print the round of each factor, the best one, the best for each position, and the gain."""
    at = [sizes.index(F) for F in fan_out]
    a, hit, H = curves.acceptance[:, at[:-1]], curves.rejected_hit[:, at[:-1]], float(curves.accepted_hit[at[-1]])
    table = (a, hit, H, T_p, T_b)

    def line(name: str, made: SaguaroRound) -> str:
        mean_acceptance = float(a[made.choice, range(len(at) - 1)].mean())
        return f"| {name} | {mean_acceptance:.3f} | {made.h:.3f} | {made.E:.3f} | {made.speedup:.3f} |"

    print("| C | acceptance | hit rate | tokens a round | speedup over AR |\n|---|---|---|---|---|")
    for i, C in enumerate(FACTORS):
        print(line(f"{C:g}", saguaro_round([i] * (len(at) - 1), *table)))
    single, each = best_single_factor(*table), best_factors(*table)
    print(line(f"best one: {FACTORS[single.choice[0]]:g}", single))
    print(line("best C_k: " + " ".join(f"{FACTORS[i]:g}" for i in each.choice), each))
    none = saguaro_round([0] * (len(at) - 1), *table)
    print(
        f"one C gains {single.speedup / none.speedup - 1:+.2%} over C=1, one C_k per position {each.speedup / single.speedup - 1:+.2%} more"
    )


def main() -> None:
    """Draw or load, measure, choose, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--arrays", help="a .npz file with p and q, instead of models")
    parser.add_argument("--save", help="write p and q to this .npz file")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--prompt-set", default="code", choices=["code", "chat", "library"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fan-out", type=int, nargs="+", default=[2, 2, 2, 2, 3], help="F_0 .. F_K")
    parser.add_argument("--T-p", type=float, default=1.0, help="building the cache")
    parser.add_argument("--T-b", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="the backup's drafting; one table each")
    args = parser.parse_args()
    if args.arrays is None and None in (args.target, args.draft):
        parser.error("give --target and --draft, or --arrays")
    pairs = stored(args.arrays) if args.arrays else drawn(args)
    if args.save:
        kept = list(pairs)
        np.savez_compressed(args.save, p=np.concatenate([p for p, _ in kept]), q=np.concatenate([q for _, q in kept]))
        pairs = chain(kept)
    sizes = sorted(set(args.fan_out))
    curves, count = measured(pairs, sizes)
    print(f"{count} positions, acceptance {curves.acceptance[0, 0]:.3f} with C=1, K={len(args.fan_out) - 1}, F={args.fan_out}")
    for T_b in args.T_b:
        print(f"\nT_p={args.T_p:g}, T_b={T_b:g}\n")
        show(curves, sizes, args.fan_out, args.T_p, T_b)


if __name__ == "__main__":
    main()
