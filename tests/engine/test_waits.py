"""What the host waits for in a round on an accelerator (here a made-up one): the accepted tokens; on the draft, what it sends and ranks."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from ssd.devices import upload
from tests.engine import inprocess
from tests.engine.far import DEVICE, Far, accelerator, module_there
from tests.engine.inprocess import noisy, pair, setup, tiny_model
from tests.tiny import CONTEXT

PROMPTS = [[4, 5, 6], [7, 8, 9, 10]]
WAYS = {
    "greedy": {},
    "coupled": {"temperature": 1.0, "seed": 3, "verification": "coupled"},
    "rejection": {"temperature": 1.0, "seed": 3, "verification": "rejection"},
    "all options": {
        "temperature": 0.9,
        "seed": 3,
        "verification": "rejection",
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "min_tokens": 4,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": {7: 2.0},
        "bad_words_token_ids": ((9, 9),),
        "stop_token_ids": (3,),
    },
}
HOW = {
    "sd": setup(3),
    "fan-outs": setup(3, (2, 1, 1, 2)),
    "budget": setup(3, budget=6),
    "anytime": setup(3, budget=6, building="anytime"),
    "ngram": setup(3, (1, 1, 1, 1), backup="ngram"),
}


@pytest.fixture
def noted(monkeypatch):
    """Both models on the device; what is noted."""
    plain = inprocess.loaded

    def there(model):
        found = plain(model)
        return replace(found, module=module_there(found.module), device=DEVICE)

    monkeypatch.setattr(inprocess, "loaded", there)
    with accelerator(monkeypatch) as notes:
        yield notes


def spent(notes, what, where, calls):
    """Let `where.what` also note how many waits each of its calls took in its thread."""
    plain = getattr(where, what)

    def act(*args, **kwargs):
        def own():
            return [told for name, told in notes.waits if name == threading.current_thread().name]

        before = len(own())
        found = plain(*args, **kwargs)
        calls.append(own()[before:])
        return found

    setattr(where, what, act)


def decoded(notes, how, **params):
    """Decode two requests together; return their texts and the waits of each call of the target's round and of the draft's."""
    model = tiny_model("llama", 5)
    draft = noisy(model, 0.1, 6)
    with pair(model, draft, CONTEXT, rows=2) as both:
        scheduler = both.scheduler(how)
        rounds, answers, works = [], [], []
        spent(notes, "round", scheduler.target, rounds)
        spent(notes, "answer", both.drafter, answers)
        spent(notes, "work", both.drafter, works)
        requests = [both.request(prompt, 20, **params) for prompt in PROMPTS]
        for request in requests:
            scheduler.add(request)
        while scheduler.busy:
            scheduler.step()
    assert both.peer.lost is None
    return [request.output for request in requests], rounds, answers, works


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", HOW)
def test_the_host_waits_in_a_round_for_what_it_must_know_and_for_nothing_else(noted, how, way):
    _, rounds, answers, works = decoded(noted, HOW[how], **WAYS[way])
    assert not noted.wrong, set(noted.wrong)
    assert noted.uploads
    assert answers
    # The accepted tokens of all rows together.
    assert all(len(waits) <= 1 for waits in rounds), rounds
    # The tokens of all rows together, and the laws of each row whose target reads them.
    laws = 2 if WAYS[way].get("verification") == "rejection" else 0
    assert all(len(waits) <= 1 + laws for waits in answers), answers
    # The candidates of each row, once; no step of a branch.
    assert all(len(waits) <= 2 for waits in works), works
    assert sum(map(len, works)) <= 2 * (len(answers) + 2)


@pytest.mark.parametrize("way", ["greedy", "coupled", "all options"])
def test_an_accelerator_that_is_made_up_says_what_the_cpu_says(noted, monkeypatch, way):
    params = {**WAYS[way], "verification": "coupled"}
    there = decoded(noted, HOW["fan-outs"], **params)[0]
    monkeypatch.undo()
    assert decoded(noted, HOW["fan-outs"], **params)[0] == there


def test_log_probabilities_come_with_one_wait_a_row(noted):
    _, rounds, _, _ = decoded(noted, HOW["sd"], logprobs=3)
    assert not noted.wrong, set(noted.wrong)
    assert max(map(len, rounds)) == 1 + len(PROMPTS)


def test_what_makes_the_host_wait_is_seen(noted):
    """Of the made-up device itself: nothing escapes it that a real one would wait for."""
    far = upload(np.arange(4), DEVICE)
    assert isinstance(far, Far)
    assert (noted.wrong, noted.waits, noted.uploads.total()) == ([], [], 1)
    acts = (far.tolist, far.cpu, far.sum().item, lambda: int(far[1]), lambda: bool(far.any()), lambda: far[far > 1], far.nonzero)
    for seen, act in enumerate(acts, 1):
        act()
        assert len(noted.waits) == seen
    for act in (
        lambda: far[[0, 1]],
        lambda: far[np.array([0, 1])],
        lambda: far[torch.tensor([0, 1])],
        lambda: far + torch.ones(4),
        lambda: torch.tensor([1], device=DEVICE),
        lambda: torch.ones(4).to(DEVICE),
        lambda: torch.ones(4).pin_memory().to(DEVICE),
    ):
        noted.wrong.clear()
        act()
        assert len(noted.wrong) == 1
