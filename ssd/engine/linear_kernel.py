"""A matrix product for few tokens: weights read once, fp32 activations and sums, compiled for this machine's vectors.

Weights are bf16, stored in blocks of ``2 * lanes`` output rows, ``[block, input, lane]`` of 32-bit words: output ``lane`` of the
block in the low half of a word, output ``lanes + lane`` in its high half. A shift and a mask then turn one vector load into
two vectors of fp32 weights, which meet one broadcast activation: no horizontal sums, and each weight is decoded once for a whole
tile of tokens. The loops are built as LLVM IR, since the sums must stay in registers whatever the optimiser thinks of it; a kernel
compiles in 40 to 80 ms at the first use of its number of tokens and is kept for the life of the process, nowhere else.

A draft's weights may be kept in one byte instead, `[block, input, 2 * lanes]`, each output's as multiples of a scale of its own: half as
much to read, which is what a step of one token costs. It is then another draft, and what is emitted is the target's all the same.

What the sums become (`finish`): `plain`, themselves; `onto`, added to another array; `gated`, silu of the first half of the rows
times the second.
"""

from __future__ import annotations

from typing import Any

import torch

from ssd import native
from ssd.native import Code, Kernel, integer, ir

CHUNK_BYTES = 256 * 1024  # of weights, kept in the second-level cache while several tiles of tokens pass over them
MIN_TEAM_WORK = 1 << 17  # multiply-adds below which waking a second thread costs more than it brings


