"""A decoder of the Llama family on a CPU, played layer by layer with few calls of machine code.

Of a small model's forward through transformers two thirds are not arithmetic but Python and small operators. Here a layer is eight calls
whose arguments are made once for each number of tokens: norm, projections of queries, keys and values in one product, rotary positions
with the write into slots, attention, output projection onto the residual, norm, gated projection, down projection onto it.
The numbers are those of fp32 on the checkpoint's bf16 weights, as `ssd.engine.linear` has them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ssd import native
from ssd.engine import decoder_kernel as kernels
from ssd.engine import linear_kernel
from ssd.engine.kv import Abort, Aborted
from ssd.engine.linear import fits_bf16, fp32_compute_from_bf16
from ssd.engine.queries import Fed

# Architectures whose layers are as above, and how their rotary positions may be made for the numbers of a token to hang on its place alone.
FAMILY = ("llama", "mistral", "qwen2", "qwen3")
ROTARY = ("default", "linear", "llama3", "yarn")
# Programs, one for each number of tokens and rows, that are kept; and for how many tokens more, at least, room is made.
MAX_PROGRAMS = 256
ROOM = 32
# Multiply-adds of attention below which waking a second thread costs more than it brings.
MIN_TEAM_WORK = 1 << 16
# From so many tokens on, threads share what is done for each of them.
MANY = 16


@dataclass(frozen=True, slots=True)
class Packed:
    """The weight of a product as its kernel reads it, `[out, in]`, with its bias, and the scales of int8 weights."""

    words: torch.Tensor
    bias: torch.Tensor
    scales: torch.Tensor | None = None

    @classmethod
    def rounded(cls, layers: Sequence[nn.Linear], lanes: int, *, gated: bool = False) -> Packed:
        """As `of`, with weights of any type rounded to a byte each."""
        parts = [(*linear_kernel.quantised(_weight(layer)), _bias(layer)) for layer in layers]
        numbers, scales, bias = (_in_turns(part, lanes) if gated else torch.cat(part) for part in zip(*parts, strict=True))
        return cls(linear_kernel.pack_bytes(numbers, lanes), bias, scales)

    @classmethod
    def of(cls, layers: Sequence[nn.Linear], lanes: int, *, gated: bool = False) -> Packed:
        """Pack the weights of layers one below the other; of a gated one's two, the rows in turns."""
        weights = [_weight(layer).detach().to(torch.bfloat16).contiguous() for layer in layers]
        biases = [_bias(layer) for layer in layers]
        inputs, block = weights[0].shape[1], 2 * lanes
        words = torch.empty(sum(map(len, weights)) // block, inputs, lanes, dtype=torch.int32)
        if gated:
            gate, up = (weight.view(-1, lanes, inputs) for weight in weights)
            linear_kernel.pack_halves(gate, up, words)
            return cls(words, _in_turns(biases, lanes))
        first = 0
        for weight in weights:
            halves = weight.view(-1, 2, lanes, inputs)
            linear_kernel.pack_halves(halves[:, 0], halves[:, 1], words[first : first + len(halves)])
            first += len(halves)
        return cls(words, torch.cat(biases))


def _in_turns(parts: Sequence[torch.Tensor], lanes: int) -> torch.Tensor:
    """`lanes` rows of each part in turn."""
    return torch.stack([part.view(-1, lanes, *part.shape[1:]) for part in parts], 1).flatten(0, 2)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights."""

    norm: torch.Tensor
    projection: Packed
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: Packed
    feed_norm: torch.Tensor
    gate: Packed
    down: Packed


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder's weights: an embedding, layers, a norm, a head and the rotary positions; and the sizes that its kernels need."""

    embedding: nn.Module
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: nn.Module
    rotary: nn.Module
    heads: int
    kv_heads: int
    size: int
    hidden: int
    intermediate: int
    eps: float
    scale: float
    vectors: native.Vectors

    @classmethod
    def of(cls, module: Any, *, int8: bool = False) -> Decoder | None:
        """Take the weights out of a transformers model on a CPU, which is then of no more use; None where it is not of the family.

        int8: keep matrices rounded to a byte a number, as a draft's may be.
        """
        vectors = native.host_vectors()
        if vectors is None or not _is_of_family(module, vectors, int8):
            return None
        config, attention = module.config, module.model.layers[0].self_attn
        size, scale = int(attention.head_dim), float(attention.scaling)
        del attention
        layers = []
        while len(module.model.layers):
            layers.append(_layer(module.model.layers[0], Packed.rounded if int8 else Packed.of, vectors.lanes))
            # Each is let go once it is packed: the weights are never there twice.
            for weight in module.model.layers[0].parameters():
                _page_out(weight)
            del module.model.layers[0]
        fp32_compute_from_bf16(module, int8=int8)
        return cls(
            embedding=module.model.embed_tokens,
            layers=tuple(layers),
            norm=module.model.norm.weight.detach().float(),
            head=module.get_output_embeddings(),
            rotary=module.model.rotary_emb,
            heads=int(config.num_attention_heads),
            kv_heads=int(config.num_key_value_heads),
            size=size,
            hidden=int(config.hidden_size),
            intermediate=int(config.intermediate_size),
            eps=float(config.rms_norm_eps),
            scale=scale,
            vectors=vectors,
        )


def _page_out(tensor: torch.Tensor) -> None:
    """Let the system forget the pages of a mapped file that a tensor lies in; should they be read again, they are read anew."""
    page, page_out = mmap.PAGESIZE, 21  # MADV_PAGEOUT, Linux 5.4 and later; elsewhere nothing happens
    begin = -(-tensor.data_ptr() // page) * page
    size = (tensor.data_ptr() + tensor.nbytes - begin) // page * page
    if sys.platform == "linux" and size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), page_out)


