"""Check an accelerator in a few minutes, without a download: is what runs there right, and as fast as its memory allows?

    python examples/gpu_check.py                         # the first accelerator; writes gpu_check.json
    python examples/gpu_check.py --device cuda:1 --json result.json
    python examples/gpu_check.py --device cpu --small    # every line of it on a CPU, in tiny shapes: no speed that counts

Prints one table and writes it as JSON, with the device's name. Ends with 1 where something is wrong. Speeds are of random weights in the
shapes of Llama 3.1 8B and 3.2 1B: with them hardly a draft token is accepted, so of SD and SSD it is the seconds of a round that count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from shutil import copy
from time import monotonic, perf_counter

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig
from transformers.utils.logging import disable_progress_bar

import ssd
from ssd import devices
from ssd.bench.memory import planned_bytes
from ssd.engine.forward import SlotModel
from ssd.engine.graphs import Graphs, as_it_is
from ssd.engine.queries import Queries
from ssd.models import LoadedModel, load, locate, weight_bytes
from ssd.sampling import Proposed, draw, gumbel, noise_key, uniform, verify
from ssd.shapes import catalogue
from ssd.specs import EMBEDDED_TARGET, Configuration, Placement, Plan

PROMPT = "def mean(numbers):\n"
TINY = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96, "vocab": 4096, "tied": False}


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    target: dict
    draft: dict
    context: int = 1024
    model_len: int = 4096
    tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 256)
    repeats: int = 20
    draws: int = 400_000
    output_tokens: int = 48
    copied: int = 1 << 30
    lookahead: int = 4
    budget: int = 16


@dataclass
class Check:
    """Lines of the table: what was looked at, what came of it, what it is held against, and whether it is right (none: it is a number)."""

    device: str
    lines: list[dict] = field(default_factory=list)

    def say(self, part: str, what: str, value: object, against: object = "", right: bool | None = None) -> None:
        """Add a line."""
        self.lines.append({"part": part, "what": what, "value": value, "against": against, "right": right})
        print(f"{part}: {what}: {value} {against} {'' if right is None else 'ok' if right else 'WRONG'}", file=sys.stderr, flush=True)


def main() -> int:
    """Run every part; return how the process is to end."""
    options = argparse.ArgumentParser(description="Check an accelerator: correctness, graphs, latency, bandwidth, memory.")
    found = devices.accelerators()
    options.add_argument("--device", default=str(found[0]) if found else None, help="torch's name of the device [the first accelerator]")
    options.add_argument("--small", action="store_true", help="tiny shapes and few repeats: to see that every part runs")
    options.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where the result is written [gpu_check.json]")
    asked = options.parse_args()
    if asked.device is None:
        options.error("--device: torch finds no accelerator here; give --device cpu --small to see that the script runs")
    disable_progress_bar()
    device = torch.device(asked.device)
    sizes = Sizes(catalogue()["Llama-3.1-8B"], catalogue()["Llama-3.2-1B"])
    if asked.small:
        sizes = Sizes(TINY, {**TINY, "layers": 1}, 40, 160, (1, 2, 5), 2, 20_000, 12, 1 << 22, 2, 4)
    begin = monotonic()
    check = Check("the CPU" if devices.is_cpu(device) else devices.product_name(device))
    with tempfile.TemporaryDirectory() as folder:
        for part in (against_the_cpu, sampling, graphs_and_latency, modes):
            part(check, device, sizes, Path(folder))
    check.say("all", "seconds", round(monotonic() - begin))
    show(check)
    known = {"device": check.device, "kind": str(device), "small": asked.small, "on": date.today().isoformat(), "torch": torch.__version__}
    asked.json.write_text(json.dumps({**known, "accelerators": len(found), "sizes": asdict(sizes), "lines": check.lines}, indent=1) + "\n")
    return int(any(line["right"] is False for line in check.lines))


def show(check: Check) -> None:
    """Print the table."""
    table = Table(title=f"gpu_check on {check.device}")
    for name in ("part", "what", "value", "against", ""):
        table.add_column(name)
    for line in check.lines:
        verdict = {None: "", True: "ok", False: "WRONG"}[line["right"]]
        table.add_row(line["part"], line["what"], str(line["value"]), str(line["against"]), verdict)
    Console(width=150).print(table)


# --- correctness ---


def against_the_cpu(check: Check, device: torch.device, sizes: Sizes, _: Path) -> None:
    """The embedded target in fp32 says there what it says on the CPU, greedily and with the same logits but for rounding."""
    source = locate("target", EMBEDDED_TARGET)
    ids = source.tokenizer()(PROMPT)["input_ids"]
    told = [greedy(load(source, where, torch.float32), ids, sizes.output_tokens) for where in (devices.cpu(), device)]
    same = told[0][0] == told[1][0]
    check.say("correctness", "greedy tokens of the embedded target in fp32 as on the CPU", len(told[0][0]), "tokens", same)
    distance = float((told[0][1] - told[1][1].cpu()).abs().max())
    check.say("correctness", "largest difference of logits after the prompt", f"{distance:.1e}", "below 1e-2", distance < 1e-2)


def greedy(loaded: LoadedModel, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Return greedy tokens after a prompt and the logits of the first."""
    model, tokens, first = SlotModel(loaded, 1, 1 + len(prompt) + count), list(prompt), None
    fed = 0
    while len(tokens) < len(prompt) + count:
        logits = model.forward({0: chained(model, tokens[fed:], fed)})[0]
        first = logits[-1] if first is None else first
        fed = len(tokens)
        tokens.append(int(logits[-1].argmax()))
    assert first is not None, "a prompt has a token"
    return tokens[len(prompt) :], first


