"""Both sides of the engine in one process, each drafter in a thread: the real drafters, links and scheduler without a process's start."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from time import monotonic, sleep
from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ssd.engine.draft import Drafter
from ssd.engine.draft_process import run
from ssd.engine.group import DraftGroup
from ssd.engine.kv import ATTENTION
from ssd.engine.link import Link, LinkError, Ready, Setup, Shutdown
from ssd.engine.peer import DraftPeer
from ssd.engine.scheduler import Request, Scheduler
from ssd.engine.target import Target, slots_needed
from ssd.engine.text import Text
from ssd.engine.transport import LocalTransport
from ssd.models import LoadedModel
from ssd.specs import Placement, SamplingParams
from tests.tiny import EXTRA, GROUPED, tokenizer, vary

NUMBERS = itertools.count()
NOWHERE = Placement(target=("meta:0",), draft=("meta:0",))
NEAR_TIE = 1e-3
# Of a drafter in a thread, there is none to end.
PROCESS = SimpleNamespace(pid=None, kill=lambda: None, wait=lambda timeout=None: None)


def tiny_model(model_type: str, seed: int) -> PreTrainedModel:
    """A random decoder whose greedy text varies."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **EXTRA.get(model_type, GROUPED))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    vary(model)
    return model


def noisy(model: PreTrainedModel, noise: float, seed: int) -> PreTrainedModel:
    """A copy of `model` with noise on its weights, to be its draft."""
    torch.manual_seed(seed)
    # A configuration of its own: the attention it names is switched to and fro while the other model is at work.
    draft = type(model)(deepcopy(model.config)).eval()
    draft.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() > 1:
                weight.add_(noise * weight.std() * torch.randn_like(weight))
    return draft


def loaded(model: PreTrainedModel) -> LoadedModel:
    """Wrap a model for the engine, on key-value slots."""
    model.set_attn_implementation(ATTENTION)
    config = model.config
    groups = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    return LoadedModel(model, torch.device("cpu"), torch.float32, config.vocab_size, config.max_position_embeddings, groups)


def setup(K: int, fan_out_hit: tuple[int, ...] = (), fan_out_miss: tuple[int, ...] = (), backup: str = "jit", **more) -> Setup:
    """How to draft; without fan-outs, as plain SD."""
    return Setup(K, fan_out_hit, fan_out_miss or fan_out_hit, backup, NOWHERE, **more)


class Pair:
    """A target here and its drafters, each in a thread, at the far ends of links."""

    def __init__(
        self, target: LoadedModel, peer: DraftPeer | DraftGroup, max_model_len: int, fars: list[Watched], drafters: list[Drafter]
    ) -> None:
        self.target, self.peer, self.max_model_len, self.fars, self.drafters = target, peer, max_model_len, fars, drafters
        self.drafter = drafters[0]
        self.spans: deque = deque()

    def scheduler(self, how, patient=False) -> Scheduler:
        """A scheduler that decodes as `how` says (None: AR); a patient target lets the draft finish its cache before it verifies."""
        if how is not None:
            count = len(self.drafters)
            place = NOWHERE if count == 1 else Placement(target=("meta:0",), draft=("meta:0",) * count, draft_workers=count)
            assert self.peer.configure(replace(how, placement=place)), self.peer.lost
        K = how.num_speculative_tokens if how is not None else 0
        target = Target(self.target, len(self.drafter.rows), slots_needed(self.max_model_len, K))
        if patient:
            play = target.round
            target.round = lambda *rest: self.drafter_rests() and play(*rest)
        return Scheduler(target, self.peer if how is not None else None, self.spans, "jit" if how is None else how.backup)

    def drafter_rests(self) -> bool:
        """Wait until the drafters that are not lost have taken in all that they were told and have nothing left to do."""
        deadline = monotonic() + 600
        while not self._all_rest():
            # One that never rests is a fault; a machine that stands still for a while is none.
            assert monotonic() < deadline, "a drafter does not come to rest"
            sleep(2e-4)
        return True

    def _all_rest(self) -> bool:
        pairs = zip(self.fars, self.peer.peers, strict=True)
        return all(peer.lost is not None or (far.idle and far.received == peer.link.sent) for far, peer in pairs)

    def request(self, prompt, max_tokens, ends=frozenset(), **params) -> Request:
        """A request with further sampling parameters, settled."""
        settled = SamplingParams(max_tokens=max_tokens, **params)
        return Request(f"r{next(NUMBERS)}", tuple(prompt), settled, ends, self.max_model_len - len(prompt), Text(tokenizer()))

    def decode(self, how, prompt, max_tokens, ends=frozenset(), stop_after=None, patient=False, **params):
        """Decode one prompt alone; return the finished request. stop_after cancels it after so many rounds."""
        scheduler, request = self.scheduler(how, patient), self.request(prompt, max_tokens, ends, **params)
        scheduler.add(request)
        number = 0
        while scheduler.busy:
            if scheduler.step():
                if number == stop_after:
                    scheduler.cancel(request)
                number += 1
        return request

    def decode_all(self, how, requests, joins=(), leaves=(), patient=False):
        """Decode requests together: request i joins before step joins[i] (0 if there is none), and is cancelled before step leaves[i]."""
        scheduler = self.scheduler(how, patient)
        joins = dict(enumerate(joins))
        due = sorted(range(len(requests)), key=lambda i: joins.get(i, 0))
        step = 0
        while due or scheduler.busy:
            while due and (joins.get(due[0], 0) <= step or not scheduler.busy):
                scheduler.add(requests[due.pop(0)])
            for i, last in enumerate(leaves):
                if last == step:
                    scheduler.cancel(requests[i])
            scheduler.step()
            step += 1
        return requests