def _is_of_family(module: Any, vectors: native.Vectors, int8: bool) -> bool:
    config = module.config
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type not in FAMILY or rope.get("rope_type", "default") not in ROTARY:
        return False
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    whole = not any(width % (2 * vectors.lanes) for width in (size, config.hidden_size, config.intermediate_size))
    plain = config.hidden_act == "silu" and rope.get("partial_rotary_factor", 1.0) == 1.0
    linears = [layer for layer in module.model.layers.modules() if isinstance(layer, nn.Linear)]
    return whole and plain and all(layer.weight.is_cpu and (int8 or fits_bf16(_weight(layer))) for layer in linears)


def _weight(layer: nn.Linear) -> torch.Tensor:
    return layer.weight


def _bias(layer: nn.Linear) -> torch.Tensor:
    return torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach().float()


def _layer(layer: Any, pack: Callable[..., Packed], lanes: int) -> Layer:
    attention, feed = layer.self_attn, layer.mlp
    norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
    return Layer(
        norm=layer.input_layernorm.weight.detach().float(),
        projection=pack([attention.q_proj, attention.k_proj, attention.v_proj], lanes),
        head_norms=None if norms is None else (norms[0].weight.detach().float(), norms[1].weight.detach().float()),
        output=pack([attention.o_proj], lanes),
        feed_norm=layer.post_attention_layernorm.weight.detach().float(),
        gate=pack([feed.gate_proj, feed.up_proj], lanes, gated=True),
        down=pack([feed.down_proj], lanes),
    )


class Program(NamedTuple):
    """All steps of a forward in one call, and the same layer by layer, for whoever may give it up between two."""

    whole: native.Steps
    layers: list[native.Steps]


