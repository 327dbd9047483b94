"""What a decoder layer does between its matrix products, as machine code: norm, rotary positions with the write into slots, attention.

Keys of a row and head lie as ``[slots / block, head_dim, block]``, values as ``[head_dim / block, slots, block]``, ``block = 2 * lanes``:
as the weights of two matrix products, so that scores and sums over slots come from the kernel of linear layers, at its speed. Queries
of one row and one key-value head lie together, ``[token, query head of the group]``.
"""

from __future__ import annotations

from typing import Any

from ssd import native
from ssd.engine import linear_kernel
from ssd.native import F32, FLOATS, I64, LONGS, VOID, Code, Kernel, integer, ir

NORM_ARGUMENTS = ("x", "weight", "out", "width", "eps", "tokens")
TURN_ARGUMENTS = (
    *("qkv", "angles", "queries", "keys", "values", "places"),
    *("heads", "kv_heads", "size", "slots", "scale", "query_norm", "key_norm", "eps", "tokens"),
)
ATTEND_ARGUMENTS = ("queries", "keys", "values", "out", "units", "scratch", "share", "size", "slots", "stride", "group", "count")
# A row and key-value head to attend: floats to its queries, their number, how many at once, the kernel for so many, floats to its keys and
# values, slots that are read, where its mask lies and the bytes from one token's to the next, floats to its output.
UNIT_FIELDS = ("queries", "number", "tile", "kernel", "slots", "read", "mask", "apart", "out")


@native.once
def norm_kernel(lanes: int) -> Kernel:
    """RMS norm of `tokens` rows of `width` floats (a multiple of lanes)."""
    module = ir.Module()
    code = _work(module, "norm", lanes)
    x, weight, out, width, eps, _ = _arguments(code, NORM_ARGUMENTS)
    with code.loop(*code.args[1:3]) as token:
        row, to = code.at(x, code.product(token, width)), code.at(out, code.product(token, width))
        inverse = _inverse_rms(code, row, width, eps)
        with code.loop(0, width, lanes) as i:
            value = code.b.fmul(code.load(code.at(row, i)), inverse)
            code.store(code.b.fmul(value, code.load(code.at(weight, i))), code.at(to, i))
    code.b.ret_void()
    return native.kernel(module, code.function, len(NORM_ARGUMENTS) - 1)


@native.once
def turn_kernel(lanes: int, normed: bool) -> Kernel:
    """Turn queries and keys by their positions and put queries, keys and values where attention reads them.

    angles: cosines and sines of a token, `[tokens, head_dim]`; places: of each token, the floats to its queries and from one key-value
    head's queries to the next one's, and the floats to its key and value. normed: whether heads are normed first (Qwen3).
    """
    module = ir.Module()
    code = _work(module, "turn", lanes)
    qkv, angles, queries, keys, values, places, heads, kv_heads, size, slots, scale, query_norm, key_norm, eps, _ = _arguments(
        code, TURN_ARGUMENTS
    )
    b, block = code.b, 2 * lanes
    group, apart = b.sdiv(heads, kv_heads), code.product(slots, size)
    width = code.product(code.sum(heads, kv_heads, kv_heads), size)
    with code.loop(*code.args[1:3]) as token:
        source, angle = code.at(qkv, code.product(token, width)), code.at(angles, code.product(token, size))
        query_at, query_apart, key_at, value_at = code.longs(places, 4, code.product(token, 4))
        with code.loop(0, heads) as head:
            to = code.at(queries, query_at, code.product(b.sdiv(head, group), query_apart), code.product(b.srem(head, group), size))
            _turn(code, code.at(source, code.product(head, size)), to, angle, size, scale, query_norm if normed else None, eps)
        source = code.at(source, code.product(heads, size))
        with code.loop(0, kv_heads) as head:
            key, to = code.at(source, code.product(head, size)), code.at(keys, key_at, code.product(head, apart))
            _turn(code, key, key, angle, size, None, key_norm if normed else None, eps)
            with code.loop(0, size) as i:
                b.store(b.load(code.at(key, i)), code.at(to, code.product(i, block)))
        source = code.at(source, code.product(kv_heads, size))
        with code.loop(0, kv_heads) as head:
            value, to = code.at(source, code.product(head, size)), code.at(values, value_at, code.product(head, apart))
            with code.loop(0, size, block) as i:
                for half in (0, lanes):
                    code.store(code.load(code.at(value, i, half)), code.at(to, code.product(i, slots), half))
    b.ret_void()
    return native.kernel(module, code.function, len(TURN_ARGUMENTS) - 1)


