"""Run several configurations on the same prompts, in turn, and compare them prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence

from ssd.bench.candidates import candidates
from ssd.bench.result import BenchResult, Skipped
from ssd.bench.run import Run, Runs
from ssd.bench.summary import summarise
from ssd.engine.engine import Engine
from ssd.progress import Progress
from ssd.specs import Configuration, Plan, SamplingParams


def bench(plan: Plan, *, prompts: Sequence[str], output_tokens: int, warmup: int = 1, progress: Progress | None = None) -> BenchResult:
    """Decode every prompt greedily to `output_tokens` by the plan, its best rivals and the baselines, one after another on one engine.

    The order turns from prompt to prompt; `warmup` runs of each configuration come first and do not count; progress is called with what
    is being done and the share done, 0..1. ValueError for a plan for batches and for prompts that repeat or do not fit, RuntimeError if the
    draft is lost meanwhile.
    """
    if plan.workload.batch_size > 1:
        raise ValueError(
            f"workload.batch_size={plan.workload.batch_size}: a benchmark decodes one request at a time, not what the plan is for: "
            "plan with batch_size=1"
        )
    _check(prompts, output_tokens, warmup)
    chosen = candidates(plan)
    tell = progress or (lambda *_: None)
    tell("loading models", 0.0)
    with Engine.from_plan(plan.with_configuration(_with_draft(chosen))) as engine:
        _check_room(engine, prompts, output_tokens)
        params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
        runnable, skipped = _warm_up(engine, chosen, prompts[0], params, warmup)
        runs = _measure(engine, runnable, prompts, params, tell)
    return summarise(plan, len(prompts), output_tokens, runs, skipped)


def _check(prompts: Sequence[str], output_tokens: int, warmup: int) -> None:
    if not prompts:
        raise ValueError("prompts is empty: give at least one")
    if len(set(prompts)) < len(prompts):
        raise ValueError(f"prompts repeat: {len(set(prompts))} of {len(prompts)} are distinct; a repeated prompt would count twice")
    if output_tokens < 2:
        raise ValueError(f"output_tokens={output_tokens}: the speed of decoding needs at least 2")
    if warmup < 0:
        raise ValueError(f"warmup={warmup}: give 0 or more runs")


def _with_draft(chosen: Sequence[Configuration]) -> Configuration:
    """Return what to start the engine from, so that a draft is loaded if any configuration needs one."""
    rank = {"ssd": 0, "sd": 1, "ar": 2}
    return min(chosen, key=lambda configuration: rank[configuration.mode])


def _check_room(engine: Engine, prompts: Sequence[str], output_tokens: int) -> None:
    room = engine.pair.max_model_len - output_tokens
    for place, prompt in enumerate(prompts):
        length = len(engine.pair.tokenizer(prompt)["input_ids"])
        if length > room:
            raise ValueError(
                f"prompt {place} has {length} tokens, but output_tokens={output_tokens} leaves {room} of max_model_len="
                f"{engine.pair.max_model_len}: shorten it, lower output_tokens or raise max_model_len"
            )


def _warm_up(
    engine: Engine, chosen: Sequence[Configuration], prompt: str, params: SamplingParams, warmup: int
) -> tuple[list[Configuration], list[Skipped]]:
    """Return what this engine can run, the plan (first) by all means, and what it cannot."""
    runnable, skipped = [], []
    for place, configuration in enumerate(chosen):
        try:
            engine.configure(configuration)
        except ValueError as error:
            if place == 0:
                raise
            skipped.append(Skipped(configuration=configuration, reason=str(error)))
            continue
        runnable.append(configuration)
        for _ in range(warmup):
            run_once(engine, configuration, prompt, params)
    return runnable, skipped


def _measure(engine: Engine, chosen: Sequence[Configuration], prompts: Sequence[str], params: SamplingParams, tell: Progress) -> Runs:
    runs: Runs = {configuration: [] for configuration in chosen}
    for place, prompt in enumerate(prompts):
        tell(f"prompt {place + 1} of {len(prompts)}", place / len(prompts))
        turn = place % len(chosen)
        for configuration in [*chosen[turn:], *chosen[:turn]]:
            runs[configuration].append(run_once(engine, configuration, prompt, params))
    return runs


def run_once(engine: Engine, configuration: Configuration, prompt: str, params: SamplingParams) -> Run:
    """Decode one prompt; taking the timeline also waits until the draft is at rest, so that the next run has the machine to itself."""
    engine.configure(configuration)
    engine.timeline()
    before = engine.health()
    output = engine.generate(prompt, params)[0]
    run = Run(output, engine.timeline())
    health = engine.health()
    if health.draft == "lost" or health.restarts > before.restarts:
        raise RuntimeError(f"the draft was lost, so this was AR under another name: {health.reason or 'it has been started again'}")
    return run
