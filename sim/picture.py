"""A timeline as a picture: a lane for each device, and over them the rounds of each request."""

from pathlib import Path

from sim.timeline import Timeline

COLOURS = {"verify": "#4c72b0", "prefill": "#8172b3", "build": "#55a868", "answer": "#dd8452", "wait": "#e0e0e0", "lost": "#c44e52"}
MOST_REQUESTS = 12


def draw(timeline: Timeline, path: str | Path, seconds: float | None = None) -> None:
    """Draw the first `seconds` of a timeline (default: all of it) as .svg, .png or whatever else matplotlib writes.

    ValueError without matplotlib, and for an ending that it does not write.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"path={str(path)!r}: a picture needs matplotlib; pip install 'ssd-decoding[plots]'") from error
    end = max((span.end for span in timeline.spans), default=0.0) if seconds is None else seconds
    devices = list(dict.fromkeys(span.device for span in sorted(timeline.spans, key=lambda s: (s.device != "target", s.device))))
    requests = list(dict.fromkeys(entry.request for entry in timeline.rounds if entry.start < end))[:MOST_REQUESTS]
    lanes = [*devices, *requests]
    figure = Figure(figsize=(12, 1.2 + 0.35 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    for activity, colour in COLOURS.items():
        for lane, device in enumerate(devices):
            bars = [(s.start, s.end - s.start) for s in timeline.spans if (s.device, s.activity) == (device, activity) and s.start < end]
            axes.broken_barh(bars, (lane - 0.4, 0.8), color=colour, label=activity if device == devices[0] else None)
    for lane, request in enumerate(requests, len(devices)):
        for entry in timeline.rounds:
            if entry.request == request and entry.start < end:
                colour = COLOURS["build" if entry.hit else "answer" if entry.drafted else "wait"]
                axes.broken_barh(
                    [(entry.start, entry.wait_seconds + entry.verify_seconds)], (lane - 0.4, 0.8), color=colour, edgecolor="white"
                )
                axes.text(entry.start, lane, f" {entry.committed}", va="center", fontsize=7, clip_on=True)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlim(0, end or 1)
    axes.set_xlabel("seconds; in a request's lane: tokens of the round, green where its draft came from the cache")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12 - 0.6 / len(lanes or "1")), ncols=len(COLOURS), frameon=False)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ValueError(f"path={str(path)!r}: {error}") from error
