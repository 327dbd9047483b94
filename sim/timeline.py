"""Who did what and when: spans of the two devices on one clock, their overlap, and their export for a trace viewer."""

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from sim.metrics import Round

DEVICES = ("target", "draft")
# A target that waits and a draft that has nothing to build do no work.
RESTING = ("wait", "idle", "lost")

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Span:
    """One activity of one device; start and end in seconds on a clock that both devices share.

    Activities: target "prefill", "verify" (maybe with a piece of a prompt beside), "wait", "idle"; draft "prefill", "answer" (drafting once
    the outcomes are known), "build" (the cache, while the target verifies), "idle". request: names, joined by ", " for a batch. Round 0 is
    the first prompt. ValueError for another device or an end before the start.
    """

    device: str
    activity: str
    start: float
    end: float
    round: int
    request: str

    def __post_init__(self) -> None:
        if self.device not in DEVICES and not self.device.startswith("draft-"):
            raise ValueError(f"device={self.device!r} is unknown: use one of {DEVICES}")
        if not self.start <= self.end:
            raise ValueError(f"end={self.end!r} lies before start={self.start!r}: take both from one clock")


class Timeline:
    """Spans in the order in which they were added, and the rounds of the requests that they served."""

    def __init__(self, spans: Iterable[Span] = (), rounds: Iterable[Round] = ()) -> None:
        self.spans, self.rounds = list(spans), list(rounds)

    def add(self, span: Span) -> None:
        """Append one span."""
        self.spans.append(span)

    def busy(self, device: str, activities: Collection[str] | None = None) -> float:
        """Seconds in which the device was at one of these activities (default: all but "wait" and "idle"), overlaps counted once."""
        return _length(self._intervals(device, activities))

    def overlap(self) -> float:
        """Share, 0..1, of the draft's busy seconds that lie inside verifications by the target; 0 if the draft did nothing."""
        draft, verify = self._intervals("draft", None), self._intervals("target", ["verify"])
        return _length(_intersection(draft, verify)) / _length(draft) if draft else 0.0

    def to_chrome(self) -> dict[str, object]:
        """Chrome/Perfetto trace events: complete ("X") events in microseconds, a thread for each device, and one for each request, where
        a round says who drafted, how many tokens and how many of them were accepted."""
        requests = {name: tid for tid, name in enumerate(dict.fromkeys(entry.request for entry in self.rounds))}
        # Those of several draft devices after the two that there always are.
        devices = {name: tid for tid, name in enumerate(dict.fromkeys((*DEVICES, *sorted({span.device for span in self.spans}))))}
        threads = [(0, tid, name) for name, tid in devices.items()] + [(1, tid, name) for name, tid in requests.items()]
        names = [{"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}} for pid, tid, name in threads]
        processes = [
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}} for pid, name in enumerate(("devices", "requests"))
        ]
        rounds = [_chrome_round(entry, requests[entry.request]) for entry in self.rounds]
        events = [_chrome_event(span, devices[span.device]) for span in self.spans]
        return {"traceEvents": [*processes, *names, *events, *rounds], "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Write the Chrome/Perfetto trace as JSON."""
        Path(path).write_text(json.dumps(self.to_chrome()), encoding="utf-8")

    def _intervals(self, device: str, activities: Collection[str] | None) -> list[Interval]:
        return _merged(
            (s.start, s.end)
            for s in self.spans
            if s.device == device and s.start < s.end and (s.activity not in RESTING if activities is None else s.activity in activities)
        )


def _chrome_event(span: Span, tid: int) -> dict[str, object]:
    return {
        "name": span.activity,
        "ph": "X",
        "ts": span.start * 1e6,
        "dur": (span.end - span.start) * 1e6,
        "pid": 0,
        "tid": tid,
        "args": {"round": span.round, "request": span.request},
    }


def _chrome_round(entry: Round, tid: int) -> dict[str, object]:
    return {
        "name": f"{entry.drafter} {entry.accepted}/{entry.drafted}",
        "ph": "X",
        "ts": entry.start * 1e6,
        "dur": (entry.wait_seconds + entry.verify_seconds) * 1e6,
        "pid": 1,
        "tid": tid,
        "args": asdict(entry),
    }


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _intersection(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Common parts of two lists of merged intervals, in one pass."""
    common = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            common.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common
