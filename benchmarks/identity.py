"""Hold the engine's tokens against transformers' own greedy `generate`, in all three modes.

python benchmarks/identity.py TARGET DRAFT [--num-prompts 16] [--output-tokens 64] [--prompt-set code]

Where an output differs, the two best logits at that place are printed: sums in another order may decide a near tie, nothing else.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import AutoModelForCausalLM

import ssd
from ssd.bench.result import NEAR_TIE
from ssd.prompts import prompts
from ssd.specs import Configuration, Placement, Plan, SamplingParams


def configurations(hardware: ssd.Hardware) -> dict[str, Configuration]:
    """Return AR, SD and SSD, with hits and misses, on the first core and the last."""
    first, last = hardware.devices[0].id, hardware.devices[-1].id
    shared, apart = Placement(target=(first,), draft=(first,)), Placement(target=(first,), draft=(last,))
    lists = {"fan_out_hit": (1, 1, 1, 2), "fan_out_miss": (1, 1, 1, 2)}
    return {
        "ar": Configuration(mode="ar", placement=Placement(target=(first,))),
        "sd": Configuration(mode="sd", num_speculative_tokens=4, placement=shared),
        "ssd jit": Configuration(mode="ssd", num_speculative_tokens=3, backup="jit", placement=apart, **lists),
        "ssd none": Configuration(mode="ssd", num_speculative_tokens=3, backup="none", placement=apart, **lists),
    }


def decode(target: str, draft: str, texts: list[str], output_tokens: int) -> tuple[list[list[int]], dict[str, list[list[int]]]]:
    """Return the prompts' token ids and each mode's output ids."""
    hardware, models = ssd.Hardware.local(), ssd.Models(target=target, draft=draft, max_model_len=2048)
    modes = configurations(hardware)
    ids: dict[str, list[list[int]]] = {}
    with ssd.Engine.from_plan(Plan(**dict(modes["ssd jit"]), hardware=hardware, models=models)) as engine:
        for name, configuration in modes.items():
            engine.configure(configuration)
            outputs = engine.generate(texts, SamplingParams(max_tokens=output_tokens))
            ids[name] = [list(output.token_ids) for output in outputs]
            rounds = [output.metrics for output in outputs]
            hits, misses = sum(m.num_cache_hits for m in rounds), sum(m.num_cache_misses for m in rounds)
            print(f"{name:9} {sum(m.num_rounds for m in rounds):5} rounds, {hits} hits, {misses} misses", flush=True)
    return [list(output.prompt_token_ids) for output in outputs], ids


@torch.inference_mode()
def main() -> None:
    """Decode, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--prompt-set", default="code", choices=["code", "chat"])
    args = parser.parse_args()
    given, ours = decode(args.target, args.draft, prompts(args.prompt_set, args.num_prompts), args.output_tokens)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    same, excused, wrong = 0, 0, 0
    for place, prompt in enumerate(given):
        ids = torch.tensor([prompt])
        # Plain greedy: a generation config that penalises repetition, as that of Qwen on the hub does, is another law.
        plain = {"do_sample": False, "repetition_penalty": 1.0, "max_new_tokens": args.output_tokens}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **plain)
        theirs = out[0, len(prompt) :].tolist()
        for mode, outputs in ours.items():
            if outputs[place] == theirs:
                same += 1
                continue
            where = next((i for i, (a, b) in enumerate(zip(outputs[place], theirs, strict=False)) if a != b), None)
            if where is None:
                wrong += 1
                print(f"prompt {place}, {mode}: {len(outputs[place])} tokens against {len(theirs)}")
                continue
            best = model(torch.tensor([prompt + theirs[:where]])).logits[0, -1].topk(2).values
            gap = float(best[0] - best[1])
            excused, wrong = (excused + 1, wrong) if gap < NEAR_TIE else (excused, wrong + 1)
            print(f"prompt {place}, {mode}: token {where} differs, two best logits {gap:.2e} apart")
        print(f"prompt {place}: compared", flush=True)
    print(f"{same} of {len(given) * len(ours)} outputs the same as transformers', {excused} differ at a near tie, {wrong} wrong")


if __name__ == "__main__":
    main()
