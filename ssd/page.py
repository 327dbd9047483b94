"""A plan as one page that opens anywhere: rounds in time, what K, the budget and the batch do, what it costs, and what it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from sim.simulate import Result, simulate
from ssd.lookup import recorded
from ssd.outcomes import LARGEST_BUDGET, outcome_model
from ssd.pace import Pace, pace
from ssd.prediction import scenario
from ssd.report import cost_per_million, describe, provenance
from ssd.search import BUDGETS, Lists, Search
from ssd.specs import Configuration, Mode, Plan, Sensitivity
from theory.fanout import optimal, uniform

if TYPE_CHECKING:
    import plotly.graph_objects as go

COLOURS: dict[str, str] = {"ar": "#8a8f98", "sd": "#3b7dd8", "ssd": "#d9480f"}
ACTIVITIES = {"verify": "#3b7dd8", "prefill": "#c9d6ea", "build": "#74b816", "answer": "#e8590c"}
WORDS = {"verify": "verify", "prefill": "prefill", "build": "build the cache", "answer": "draft while the target waits"}
NAMES: dict[Mode, str] = {"ar": "AR", "sd": "SD", "ssd": "SSD"}
SHOWN_ROUNDS = 5
TOKENS = 400
LARGEST_SHOWN_BATCH = 64


def page(plan: Plan) -> str:
    """Return a self-contained HTML page about the plan; ValueError for one that was typed by hand, of which nothing is known."""
    if plan.profile is None or plan.predicted is None:
        raise ValueError("the plan was typed by hand, so there is nothing to report: let ssd.plan choose, or force its mode")
    shown = _Shown(plan)
    charts: list[tuple[str, str, go.Figure]] = [
        ("Rounds in time", "The target verifies while the draft, on a device of its own, builds the next cache.", shown.timeline()),
        ("Where the time of a token goes", "Simulated, per output token of the batch.", shown.shares()),
        ("Speed against lookahead K", "The best of each K by theory, at the devices of the plan.", shown.by_lookahead()),
    ]
    if plan.mode == "ssd":
        charts.append(("Speed against cached outcomes B", f"At K={plan.num_speculative_tokens}, by theory.", shown.by_budget()))
    if plan.models.draft is not None:
        charts.append(("Speed of one request against batch size", shown.batch_words(), shown.by_batch()))
    charts.append(("What it costs", "Every configuration that the plan was held against.", shown.frontier()))
    template = Template(files("ssd").joinpath("data", "report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"{plan.models.target} on {plan.hardware.name}"),
        choice=escape(describe(plan)),
        figures="".join(f"<div class=figure><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in _figures(plan)),
        charts="".join(_card(*chart, script=place == 0) for place, chart in enumerate(charts)),
        tables="".join(_table(*table) for table in _tables(plan)),
        words=escape(plan.explain()),
    )


def _card(title: str, words: str, figure: go.Figure, *, script: bool) -> str:
    chart = figure.to_html(full_html=False, include_plotlyjs=script, config={"displayModeBar": False, "responsive": True})
    return f"<section class=card><h2>{escape(title)}</h2><p>{escape(words)}</p>{chart}</section>"


def _figures(plan: Plan) -> Iterator[tuple[str, str]]:
    predicted = plan.predicted
    assert predicted is not None
    yield "tokens a second", f"{predicted.tokens_per_second:.1f}"
    if predicted.tokens_per_second_between is not None:
        yield "9 times in 10 between", "{:.0f} to {:.0f}".format(*predicted.tokens_per_second_between)
    yield ("against AR, equal devices" if plan.placement.draft else "against AR"), f"{predicted.speedup_vs_ar_equal_devices:.2f}x"
    if predicted.speedup_vs_sd_equal_devices is not None:
        yield "against SD, equal devices", f"{predicted.speedup_vs_sd_equal_devices:.2f}x"
    if predicted.hit_rate is not None:
        yield f"hits, at acceptance {predicted.draft_acceptance_rate or 0:.0%}", f"{predicted.hit_rate:.0%}"
    cost = cost_per_million(plan, plan.hardware)
    if cost is not None:
        yield "a million tokens", f"${cost:.2f}"


def _tables(plan: Plan) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    everything = [plan, *plan.alternatives]
    rows = []
    for configuration in everything:
        predicted = configuration.predicted
        if predicted is None:
            continue
        cost = cost_per_million(configuration, plan.hardware)
        low, high = predicted.tokens_per_second_between or (predicted.tokens_per_second,) * 2
        speed = f"{predicted.tokens_per_second:.1f} ({low:.0f}-{high:.0f})"
        ratio = f"{predicted.speedup_vs_ar:.2f}x / {predicted.speedup_vs_ar_equal_devices:.2f}x"
        rows.append((describe(configuration), speed, ratio, "" if cost is None else f"${cost:.2f}"))
    yield "The plan and its rivals", ("configuration", "tokens/s (9 in 10)", "AR: target's devices / equal", "$ a million"), rows
    if plan.considered:
        drafts = [(str(c.draft), "" if c.tokens_per_second is None else f"{c.tokens_per_second:.1f}", c.best) for c in plan.considered]
        yield "Drafts considered", ("draft", "tokens/s", "best of it"), drafts
    if plan.sensitivity:
        yield "What would change the choice", ("input", "now", "below", "above"), [_change(each) for each in plan.sensitivity]
    inputs = [(kind, line) for kind, lines in provenance(plan).items() for line in lines]
    yield "What it rests on", ("source", "input"), inputs


def _change(each: Sensitivity) -> Sequence[str]:
    def amount(value: float) -> str:
        return f"{value * 1e3:.2f} ms" if each.unit == "s" else f"{value:.2f}"

    def end(at: float | None, mode: str | None) -> str:
        return "no change" if at is None else f"{amount(at)}: {mode}"

    return each.name, amount(each.value), end(each.below, each.becomes_below), end(each.above, each.becomes_above)


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f'<td data-name="{escape(name)}">{escape(cell)}</td>' for name, cell in zip(header, row, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f"<section class='card wide'><h2>{escape(title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></section>"
    )


@dataclass(frozen=True)
class _Shown:
    """The charts of one plan."""

    plan: Plan

    @cached_property
    def best(self) -> dict[Mode, Configuration]:
        """The fastest of each mode on the plan's devices, or on those of its target; of the plan's own mode, the plan."""
        used = set(self.plan.placement.devices)
        known = [self.plan, *(c for c in self.plan.alternatives if c.mode != self.plan.mode)]
        inside = [c for c in known if set(c.placement.devices) <= used] + known
        found: dict[Mode, Configuration] = {}
        for mode in NAMES:
            near = [c for c in inside if c.mode == mode]
            same = [c for c in near if c.placement.target == self.plan.placement.target]
            for c in (same or near)[:1]:
                found[mode] = c
        return found

    def pace(self, configuration: Configuration) -> Pace:
        """How fast it goes."""
        assert self.plan.profile is not None
        found = pace(self.plan.profile, configuration.placement, configuration.mode, configuration.verification)
        assert found is not None, "what was planned has tables"
        return found

    def search(self, rows: int | None = None) -> Search:
        """Theory at a batch size."""
        assert self.plan.profile is not None
        rows = self.plan.workload.batch_size if rows is None else rows
        return Search(outcome_model(self.plan.profile), rows, recorded(self.plan.profile))

    @cached_property
    def played(self) -> dict[Mode, Result]:
        """A short simulation of each mode; of prompt lookup, whose rounds are not simulated, as if it never found anything."""
        assert self.plan.profile is not None
        outcomes = outcome_model(self.plan.profile).simulated()
        load = self.plan.workload.model_copy(update={"batch_size": min(self.plan.workload.batch_size, 8)})
        found: dict[Mode, Result] = {}
        for mode, configuration in self.best.items():
            known = configuration.model_copy(update={"backup": "none"}) if configuration.backup == "ngram" else configuration
            found[mode] = simulate(scenario(known, self.pace(configuration), outcomes, load, TOKENS))
        return found

    def timeline(self) -> go.Figure:
        """Some rounds of each mode, side by side in the same seconds."""
        import plotly.graph_objects as go

        figure, named = _figure(height=60 + 74 * len(self.played)), set[str]()
        ends = []
        for result in self.played.values():
            verified = [span for span in result.timeline.spans if span.device == "target" and span.activity == "verify"]
            ends.append(verified[min(SHOWN_ROUNDS, len(verified) - 1)].end - verified[0].start)
        shown = max(ends)
        for mode, result in self.played.items():
            start = next(span.start for span in result.timeline.spans if span.device == "target" and span.activity == "verify")
            for activity, colour in ACTIVITIES.items():
                spans = [s for s in result.timeline.spans if s.activity == activity and s.end > start and s.start < start + shown]
                if not spans:
                    continue
                figure.add_trace(
                    go.Bar(
                        name=WORDS[activity],
                        legendgroup=activity,
                        showlegend=activity not in named,
                        orientation="h",
                        y=[f"{NAMES[mode]} {span.device}" for span in spans],
                        base=[1e3 * (max(span.start, start) - start) for span in spans],
                        x=[1e3 * (min(span.end, start + shown) - max(span.start, start)) for span in spans],
                        marker={"color": colour, "line": {"color": "white", "width": 1}},
                        hovertemplate="%{y}: " + activity + " %{x:.1f} ms<extra></extra>",
                    )
                )
                named.add(activity)
        figure.update_layout(barmode="overlay", xaxis_title="ms", bargap=0.25)
        figure.update_yaxes(autorange="reversed", showgrid=False)
        return figure

    def shares(self) -> go.Figure:
        """Milliseconds of a token by what the target does meanwhile."""
        import plotly.graph_objects as go

        figure = _figure(height=240)
        names = [NAMES[mode] for mode in self.played]
        parts: dict[str, list[float]] = {"verifying": [], "waiting for the draft": [], "messages and host work": []}
        for mode, result in self.played.items():
            metrics = result.metrics
            tokens = max(1, metrics.num_output_tokens - metrics.num_requests)
            rounds = list({r.start: r for r in result.rounds}.values()) if self.plan.workload.batch_size > 1 else list(result.rounds)
            verify, wait = (sum(getattr(r, name) for r in rounds) / tokens for name in ("verify_seconds", "wait_seconds"))
            its = self.pace(self.best[mode])
            rest = (its.overhead_seconds + 2 * its.link_seconds) * len(rounds) / tokens
            for name, seconds in zip(parts, (verify, wait, rest), strict=True):
                parts[name].append(1e3 * seconds)
        for (name, milliseconds), colour in zip(parts.items(), ("#3b7dd8", "#e8590c", "#adb5bd"), strict=True):
            figure.add_trace(go.Bar(name=name, orientation="h", y=names, x=milliseconds, marker={"color": colour}))
        figure.update_layout(barmode="stack", xaxis_title="ms a token", legend_traceorder="normal")
        figure.update_yaxes(autorange="reversed", showgrid=False)
        return figure

    def by_lookahead(self) -> go.Figure:
        """Tokens a second over K, for SD and SSD; AR is a line."""
        figure, search = _figure(), self.search()
        for mode, configuration in self.best.items():
            its = self.pace(configuration)
            fastest: dict[int, float] = {}
            for seconds, each in search.scored(mode, its):
                fastest.setdefault(each.num_speculative_tokens, search.rows / seconds)
            if mode == "ar":
                fastest = dict.fromkeys(search.lookaheads, fastest[0])
            _line(figure, NAMES[mode], sorted(fastest.items()), COLOURS[mode], dash=mode == "ar")
        figure.update_layout(xaxis_title="K", yaxis_title="tokens/s", xaxis_dtick=1)
        return _from_zero(figure)

    def by_budget(self) -> go.Figure:
        """Tokens a second over the number of cached outcomes, at the plan's K and backup."""
        figure, search, K = _figure(), self.search(), self.plan.num_speculative_tokens
        its = self.pace(self.plan)
        budgets = [budget for budget in BUDGETS if budget <= LARGEST_BUDGET]
        law, of_hit, of_miss = search.law(K), search.curves(K, True), search.curves(K, False)
        lists: dict[str, list[tuple[Lists, Lists]]] = {
            "best lists": [(optimal(budget, law, of_hit), optimal(budget, law, of_miss)) for budget in budgets],
            "equal lists": [(uniform(budget, K), uniform(budget, K)) for budget in budgets],
        }
        for (name, each), colour in zip(lists.items(), (COLOURS["ssd"], "#f4a582"), strict=True):
            points = [
                (budget, search.rows / search.ssd_seconds_per_token(its, K, after_hit, after_miss, self.plan.backup))
                for budget, (after_hit, after_miss) in zip(budgets, each, strict=True)
                if any(after_hit) and any(after_miss)
            ]
            _line(figure, name, points, colour)
        figure.update_layout(xaxis_title="cached outcomes B", yaxis_title="tokens/s")
        return _from_zero(figure)

    def by_batch(self) -> go.Figure:
        """Tokens a second of one request over the batch size: AR, SD, and SSD with either backup."""
        figure = _figure()
        sizes = [size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, LARGEST_SHOWN_BATCH) if size <= self._trusted()]
        for mode, configuration in self.best.items():
            its = self.pace(configuration)
            ways = {NAMES[mode]: configuration}
            if mode == "ssd":
                fast = self.search().backups[-1]
                ways = {f"SSD, backup {which}": configuration.model_copy(update={"backup": which}) for which in ("jit", fast)}
            for name, way in ways.items():
                points = [(size, 1 / self.search(size).seconds_per_token(way, its)) for size in sizes]
                _line(figure, name, points, COLOURS[mode] if way.backup == "jit" else "#7048e8", dash=mode == "ar")
        critical = self.plan.predicted.critical_batch_size if self.plan.predicted else None
        if critical is not None and critical <= sizes[-1]:
            highest = max(max(trace.y) for trace in figure.data)
            _line(figure, f"b* = {critical}", [(critical, 0), (critical, highest)], "#495057", dash=True)
        figure.update_layout(xaxis_title="requests together", yaxis_title="tokens/s of each", xaxis_type="log", xaxis_tickvals=sizes)
        return _from_zero(figure)

    def _trusted(self) -> float:
        """The batch up to which the latency tables of all modes reach."""
        K = self.plan.num_speculative_tokens
        return max(1.0, min(2 * self.pace(c).verify.sizes[-1] / (1 + K) for c in self.best.values()))

    def batch_words(self) -> str:
        """What the chart of batch sizes shows."""
        critical = self.plan.predicted.critical_batch_size if self.plan.predicted else None
        at = "" if critical is None else f" From b* = {critical} on, the backup that makes nobody wait is ahead of drafting anew."
        return f"By theory, all else as planned.{at}"

    def frontier(self) -> go.Figure:
        """Tokens a second against dollars a million tokens, or against devices where there are no prices."""
        import plotly.graph_objects as go

        figure, everything = _figure(), [self.plan, *self.plan.alternatives]
        priced = all(cost_per_million(c, self.plan.hardware) is not None for c in everything)
        for mode, colour in COLOURS.items():
            points = [(c, c.predicted) for c in everything if c.mode == mode and c.predicted is not None]
            if not points:
                continue
            across = [cost_per_million(c, self.plan.hardware) if priced else len(c.placement.devices) for c, _ in points]
            figure.add_trace(
                go.Scatter(
                    name=NAMES[mode],  # type: ignore[index]
                    mode="markers",
                    x=across,
                    y=[p.tokens_per_second for _, p in points],
                    text=[describe(c) for c, _ in points],
                    hovertemplate="%{text}<br>%{y:.1f} tokens/s<extra></extra>",
                    marker={
                        "size": [16 if c is self.plan else 9 for c, _ in points],
                        "color": colour,
                        "line": {"width": 1, "color": "white"},
                    },
                )
            )
        figure.update_layout(xaxis_title="$ a million tokens" if priced else "devices", yaxis_title="tokens/s", xaxis_rangemode="tozero")
        return _from_zero(figure)


def _figure(height: int = 330) -> go.Figure:
    import plotly.graph_objects as go

    return go.Figure(
        layout={
            "height": height,
            "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
            "template": "plotly_white",
            "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#343a40"},
            "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
            "xaxis": {"automargin": True, "fixedrange": True},
            "yaxis": {"automargin": True, "fixedrange": True},
        }
    )


def _from_zero(figure: go.Figure) -> go.Figure:
    return figure.update_yaxes(rangemode="tozero")


def _line(figure: go.Figure, name: str, points: Sequence[tuple[float, float]], colour: str, *, dash: bool = False) -> None:
    import plotly.graph_objects as go

    xs, ys = zip(*points, strict=True)
    line = {"color": colour, "width": 2.5, "dash": "dash" if dash else "solid"}
    figure.add_trace(go.Scatter(name=name, x=xs, y=ys, mode="lines" if dash else "lines+markers", line=line))