class SlotDecoder:
    """A decoder with the keys and values of `rows` sequences in slots, what lies between two calls of a forward, and its programs."""

    def __init__(self, decoder: Decoder, rows: int, slots: int) -> None:
        self.decoder, self.vectors, self.block = decoder, decoder.vectors, 2 * decoder.vectors.lanes
        self.slots = -(-slots // self.block) * self.block
        d = decoder
        shape = len(d.layers), rows, d.kv_heads
        self.keys = self._allocate(*shape, self.slots // self.block, d.size, self.block)
        self.values = self._allocate(*shape, d.size // self.block, self.slots, self.block)
        self._angles = self._positions()
        # Kernels are given addresses: what they read anew in each forward stays where it is.
        self._units = np.zeros((rows * d.kv_heads, len(kernels.UNIT_FIELDS)), dtype=np.int64)
        self._between: dict[str, torch.Tensor] = {}
        self._places = np.zeros((0, 4), dtype=np.int64)
        self._programs: dict[tuple[int, int, bool], Program] = {}
        self._layouts: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}

    def copy(self, source: int, from_slots: np.ndarray, row: int, to_slots: np.ndarray) -> None:
        """Copy keys and values from some slots of one row into some of another."""
        before, after, block = torch.from_numpy(from_slots), torch.from_numpy(to_slots), self.block
        self.keys[:, row, :, after // block, :, after % block] = self.keys[:, source, :, before // block, :, before % block]
        self.values[:, row, :, :, after] = self.values[:, source, :, :, before]

    def forward(self, fed: Fed, abort: Abort | None = None) -> torch.Tensor:
        """Feed the queries and return the logits that are wanted, `[wanted, vocabulary]`. Raises Aborted when `abort` says so."""
        count, threads = len(fed.slots), native.team_size()
        self._make_room(count, threads)
        self._lay_out(fed)
        self._between["x"][:count] = self.decoder.embedding(fed.tokens)
        torch.index_select(self._angles, 0, torch.from_numpy(fed.positions), out=self._between["angles"][:count])
        program = self._program(count, len(fed.rows), self._reads_much(fed))
        for steps in [program.whole] if abort is None else program.layers:
            if abort is not None and abort():
                raise Aborted
            steps.run(threads)
        wanted = self._between["x"][:count] if len(fed.wanted) == count else self._between["x"][torch.from_numpy(fed.wanted)]
        logits: torch.Tensor = self.decoder.head(self._normed(wanted))
        return logits

    def _allocate(self, *shape: int) -> torch.Tensor:
        # Zeros, not garbage: a NaN in a masked slot would poison every query of its row.
        return torch.zeros(shape)

    def _positions(self) -> torch.Tensor:
        """Return cosines and sines, `[places, head_dim]`, of as many places as there are slots."""
        cosine, sine = self.decoder.rotary(torch.zeros(1), torch.arange(self.slots)[None])
        half = self.decoder.size // 2
        return torch.cat([cosine[0, :, :half], sine[0, :, :half]], -1).float().contiguous()

    def _make_room(self, count: int, threads: int) -> None:
        """Let there be room for `count` tokens between two calls, and for the scores of so many threads."""
        if count <= len(self._places) and threads <= len(self._between["scratch"]):
            return
        count = max(count, len(self._places))
        d, count = self.decoder, -(-count // ROOM) * ROOM
        heads, qkv = d.heads * d.size, (d.heads + 2 * d.kv_heads) * d.size
        widths = {"x": d.hidden, "y": d.hidden, "normed": d.hidden, "qkv": qkv, "queries": heads, "attended": heads}
        self._between = {name: torch.zeros(count, width) for name, width in (widths | {"gated": d.intermediate, "angles": d.size}).items()}
        self._between["scratch"] = torch.zeros(threads, self.vectors.max_tile * (self.slots + d.size))
        self._places = np.zeros((count, 4), dtype=np.int64)
        self._programs.clear()

    def _lay_out(self, fed: Fed) -> None:
        """Tell the kernels where the queries, keys and values of each token go, and what each row and head attends to."""
        d, block = self.decoder, self.block
        row_size = d.kv_heads * self.slots * d.size
        places, units = self._layout(tuple(row.count for row in fed.rows))
        self._places[: len(places)], self._units[: len(units)] = places, units
        blocks, within = np.divmod(fed.slots, block)
        rows = fed.owners * row_size
        self._places[: len(places), 2] = rows + blocks * (d.size * block) + within
        self._places[: len(places), 3] = rows + fed.slots * block
        for place, row in enumerate(fed.rows):
            own = self._units[place * d.kv_heads : (place + 1) * d.kv_heads]
            own[:, 4] += row.index * row_size
            read, mask = -(-row.limit // block) * block, row.visible.__array_interface__["data"][0]
            own[:, 5:8] = read, mask, row.visible.strides[0]

    def _layout(self, counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tables `places` and `units` as far as they hang on how many tokens each row feeds alone."""
        found = self._layouts.get(counts)
        if found is None:
            if len(self._layouts) >= MAX_PROGRAMS:
                self._layouts.clear()
            found = self._layouts[counts] = self._laid_out(counts)
        return found

    def _laid_out(self, counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        d = self.decoder
        group, heads = d.heads // d.kv_heads, np.arange(d.kv_heads)
        places = np.zeros((sum(counts), 4), dtype=np.int64)
        units = np.zeros((len(counts), d.kv_heads, len(kernels.UNIT_FIELDS)), dtype=np.int64)
        first = 0
        for count, own in zip(counts, units, strict=True):
            begin, apart, number = first * d.heads * d.size, group * count * d.size, group * count
            places[first : first + count, 0] = begin + np.arange(count) * (group * d.size)
            places[first : first + count, 1] = apart
            tile = self.vectors.tile(number)
            own[:, 0] = begin + heads * apart
            own[:, 1:4] = number, tile, kernels.attend_tile(self.vectors.lanes, tile)[0]
            own[:, 4] = heads * (self.slots * d.size)
            own[:, 8] = begin + heads * (group * d.size)
            first += count
        return places, units.reshape(-1, len(kernels.UNIT_FIELDS))

    def _reads_much(self, fed: Fed) -> bool:
        """Whether attention is worth more than one thread."""
        return sum(row.count * row.limit for row in fed.rows) * self.decoder.heads * self.decoder.size >= MIN_TEAM_WORK

    def _program(self, count: int, rows: int, long: bool) -> Program:
        """Return the calls of each layer for so many tokens of so many rows; long: whether attention is much of the work."""
        found = self._programs.get((count, rows, long))
        if found is None:
            if len(self._programs) >= MAX_PROGRAMS:
                self._programs.clear()
            calls = [self._calls(number, count, rows, long) for number in range(len(self.decoder.layers))]
            found = Program(native.Steps([*chain.from_iterable(calls)]), [native.Steps(layer) for layer in calls])
            self._programs[count, rows, long] = found
        return found

    def _calls(self, number: int, count: int, rows: int, long: bool) -> list[tuple[native.Kernel, Any, bool]]:
        d, layer, lanes = self.decoder, self.decoder.layers[number], self.vectors.lanes
        at = {name: array.data_ptr() for name, array in self._between.items()}
        norms, eps, many = layer.head_norms, native.bits(d.eps), count >= MANY

        def norm(x: str, weight: torch.Tensor) -> tuple[native.Kernel, Any, bool]:
            given = at[x], weight.data_ptr(), at["normed"], d.hidden, eps, count
            return kernels.norm_kernel(lanes), native.integers(given), many

        def product(packed: Packed, x: str, out: str, finish: str = "plain", onto: str = "") -> tuple[native.Kernel, Any, bool]:
            where = at[onto] if onto else 0
            given = packed.words, packed.bias, at[x], at[out], count
            return linear_kernel.product(*given, scales=packed.scales, finish=finish, onto=where)

        keys, values = self.keys[number].data_ptr(), self.values[number].data_ptr()
        turn = (
            *(at["qkv"], at["angles"], at["queries"], keys, values, self._places.ctypes.data),
            *(d.heads, d.kv_heads, d.size, self.slots, native.bits(d.scale)),
            *((0, 0) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())),
            *(eps, count),
        )
        attend = (
            *(at["queries"], keys, values, at["attended"], self._units.ctypes.data, at["scratch"], self._between["scratch"].shape[1]),
            *(d.size, self.slots, d.heads * d.size, d.heads // d.kv_heads, rows * d.kv_heads),
        )
        return [
            norm("x", layer.norm),
            product(layer.projection, "normed", "qkv"),
            (kernels.turn_kernel(lanes, norms is not None), native.integers(turn), many),
            (kernels.attend_kernel(lanes), native.integers(attend), long),
            product(layer.output, "attended", "y", "onto", "x"),
            norm("y", layer.feed_norm),
            product(layer.gate, "normed", "gated", "gated"),
            product(layer.down, "gated", "x", "onto", "y"),
        ]

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last norm of `x`, `[n, hidden]`."""
        out = torch.empty_like(x)
        arguments = x.data_ptr(), self.decoder.norm.data_ptr(), out.data_ptr(), self.decoder.hidden, native.bits(self.decoder.eps), len(x)
        kernels.norm_kernel(self.vectors.lanes).run(native.integers(arguments))
        return out
