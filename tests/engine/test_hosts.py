"""A draft on another host: the same tokens, whatever becomes of it and of the cable, and nobody is served who does not know the secret."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

import ssd
from ssd.cli import run
from ssd.engine import gloo, hosts
from ssd.engine.address import Address, rank, secret, this_host, under_torchrun
from ssd.engine.engine import Health
from ssd.engine.gloo import ROOM
from ssd.engine.link import MESSAGES, Failed, LinkError, Ping, Ready
from ssd.specs import Configuration, Device, Models, Placement, Plan, SamplingParams
from tests.engine.inprocess import reference
from tests.engine.patience import patient
from tests.engine.test_processes import wait_for
from tests.hosts import another_host, why_not
from tests.plans import CORES
from tests.tiny import tokenizer

PROMPT = "hello, world"
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)
NO_HOSTS = why_not()
elsewhere = pytest.mark.skipif(NO_HOSTS is not None, reason=f"no network namespaces here: {NO_HOSTS}")
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv("SSD_SECRET", "a secret")
    # gloo and its store tell on stderr of what is raised as well.
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")


@pytest.fixture(scope="module")
def expected(tiny_pair):
    model = AutoModelForCausalLM.from_pretrained(tiny_pair[0])
    return reference(model, tokenizer()(PROMPT)["input_ids"], PARAMS.max_tokens)


@contextmanager
def linked(name="far", known=b"a secret", known_there=b"a secret", seconds=60.0):
    """Both ends of a link between an engine and a worker, here in one process."""
    meeting = hosts.Meeting("127.0.0.1:0")
    meeting._secret = known
    there, ends = [], []

    def come():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hosts, "secret", lambda: known_there)
            with suppress(LinkError):
                there.append(hosts.visit(meeting.address, name))

    thread = threading.Thread(target=come)
    thread.start()
    try:
        ends.append(meeting.await_draft("far", seconds))
        thread.join()
        ends += there
        yield ends
    finally:
        for end in ends:
            end.close()
        meeting.close()
        thread.join(20)


def test_messages_of_any_size_cross_in_order_and_are_counted(monkeypatch):
    """Also more of them than either side has room for: nobody reads meanwhile."""
    monkeypatch.setattr("ssd.engine.gloo.PULSE_SECONDS", 0.05)
    with linked() as (near, far):
        around = ROOM - len(MESSAGES.encode(Failed("")))
        sent = [Failed("x" * size) for size in (0, 1, *range(around - 2, around + 3), 5000, 300_000, 2, 3, 4, 5)]
        for message in sent:
            near.send(message)
            far.send(message)
        assert [far.receive(5) for _ in sent] == sent
        assert near.peek() == sent[0]
        assert [near.receive(5) for _ in sent] == sent
        assert near.peek() is None
        assert near.traffic.messages == 2 * len(sent)
        assert near.traffic == far.traffic
        assert near.traffic.size > 2 * 300_000


def patiently(peek):
    """Peek until something is there, a minute at most."""
    end = time.monotonic() + 60
    while peek() is None and time.monotonic() < end:
        time.sleep(0.01)


def test_an_idle_link_stays_and_says_nothing(monkeypatch):
    monkeypatch.setattr("ssd.engine.gloo.PULSE_SECONDS", 0.05)
    monkeypatch.setattr("ssd.engine.gloo.SILENCE_SECONDS", 2.0)
    with linked() as (near, far):
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            assert far.peek() is None
            time.sleep(0.01)
        far.send(Ready())
        assert near.receive() == Ready()


def test_a_peer_that_falls_silent_is_a_link_error_for_who_waits_and_for_who_peeks(monkeypatch):
    monkeypatch.setattr("ssd.engine.gloo.PULSE_SECONDS", 1e9)
    monkeypatch.setattr("ssd.engine.gloo.SILENCE_SECONDS", 0.3)
    with linked() as (near, far):
        begin = time.monotonic()
        with pytest.raises(LinkError, match=r"no message within 0\.3 s"):
            near.receive()
        assert 0.2 < time.monotonic() - begin < 8
        with pytest.raises(LinkError):
            patiently(far.peek)


def test_a_deadline_is_kept_and_ends_the_link():
    with linked() as (near, far):
        begin = time.monotonic()
        with pytest.raises(LinkError, match=r"no message within 0\.2 s"):
            near.receive(0.2)
        assert 0.1 < time.monotonic() - begin < 8
        with pytest.raises(LinkError, match="the peer is gone"):
            far.receive(5)
        with pytest.raises(LinkError):
            far.send(Ping())


@pytest.mark.parametrize("side", [0, 1])
def test_a_closed_end_is_a_link_error_at_the_other_at_once(side):
    with linked() as ends:
        ends[side].close()
        begin = time.monotonic()
        with pytest.raises(LinkError, match="the peer is gone"):
            ends[1 - side].receive(60)
        assert time.monotonic() - begin < 30
        with pytest.raises(LinkError, match="closed"):
            ends[side].receive(1)


def test_who_does_not_know_the_secret_is_not_served():
    with (
        pytest.raises(LinkError, match=r"turned away: the other does not know the secret: SSD_SECRET must be the same"),
        linked(known_there=b"another", seconds=1.0),
    ):
        pass


class Mirror:
    """Says what it hears."""

    def __init__(self):
        self.heard, self.closed = deque(), False
        self.send, self.receive = self.heard.append, lambda _: self.heard.popleft()

    def close(self):
        self.closed = True


def test_who_only_returns_what_it_hears_has_proved_nothing():
    mirror = Mirror()
    with pytest.raises(LinkError, match="does not know the secret"):
        hosts.prove(mirror, b"a secret", "engine", "draft")
    assert mirror.closed


@pytest.fixture
def meeting():
    found = hosts.Meeting("127.0.0.1:0")
    yield found
    found.close()


def test_who_came_last_is_called_first_and_nobody_twice(meeting):
    meeting._store.add("ssd/far/arrivals", 3)
    assert [meeting._next("far") for _ in range(4)] == [3, 2, 1, None]
    assert meeting._next("near") is None


def test_a_worker_that_is_gone_when_it_is_called_is_told_of(meeting, monkeypatch):
    monkeypatch.setattr(hosts, "CALL_SECONDS", 0.1)
    meeting._store.add("ssd/far/arrivals", 1)
    with pytest.raises(LinkError, match="turned away: it has gone again"):
        meeting.await_draft("far", 0.3)


def test_a_meeting_that_is_closed_waits_for_nobody(meeting):
    meeting.close()
    with pytest.raises(LinkError, match="the engine was closed"):
        meeting.await_draft("far", 60)


def test_a_worker_that_goes_before_it_is_booted_is_a_link_error_and_its_link_is_closed():
    done = []

    def gone(_):
        raise LinkError("gone")

    link = SimpleNamespace(send=gone, close=lambda: done.append("closed"))
    with pytest.raises(LinkError, match="gone"):
        hosts.await_draft(SimpleNamespace(await_draft=lambda *_: link), "far", None, 1.0)
    assert done == ["closed"]


def test_frames_out_of_turn_and_messages_too_long_are_link_errors(monkeypatch):
    with linked() as (near, far):
        far._transport._sent += 1
        far.send(Ready())
        with pytest.raises(LinkError, match=r"the \d+th, came as the \d+th"):
            near.receive(5)
    with linked() as (near, far):
        monkeypatch.setattr("ssd.engine.gloo.LONGEST", 1000)
        far.send(Failed("x" * 1001))
        with pytest.raises(LinkError, match=r"a message of \d+ bytes"):
            near.receive(5)


def test_a_peer_that_stops_in_the_midst_of_a_message_is_given_up_when_told():
    with linked() as (near, far):
        near.give_up_after(0.3)
        frame = gloo._Frame()
        far._transport._sent += 1
        frame.fill(b"x" * (2 * ROOM), far._transport._sent)
        far._transport._start(frame.tensor, gloo.FRAMES)
        begin = time.monotonic()
        with pytest.raises(LinkError, match=r"no message within 0\.3 s"):
            near.receive(60)
        assert time.monotonic() - begin < 30


def test_a_draft_of_another_name_is_not_taken_and_the_error_says_what_to_start():
    told = r"no draft came from 'far' to 127\.0\.0\.1:\d+ within 1 s: start `ssd draft --connect .* --name far`"
    with pytest.raises(LinkError, match=told), linked(name="near", seconds=1.0):
        pass


def test_without_a_secret_there_is_no_meeting(monkeypatch):
    monkeypatch.delenv("SSD_SECRET")
    with pytest.raises(ValueError, match="SSD_SECRET is not set: give the engine and the drafts of other hosts the same text"):
        secret()


@pytest.mark.parametrize("text", ["", "here", "here:", ":1", "[]:1", "here:x", "here:65536", "here:-1"])
def test_an_address_that_is_none_is_refused_by_name(text):
    with pytest.raises(ValueError, match=r"listen=.*: give HOST:PORT"):
        Address.parse("listen", text)


def test_an_address_is_read_and_every_address_is_none():
    assert str(Address.parse("listen", "[fe80::1]:29400")) == "[fe80::1]:29400"
    assert Address.parse("listen", "gpu1:0") == Address("gpu1", 0)
    assert Address.parse("listen", "gpu1:65535").port == 65535
    for every in ("0.0.0.0", "[::]", "*"):
        with pytest.raises(ValueError, match="every address at once"):
            Address.parse("listen", f"{every}:29400")


def test_our_own_address_is_the_one_that_faces_the_other():
    assert Address("localhost", 29400).own() in ("127.0.0.1", "::1")
    with pytest.raises(LinkError, match=r"there is no way to no\.such\.host\.invalid:1"):
        Address("no.such.host.invalid", 1).own()


def test_torchrun_says_where_its_store_is_what_this_host_is_called_and_who_we_are(monkeypatch):
    for name in ("RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert (under_torchrun(), rank(), this_host()) == (None, 0, socket.gethostname())
    # Whoever has a rank of somebody else's is not torchrun's.
    monkeypatch.setenv("RANK", "3")
    assert (under_torchrun(), rank()) == (None, 0)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29400")
    monkeypatch.setenv("GROUP_RANK", "1")
    assert (under_torchrun(), rank(), this_host()) == (Address("10.0.0.1", 29400), 3, "node1")


def test_where_this_machine_cannot_listen_is_refused():
    with pytest.raises(ValueError, match=r"listen=198\.18\.255\.250:1: this machine cannot listen there"):
        hosts.Meeting("198.18.255.250:1")


@pytest.fixture
def unloaded(monkeypatch):
    """Fail where a model is loaded."""
    monkeypatch.setattr("ssd.engine.engine.load", lambda *_: pytest.fail("weights were loaded"))
    monkeypatch.setattr("ssd.engine.engine.spawn", lambda *_: pytest.fail("a process was started"))


def test_mistakes_are_named_before_anything_is_loaded(plan_for, unloaded):
    far = plan_for().with_draft_on("far")
    with pytest.raises(ValueError, match=r"placement.draft is on another host: give listen='HOST:PORT'"):
        ssd.Engine.from_plan(far)
    with pytest.raises(ValueError, match="listen='here': give HOST:PORT"):
        ssd.Engine.from_plan(far, listen="here")
    with pytest.raises(ValueError, match=r"listen='127.0.0.1:0': the plan has no draft on another host that could come there"):
        ssd.Engine.from_plan(plan_for(), listen="127.0.0.1:0")


@pytest.mark.parametrize("local", [0, 1])
def test_of_torchruns_processes_on_the_drafts_host_the_first_serves_and_the_others_leave(plan_for, unloaded, monkeypatch, local):
    for name, value in {"RANK": 2 + local, "LOCAL_RANK": local, "GROUP_RANK": 1, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    served = []
    monkeypatch.setattr("ssd.engine.draft_host.serve_engines", lambda *given, **more: served.append((*given, more)))
    with pytest.raises(SystemExit) as left:
        ssd.Engine.from_plan(plan_for().with_draft_on("node1"))
    assert left.value.code == 0
    assert served == [(Address("10.0.0.1", 1), "node1", {"once": True})][local:]
    with pytest.raises(ValueError, match="there is nothing to do for torchrun's process"):
        ssd.Engine.from_plan(plan_for().with_draft_on("node2"))


def test_devices_of_another_host_are_planned_for_and_the_target_stays_here(plan_for):
    far = plan_for().with_draft_on("gpu-box.lan")
    assert far.placement.draft == tuple(f"gpu-box.lan/{name}" for name in plan_for().placement.draft)
    assert Plan.model_validate_json(far.model_dump_json()) == far
    assert far.with_draft_on("other").placement.draft[0].startswith("other/cpu:")
    with pytest.raises(ValueError, match="the target runs on the host where the engine is started"):
        Placement(target=("node1/cpu:0",))
    with pytest.raises(ValueError, match="no draft to be moved"):
        Plan(mode="ar", placement=Placement(target=CORES[:1]), hardware=far.hardware, models=Models()).with_draft_on("x")
    for wrong in ("/cpu:0", "a/b/cpu:0", "a b/cpu:0"):
        with pytest.raises(ValueError, match="id"):
            Device(id=wrong, name="x", memory_bytes=1, memory_bandwidth=1, flops=1)


@contextmanager
def worker(host, engine_at: Address, log: Path, *more: str):
    """A draft on another host, as its user starts it."""
    words = ("-m", "ssd.cli", "draft", "--connect", str(engine_at), "--name", "far", *more)
    process = host.start(*words, log=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def free_port(here: str) -> int:
    with socket.create_server((here, 0)) as probe:
        return probe.getsockname()[1]


@contextmanager
def two_hosts(plan, tmp_path, **more):
    """An engine here, its draft on another host."""
    with another_host() as host:
        address = Address(host.here, free_port(host.here))
        with (
            worker(host, address, tmp_path / "log"),
            ssd.Engine.from_plan(plan.with_draft_on("far"), listen=str(address), **more) as engine,
        ):
            yield host, engine


def tokens_of(engine) -> list[int]:
    return list(engine.generate(PROMPT, PARAMS)[0].token_ids)


def back(engine, expected) -> bool:
    """Whether the draft drafts again, for a request that is decoded right in any case."""
    assert tokens_of(engine) == expected
    return engine.health().draft == "ok"


@elsewhere
@two_cores
def test_all_modes_give_the_same_tokens_with_the_draft_on_another_host(plan_for, expected, tmp_path):
    with two_hosts(plan_for(), tmp_path) as (_, engine):
        for configuration in (engine.plan, Configuration(mode="sd", num_speculative_tokens=2, placement=engine.plan.placement)):
            engine.configure(configuration)
            assert tokens_of(engine) == expected
        assert engine.health() == Health("ok")
        done = engine.metrics()
        assert 0 < done.link_seconds < 0.05
        # Outcomes and drafts of every round, and two messages a request.
        assert done.num_rounds <= done.link_messages / 2 <= done.num_rounds + 8
        assert 50 < done.link_bytes / done.num_rounds < 1000
        spans = engine.timeline().spans
        drafts = [span for span in spans if span.device == "draft"]
        first, last = (min(s.start for s in spans if s.device == "target"), max(s.end for s in spans if s.device == "target"))
        assert drafts
        assert all(first - 0.1 < span.start < span.end < last + 0.5 for span in drafts)
        engine.configure(plan_for().with_draft_on("far"))
        patient(engine)
        before = engine.metrics().num_cache_hits
        assert tokens_of(engine) == expected
        assert engine.metrics().num_cache_hits > before


@elsewhere
@two_cores
@pytest.mark.slow
def test_a_draft_killed_on_another_host_costs_no_request_and_comes_back_by_itself(plan_for, expected, tmp_path):
    with two_hosts(plan_for(), tmp_path) as (host, engine):
        chunks = engine.stream(PROMPT, PARAMS)
        tokens = [*next(chunks).token_ids, *next(chunks).token_ids]
        for pid in workers_of(host):
            os.kill(pid, signal.SIGKILL)
        for chunk in chunks:
            tokens += chunk.token_ids
        assert tokens == expected
        assert wait_for(lambda: back(engine, expected) and engine.health().restarts == 1, 60), (tmp_path / "log").read_text()
        patient(engine)
        hits = engine.metrics().num_cache_hits
        assert tokens_of(engine) == expected
        assert engine.metrics().num_cache_hits > hits


@elsewhere
@two_cores
@pytest.mark.slow
def test_a_pulled_cable_costs_one_deadline_and_no_request_and_the_draft_comes_back_with_it(plan_for, expected, tmp_path):
    with two_hosts(plan_for(), tmp_path, deadline=2.0) as (host, engine):
        assert tokens_of(engine) == expected
        loads = (tmp_path / "log").read_text().count("serving the engine")
        assert loads == 1
        host.pull()
        begin = time.monotonic()
        assert tokens_of(engine) == expected
        assert time.monotonic() - begin < 6
        assert engine.health().draft == "lost"
        assert "no message within 2 s" in engine.health().reason
        host.plug()
        assert wait_for(lambda: back(engine, expected), 60), (tmp_path / "log").read_text()
        assert engine.health().restarts == 1
        # It took note of the silence, and did not die of it.
        assert "another is started" not in (tmp_path / "log").read_text()


@elsewhere
@two_cores
@pytest.mark.slow
def test_one_worker_serves_one_engine_after_another(plan_for, expected, tmp_path):
    with another_host() as host:
        address = Address(host.here, free_port(host.here))
        with worker(host, address, tmp_path / "log"):
            for _ in range(2):
                with ssd.Engine.from_plan(plan_for().with_draft_on("far"), listen=str(address)) as engine:
                    patient(engine)
                    assert tokens_of(engine) == expected
                    assert engine.metrics().num_cache_hits > 0
        assert "it said farewell" in (tmp_path / "log").read_text()


@elsewhere
@two_cores
@pytest.mark.slow
def test_a_draft_that_cannot_load_there_is_an_error_with_its_reason(plan_for, tmp_path):
    plan = plan_for().with_draft_on("far")
    there = "far/cpu:4711"
    devices = [d.model_copy(update={"id": there}) if d.id.startswith("far/") else d for d in plan.hardware.devices]
    wrong = plan.model_copy(
        update={
            "hardware": plan.hardware.model_copy(update={"devices": tuple(devices)}),
            "placement": Placement(target=plan.placement.target, draft=(there,)),
        }
    )
    with another_host() as host:
        address = Address(host.here, free_port(host.here))
        with worker(host, address, tmp_path / "log"), pytest.raises(RuntimeError, match=r"far/cpu:4711.*this process may not run there"):
            ssd.Engine.from_plan(wrong, listen=str(address))


@elsewhere
@two_cores
@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "bench"])
def test_the_command_line_has_its_draft_on_another_host(plan_for, expected, tmp_path, capsys, command):
    path = tmp_path / "plan.json"
    plan_for().save(path)
    words = {"generate": [PROMPT, "--json"], "bench": ["--num-prompts", "1", "--prompt-tokens", "16", "--warmup", "0", "--json"]}[command]
    with another_host() as host:
        address = Address(host.here, free_port(host.here))
        with worker(host, address, tmp_path / "log"):
            there = ["--draft-host", "far", "--listen", str(address)]
            assert run([command, *words, "--plan", str(path), "--output-tokens", "20", *there]) == 0
    told = json.loads(capsys.readouterr().out)
    if command == "generate":
        assert told["output"]["token_ids"] == expected[:20]
        assert told["draft"] == "ok"
        assert told["output"]["metrics"]["num_cache_hits"] > 0
        return
    rows = {row["configuration"]["mode"]: row for row in told["cells"][0]["rows"]}
    assert set(rows) == {"ssd", "ar", "sd"}
    assert not told["cells"][0]["skipped"]
    assert all(rows[mode]["configuration"]["placement"]["draft"][0].startswith("far/") for mode in ("ssd", "sd"))
    assert not any(row["differences"] for row in rows.values())
    assert rows["ssd"]["hit_rate"] > 0


@pytest.mark.parametrize("command", [["generate", "a"], ["bench"]])
def test_where_to_listen_goes_with_a_host_to_listen_for(capsys, command):
    assert run([*command, "--listen", "127.0.0.1:0"]) == 2
    assert "--listen: is where the draft of another host comes to: name it with --draft-host" in capsys.readouterr().err


def workers_of(host) -> list[int]:
    """The processes that serve over there, not those that keep them."""
    pids = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True).stdout.split()
    return [int(pid) for pid in pids if b"ssd.engine.draft_host" in Path(f"/proc/{pid}/cmdline").read_bytes()]


SCRIPT = """
import sys, ssd
plan = ssd.Plan.load(sys.argv[1])
with ssd.Engine.from_plan(plan) as engine:
    output = engine.generate(sys.argv[2], ssd.SamplingParams(max_tokens=60, ignore_eos=True))[0]
    print("tokens", *output.token_ids)
    print("hits", engine.metrics().num_cache_hits, engine.health().draft)
"""


@elsewhere
@two_cores
@pytest.mark.slow
def test_the_same_script_on_two_hosts_of_torchrun(plan_for, expected, tmp_path):
    """Each host runs it: on the first it is the engine, on the second the draft."""
    plan_for().with_draft_on("node1").save(tmp_path / "plan.json")
    (tmp_path / "script.py").write_text(SCRIPT)
    with another_host() as host:
        where = ("--master-addr", host.here, "--master-port", str(free_port(host.here)))
        shape = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *where)
        run = (str(tmp_path / "script.py"), str(tmp_path / "plan.json"), PROMPT)
        there = host.start(*shape, "--node-rank", "1", *run, log=tmp_path / "there")
        env = {**os.environ, "PYTHONPATH": str(Path(ssd.__file__).parents[1])}
        command = [sys.executable, *shape, "--node-rank", "0", *run]
        try:
            here = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
            assert there.wait(30) == 0, (tmp_path / "there").read_text()
        finally:
            there.kill()
    told = {line.split()[0]: line.split()[1:] for line in here.stdout.splitlines() if line}
    assert [int(token) for token in told["tokens"]] == expected, here.stderr[-2000:]
    assert int(told["hits"][0]) > 0
    assert told["hits"][1] == "ok"
