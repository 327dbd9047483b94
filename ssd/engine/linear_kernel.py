"""A matrix product for few tokens: weights read once, fp32 activations and sums, compiled for this machine's vectors.

Weights are bf16, stored in blocks of ``2 * lanes`` output rows, ``[block, input, lane]`` of 32-bit words: output ``lane`` of the
block in the low half of a word, output ``lanes + lane`` in its high half. A shift and a mask then turn one vector load into
two vectors of fp32 weights, which meet one broadcast activation: no horizontal sums, and each weight is decoded once for a whole
tile of tokens. The loops are built as LLVM IR, since the sums must stay in registers whatever the optimiser thinks of it; a kernel
compiles in 40 to 80 ms at the first use of its number of tokens and is kept for the life of the process, nowhere else.

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
    function, given = _packing(lanes).call(arguments, threads)
    function(*given)


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


def matmul(x: torch.Tensor, words: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T + bias`, `[..., padded out]`: x fp32 `[..., in]`, contiguous; bias fp32 `[padded out]`."""
    blocks, _, lanes = words.shape
    out = torch.empty((*x.shape[:-1], 2 * lanes * blocks))
    if out.numel():
        kernel, arguments, shared = product(words, bias, x.data_ptr(), out.data_ptr(), out.numel() // out.shape[-1])
        function, given = kernel.call(arguments, native.team_size() if shared else 1)
        function(*given)
    return out


def product(
    words: torch.Tensor, bias: torch.Tensor, x: int, out: int, tokens: int, *, finish: str = "plain", onto: int = 0
) -> tuple[Kernel, Any, bool]:
    """The kernel, and its arguments, that put the product for so many tokens at `x` to `out`; all stay where they are meanwhile. And
    whether a second thread is worth waking for it.

    onto: where the array lies that the sums are added to; not `out` itself.
    """
    blocks, in_features, lanes = words.shape
    tile, chunk = native.VECTORS[lanes].tile(tokens), blocks
    if tile < tokens:
        chunk = max(1, CHUNK_BYTES // (4 * lanes * in_features))
    out_features = (1 if finish == "gated" else 2) * lanes * blocks
    arguments = native.integers((words.data_ptr(), x, bias.data_ptr(), onto, out, in_features, out_features, tokens, blocks, chunk))
    return _kernel(tile, lanes, finish), arguments, tokens * words.numel() * 2 >= MIN_TEAM_WORK


@native.once
def _kernel(tokens: int, lanes: int, finish: str) -> Kernel:
    vectors, module = native.VECTORS[lanes], ir.Module()
    rows = _rows(module, tokens, tile(module, tokens, vectors, finish), lanes)
    return native.kernel(module, rows, BLOCKS_AT)


# --- code generation ---

BLOCKS_AT = 8  # the place of the number of blocks among the arguments


def _rows(module: Any, tokens: int, tile: Any, lanes: int) -> Any:
    """Blocks `first..last` for all tokens: chunk by chunk of weights, and over each chunk tile by tile of tokens (the last may overlap)."""
    code = Code(module, "rows", [native.LONGS, native.I64, native.I64, native.I64], lanes)
    code.function.attributes.add("noinline")
    arguments, first, last, _ = code.args
    *pointers, inputs, outputs, total, _, chunk = code.longs(arguments, 10)
    words, x, bias, onto, out = (code.pointer(address) for address in pointers)
    with code.loop(first, last, chunk) as block, code.loop(0, total, tokens) as token:
        token = code.least(token, code.sum(total, -tokens))
        place = code.product(token, outputs)
        sizes = [inputs, inputs, outputs, inputs, block, code.least(code.sum(block, chunk), last)]
        code.b.call(tile, [words, code.at(x, code.product(token, inputs)), bias, code.at(onto, place), code.at(out, place), *sizes])
    code.b.ret_void()
    return code.function


def tile(module: Any, tokens: int, vectors: native.Vectors, finish: str) -> Any:
    """A function for `tokens` tokens: as many blocks of weights at once as fit in registers, then the rest one by one.

    Its arguments: weights, activations, bias, what is added to, out; inputs, floats from one token's activations to the next one's, from
    one token's outputs to the next one's, inputs from one block's weights to the next one's; first and last block.
    finish: see the module; `keys` is `plain` for fp32 weights `[block, input, 2 * lanes]` and no bias.
    """
    code = Code(module, f"tile_{finish}", [native.FLOATS] * 5 + [native.I64] * 6, vectors.lanes, inside=finish != "keys")
    for pointer in code.args[:5]:
        pointer.add_attribute("noalias")
    *_, first, last = code.args
    at_once, b = vectors.blocks_at_once(tokens), code.b
    middle = b.add(first, b.mul(b.sdiv(b.sub(last, first), integer(at_once)), integer(at_once)))
    for start, stop, count in ((first, middle, at_once), (middle, last, 1))[: 2 if at_once > 1 else 1]:
        with code.loop(start, stop, count) as block:
            _sums(code, block, tokens, count, finish)
    b.ret_void()
    return code.function


def _sums(code: Code, block: Any, tokens: int, count: int, finish: str) -> None:
    """The outputs of `count` blocks for `tokens` tokens: sums start at the bias and stay in registers along the inputs."""
    words, x, bias, _, _, inputs, stride, outputs, apart, *_ = code.args
    b, lanes = code.b, code.lanes
    column = code.product(block, 2 * lanes)
    columns = [code.sum(column, v * lanes) for v in range(2 * count)]
    zero = code.constant(0.0)
    sums = [code.variables(len(columns), zero) for _ in range(tokens)]
    if finish != "keys":
        for v, at in enumerate(columns):
            start = code.load(code.at(bias, at))
            for row in sums:
                b.store(start, row[v])
    with code.loop(0, inputs) as i:
        for k in range(count):
            # Block after block, so that only one block's weights are in registers beside the sums.
            start = code.product(code.sum(code.product(code.sum(block, k), apart), i), lanes)
            weights = _keys(code, words, start) if finish == "keys" else _weights(code, words, start, tokens, count)
            for q, row in enumerate(sums):
                value = code.broadcast(b.load(code.at(x, code.product(q, stride), i)))
                for v, weight in enumerate(weights, 2 * k):
                    b.store(code.fma(value, weight, b.load(row[v])), row[v])
    for q, row in enumerate(sums):
        _finish(code, [b.load(variable) for variable in row], code.product(q, outputs), columns, finish)


def _finish(code: Code, values: list[Any], row: Any, columns: list[Any], finish: str) -> None:
    """Put what the sums of one token become where it belongs."""
    _, _, _, onto, out, *_ = code.args
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


def _keys(code: Code, words: Any, start: Any) -> tuple[Any, Any]:
    """Two vectors of fp32 weights."""
    at = code.at(words, code.product(start, 2))
    return code.load(at), code.load(code.at(at, code.lanes))


def _weights(code: Code, words: Any, start: Any, tokens: int, count: int) -> tuple[Any, Any]:
    """The two weight vectors of a block at one input, and a prefetch of those to come where arithmetic would delay their request."""
    b, at = code.b, code.at(words, start)
    # A stream alone is asked for far ahead; several keep the memory busy by themselves.
    ahead = 128 if count == 1 else 16 * tokens if tokens < 3 else 0
    if ahead:
        kinds = [native.BYTES, native.I32, native.I32, native.I32]
        prefetch = code.intrinsic("llvm.prefetch.p0", native.VOID, kinds)
        later = b.bitcast(code.at(at, ahead * code.lanes), native.BYTES)
        b.call(prefetch, [later, *(ir.Constant(native.I32, k) for k in (0, 3, 1))])
    word = code.load(at, code.words)
    low, high = b.shl(word, code.word(16)), b.and_(word, code.word(0xFFFF0000))
    return b.bitcast(low, code.vector), b.bitcast(high, code.vector)
