"""Fixed shapes: filling a forward up changes no token, and what is compiled or captured are a few shapes. Without a CUDA device no graph
is captured here: the functions that would be are played on the same static inputs, or compiled without a break."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_map

from ssd.engine import graphs as module
from ssd.engine.forward import SlotModel, chain
from ssd.engine.graphs import Graphs, as_it_is, bucket, sampling_graphs
from ssd.engine.kv import Aborted, Trunk
from ssd.engine.queries import Fed
from tests.engine.inprocess import differs, loaded, noisy, pair, reference, setup, tiny_model
from tests.tiny import CONTEXT

CPU = torch.device("cpu")
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2", "phi3", "mixtral")


def held(play):
    """Play a function with outputs that stay where they are, too, as a graph's do: the next play writes over them."""
    outputs = play()

    def replay():
        tree_map(lambda old, new: old.copy_(new) if isinstance(old, torch.Tensor) else old, outputs, play())
        return outputs

    return replay


@pytest.fixture
def fixed(monkeypatch):
    """Let the CPU be a device with graphs; yield all sets of them that are made."""
    made = []

    class Counted(Graphs):
        def __init__(self, device, make):
            super().__init__(device, make)
            made.append(self)

    monkeypatch.setattr(module, "has_graphs", lambda _: True)
    monkeypatch.setattr(module, "Capture", lambda _: held)
    monkeypatch.setattr(Graphs, "on", classmethod(lambda _, device: Counted(device, held)))
    sampling_graphs.cache_clear()
    yield made
    sampling_graphs.cache_clear()


@given(
    counts=st.dictionaries(st.integers(0, 6), st.integers(1, 40), min_size=1),
    wanted=st.integers(0, 40),
    context=st.integers(0, 900),
)
def test_a_bucket_holds_what_is_fed_and_is_one_of_few(counts, wanted, context):
    slots = 1000
    fed = Fed.of({row: queries(count, min(wanted, count), context, slots) for row, count in counts.items()})
    shape = bucket(fed, 7, slots)
    assert shape.rows > max(counts)
    assert shape.queries >= sum(counts.values())
    assert shape.width >= max(counts.values())
    assert shape.wanted >= max(1, sum(min(wanted, count) for count in counts.values()))
    assert shape.slots >= 1 + context + max(counts.values())
    assert shape.rows in (1, 2, 4, 7)
    assert shape.slots in (256, 512, 1000)
    assert {shape.queries, shape.width, shape.wanted} <= set(module.QUERIES)


def queries(count, wanted, context, slots):
    trunk = Trunk(slots)
    trunk.add(trunk.slots.take(context))
    return chain(trunk, range(count), wanted, CPU)


def test_what_is_beyond_the_largest_sizes_is_played_as_it_is(fixed):
    model = SlotModel(loaded(tiny_model("llama", 0)), 1, 400)
    tokens = [place % 250 for place in range(300)]
    trunk = Trunk(model.slots)
    assert model.forward({0: chain(trunk, tokens[:256], 1, CPU)})[0].shape[0] == 1
    assert [len(graphs) for graphs in fixed] == [1]
    assert bucket(Fed.of({0: chain(Trunk(model.slots), tokens, 1, CPU)}), 1, model.slots) is None
    assert model.forward({0: chain(Trunk(model.slots), tokens, 1, CPU)})[0].shape[0] == 1
    assert [len(graphs) for graphs in fixed] == [1]


def test_the_logits_of_a_forward_outlast_the_next_of_its_shape(fixed):
    model = SlotModel(loaded(tiny_model("llama", 0)), 1, 64)
    first = model.forward({0: chain(Trunk(model.slots), [1, 2], 1, CPU)})[0]
    before = first.clone()
    second = model.forward({0: chain(Trunk(model.slots), [3, 4], 1, CPU)})[0]
    assert torch.equal(first, before)
    assert not torch.equal(first, second)
    assert [len(graphs) for graphs in fixed] == [1]


def test_no_more_graphs_are_kept_than_allowed(monkeypatch):
    monkeypatch.setattr(module, "MOST_GRAPHS", 2)
    graphs = Graphs(CPU, as_it_is)
    assert [graphs.play(torch.sum, torch.ones(size)).item() for size in (1, 2, 3, 3, 1)] == [1, 2, 3, 3, 1]
    assert len(graphs) == 2


