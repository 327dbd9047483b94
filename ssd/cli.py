"""The command line: plan, profile, bench, generate, simulate, validate and the trainings. Answers go to stdout, all else to stderr.

torch, transformers and the engine are imported inside commands, so that help comes at once.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssd.asked import BENCHING, MEASURING, PLANNING, RUNNING, Asked, takes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ssd.engine.engine import Health
    from ssd.progress import Progress
    from ssd.specs import Plan, RequestOutput

app = typer.Typer(
    name="ssd",
    help="Speculative speculative decoding: plan it, run it, measure it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# The command line, for the record.
_words: list[str] = []

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]
DraftHost = Annotated[str | None, typer.Option(help="Run the draft on this other host, where `ssd draft` is started.")]
Listen = Annotated[
    str | None, typer.Option(help="With --draft-host: HOST:PORT of this host, where the draft comes to. [default: torchrun's]")
]
SavePlan = Annotated[Path | None, typer.Option("--save", help="Write the plan as JSON to this file.")]
Save = Annotated[Path | None, typer.Option("--save", help="Write the result as JSON to this file.")]


@app.callback()
def ssd(show_version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and leave.")] = False) -> None:
    """Speculative speculative decoding: plan it, run it, measure it."""


@app.command()
@takes(*PLANNING)
def plan(
    asked: Asked,
    report: Annotated[Path | None, typer.Option(help="Write a page with charts to this .html file; it opens anywhere, offline.")] = None,
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Say whether and how speculation pays on given hardware."""
    from ssd.options import plan_for

    _refuse(asked.plan is not None and asked.output_tokens, "--output-tokens", "--plan settles it already: leave it out")
    _refuse(asked.plan is not None and asked.prompt_set, "--prompt-set", "--plan settles it already: leave it out")
    with _progress() as tell:
        found = plan_for(asked, tell)
    if save is not None:
        _write(save, found.model_dump_json(indent=2))
    if report is not None:
        from ssd.page import page

        _write(report, page(found))
    print(found.model_dump_json(indent=2) if as_json else found.explain())


@app.command()
@takes(*MEASURING)
def profile(
    asked: Asked,
    temperature: Annotated[str, typer.Option(help="Sampling temperatures to plan for; a list such as 0,1.")] = "0",
    prompt_set: Annotated[
        str, typer.Option(help="Prompts to measure acceptance on: code, chat or library; a list such as code,chat.")
    ] = "code",
    save: Save = None,
    as_json: Json = False,
) -> None:
    """Measure a pair on this machine.

    Latency tables, and acceptance of each prompt set at each temperature, as JSON to --save or else to stdout. With --save, a run that was
    broken off goes on where it ended.
    """
    from ssd.options import hardware_for, listed, models_for, one_draft, workload_for

    one_draft(asked)
    temperatures, prompt_sets = listed("temperature", temperature, float), tuple(prompt_set.split(","))
    hardware, models, workload = hardware_for(asked), models_for(asked), workload_for(asked)
    _refuse(not hardware.is_local, f"--hardware={asked.hardware!r}", "is another machine: leave it out to measure this one")
    from ssd.profiler import profile as measure

    with _progress() as tell:
        partial = None if save is None else save.with_name(save.name + ".partial")
        loads: dict[str, Any] = {"temperatures": temperatures, "prompt_sets": prompt_sets}
        found = measure(hardware, models, workload, **loads, progress=tell, partial=partial)
    text = found.model_dump_json(indent=2)
    if save is not None:
        _write(save, text)
    if save is None or as_json:
        print(text)
        return
    print(found.explain())
    print(f"Written to {save}; plan with --profile {save}.")


