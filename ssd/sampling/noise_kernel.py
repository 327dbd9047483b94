"""Gumbel noise on a CPU in one pass over the tokens: the same 64-bit hash as `ssd.sampling.noise`, its logarithms to the last digits."""

from __future__ import annotations

from typing import Any

import torch

from ssd import native
from ssd.native import I64, LONGS, Code, Kernel, ir

ARGUMENTS = ("keys", "out", "vocabulary", "rows")
MIN_TEAM_WORK = 1 << 15  # numbers below which waking a second thread costs more than it brings


def available(vocab_size: int) -> bool:
    """Whether the noise of so many tokens can be made here."""
    vectors = native.host_vectors()
    return vectors is not None and vocab_size >= vectors.lanes * 4


def gumbel(keys: torch.Tensor, vocab_size: int, constants: tuple[int, int, int]) -> torch.Tensor:
    """Gumbel noise for each token under each key, fp32, `[n]` (int64, on the CPU) to `[n, vocab_size]`. constants: those of the hash."""
    vectors = native.host_vectors()
    if vectors is None:
        raise RuntimeError(native.why_unavailable())
    keys, out = keys.contiguous(), torch.empty(len(keys), vocab_size)
    threads = 1 if out.numel() < MIN_TEAM_WORK else native.team_size()
    arguments = native.integers((keys.data_ptr(), out.data_ptr(), vocab_size, len(keys)))
    kernel(vectors.lanes * 4, constants).run(arguments, threads)
    return out


@native.once
def kernel(lanes: int, constants: tuple[int, int, int]) -> Kernel:
    """The noise of rows, one key each."""
    module = ir.Module()
    code = Code(module, "noise", [LONGS, I64, I64, I64], lanes)
    keys, out, vocabulary, _ = code.longs(code.args[0], len(ARGUMENTS))
    keys, out = code.pointer(keys, LONGS), code.pointer(out)
    golden, *factors = constants
    with code.loop(*code.args[1:3]) as row:
        key = code.b.load(code.at(keys, row))
        to = code.at(out, code.product(row, vocabulary))
        with code.loop(0, vocabulary, lanes) as token:
            # The last tokens may be done twice.
            token = code.least(token, code.sum(vocabulary, -lanes))
            code.store(_noise(code, _words(code, key, token, golden, factors)), code.at(to, token))
    code.b.ret_void()
    return native.kernel(module, code.function, len(ARGUMENTS) - 1)


def _words(code: Code, key: Any, token: Any, golden: int, factors: list[int]) -> Any:
    """The hash of a key and each of the tokens from `token` on, without its sign."""
    b, kind = code.b, ir.VectorType(I64, code.lanes)

    def constant(value: int) -> Any:
        return ir.Constant(kind, [value] * code.lanes)

    first = code.sum(key, code.product(code.sum(token, 1), golden))
    spread = b.insert_element(ir.Constant(kind, ir.Undefined), first, ir.Constant(native.I32, 0))
    spread = b.shuffle_vector(spread, ir.Constant(kind, ir.Undefined), code.word(0))
    word = b.add(spread, b.mul(ir.Constant(kind, list(range(code.lanes))), constant(golden)))
    for shift, factor in zip((30, 27), factors, strict=True):
        word = b.mul(b.xor(word, b.lshr(word, constant(shift))), constant(factor))
    word = b.xor(word, b.lshr(word, constant(31)))
    return b.or_(b.lshr(word, constant(1)), constant(1))


def _noise(code: Code, words: Any) -> Any:
    """-log(-log(1 - u)), u in (0, 1) from 63 bits; small exponentials keep all of fp32's relative precision."""
    b, one = code.b, code.constant(1.0)
    u = b.fmul(_as_floats(code, words), code.constant(2.0**-63))
    u = b.select(b.fcmp_ordered("<", u, code.constant(1 - 2.0**-24)), u, code.constant(1 - 2.0**-24))
    # log(1 - u) by way of the rounded difference, whose rounding is divided out again (Kahan).
    left = b.fsub(one, u)
    taken = b.fsub(one, left)
    exact = b.fcmp_ordered("==", taken, code.constant(0.0))
    scaled = b.fmul(b.fneg(code.log(left)), b.fdiv(u, b.select(exact, one, taken)))
    return b.fneg(code.log(b.select(exact, u, scaled)))


def _as_floats(code: Code, words: Any) -> Any:
    """Positive 64-bit integers as fp32, through fp64: half by half, each put into the mantissa of a number that is taken off again."""
    b, kind, double = code.b, words.type, ir.VectorType(ir.DoubleType(), code.lanes)

    def constant(value: int) -> Any:
        return ir.Constant(kind, [value] * code.lanes)

    high = b.bitcast(b.or_(b.lshr(words, constant(32)), constant(0x4530000000000000)), double)
    low = b.bitcast(b.or_(b.and_(words, constant(0xFFFFFFFF)), constant(0x4330000000000000)), double)
    found = b.fadd(b.fsub(high, ir.Constant(double, [2.0**84 + 2.0**52] * code.lanes)), low)
    return b.fptrunc(found, code.vector)