def test_a_graph_is_played_on_its_own_inputs_and_known_by_sizes_and_all_else():
    made = []

    def make(play):
        made.append(play)
        return play

    graphs = Graphs(CPU, make)

    def scaled(table, factor):
        return table * factor

    for factor in (2, 3):
        for fill in (1.0, 5.0):
            assert graphs.play(scaled, torch.full((2,), fill), factor).tolist() == [fill * factor] * 2
    assert graphs.play(scaled, torch.ones(2, dtype=torch.long), 2).tolist() == [2, 2]
    assert len(made) == len(graphs) == 3


# The others say the same, a little later.
@pytest.mark.parametrize("kind", [kind if kind == "llama" else pytest.param(kind, marks=pytest.mark.slow) for kind in ARCHITECTURES])
def test_filling_up_changes_no_greedy_token(fixed, kind):
    model = tiny_model(kind, 3)
    prompts = [[1, 2, 3], list(range(5, 60)), [9]]
    expected = [reference(model, prompt, 14) for prompt in prompts]
    for how in (None, setup(3), setup(3, (1, 1, 1, 2))):
        with pair(model, noisy(model, 0.1, 4), CONTEXT, rows=4) as both:
            requests = both.decode_all(how, [both.request(prompt, 14) for prompt in prompts], joins=(0, 1, 3))
        for prompt, request, theirs in zip(prompts, requests, expected, strict=True):
            assert differs(model, prompt, request.output, theirs) is None
    assert fixed
    assert all(0 < len(graphs) < 30 for graphs in fixed if graphs is not sampling_graphs(CPU))


@pytest.mark.parametrize(
    "params", [{}, {"verification": "rejection"}, {"top_k": 5, "min_p": 0.01}, {"logit_bias": {7: 2.0}, "min_tokens": 3}]
)
def test_laws_and_draws_are_the_same_from_graphs(fixed, monkeypatch, params):
    model, prompt = tiny_model("llama", 5), [4, 5, 6]
    draft = noisy(model, 0.2, 6)
    texts = []
    for graphs in (True, False):
        if not graphs:
            monkeypatch.setattr(Graphs, "on", classmethod(lambda *_: None))
            sampling_graphs.cache_clear()
        with pair(model, draft, CONTEXT) as both:
            request = both.decode(setup(2, (2, 1, 1), saguaro=(0.5, 0.5)), prompt, 20, patient=True, temperature=0.9, seed=11, **params)
        texts.append(request.output)
        assert not graphs or len(sampling_graphs(CPU)) > 0
    assert texts[0] == texts[1]


def test_a_forward_that_nobody_waits_for_is_not_begun(fixed):
    model = SlotModel(loaded(tiny_model("llama", 0)), 1, 64)
    with pytest.raises(Aborted):
        model.forward({0: chain(Trunk(model.slots), [1, 2], 1, CPU)}, lambda: True)


def test_what_is_compiled_are_the_buckets_and_nothing_in_a_forward_asks_the_host():
    """torch.compile breaks where a number is read back, and compiles anew where a size changes: neither happens."""
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    plain = loaded(tiny_model("llama", 7))
    exact, static = (SlotModel(plain, 3, 300) for _ in range(2))
    trunks = [[Trunk(exact.slots) for _ in range(3)] for _ in range(2)]

    def feed(counts):
        said = []
        for model, own in zip((exact, static), trunks, strict=True):
            fed = {row: chain(own[row], [(7 * row + place) % 250 for place in range(count)], 1, CPU) for row, count in counts.items()}
            said.append(model.forward(fed))
            for row, its in fed.items():
                own[row].add(its.slots)
        for row in counts:
            torch.testing.assert_close(said[0][row], said[1][row])

    # The buffers are there before anything is captured.
    static.forward({0: chain(Trunk(static.slots), [1], 1, CPU)})
    static.cache.graphs = Graphs(CPU, lambda play: torch.compile(play, fullgraph=True, dynamic=False, backend=backend))
    fills = [{0: 1}, {0: 3}, {0: 4}, {0: 2, 1: 1}, {0: 3, 1: 1}, {0: 1, 2: 5}, {0: 3}, {0: 1}, {1: 2, 2: 5}]
    shapes = set()
    for counts in fills:
        feed(counts)
        shapes |= {key[1][0] for key in static.cache.graphs._known}
    assert len(compiled) == len(shapes) == len(static.cache.graphs)
    assert len(shapes) < len(fills)