@app.command()
@takes(*BENCHING)
def bench(
    asked: Asked,
    num_prompts: Annotated[int, typer.Option(help="Distinct prompts.")] = 8,
    warmup: Annotated[int, typer.Option(help="Runs of each configuration before those that count.")] = 1,
    against: Annotated[
        list[str] | None, typer.Option(help="Measure transformers, or llama.cpp on the same .gguf file, too; may be given several times.")
    ] = None,
    batch_size: Annotated[str | None, typer.Option(help="Prompts decoded together; a list such as 1,2,4,8. [default: the plan's]")] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(
            "--prompt-tokens",
            "--context",
            help="Cut or fill prompts to this length, tokens; a list such as 128,1024. [default: as they are]",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        str | None,
        typer.Option("--num-speculative-tokens", "--k", "-K", help="Lookahead K, typed by hand (with --mode); a list such as 2,4,6."),
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Outcomes cached a request, typed by hand; a list such as 4,8.")] = None,
    temperature: Annotated[str, typer.Option(help="0 is greedy; a list such as 0,1.")] = "0",
    draft_host: DraftHost = None,
    listen: Listen = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Compare two results that --out wrote, and measure nothing.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the result as JSON to this file.")] = None,
    save: SavePlan = None,
    as_json: Json = False,
) -> None:
    """Measure the plan beside AR and SD, and beside what else a user might run.

    The plan, its best rivals and the baselines decode the same prompts in turn. Lists make a grid, measured in one run.
    """
    if compare is not None:
        beside = (batch_size, prompt_tokens, num_speculative_tokens, budget, draft_host, listen, save, out, against)
        changed = asked != Asked() or any(beside) or (num_prompts, warmup, temperature) != (8, 1, "0")
        _refuse(changed, "--compare", "measures nothing: leave out what is to be measured, --out and --save")
        _compare(*compare, as_json)
        return
    from ssd.options import Axes, plans_to_run

    axes = Axes.typed(batch_size, prompt_tokens, num_speculative_tokens, budget, temperature)
    _refuse_listening(listen, draft_host)
    with _progress() as tell:
        plans = plans_to_run(asked, axes, tell)
    plans = plans if draft_host is None else [one.with_draft_on(draft_host) for one in plans]
    found = plans[0]
    _refuse(save is not None and len(plans) > 1, "--save", f"there are {len(plans)} plans, one for each point of the grid: leave it out")
    _saved(found, save)
    from ssd.bench import bench as measure
    from ssd.models import inspect as inspect_models
    from ssd.prompts import prompts

    kind: Any = asked.prompt_set or found.workload.prompt_set
    texts = prompts(kind, num_prompts, inspect_models(found.models).tokenizer)
    tokens = found.workload.output_tokens if asked.output_tokens is None else asked.output_tokens
    with _progress() as tell:
        result = measure(
            plans,
            prompts=texts,
            output_tokens=tokens,
            warmup=warmup,
            temperatures=axes.temperatures,
            fit_prompts=prompt_tokens is not None,
            against=against or (),  # type: ignore[arg-type]
            prompt_set=kind,
            command=shlex.join(["ssd", *_words]),
            progress=tell,
            listen=listen,
        )
    if out is not None:
        _write(out, result.model_dump_json(indent=2))
    if as_json:
        print(result.model_dump_json(indent=2))
        return
    from ssd.bench.tables import report

    _show(report(result))


def _compare(first: Path, second: Path, as_json: bool) -> None:
    from ssd.bench.compare import compare, comparison
    from ssd.bench.result import BenchResult
    from ssd.options import read

    a, b = (read(BenchResult, "compare", path) for path in (first, second))
    if as_json:
        print(json.dumps([row.model_dump(mode="json") for row in compare(a, b)], indent=2))
        return
    _show(comparison(a, b))


@app.command()
@takes(*RUNNING)
def generate(
    asked: Asked,
    prompt: Annotated[str, typer.Argument(help="Text to go on from.")],
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0 from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the fewest likeliest tokens with this mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Draw from tokens with this share of the likeliest's probability.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, tokens that came before come less often.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes the output repeatable, in every mode. [default: another each time]")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be given several times.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Write what both devices did as a trace for Chrome or ui.perfetto.dev.")] = None,
    draft_host: DraftHost = None,
    listen: Listen = None,
    save: SavePlan = None,
    as_json: Json = False,
) -> None:
    """Decode a prompt as planned.

    The text goes to stdout as it comes, then one line of metrics to stderr.
    """
    from ssd.options import plan_to_run
    from ssd.specs import SamplingParams

    asked_for: dict[str, object] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    asked_for |= {"repetition_penalty": repetition_penalty, "stop": tuple(stop or ())}
    # A mistake is named before anything is measured or loaded.
    SamplingParams.model_validate(asked_for)
    _refuse_listening(listen, draft_host)
    with _progress() as tell:
        found = plan_to_run(asked, tell)
    found = _saved(found if draft_host is None else found.with_draft_on(draft_host), save)
    from ssd.engine.engine import Engine

    length = found.workload.output_tokens if asked.output_tokens is None else asked.output_tokens
    params = SamplingParams.model_validate({**asked_for, "max_tokens": length})
    with Engine.from_plan(found, listen=listen) as engine:
        for chunk in engine.stream(prompt, params):
            if not as_json:
                print(chunk.text, end="", flush=True)
        output, health = chunk.output, engine.health()
        if timeline is not None:
            _write(timeline, json.dumps(engine.timeline().to_chrome()))
    assert output is not None
    if as_json:
        print(json.dumps({"output": output.model_dump(mode="json"), "plan": found.model_dump(mode="json"), "draft": health.draft}))
        return
    print(flush=True)
    print(metrics_line(output, found, health), file=sys.stderr)


@app.command()
def draft(
    connect: Annotated[str, typer.Option(help="HOST:PORT where the engine listens.")],
    name: Annotated[str | None, typer.Option(help="This host in device ids, as in NAME/cuda:0. [default: what it is called]")] = None,
) -> None:
    """Draft for the engine of another host.

    It goes there until Ctrl-C, again and again, loads what the engine asks for and keeps it for the next. SSD_SECRET is the same on both.
    """
    from ssd.engine.address import Address, this_host
    from ssd.engine.draft_host import supervise

    logging.getLogger().setLevel(logging.INFO)
    supervise(Address.parse("--connect", connect), name or this_host())


@app.command()
def simulate(
    scenario: Annotated[Path, typer.Argument(help="The scenario, a .yaml or .json file such as examples/scenario.yaml.")],
    seed: Annotated[int, typer.Option(help="Of the first run; further ones have the seeds after it.")] = 0,
    replications: Annotated[int, typer.Option(help="Runs with different chance, for means with 95 % intervals.")] = 1,
    sweep: Annotated[list[str] | None, typer.Option(help="KEY=V1,V2,...: every combination is played; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the table of a sweep goes, .csv or .parquet.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Write what all devices did as a trace for Chrome or ui.perfetto.dev.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw what all devices did, as .svg or .png.")] = None,
    as_json: Json = False,
) -> None:
    """Play a scenario in simulated time.

    What a deployment would do, from latencies, acceptance, a configuration and a load.
    """
    from dataclasses import asdict

    from ssd import simulation

    _refuse(replications < 1, f"--replications={replications}", "give 1 or more")
    _refuse(sweep and (timeline or plot), "--sweep", "has no one timeline to write or draw: leave --timeline and --plot out")
    _refuse(bool(sweep) != (out is not None), "--sweep and --out", "belong together: give both, or neither")
    if sweep and out is not None:
        with _progress() as tell:
            rows = simulation.swept(scenario, sweep, seed, replications, tell)
        simulation.write(rows, out)
        print(json.dumps(rows) if as_json else f"{len(rows)} rows written to {out}.")
        return
    if replications > 1:
        with _progress() as tell:
            found = simulation.numbers(scenario, seed, replications, tell)
    if replications == 1 or timeline is not None or plot is not None:
        result = simulation.play(scenario, seed)
        if replications == 1:
            found = simulation.of_one(result)
        if timeline is not None:
            _write(timeline, json.dumps(result.timeline.to_chrome()))
        if plot is not None:
            from sim.picture import draw

            draw(result.timeline, plot)
    told = {name: interval and asdict(interval) for name, interval in found.items()}
    print(json.dumps(told, indent=2) if as_json else simulation.told(found))


@app.command()
@takes("target", "draft", "max_model_len", "dtype", "prompt_tokens", "output_tokens", "prompt_set")
def validate(
    asked: Asked,
    repeats: Annotated[int, typer.Option(help="Times that each configuration is run.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Hold the simulator against the engine.

    Profiles once, then predicts and measures sixteen configurations that the profile did not see.
    """
    from ssd.options import hardware_for, models_for, one_draft, workload_for

    one_draft(asked)
    hardware, models, load = hardware_for(asked), models_for(asked), workload_for(asked)
    from ssd.validation import cases
    from ssd.validation import validate as compare

    chosen = cases(hardware) if asked.prompt_tokens is None else cases(hardware, asked.prompt_tokens)
    tokens = 64 if asked.output_tokens is None else asked.output_tokens
    with _progress() as tell:
        found = compare(hardware, models, chosen=chosen, prompt_set=load.prompt_set, output_tokens=tokens, repeats=repeats, progress=tell)
    if out is not None:
        _write(out, found.model_dump_json(indent=2))
    print(found.model_dump_json(indent=2) if as_json else found.table())


@app.command()
def distill(
    target: Annotated[str, typer.Option(help="Model to propose for: hub id, folder or .gguf file.")],
    out: Annotated[Path, typer.Option(help="Folder for the draft, its report and what training needs to go on after a break.")],
    layers: Annotated[str, typer.Option(help="How many layers, or which of the target's to begin with, such as 0,10,29.")] = "4",
    hidden: Annotated[int | None, typer.Option(help="Width. [default: the target's, so that its weights can be taken over]")] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width inside the feed-forward part. [default: the target's]")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads. [default: the target's]")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Key-value heads. [default: the target's]")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Propose only so many tokens, the commonest. [default: all]")] = None,
    prompts: Annotated[str, typer.Option(help="code, chat, or files: .json with a list of texts, else a text a line.")] = "code,chat",
    text: Annotated[list[Path] | None, typer.Option(help="Text file to learn from besides the target's own; may be repeated.")] = None,
    samples: Annotated[int, typer.Option(help="Texts that the target writes.")] = 512,
    sample_tokens: Annotated[int, typer.Option(help="Length of such a text, tokens.")] = 192,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 500,
    batch_size: Annotated[int, typer.Option(help="Windows in a step.")] = 4,
    window: Annotated[int, typer.Option(help="Length of a window, tokens.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="Between warm-up and decay.")] = 5e-4,
    seed: Annotated[int, typer.Option(help="Of samples, weights and windows.")] = 0,
    as_json: Json = False,
) -> None:
    """Make a draft for a target.

    A student of the target's kind learns from the text that the target writes. A run that was broken off goes on where it ended.
    """
    from ssd.training.distill import DistillRecipe
    from ssd.training.distill import distill as make
    from ssd.training.fit import Schedule
    from ssd.training.student import StudentShape, layers_for

    schedule = Schedule(steps=steps, batch_size=batch_size, window=window, learning_rate=learning_rate, seed=seed)
    shape = StudentShape(layers=layers_for(layers, target), hidden=hidden, intermediate=intermediate, heads=heads, kv_heads=kv_heads)
    recipe = DistillRecipe(
        target=target,
        shape=shape,
        prompts=tuple(prompts.split(",")),
        text=tuple(map(str, text or ())),
        samples=samples,
        sample_tokens=sample_tokens,
        vocabulary=vocabulary,
        schedule=schedule,
    )
    with _progress() as tell:
        found = make(out, recipe, tell)
    told = f"{found.table()}\n\nKL(p || q) {found.divergence:.3f} nats a token on held-out text."
    print(found.model_dump_json(indent=2) if as_json else told)
    print(f"The draft is in {out / 'draft'}; use it with --target {target} --draft {out / 'draft'}.", file=sys.stderr)


@app.command("train-pair")
def train_pair(
    out: Annotated[Path, typer.Option(help="Folder for the pair and for what training needs to go on after a break.")],
    target_steps: Annotated[int | None, typer.Option(help="Optimizer steps of the target. [default: the recipe's]")] = None,
    draft_steps: Annotated[int | None, typer.Option(help="Optimizer steps of the draft. [default: the recipe's]")] = None,
    samples: Annotated[int | None, typer.Option(help="Texts that the target writes for the draft. [default: the recipe's]")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, windows and samples.")] = 0,
    as_json: Json = False,
) -> None:
    """Train the embedded pair anew, on the Python standard library.

    Hours on two cores. A run that was broken off goes on where it ended.
    """
    from ssd.training.pair import recipe_for
    from ssd.training.pair import train_pair as make

    with _progress() as tell:
        found = make(out, recipe_for(target_steps, draft_steps, samples, seed), tell)
    print(found.model_dump_json(indent=2) if as_json else (out / "README.md").read_text(encoding="utf-8"))


def metrics_line(output: RequestOutput, plan: Plan, health: Health) -> str:
    """Return mode, speed beside what was predicted, hit rate with acceptance and length, and the health of the draft, on one line."""
    m, predicted = output.metrics, plan.predicted
    parts = [plan.mode, "no speed from one token" if m.time_per_output_token is None else f"{1 / m.time_per_output_token:.1f} tokens/s"]
    if predicted is not None:
        batch = f" for {plan.workload.batch_size} requests together" if plan.workload.batch_size > 1 else ""
        parts.append(f"predicted {predicted.tokens_per_second:.1f} tokens/s{batch}, {predicted.speedup_vs_ar:.2f}x AR")
    elif plan.mode != "ar":
        parts.append("speed against AR: see ssd bench")
    if m.draft_acceptance_rate is not None and m.mean_acceptance_length is not None:
        hits = "" if m.cache_hit_rate is None else f"hit rate {m.cache_hit_rate:.0%}, "
        parts.append(f"{hits}acceptance {m.draft_acceptance_rate:.0%}, mean acceptance length {m.mean_acceptance_length:.2f}")
    parts.append(f"draft {health.draft}" + (f" ({health.reason})" if health.reason else ""))
    return "; ".join(parts)


def _show(what: RenderableType) -> None:
    """Print what rich lays out, to a width that fits a page where there is no terminal."""
    from rich.console import Console

    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(what)


def _refuse(condition: object, option: str, remedy: str) -> None:
    if condition:
        raise ValueError(f"{option}: {remedy}")


def _refuse_listening(listen: str | None, draft_host: str | None) -> None:
    _refuse(listen is not None and draft_host is None, "--listen", "is where the draft of another host comes to: name it with --draft-host")


def _saved(plan: Plan, path: Path | None) -> Plan:
    if path is not None:
        _write(path, plan.model_dump_json(indent=2))
    return plan


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be written ({error.strerror}): give another file") from error


@contextmanager
def _progress() -> Iterator[Progress]:
    """Yield what shows a bar on a terminal, and nothing elsewhere; the bar comes with the first news and leaves no trace."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, share: None
        return
    # What is left is told by the share of the time that is over, however uneven the steps.
    with Progress(console=console, transient=True, speed_estimate_period=float("inf")) as bar:
        task = bar.add_task("", total=1.0, visible=False)
        yield lambda what, share: bar.update(task, description=what, completed=share, visible=True)


def _quiet() -> None:
    """Keep the libraries' progress bars and remarks away, here and in the draft's process, unless the user set them otherwise."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr, force=True)


def _version() -> str:
    try:
        return version("ssd-decoding")
    except PackageNotFoundError:
        return "unknown (the package is not installed)"


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 2 for a mistake of the user, 1 for a failure, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--version"]:
        print(f"ssd {_version()}")
        return 0
    _quiet()
    _words[:] = words
    try:
        return int(app(words, prog_name="ssd", standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ValueError as error:
        from ssd.options import explain

        return _failed(explain(error), 2)
    except Exception as error:
        # Mistakes in the words themselves are typer's, or click's, exceptions, depending on its version.
        if hasattr(error, "format_message"):
            return _failed(error.format_message(), 2)
        if isinstance(error, RuntimeError):
            return _failed(str(error), 1)
        raise


def _failed(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def main() -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(run())


if __name__ == "__main__":
    main()
