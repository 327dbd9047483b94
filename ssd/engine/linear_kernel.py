"""A matrix product for few tokens: bf16 weights read once, fp32 activations and sums, compiled for this machine's vectors.

Weights are stored in blocks of ``2 * lanes`` output rows, ``[block, input, lane]`` of 32-bit words: output ``lane`` of the
block in the low half of a word, output ``lanes + lane`` in its high half. A shift and a mask then turn one vector load into
two vectors of fp32 weights, which meet one broadcast activation: no horizontal sums, and each weight is decoded once for up
to 14 tokens. The loops are built as LLVM IR, since the sums must stay in registers whatever the optimiser thinks of it; a kernel
compiles in 40 to 80 ms at the first use of its number of tokens and is kept for the life of the process, nowhere else.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

try:
    import llvmlite.binding as llvm
    from llvmlite import ir
except ImportError:  # pragma: no cover - a dependency, but the package must import without it
    llvm = ir = None

log = logging.getLogger(__name__)

MAX_BLOCKS_AT_ONCE = 4
_Arguments = ctypes.c_int64 * 9
CHUNK_BYTES = 256 * 1024  # of weights, kept in the second-level cache while several tiles of tokens pass over them
MIN_TEAM_WORK = 1 << 18  # multiply-adds below which waking a second thread costs more than it brings


@dataclass(frozen=True, slots=True)
class Vectors:
    """The machine's vector registers: fp32 lanes in one, and how many there are."""

    lanes: int
    registers: int

    def blocks_at_once(self, tokens: int) -> int:
        """Blocks of output rows whose sums for `tokens` tokens fit in registers, beside the weights and one activation (0: none)."""
        return min(MAX_BLOCKS_AT_ONCE, (self.registers - 1) // (2 * tokens + 2))

    @property
    def max_tile(self) -> int:
        """Most tokens whose sums for one block fit in registers."""
        return (self.registers - 3) // 2


VECTORS = {16: Vectors(16, 32), 8: Vectors(8, 16), 4: Vectors(4, 32)}  # AVX-512, AVX2, NEON


@functools.cache
def host_vectors() -> Vectors | None:
    """The vectors the kernel uses here, or None where it would lose to torch."""
    if llvm is None:
        return None
    if platform.machine().lower() in ("arm64", "aarch64"):
        return VECTORS[4]
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return VECTORS[16]
    return VECTORS[8] if features.get("avx2") and features.get("fma") else None


def why_unavailable() -> str:
    """Why the kernel cannot be used here; empty where it can."""
    if llvm is None:
        return "llvmlite is not installed"
    return "" if host_vectors() else "this CPU has neither AVX-512, AVX2 with FMA, nor NEON"


def pack(weight: torch.Tensor, lanes: int) -> torch.Tensor:
    """Words `[blocks, in, lanes]` (int32) of a bf16 weight `[out, in]`, padded with zeros to whole blocks."""
    out_features, in_features = weight.shape
    bits = weight.contiguous().view(torch.int16)
    bits = torch.nn.functional.pad(bits, (0, 0, 0, -out_features % (2 * lanes)))
    bits = bits.view(-1, 2, lanes, in_features).permute(0, 3, 2, 1).contiguous()
    return bits.view(torch.int32).squeeze(-1)


def unpack(words: torch.Tensor, out_features: int) -> torch.Tensor:
    """The bf16 weight `[out, in]` that `pack` was given."""
    blocks, in_features, lanes = words.shape
    bits = words.unsqueeze(-1).view(torch.int16).permute(0, 3, 2, 1).reshape(blocks * 2 * lanes, in_features)
    return bits[:out_features].view(torch.bfloat16)


def matmul(x: torch.Tensor, words: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T + bias`, `[..., padded out]`: x fp32 `[..., in]`, contiguous; bias fp32 `[padded out]`."""
    blocks, in_features, lanes = words.shape
    out_features = 2 * lanes * blocks
    out = torch.empty((*x.shape[:-1], out_features))
    tokens = out.numel() // out_features
    if tokens == 0:
        return out
    max_tile = VECTORS[lanes].max_tile
    tile, chunk = tokens, blocks
    if tokens > max_tile:
        tile = -(-tokens // -(-tokens // max_tile))
        chunk = max(1, CHUNK_BYTES // (4 * lanes * in_features))
    arguments = _Arguments(
        words.data_ptr(), x.data_ptr(), bias.data_ptr(), out.data_ptr(), in_features, out_features, tokens, blocks, chunk
    )
    kernel = _kernels.get((tile, lanes)) or _kernel(tile, lanes)
    threads = _threads(tokens * in_features * out_features)
    if threads > 1 and kernel.team:
        _openmp().GOMP_parallel(kernel.team, arguments, threads, 0)
    else:
        kernel.alone(arguments)
    return out


# --- threads: torch's own OpenMP team, so that no second pool exists and its threads are awake between two operators ---


@functools.cache
def _openmp() -> Any:
    """The OpenMP library that torch was linked with, or None where it lacks GNU's entry point."""
    try:
        library = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))))
        library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = None
    except (StopIteration, OSError, AttributeError):
        log.info("torch's OpenMP has no GOMP_parallel here: bf16 linear layers use one thread")
        return None
    return library


_cores_seen: set[int] = set()


def _threads(work: int) -> int:
    """Threads for a product of `work` multiply-adds: torch's number, but no more than the cores that the caller may run on."""
    wanted = torch.get_num_threads()
    if wanted == 1 or work < MIN_TEAM_WORK:
        return 1
    if not hasattr(os, "sched_getaffinity"):
        return wanted
    cores = os.sched_getaffinity(0)
    threads = min(wanted, len(cores))
    if threads > 1 and cores != _cores_seen:
        _spread(cores, threads)
    return threads


def _spread(cores: set[int], threads: int) -> None:
    """Let the team's threads run on `cores`: they were born with the cores of their creator, which may have changed."""
    library = _openmp()
    if library is not None:
        move = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: os.sched_setaffinity(0, cores))
        library.GOMP_parallel(ctypes.cast(move, ctypes.c_void_p), None, threads, 0)
    _cores_seen.clear()
    _cores_seen.update(cores)


# --- code generation ---


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Compiled code for one number of tokens: called by one thread, or (an address) by each thread of an OpenMP team."""

    alone: Any
    team: int
    engine: Any  # owns the machine code


_kernels: dict[tuple[int, int], _Kernel] = {}
_compiling = threading.Lock()


def _kernel(tokens: int, lanes: int) -> _Kernel:
    found = _kernels.get((tokens, lanes))
    if found is None:
        with _compiling:
            found = _kernels.setdefault((tokens, lanes), _compile(tokens, VECTORS[lanes]))
    return found


def _compile(tokens: int, vectors: Vectors) -> _Kernel:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    module = llvm.parse_assembly(str(_module(tokens, vectors)))
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=1))
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("alone"))
    return _Kernel(alone, engine.get_function_address("team") if _openmp() else 0, engine)


if ir is not None:
    _F32, _I32, _I64, _VOID = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.VoidType()
    _LONGS = _I64.as_pointer()
    _POINTERS = [_I32.as_pointer()] + [_F32.as_pointer()] * 3  # words, x, bias, out


def _int(value: int) -> Any:
    return ir.Constant(_I64, value)


@contextmanager
def _loop(b: Any, start: Any, stop: Any, step: Any) -> Iterator[Any]:
    """`for i in range(start, stop, step)` around the code built inside."""
    with b.goto_entry_block():
        counter = b.alloca(_I64)
    head, body, done = (b.append_basic_block() for _ in range(3))
    b.store(start, counter)
    b.branch(head)
    b.position_at_end(head)
    i = b.load(counter)
    b.cbranch(b.icmp_signed("<", i, stop), body, done)
    b.position_at_end(body)
    yield i
    b.store(b.add(i, step), counter)
    b.branch(head)
    b.position_at_end(done)


def _intrinsic(b: Any, name: str, kind: Any) -> Any:
    return b.module.globals.get(name) or ir.Function(b.module, kind, name)


def _min(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.icmp_signed("<", x, y), x, y)


def _module(tokens: int, vectors: Vectors) -> Any:
    module = ir.Module()
    rows = _rows(module, tokens, _tile(module, tokens, vectors))
    _entry(module, "alone", rows, lambda b: (_int(0), _int(1)))
    if library := _openmp():
        ask = [ctypes.cast(f, ctypes.c_void_p).value for f in (library.omp_get_thread_num, library.omp_get_num_threads)]
        kind = ir.FunctionType(_I32, []).as_pointer()
        _entry(module, "team", rows, lambda b: [b.sext(b.call(b.inttoptr(_int(f or 0), kind), []), _I64) for f in ask])
    return module


def _entry(module: Any, name: str, rows: Any, place: Any) -> None:
    """`name(arguments)`: the share of the blocks that belongs to this thread, `place` giving its number and their count."""
    function = ir.Function(module, ir.FunctionType(_VOID, [_LONGS]), name)
    b = ir.IRBuilder(function.append_basic_block())
    number, count = place(b)
    blocks = b.load(b.gep(function.args[0], [_int(7)]))
    first = b.sdiv(b.mul(blocks, number), count)
    last = b.sdiv(b.mul(blocks, b.add(number, _int(1))), count)
    b.call(rows, [function.args[0], first, last])
    b.ret_void()


def _rows(module: Any, tokens: int, tile: Any) -> Any:
    """Blocks `first..last` for all tokens: chunk by chunk of weights, and over each chunk tile by tile of tokens (the last may overlap)."""
    function = ir.Function(module, ir.FunctionType(_VOID, [_LONGS, _I64, _I64]), "rows")
    function.linkage = "internal"
    function.attributes.add("noinline")
    arguments, first, last = function.args
    b = ir.IRBuilder(function.append_basic_block())
    words, x, bias, out, inputs, outputs, total, _, chunk = (b.load(b.gep(arguments, [_int(k)])) for k in range(9))
    words, x, bias, out = (b.inttoptr(v, kind) for v, kind in zip((words, x, bias, out), _POINTERS, strict=True))
    with _loop(b, first, last, chunk) as block, _loop(b, _int(0), total, _int(tokens)) as token:
        token = _min(b, token, b.sub(total, _int(tokens)))
        x_tile, out_tile = b.gep(x, [b.mul(token, inputs)]), b.gep(out, [b.mul(token, outputs)])
        b.call(tile, [words, x_tile, bias, out_tile, inputs, outputs, block, _min(b, b.add(block, chunk), last)])
    b.ret_void()
    return function


def _tile(module: Any, tokens: int, vectors: Vectors) -> Any:
    """Blocks `first..last` for `tokens` tokens: as many blocks at once as fit in registers, then the rest one by one."""
    function = ir.Function(module, ir.FunctionType(_VOID, [*_POINTERS, _I64, _I64, _I64, _I64]), "tile")
    function.linkage = "internal"
    for pointer in function.args[:4]:
        pointer.add_attribute("noalias")
    first, last = function.args[6:]
    b = ir.IRBuilder(function.append_basic_block())
    at_once = vectors.blocks_at_once(tokens)
    middle = b.add(first, b.mul(b.sdiv(b.sub(last, first), _int(at_once)), _int(at_once)))
    for start, stop, count in ((first, middle, at_once), (middle, last, 1))[: 2 if at_once > 1 else 1]:
        with _loop(b, start, stop, _int(count)) as block:
            _sums(b, function.args, block, tokens, count, vectors.lanes)
    b.ret_void()
    return function


def _sums(b: Any, arguments: Any, block: Any, tokens: int, count: int, lanes: int) -> None:
    """The outputs of `count` blocks for `tokens` tokens: sums start at the bias and stay in registers along the inputs."""
    words, x, bias, out, inputs, outputs, *_ = arguments
    vector = ir.VectorType(_F32, lanes)
    fma = _intrinsic(b, f"llvm.fma.v{lanes}f32", ir.FunctionType(vector, [vector] * 3))
    column = b.mul(block, _int(2 * lanes))
    columns = [b.add(column, _int(v * lanes)) for v in range(2 * count)]
    with b.goto_entry_block():
        sums = [[b.alloca(vector) for _ in columns] for _ in range(tokens)]
    for v, at in enumerate(columns):
        start = b.load(b.bitcast(b.gep(bias, [at]), vector.as_pointer()), align=4)
        for row in sums:
            b.store(start, row[v])
    with _loop(b, _int(0), inputs, _int(1)) as i:
        weights = [w for k in range(count) for w in _weights(b, words, b.add(block, _int(k)), inputs, i, tokens, count, lanes)]
        for q, row in enumerate(sums):
            value = _broadcast(b, b.load(b.gep(x, [b.add(b.mul(_int(q), inputs), i)])), vector)
            for v, weight in enumerate(weights):
                b.store(b.call(fma, [value, weight, b.load(row[v])]), row[v])
    for q, row in enumerate(sums):
        for v, at in enumerate(columns):
            b.store(b.load(row[v]), b.bitcast(b.gep(out, [b.add(b.mul(_int(q), outputs), at)]), vector.as_pointer()), align=4)


def _weights(b: Any, words: Any, block: Any, inputs: Any, i: Any, tokens: int, count: int, lanes: int) -> tuple[Any, Any]:
    """The two weight vectors of a block at input `i`, and a prefetch of those to come where arithmetic would delay their request."""
    integers = ir.VectorType(_I32, lanes)
    at = b.gep(words, [b.mul(b.add(b.mul(block, inputs), i), _int(lanes))])
    ahead = 0 if tokens < 3 else 8 if count > 1 else 64
    if ahead:
        byte = ir.IntType(8).as_pointer()
        prefetch = _intrinsic(b, "llvm.prefetch.p0", ir.FunctionType(_VOID, [byte, _I32, _I32, _I32]))
        b.call(prefetch, [b.bitcast(b.gep(at, [_int(ahead * lanes)]), byte), *(ir.Constant(_I32, k) for k in (0, 3, 1))])
    word = b.load(b.bitcast(at, integers.as_pointer()), align=4)
    low = b.shl(word, ir.Constant(integers, [16] * lanes))
    high = b.and_(word, ir.Constant(integers, [0xFFFF0000] * lanes))
    vector = ir.VectorType(_F32, lanes)
    return b.bitcast(low, vector), b.bitcast(high, vector)


def _broadcast(b: Any, value: Any, vector: Any) -> Any:
    undefined, zero = ir.Constant(vector, ir.Undefined), ir.Constant(_I32, 0)
    one = b.insert_element(undefined, value, zero)
    return b.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count))