@native.once
def attend_kernel(lanes: int) -> Kernel:
    """Attention of each unit's queries over the slots that the mask (a byte each, 0: not seen) shows; queries are scaled already."""
    module = ir.Module()
    softmax = _softmax(module, lanes)
    code = _work(module, "attend", lanes)
    queries, keys, values, out, units, scratch, share, size, slots, stride, group, _ = _arguments(code, ATTEND_ARGUMENTS)
    b, block, nothing = code.b, 2 * lanes, integer(0)
    kind = ir.FunctionType(VOID, [FLOATS] * 6 + [I64] * 6).as_pointer()
    scores = code.at(scratch, code.product(code.args[3], share))
    with code.loop(*code.args[1:3]) as unit:
        fields = code.longs(units, len(UNIT_FIELDS), code.product(unit, len(UNIT_FIELDS)))
        query_at, number, tile, kernel, row_at, read, mask_at, mask_apart, out_at = fields
        kernel, result = b.inttoptr(kernel, kind), code.at(scores, code.product(tile, read))
        key, value = code.at(keys, row_at), code.at(values, row_at)
        with code.loop(0, number, tile) as first:
            # The last tile may overlap the one before.
            first = code.least(first, b.sub(number, tile))
            query = code.at(queries, query_at, code.product(first, size))
            b.call(kernel, [key, query, query, query, query, scores, size, size, read, size, nothing, b.sdiv(read, integer(block))])
            with code.loop(0, tile) as i:
                seen = code.sum(mask_at, code.product(b.sdiv(b.add(first, i), group), mask_apart))
                b.call(softmax, [code.at(scores, code.product(i, read)), code.pointer(seen, native.BYTES), read])
            b.call(kernel, [value, scores, query, query, query, result, read, read, size, slots, nothing, b.sdiv(size, integer(block))])
            with code.loop(0, tile) as i:
                query = b.add(first, i)
                token, head = b.sdiv(query, group), b.srem(query, group)
                to = code.at(out, out_at, code.product(token, stride), code.product(head, size))
                with code.loop(0, size, lanes) as j:
                    code.store(code.load(code.at(result, code.product(i, size), j)), code.at(to, j))
    b.ret_void()
    return native.kernel(module, code.function, len(ATTEND_ARGUMENTS) - 1)


@native.once
def attend_tile(lanes: int, queries: int) -> tuple[int, Any]:
    """Where the product of `queries` queries with fp32 keys or values lies, and what owns it."""
    module = ir.Module()
    linear_kernel.tile(module, queries, native.VECTORS[lanes], "fp32")
    engine = native.compiled(module)
    return engine.get_function_address("tile"), engine


def _work(module: Any, name: str, lanes: int) -> Code:
    """A function of arguments, first and last piece of work, and the thread's number."""
    return Code(module, name, [LONGS, I64, I64, I64], lanes)


def _arguments(code: Code, names: tuple[str, ...]) -> list[Any]:
    """The arguments: pointers and floats where their names say so."""
    found = []
    for name, value in zip(names, code.longs(code.args[0], len(names)), strict=True):
        if name in ("units", "places"):
            value = code.pointer(value, LONGS)
        elif name in ("eps", "scale"):
            value = code.b.bitcast(code.b.trunc(value, native.I32), F32)
        elif name not in ("width", "tokens", "heads", "kv_heads", "size", "slots", "share", "stride", "group", "count"):
            value = code.pointer(value)
        found.append(value)
    return found


def _inverse_rms(code: Code, row: Any, width: Any, eps: Any) -> Any:
    """A vector of 1 / sqrt(mean of squares + eps)."""
    b = code.b
    (squares,) = code.variables(1, code.constant(0.0))
    with code.loop(0, width, code.lanes) as i:
        value = code.load(code.at(row, i))
        b.store(code.fma(value, value, b.load(squares)), squares)
    mean = b.fdiv(code.reduce(b.load(squares), "fadd"), b.sitofp(width, F32))
    root = b.call(code.intrinsic("llvm.sqrt.f32", F32, [F32]), [b.fadd(mean, eps)])
    return code.broadcast(b.fdiv(ir.Constant(F32, 1.0), root))


def _turn(code: Code, source: Any, to: Any, angle: Any, size: Any, scale: Any, norm: Any, eps: Any) -> None:
    """One head's vector, normed if it is to be, turned by its position, and scaled if it is to be."""
    b = code.b
    half = b.sdiv(size, integer(2))
    inverse = None if norm is None else _inverse_rms(code, source, size, eps)
    factor = None if scale is None else code.broadcast(scale)
    with code.loop(0, half, code.lanes) as i:
        places = [i, b.add(half, i)]
        x, y = (code.load(code.at(source, place)) for place in places)
        if inverse is not None:
            x, y = (b.fmul(b.fmul(value, inverse), code.load(code.at(norm, place))) for value, place in zip((x, y), places, strict=True))
        cosine, sine = (code.load(code.at(angle, place)) for place in places)
        turned = b.fsub(b.fmul(x, cosine), b.fmul(y, sine)), b.fadd(b.fmul(y, cosine), b.fmul(x, sine))
        for value, place in zip(turned, places, strict=True):
            code.store(value if factor is None else b.fmul(value, factor), code.at(to, place))


def _softmax(module: Any, lanes: int) -> Any:
    """Scores, `read` of them, become their softmax over those that the mask shows."""
    code = Code(module, "softmax", [FLOATS, native.BYTES, I64], lanes)
    (scores, mask, read), b = code.args, code.b
    few, none = ir.VectorType(ir.IntType(8), lanes), code.constant(-1e30)
    (largest,) = code.variables(1, none)
    (total,) = code.variables(1, code.constant(0.0))

    def seen(i: Any) -> Any:
        return b.icmp_unsigned("!=", code.load(code.at(mask, i), few), ir.Constant(few, [0] * lanes))

    with code.loop(0, read, lanes) as i:
        score = b.select(seen(i), code.load(code.at(scores, i)), none)
        before = b.load(largest)
        b.store(b.select(b.fcmp_ordered(">", score, before), score, before), largest)
    top = code.broadcast(code.reduce(b.load(largest), "fmax"))
    with code.loop(0, read, lanes) as i:
        power = code.exp(b.fsub(code.load(code.at(scores, i)), top))
        power = b.select(seen(i), power, code.constant(0.0))
        code.store(power, code.at(scores, i))
        b.store(b.fadd(b.load(total), power), total)
    share = code.broadcast(b.fdiv(ir.Constant(F32, 1.0), code.reduce(b.load(total), "fadd")))
    with code.loop(0, read, lanes) as i:
        code.store(b.fmul(code.load(code.at(scores, i)), share), code.at(scores, i))
    b.ret_void()
    return code.function