def joined(near: type[Link] = Link, far: type[Link] = Link) -> tuple[Link, Link]:
    """Both ends of a link."""
    ours, theirs = Pipe()
    return near(LocalTransport(ours)), far(LocalTransport(theirs))


class Counted(Link):
    """Counts what it sends."""

    sent = 0

    def send(self, message):
        self.sent += 1
        super().send(message)


class Watched(Link):
    """Counts what it receives, and says when its owner has nothing left to do but wait for a message."""

    received, idle = 0, False

    def receive(self, deadline=None):
        fresh = self._next is None
        self.idle = fresh and not self._transport.ready()
        message = super().receive(deadline)
        # One that was peeked at has been counted.
        self.received, self.idle = self.received + fresh, False
        return message


@contextmanager
def pair(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    max_model_len: int,
    deadline: float = 20.0,
    rows: int = 1,
    workers: int = 1,
    returns: bool = False,
):
    """Run so many drafters, each in a thread, and yield the Pair that talks to them. returns: whether one that is lost is started again."""
    fars, drafters, threads = [None] * workers, [None] * workers, []

    def start(index: int) -> Link:
        link, fars[index] = joined(Counted, Watched)
        drafters[index] = Drafter(loaded(draft), fars[index], rows, max_model_len, target.config.vocab_size)
        threads.append(threading.Thread(target=_serve, args=(drafters[index], fars[index]), daemon=True))
        threads[-1].start()
        return link

    def respawn(index: int):
        link = start(index)
        fars[index].send(Ready())
        return PROCESS, link

    peers = [
        DraftPeer(PROCESS, start(index), deadline, target.config.vocab_size, partial(respawn, index) if returns else None)
        for index in range(workers)
    ]
    try:
        yield Pair(loaded(target), peers[0] if workers == 1 else DraftGroup(peers), max_model_len, fars, drafters)
    finally:
        for peer in peers:
            peer.close(Shutdown())
        for thread in threads:
            thread.join(20)


def _serve(drafter: Drafter, far: Link) -> None:
    with suppress(LinkError):
        run(drafter, far)


@contextmanager
def recorded(peer):
    """The drafts that come from `peer` in the meantime."""
    sent, receive = [], peer.drafts

    def drafts():
        found = receive()
        sent.extend(found.values())
        return found

    peer.drafts = drafts
    yield sent
    peer.drafts = receive


def reference(model: PreTrainedModel, prompt: list[int], count: int, ends: frozenset[int] = frozenset()) -> list[int]:
    """What transformers' own greedy generate gives."""
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([prompt])
    kwargs = {"eos_token_id": sorted(ends)} if ends else {"eos_token_id": None}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0, **kwargs)
    model.set_attn_implementation(ATTENTION)
    return out[0, len(prompt) :].tolist()


def differs(model: PreTrainedModel, prompt: list[int], ours: list[int], theirs: list[int]) -> str | None:
    """Say where two greedy outputs differ, unless the two best logits there are nearly equal."""
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            model.set_attn_implementation("sdpa")
            with torch.no_grad():
                best = model(torch.tensor([prompt + theirs[:place]])).logits[0, -1].topk(2).values
            model.set_attn_implementation(ATTENTION)
            gap = float(best[0] - best[1])
            return None if gap < NEAR_TIE else f"token {place}: {a} against {b}, gap {gap:.4f}"
    return None if len(ours) == len(theirs) else f"{len(ours)} tokens against {len(theirs)}"
