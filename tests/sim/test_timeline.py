import json

import pytest

from sim.metrics import Round
from sim.timeline import Span, Timeline


def span(device: str, activity: str, start: float, end: float) -> Span:
    return Span(device, activity, start, end, round=1, request="a")


BY_HAND = Timeline(
    [
        span("target", "prefill", 0, 2),
        span("target", "verify", 4, 10),
        span("target", "verify", 8, 12),  # another row of the same batch
        span("target", "wait", 12, 14),
        span("target", "verify", 14, 16),
        span("draft", "prefill", 0, 1),
        span("draft", "answer", 3, 4),
        span("draft", "build", 4, 11),
        span("draft", "build", 5, 9),
        span("draft", "idle", 11, 13),
        span("draft", "answer", 13, 15),
    ]
)


def test_busy_seconds_leave_out_rest_and_count_overlaps_once():
    assert BY_HAND.busy("target") == 12
    assert BY_HAND.busy("draft") == 11
    assert BY_HAND.busy("draft", ["build"]) == 7
    assert BY_HAND.busy("target", ["wait"]) == 2


def test_overlap_is_the_share_of_drafting_that_verification_hides():
    # build 4-11 lies inside verify 4-12, and one second of the answer 13-15 inside verify 14-16.
    assert BY_HAND.overlap() == pytest.approx(8 / 11)


def test_overlap_follows_many_spans_of_both_devices():
    drafts = [span("draft", "build", 3 * i, 3 * i + 2) for i in range(10)]
    verifies = [span("target", "verify", 6 * i + 1, 6 * i + 4) for i in range(5)]
    # Of each six seconds the draft works in [0,2] and [3,5], the target verifies in [1,4].
    assert Timeline(verifies + drafts).overlap() == pytest.approx(0.5)


def test_overlap_of_nothing_is_zero():
    assert Timeline().overlap() == 0
    assert Timeline([span("draft", "build", 1, 1), span("target", "verify", 0, 2)]).overlap() == 0


def test_chrome_trace_has_a_named_thread_a_device_and_microseconds(tmp_path):
    timeline = Timeline()
    timeline.add(Span("draft", "build", 0.5, 0.75, round=3, request="r"))
    timeline.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    *names, event = trace["traceEvents"]
    assert [(n["ph"], n["name"], n["args"]["name"], n["pid"], n.get("tid")) for n in names] == [
        ("M", "process_name", "devices", 0, None),
        ("M", "process_name", "requests", 1, None),
        ("M", "thread_name", "target", 0, 0),
        ("M", "thread_name", "draft", 0, 1),
    ]
    assert event == {
        "name": "build",
        "ph": "X",
        "ts": 5e5,
        "dur": 2.5e5,
        "pid": 0,
        "tid": 1,
        "args": {"round": 3, "request": "r"},
    }


def test_chrome_trace_has_a_named_thread_a_request_whose_rounds_say_who_drafted(tmp_path):
    rounds = [
        Round("b", 3, 2, 3, True, False, verify_seconds=0.2, wait_seconds=0.05, start=1.5, drafter="cache"),
        Round("a", 0, 0, 1, False, True, verify_seconds=0.25, wait_seconds=0.0, start=2.0, drafter="none"),
        Round("b", 3, 0, 1, False, True, verify_seconds=0.25, wait_seconds=0.25, start=2.0, drafter="jit"),
    ]
    Timeline([span("target", "verify", 1.5, 2)], rounds).save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 1}
    found = [event for event in events if event["pid"] == 1 and event["ph"] == "X"]
    assert [threads[event["tid"]] for event in found] == ["b", "a", "b"]
    assert [event["name"] for event in found] == ["cache 2/3", "none 0/0", "jit 0/3"]
    assert [(event["ts"], event["dur"]) for event in found] == [pytest.approx(pair) for pair in ((1.5e6, 2.5e5), (2e6, 2.5e5), (2e6, 5e5))]
    assert found[0]["args"]["committed"] == 3
    assert [event["pid"] for event in events if event["name"] == "verify"] == [0]


def test_a_bad_span_is_refused():
    with pytest.raises(ValueError, match=r"device='gpu'.*'target', 'draft'"):
        span("gpu", "verify", 0, 1)
    with pytest.raises(ValueError, match=r"end=1.*before start=2"):
        span("draft", "build", 2, 1)