def chained(model: SlotModel, tokens: list[int], begin: int) -> Queries:
    """Queries that feed tokens after `begin` others, each token in the slot after its place."""
    count = len(tokens)
    visible = np.zeros((count, model.slots), dtype=bool)
    visible[:, 1 : begin + count + 1] = np.tri(count, begin + count, begin, dtype=bool)
    ids = torch.tensor(tokens, device=model.device)
    return Queries(ids, np.arange(begin, begin + count), np.arange(begin + 1, begin + count + 1), visible)


def sampling(check: Check, device: torch.device, sizes: Sizes, _: Path) -> None:
    """Keyed noise has the same bits there; verification emits the target's law, and the very tokens that it emits on the CPU."""
    n, K, vocab = sizes.draws, 2, 5
    seeds, purposes = torch.arange(n), 1
    keys = [noise_key(seeds.to(where), purposes, seeds.to(where) % 97, seeds.to(where)) for where in (devices.cpu(), device)]
    check.say("sampling", "noise keys as on the CPU, bit for bit", n, "keys", torch.equal(keys[0], keys[1].cpu()))
    check.say("sampling", "uniform numbers as on the CPU", n, "numbers", torch.equal(uniform(keys[0]), uniform(keys[1]).cpu()))
    noise = [gumbel(which[:64], 128_256) for which in keys]
    distance = float((noise[0] - noise[1].cpu()).abs().max())
    check.say("sampling", "Gumbel noise: largest difference from the CPU's", f"{distance:.1e}", "below 1e-4", distance < 1e-4)
    generator = torch.Generator().manual_seed(0)
    log_p, log_q = (torch.log_softmax(2 * torch.randn(1, K + 1, vocab, generator=generator), -1) for _ in range(2))
    for scheme in ("rejection", "coupled"):
        emitted = [
            first_tokens(log_p.to(where), log_q.to(where), which, scheme == "coupled")
            for where, which in zip((devices.cpu(), device), keys, strict=True)
        ]
        unlike = int((emitted[0] != emitted[1].cpu()).sum())
        # A draw whose best two are within the last digits of a logarithm may fall otherwise.
        check.say("sampling", f"{scheme}: first tokens unlike the CPU's", unlike, f"of {n}", unlike <= n // 10_000)
        observed = torch.bincount(emitted[1].cpu(), minlength=vocab).double()
        expected = log_p[0, 0].exp().double() * n
        chi = float(((observed - expected) ** 2 / expected).sum())
        check.say(
            "sampling", f"{scheme}: chi-squared of the law emitted", f"{chi:.1f}", f"below 25, {vocab - 1} degrees of freedom", chi < 25
        )


def first_tokens(log_p: torch.Tensor, log_q: torch.Tensor, keys: torch.Tensor, coupled: bool) -> torch.Tensor:
    """Draft K tokens for each key, verify them, and return the first token that is emitted."""
    n, places = len(keys), log_p.shape[1]
    position = torch.arange(places, device=keys.device)
    of = [noise_key(keys[:, None], purpose, position, keys[:, None]) for purpose in (1, 2, 3)]
    own = of[2] if coupled else of[0]
    drafted = draw(log_q.expand(n, -1, -1)[:, :-1].flatten(0, 1), own[:, :-1].flatten()).view(n, places - 1)
    lengths, has_q = torch.full((n,), places - 1, device=keys.device), torch.ones(n, dtype=torch.bool, device=keys.device)
    drafts = Proposed(drafted, lengths, log_q.exp().expand(n, -1, -1)[:, :-1], has_q)
    found = verify(log_p.expand(n, -1, -1), drafts, coupled, of[1][:, :-1], of[2])
    return torch.where(found.accepted > 0, drafted[:, 0], found.bonus)


# --- speed ---


def shaped(row: dict, folder: Path, model_len: int) -> Path:
    """Write a model without weights, with the embedded pair's tokenizer; it gets random ones where it is loaded."""
    folder.mkdir(exist_ok=True)
    config = LlamaConfig(
        hidden_size=row["hidden"],
        num_hidden_layers=row["layers"],
        num_attention_heads=row["heads"],
        num_key_value_heads=row["kv_heads"],
        head_dim=row["head_dim"],
        intermediate_size=row["intermediate"],
        vocab_size=row["vocab"],
        tie_word_embeddings=row["tied"],
        max_position_embeddings=model_len,
        architectures=["LlamaForCausalLM"],
        eos_token_id=None,
        random_weights=True,
    )
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy(Path(locate("target", EMBEDDED_TARGET).folder) / name, folder / name)
    return folder


def graphs_and_latency(check: Check, device: torch.device, sizes: Sizes, folder: Path) -> None:
    """Forwards of both shapes: replayed from graphs they say what they say without, and how long they take; what of it is memory."""
    bandwidth = copying(device, sizes)
    check.say("memory", "bandwidth of a copy on the device, GB/s", round(bandwidth / 1e9, 1))
    dtype = torch.float32 if devices.is_cpu(device) else torch.bfloat16
    for role in ("target", "draft"):
        source = locate(role, str(shaped(getattr(sizes, role), folder / role, sizes.model_len)))
        before = allocated(device)
        loaded = load(source, device, dtype)
        weights = weight_bytes(source, dtype, device)
        if not devices.is_cpu(device):
            taken = allocated(device) - before
            check.say(
                "memory", f"{role}: weights, GiB", round(taken / 2**30, 2), round(weights / 2**30, 2), abs(taken - weights) < 0.03 * weights
            )
        slots = 1 + sizes.context + sizes.tokens[-1]
        eager, replayed = SlotModel(loaded, 1, slots), SlotModel(loaded, 1, slots)
        eager.cache.graphs = None
        replayed.cache.graphs = Graphs.on(device) or Graphs(device, as_it_is)
        for tokens in sizes.tokens:
            queries = chained(eager, [1 + place % 100 for place in range(tokens)], sizes.context)
            outcome = [model.forward({0: queries})[0] for model in (eager, replayed)]
            same = torch.equal(outcome[0].argmax(-1), outcome[1].argmax(-1))
            close = float((outcome[0] - outcome[1]).abs().max() / outcome[0].abs().max())
            seconds = [
                timed(lambda model=model, queries=queries: model.forward({0: queries})[0].argmax(-1).tolist(), sizes)
                for model in (eager, replayed)
            ]
            check.say("latency", f"{role}: {tokens} tokens, ms from a graph", f"{1e3 * seconds[1]:.2f}", f"without {1e3 * seconds[0]:.2f}")
            # Filled up, a forward may be played by another kernel, which rounds otherwise.
            check.say(
                "graphs",
                f"{role}: {tokens} tokens, logits differ by",
                f"{close:.0e}",
                "the largest tokens alike" if same else "",
                close < 0.05,
            )
            if tokens == 1:
                check.say(
                    "bandwidth",
                    f"{role}: AR reads its weights at, GB/s",
                    round(weights / seconds[1] / 1e9, 1),
                    f"{weights / seconds[1] / bandwidth:.0%} of a copy's",
                )
        shapes = len(replayed.cache.graphs)
        check.say("graphs", f"{role}: shapes captured", shapes, f"for {len(sizes.tokens)} sizes", shapes <= len(sizes.tokens))
        del eager, replayed, loaded


def copying(device: torch.device, sizes: Sizes) -> float:
    """Bytes a second that are read and written by a copy on the device."""
    data = torch.zeros(2, sizes.copied, dtype=torch.uint8, device=device)

    def act() -> None:
        data[0].copy_(data[1])
        int(data[0, 0])

    return 2 * sizes.copied / timed(act, sizes)


def timed(action: Callable[[], object], sizes: Sizes) -> float:
    """Median seconds of an action that waits for the device."""
    action()
    seconds = []
    for _ in range(sizes.repeats):
        begin = perf_counter()
        action()
        seconds.append(perf_counter() - begin)
    return statistics.median(seconds)


def allocated(device: torch.device) -> int:
    """Bytes that tensors take on an accelerator."""
    return 0 if devices.is_cpu(device) else int(torch.accelerator.memory_allocated(device))


def modes(check: Check, device: torch.device, sizes: Sizes, folder: Path) -> None:
    """AR, SD and SSD by the engine itself, on one device and on two where there are: the same tokens, and the seconds of a round."""
    pair = ssd.Models(dtype="float32")
    big = ssd.Models(target=str(folder / "target"), draft=str(folder / "draft"), max_model_len=sizes.model_len)
    listed = list(configurations(device, sizes))
    for name, models in (("the embedded pair in fp32", pair), ("random 8B and 1B", big)):
        texts = set()
        first = Plan(**{**listed[-1][1].model_dump(), "hardware": hardware(device), "models": models})
        with ssd.Engine.from_plan(first, max_num_seqs=1) as engine:
            for where, configuration in listed:
                engine.configure(configuration)
                texts.add(rounds(check, engine, sizes, f"{name}: {configuration.mode} {where}"))
                planned = sum(planned_bytes(engine, configuration))
                check.say("memory", f"{name}: {configuration.mode} {where}, GiB planned", round(planned / 2**30, 2), room(device))
        if models is pair:
            check.say("modes", f"{name}: the same greedy tokens in all", len(listed), "modes and placements", len(texts) == 1)


def rounds(check: Check, engine: ssd.Engine, sizes: Sizes, name: str) -> tuple[int, ...]:
    """Decode a prompt, say how long its rounds took, and return its tokens."""
    params = ssd.SamplingParams(max_tokens=sizes.output_tokens, ignore_eos=True)
    # Once for the graphs to be captured.
    engine.generate(PROMPT, params)
    output = engine.generate(PROMPT, params)[0]
    numbers = output.metrics
    per_round = 1e3 / max(1, numbers.num_rounds)
    seconds = numbers.total_seconds - (numbers.time_to_first_token or 0)
    value = f"{per_round * seconds:.2f}, of it waiting {per_round * numbers.wait_seconds:.2f}"
    speed = f"{numbers.num_output_tokens / numbers.total_seconds:.1f} tokens/s, {numbers.mean_acceptance_length or 1:.2f} a round"
    check.say("modes", f"{name}, ms a round", value, speed)
    return output.token_ids


def room(device: torch.device) -> str:
    """What the device has."""
    return "" if devices.is_cpu(device) else f"of {devices.memory_bytes(device) / 2**30:.0f}"


def hardware(device: torch.device) -> ssd.Hardware:
    """This machine, its rates left out: nothing is predicted here."""
    found = [str(one) for one in devices.accelerators()]
    known = {"memory_bandwidth": 1.0, "flops": 1.0}
    cards = [ssd.specs.Device(id=name, name=name, memory_bytes=devices.memory_bytes(torch.device(name)), **known) for name in found]
    cores = [ssd.specs.Device(id=name, name="core", memory_bytes=16 << 30, **known) for name in devices.core_ids()]
    return ssd.Hardware(name="here", devices=(*cards, *cores), shared_memory=not cards, is_local=True)


def configurations(device: torch.device, sizes: Sizes) -> Iterator[tuple[str, Configuration]]:
    """AR, SD and SSD on the device, SSD with the draft on another one where there is, and on the cores."""
    cores = devices.core_ids()
    here = cores[:1] if devices.is_cpu(device) else (str(device),)
    K = sizes.lookahead
    alone, shared = Placement(target=here), Placement(target=here, draft=here)
    caches = {"mode": "ssd", "num_speculative_tokens": K, "budget": sizes.budget}
    yield "alone", Configuration(mode="ar", placement=alone)
    yield "on one device", Configuration(mode="sd", num_speculative_tokens=K, placement=shared)
    if not devices.is_cpu(device):
        yield "on one device, two processes", Configuration(placement=shared, **caches)
    others = tuple(str(one) for one in devices.accelerators() if one != device)
    if others:
        yield "on two devices", Configuration(placement=replace_draft(alone, others[:1]), **caches)
    if len(cores) > 1:
        yield "with the draft on a core", Configuration(placement=replace_draft(alone, cores[-1:]), **caches)


def replace_draft(place: Placement, draft: tuple[str, ...]) -> Placement:
    """The placement with this draft."""
    return place.model_copy(update={"draft": draft})


if __name__ == "__main__":
    sys.exit(main())