def pack(weight: torch.Tensor, lanes: int) -> torch.Tensor:
    """Words `[blocks, in, lanes]` (int32) of a bf16 weight `[out, in]`, padded with zeros to whole blocks."""
    out_features, in_features = weight.shape
    words = torch.empty(-(-out_features // (2 * lanes)), in_features, lanes, dtype=torch.int32)
    whole = out_features // (2 * lanes) * 2 * lanes
    last = torch.nn.functional.pad(weight[whole:], (0, 0, 0, -out_features % (2 * lanes)))
    for part, place in ((weight[:whole], words[: whole // (2 * lanes)]), (last, words[whole // (2 * lanes) :])):
        halves = part.contiguous().view(-1, 2, lanes, in_features)
        pack_halves(halves[:, 0], halves[:, 1], place)
    return words


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest multiples, int8 `[out, in]`, of a scale for each output, fp32 `[out]`: its largest weight is 127 of them."""
    weight = weight.detach().float()
    scales = weight.abs().amax(1).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def pack_bytes(weight: torch.Tensor, lanes: int) -> torch.Tensor:
    """Bytes `[blocks, in, 2 * lanes]` of an int8 weight `[out, in]`, padded with zeros to whole blocks."""
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % (2 * lanes)))
    return padded.view(-1, 2 * lanes, weight.shape[1]).mT.contiguous()


def pack_halves(low: torch.Tensor, high: torch.Tensor, words: torch.Tensor) -> None:
    """Fill words `[blocks, in, lanes]` with the rows of two bf16 tensors `[blocks, lanes, in]` as their halves; rows are contiguous."""
    blocks, in_features, lanes = words.shape
    if native.why_unavailable():
        bits = [half.contiguous().view(torch.int16).mT.to(torch.int32) for half in (low, high)]
        words.copy_(bits[0] & 0xFFFF | bits[1] << 16)
        return
    pointers = low.data_ptr(), high.data_ptr(), words.data_ptr()
    arguments = native.integers((*pointers, low.stride(0), high.stride(0), in_features, blocks))
    threads = 1 if words.numel() < MIN_TEAM_WORK else native.team_size()
    _packing(lanes).run(arguments, threads)


@native.once
def _packing(lanes: int) -> Kernel:
    module = ir.Module()
    code = Code(module, "pack", [native.LONGS, native.I64, native.I64, native.I64], lanes)
    b = code.b
    *pointers, low_apart, high_apart, inputs, _ = code.longs(code.args[0], 7)
    shorts = ir.IntType(16).as_pointer()
    low, high = (code.pointer(address, shorts) for address in pointers[:2])
    words = code.pointer(pointers[2], native.I32.as_pointer())
    with code.loop(*code.args[1:3]) as block:
        starts = code.at(low, code.product(block, low_apart)), code.at(high, code.product(block, high_apart))
        rows = [[code.at(start, code.product(inputs, lane)) for start in starts] for lane in range(lanes)]
        to = code.at(words, code.product(block, inputs, lanes))
        with code.loop(0, inputs) as i:
            for lane, pair in enumerate(rows):
                small, large = (b.zext(b.load(code.at(row, i)), native.I32) for row in pair)
                b.store(b.or_(small, b.shl(large, ir.Constant(native.I32, 16))), code.at(to, code.product(i, lanes), lane))
    b.ret_void()
    return native.kernel(module, code.function, 6)


def unpack(words: torch.Tensor, out_features: int) -> torch.Tensor:
    """The bf16 weight `[out, in]` that `pack` was given."""
    blocks, in_features, lanes = words.shape
    bits = words.unsqueeze(-1).view(torch.int16).permute(0, 3, 2, 1).reshape(blocks * 2 * lanes, in_features)
    return bits[:out_features].view(torch.bfloat16)


def matmul(x: torch.Tensor, words: torch.Tensor, bias: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`, `[..., padded out]`: x fp32 `[..., in]`, contiguous; bias, and scales of int8 weights, `[padded out]`."""
    out = torch.empty((*x.shape[:-1], len(bias)))
    if out.numel():
        kernel, arguments, shared = product(words, bias, x.data_ptr(), out.data_ptr(), out.numel() // len(bias), scales=scales)
        kernel.run(arguments, native.team_size() if shared else 1)
    return out


def product(
    words: torch.Tensor,
    bias: torch.Tensor,
    x: int,
    out: int,
    tokens: int,
    *,
    scales: torch.Tensor | None = None,
    finish: str = "plain",
    onto: int = 0,
) -> tuple[Kernel, Any, bool]:
    """The kernel, and its arguments, that put the product for so many tokens at `x` to `out`; all stay where they are meanwhile. And
    whether a second thread is worth waking for it.

    onto: where the array lies that the sums are added to; not `out` itself.
    """
    blocks, in_features, width = words.shape
    kind, lanes = ("bf16", width) if scales is None else ("int8", width // 2)
    tile, chunk = native.VECTORS[lanes].tile(tokens), blocks
    if tile < tokens:
        chunk = max(1, CHUNK_BYTES // (words[0].nbytes))
    out_features = (1 if finish == "gated" else 2) * lanes * blocks
    pointers = words.data_ptr(), x, bias.data_ptr(), 0 if scales is None else scales.data_ptr(), onto, out
    arguments = native.integers((*pointers, in_features, out_features, tokens, blocks, chunk))
    return _kernel(tile, lanes, kind, finish), arguments, tokens * in_features * len(bias) >= MIN_TEAM_WORK


@native.once
def _kernel(tokens: int, lanes: int, kind: str, finish: str) -> Kernel:
    vectors, module = native.VECTORS[lanes], ir.Module()
    rows = _rows(module, tokens, tile(module, tokens, vectors, kind, finish), lanes)
    return native.kernel(module, rows, BLOCKS_AT)


# --- code generation ---

BLOCKS_AT = 9  # the place of the number of blocks among the arguments


def _rows(module: Any, tokens: int, tile: Any, lanes: int) -> Any:
    """Blocks `first..last` for all tokens: chunk by chunk of weights, and over each chunk tile by tile of tokens (the last may overlap)."""
    code = Code(module, "rows", [native.LONGS, native.I64, native.I64, native.I64], lanes)
    code.function.attributes.add("noinline")
    arguments, first, last, _ = code.args
    *pointers, inputs, outputs, total, _, chunk = code.longs(arguments, 11)
    words, x, bias, scales, onto, out = (code.pointer(address) for address in pointers)
    with code.loop(first, last, chunk) as block, code.loop(0, total, tokens) as token:
        token = code.least(token, code.sum(total, -tokens))
        place = code.product(token, outputs)
        sizes = [inputs, inputs, outputs, inputs, block, code.least(code.sum(block, chunk), last)]
        x_tile, onto_tile, out_tile = code.at(x, code.product(token, inputs)), code.at(onto, place), code.at(out, place)
        code.b.call(tile, [words, x_tile, bias, scales, onto_tile, out_tile, *sizes])
    code.b.ret_void()
    return code.function


def tile(module: Any, tokens: int, vectors: native.Vectors, kind: str, finish: str = "plain") -> Any:
    """A function for `tokens` tokens: as many blocks of weights at once as fit in registers, then the rest one by one.

    Its arguments: weights, activations, bias, scales, what is added to, out; inputs, floats from one token's activations to the next one's,
    from one token's outputs to the next one's, inputs from one block's weights to the next one's; first and last block.
    kind: of weights, `bf16`, `int8`, or `fp32` `[block, input, 2 * lanes]`, which have no bias. finish: see the module.
    """
    code = Code(module, "tile", [native.FLOATS] * 6 + [native.I64] * 6, vectors.lanes, inside=kind != "fp32")
    for pointer in code.args[:6]:
        pointer.add_attribute("noalias")
    *_, first, last = code.args
    at_once, b = vectors.blocks_at_once(tokens), code.b
    middle = b.add(first, b.mul(b.sdiv(b.sub(last, first), integer(at_once)), integer(at_once)))
    for start, stop, count in ((first, middle, at_once), (middle, last, 1))[: 2 if at_once > 1 else 1]:
        with code.loop(start, stop, count) as block:
            _sums(code, block, tokens, count, kind, finish)
    b.ret_void()
    return code.function


def _sums(code: Code, block: Any, tokens: int, count: int, kind: str, finish: str) -> None:
    """The outputs of `count` blocks for `tokens` tokens: sums start at the bias and stay in registers along the inputs."""
    words, x, bias, scales, _, _, inputs, stride, outputs, apart, *_ = code.args
    b, lanes = code.b, code.lanes
    column = code.product(block, 2 * lanes)
    columns = [code.sum(column, v * lanes) for v in range(2 * count)]
    zero = code.constant(0.0)
    sums = [code.variables(len(columns), zero) for _ in range(tokens)]
    if kind == "bf16":
        for v, at in enumerate(columns):
            start = code.load(code.at(bias, at))
            for row in sums:
                b.store(start, row[v])
    with code.loop(0, inputs) as i:
        for k in range(count):
            # Block after block, so that only one block's weights are in registers beside the sums.
            start = code.product(code.sum(code.product(code.sum(block, k), apart), i), lanes)
            weights = _weights(code, words, start, kind, tokens, count)
            for q, row in enumerate(sums):
                value = code.broadcast(b.load(code.at(x, code.product(q, stride), i)))
                for v, weight in enumerate(weights, 2 * k):
                    b.store(code.fma(value, weight, b.load(row[v])), row[v])
    for q, row in enumerate(sums):
        values = [b.load(variable) for variable in row]
        if kind == "int8":
            values = [
                code.fma(v, code.load(code.at(scales, at)), code.load(code.at(bias, at))) for v, at in zip(values, columns, strict=True)
            ]
        _finish(code, values, code.product(q, outputs), columns, finish)


def _finish(code: Code, values: list[Any], row: Any, columns: list[Any], finish: str) -> None:
    """Put what the sums of one token become where it belongs."""
    _, _, _, _, onto, out, *_ = code.args
    if finish == "gated":
        for gate, up, at in zip(values[::2], values[1::2], columns[::2], strict=True):
            # silu(gate) = gate / (1 + e^-gate); `at` counts rows of weights, two to an output.
            below = code.b.fadd(code.constant(1.0), code.exp(code.b.fneg(gate)))
            value = code.b.fmul(code.b.fdiv(gate, below), up)
            code.store(value, code.at(out, row, code.b.sdiv(at, integer(2))))
        return
    for value, at in zip(values, columns, strict=True):
        if finish == "onto":
            value = code.b.fadd(code.load(code.at(onto, row, at)), value)
        code.store(value, code.at(out, row, at))


def _weights(code: Code, words: Any, start: Any, kind: str, tokens: int, count: int) -> list[Any]:
    """The two weight vectors of a block at one input, `start` words from the first; and a request for those to come."""
    b, lanes, place = code.b, code.lanes, code.product(start, 2)
    if kind == "fp32":
        return [code.load(code.at(words, place, half)) for half in (0, lanes)]
    if kind == "int8":
        numbers = code.at(b.bitcast(words, native.BYTES), place)
        _ask_for(code, numbers, 2 * lanes, tokens, count)
        few = ir.VectorType(ir.IntType(8), lanes)
        return [b.sitofp(b.sext(code.load(code.at(numbers, half), few), code.words), code.vector) for half in (0, lanes)]
    at = code.at(words, start)
    _ask_for(code, b.bitcast(at, native.BYTES), 4 * lanes, tokens, count)
    word = code.load(at, code.words)
    return [b.bitcast(half, code.vector) for half in (b.shl(word, code.word(16)), b.and_(word, code.word(0xFFFF0000)))]


def _ask_for(code: Code, at: Any, step: int, tokens: int, count: int) -> None:
    """Fetch ahead: a stream alone is asked for far ahead; several keep the memory busy by themselves. step: bytes to the next input's."""
    ahead = 128 if count == 1 else 16 * tokens if tokens < 3 else 0
    if ahead:
        prefetch = code.intrinsic("llvm.prefetch.p0", native.VOID, [native.BYTES, native.I32, native.I32, native.I32])
        code.b.call(prefetch, [code.at(at, ahead * step), *(ir.Constant(native.I32, k) for k in (0, 3, 1))])
