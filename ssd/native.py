"""Machine code for small loops over vectors, built as LLVM IR: what the kernels of linear layers and of decoder layers share.

A kernel is a function of one array of 64-bit integers: addresses, counts, and floats by their bits. It is called by one thread (`alone`)
or by each thread of torch's own OpenMP team (`team`), so that no second pool of threads exists and these are awake between two operators.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

try:
    import llvmlite.binding as llvm
    from llvmlite import ir as ir
except ImportError:  # pragma: no cover - a dependency, but the package must import without it
    llvm = ir = None

log = logging.getLogger(__name__)

MAX_BLOCKS_AT_ONCE = 6
# How often a thread looks whether the others have come before it lets go of the core: some 10 us.
LOOKS = 2000


@dataclass(frozen=True, slots=True)
class Vectors:
    """The machine's vector registers: fp32 lanes in one, and how many there are."""

    lanes: int
    registers: int

    def blocks_at_once(self, tokens: int) -> int:
        """Blocks of output rows whose sums for `tokens` tokens fit in registers (0: none), beside one block's weights and the activations,
        all of them where they serve several blocks."""
        several = (self.registers - tokens - 3) // (2 * tokens)
        return min(MAX_BLOCKS_AT_ONCE, max(several, int(tokens <= self.max_tile)))

    @property
    def max_tile(self) -> int:
        """Most tokens whose sums for one block fit in registers."""
        return (self.registers - 3) // 2

    def tile(self, tokens: int) -> int:
        """How many of `tokens` tokens to take at once: as few times as registers allow, and about as many each time."""
        return tokens if tokens <= self.max_tile else -(-tokens // -(-tokens // self.max_tile))


VECTORS = {16: Vectors(16, 32), 8: Vectors(8, 16), 4: Vectors(4, 32)}  # AVX-512, AVX2, NEON


@functools.cache
def host_vectors() -> Vectors | None:
    """The vectors the kernels use here, or None where they would lose to torch."""
    if llvm is None:
        return None
    if platform.machine().lower() in ("arm64", "aarch64"):
        return VECTORS[4]
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return VECTORS[16]
    return VECTORS[8] if features.get("avx2") and features.get("fma") else None


def why_unavailable() -> str:
    """Why no kernel can be used here; empty where they can."""
    if llvm is None:
        return "llvmlite is not installed"
    return "" if host_vectors() else "this CPU has neither AVX-512, AVX2 with FMA, nor NEON"


# --- threads ---


@functools.cache
def openmp() -> Any:
    """The OpenMP library that torch was linked with, or None where it lacks GNU's entry point."""
    try:
        library = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))))
        library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = None
    except (StopIteration, OSError, AttributeError):
        log.info("torch's OpenMP has no GOMP_parallel here: bf16 linear layers use one thread")
        return None
    return library


class _Seen(threading.local):
    """The cores that a caller's team was last spread over: each thread that calls has a team of its own."""

    cores: frozenset[int] = frozenset()


_seen = _Seen()


def team_size() -> int:
    """Threads for a large kernel: torch's number, but no more than the cores that the caller may run on."""
    wanted = torch.get_num_threads()
    if wanted == 1:
        return 1
    if not hasattr(os, "sched_getaffinity"):
        return wanted
    cores = os.sched_getaffinity(0)
    threads = min(wanted, len(cores))
    if threads > 1 and cores != _seen.cores:
        spread(cores, threads)
    return threads


def spread(cores: set[int], threads: int) -> None:
    """Let the team's threads run on `cores`: they were born with the cores of their creator, which may have changed."""
    library = openmp()
    if library is not None:
        move = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: os.sched_setaffinity(0, cores))
        library.GOMP_parallel(ctypes.cast(move, ctypes.c_void_p), None, threads, 0)
    _seen.cores = frozenset(cores)


# --- compiled code ---


@dataclass(frozen=True, slots=True)
class Kernel:
    """Compiled code: called with an array of 64-bit integers by one thread, or (an address) by each thread of an OpenMP team.

    work: the address of the function that does pieces of it; how many there are stands at place `count_at` of the array.
    """

    alone: Any
    team: int
    work: int
    count_at: int
    engine: Any  # owns the machine code

    def run(self, arguments: Any, threads: int = 1) -> None:
        """Run on an array from `integers`, with so many threads where there is a team."""
        if threads > 1 and self.team:
            openmp().GOMP_parallel(self.team, arguments, threads, 0)
        else:
            self.alone(arguments)


class Steps:
    """Calls of kernels one after another, in one call: a team wakes up once, and waits awake between two steps."""

    def __init__(self, steps: Sequence[tuple[Kernel, Any, bool]]) -> None:
        """Each step: a kernel, its array of arguments, and whether the team shares it."""
        rows = [(kernel.work, ctypes.addressof(given), given[kernel.count_at], int(shared)) for kernel, given, shared in steps]
        self._steps, self._table = steps, integers([value for row in rows for value in row])
        self._arrived = integers([0])
        self._arguments = integers((ctypes.addressof(self._table), len(rows), ctypes.addressof(self._arrived)))

    def run(self, threads: int) -> None:
        """Do all steps with so many threads."""
        self._arrived[0] = 0
        _runner().run(self._arguments, threads)


def integers(values: Sequence[int]) -> Any:
    """The array of arguments of a kernel."""
    return (ctypes.c_int64 * len(values))(*values)


def bits(value: float) -> int:
    """A float as a kernel's argument."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


_compiling = threading.Lock()
Made = TypeVar("Made")
Given = ParamSpec("Given")


def once(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """Like functools.cache, but threads that ask at once get the same: of two, one would be thrown away with its machine code."""
    lock, made = threading.RLock(), functools.cache(make)

    @functools.wraps(make)
    def get(*given: Given.args, **named: Given.kwargs) -> Made:
        with lock:
            return made(*given, **named)  # type: ignore[arg-type]

    return get


def compiled(module: Any) -> Any:
    """The machine code of a module: what owns it, and knows where its functions lie."""
    with _compiling:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
        )
        parsed = llvm.parse_assembly(str(module))
        passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=1))
        passes.getModulePassManager().run(parsed, passes)
        engine = llvm.create_mcjit_compiler(parsed, target)
        engine.finalize_object()
    return engine


if ir is not None:
    F32, I32, I64, VOID = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.VoidType()
    BYTES, FLOATS, LONGS = ir.IntType(8).as_pointer(), F32.as_pointer(), I64.as_pointer()


# Polynomials of e^r and log(1 + r): S. Moshier's, of the Cephes library.
_EXP = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG = (
    *(-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)


class Code:
    """Builds one function over vectors of `lanes` floats; `args` are its arguments."""

    def __init__(self, module: Any, name: str, kinds: Sequence[Any], lanes: int, *, inside: bool = True) -> None:
        self.function = ir.Function(module, ir.FunctionType(VOID, kinds), name)
        if inside:
            self.function.linkage = "internal"
        self.module, self.lanes, self.args = module, lanes, self.function.args
        self.vector = ir.VectorType(F32, lanes)
        self.words = ir.VectorType(I32, lanes)
        self.b = ir.IRBuilder(self.function.append_basic_block())

    # --- integers and loops ---

    def sum(self, *values: Any) -> Any:
        """The sum of integers."""
        return functools.reduce(self.b.add, map(integer, values))

    def product(self, *values: Any) -> Any:
        """The product of integers."""
        return functools.reduce(self.b.mul, map(integer, values))

    def least(self, x: Any, y: Any) -> Any:
        """The lesser of two integers."""
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    @contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Any]:
        """`for i in range(start, stop, step)` around the code built inside."""
        b, start, stop, step = self.b, integer(start), integer(stop), integer(step)
        with b.goto_entry_block():
            counter = b.alloca(I64)
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

    # --- memory ---

    def longs(self, array: Any, count: int, first: Any = 0) -> list[Any]:
        """The `count` integers of an array from place `first` on."""
        return [self.b.load(self.b.gep(array, [self.sum(first, k)])) for k in range(count)]

    def pointer(self, address: Any, kind: Any | None = None) -> Any:
        """An address as a pointer, to floats unless said otherwise."""
        return self.b.inttoptr(address, kind or FLOATS)

    def at(self, pointer: Any, *offset: Any) -> Any:
        """The pointer, moved by the sum of `offset`."""
        return self.b.gep(pointer, [self.sum(*offset)])

    def load(self, pointer: Any, kind: Any | None = None) -> Any:
        """The vector that lies at a pointer."""
        return self.b.load(self.b.bitcast(pointer, (kind or self.vector).as_pointer()), align=4 if kind is None else 1)

    def store(self, value: Any, pointer: Any) -> None:
        """Put a vector where a pointer points."""
        self.b.store(value, self.b.bitcast(pointer, value.type.as_pointer()), align=4)

    def variables(self, count: int, start: Any) -> list[Any]:
        """Vectors that change, all `start` at first; they stay in registers where there are enough."""
        with self.b.goto_entry_block():
            found = [self.b.alloca(self.vector) for _ in range(count)]
        for variable in found:
            self.b.store(start, variable)
        return found

    # --- vectors ---

    def constant(self, value: float) -> Any:
        """A vector of one number."""
        return ir.Constant(self.vector, [ir.Constant(F32, struct.unpack("<f", struct.pack("<f", value))[0])] * self.lanes)

    def word(self, value: int) -> Any:
        """A vector of one 32-bit integer."""
        return ir.Constant(self.words, [value] * self.lanes)

    def broadcast(self, value: Any) -> Any:
        """A vector of one float."""
        one = self.b.insert_element(ir.Constant(self.vector, ir.Undefined), value, ir.Constant(I32, 0))
        return self.b.shuffle_vector(one, ir.Constant(self.vector, ir.Undefined), self.word(0))

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """`x * y + z`, rounded once."""
        return self.b.call(self.intrinsic(f"llvm.fma.v{self.lanes}f32", self.vector, [self.vector] * 3), [x, y, z])

    def reduce(self, vector: Any, how: str) -> Any:
        """The sum (`fadd`) or the largest (`fmax`) of a vector's numbers, in an order that the hardware likes."""
        if how == "fmax":
            return self.b.call(self.intrinsic(f"llvm.vector.reduce.fmax.v{self.lanes}f32", F32, [self.vector]), [vector])
        width = self.lanes
        while width > 1:
            width //= 2
            turned = ir.Constant(self.words, [(lane + width) % self.lanes for lane in range(self.lanes)])
            vector = self.b.fadd(vector, self.b.shuffle_vector(vector, vector, turned))
        return self.b.extract_element(vector, ir.Constant(I32, 0))

    def exp(self, x: Any) -> Any:
        """e to the power of each number, to a unit or two in the last place; at least e^-87."""
        b = self.b
        largest = self.intrinsic(f"llvm.maxnum.v{self.lanes}f32", self.vector, [self.vector] * 2)
        smallest = self.intrinsic(f"llvm.minnum.v{self.lanes}f32", self.vector, [self.vector] * 2)
        x = b.call(smallest, [b.call(largest, [x, self.constant(-87.0)]), self.constant(88.0)])
        nearest = self.intrinsic(f"llvm.nearbyint.v{self.lanes}f32", self.vector, [self.vector])
        n = b.call(nearest, [b.fmul(x, self.constant(1.4426950408889634))])
        # The natural logarithm of 2 in two parts, so that the rest is exact to the last place.
        r = self.fma(n, self.constant(2.12194440e-4), self.fma(n, self.constant(-0.693359375), x))
        power = self.constant(1.9875691500e-4)
        for factor in _EXP:
            power = self.fma(power, r, self.constant(factor))
        power = b.fadd(self.fma(power, b.fmul(r, r), r), self.constant(1.0))
        scale = b.shl(b.add(b.fptosi(n, self.words), self.word(127)), self.word(23))
        return b.fmul(power, b.bitcast(scale, self.vector))

    def log(self, x: Any) -> Any:
        """The natural logarithm of each number, to a unit or two in the last place; numbers are positive and normal."""
        b = self.b
        bits = b.bitcast(x, self.words)
        exponent = b.sub(b.lshr(bits, self.word(23)), self.word(126))
        part = b.bitcast(b.or_(b.and_(bits, self.word(0x007FFFFF)), self.word(0x3F000000)), self.vector)
        low = b.fcmp_ordered("<", part, self.constant(0.707106781186547524))
        exponent = b.select(low, b.sub(exponent, self.word(1)), exponent)
        r = b.fsub(b.select(low, b.fadd(part, part), part), self.constant(1.0))
        power = self.constant(7.0376836292e-2)
        for factor in _LOG:
            power = self.fma(power, r, self.constant(factor))
        square, e = b.fmul(r, r), b.sitofp(exponent, self.vector)
        rest = self.fma(e, self.constant(-2.12194440e-4), b.fmul(b.fmul(power, r), square))
        rest = self.fma(square, self.constant(-0.5), rest)
        return self.fma(e, self.constant(0.693359375), b.fadd(r, rest))

    def intrinsic(self, name: str, result: Any, kinds: Sequence[Any]) -> Any:
        """One of LLVM's own functions."""
        return self.module.globals.get(name) or ir.Function(self.module, ir.FunctionType(result, kinds), name)


def integer(value: Any) -> Any:
    """A 64-bit integer of the code that is built."""
    return ir.Constant(I64, value) if isinstance(value, int) else value


def kernel(module: Any, work: Any, count_at: int) -> Kernel:
    """The kernel of which each thread calls `work(arguments, first, last, thread)` with its share of as many pieces as stand at place
    `count_at` of the arguments."""

    def share(code: Code, number: Any, threads: Any) -> None:
        (total,) = code.longs(code.args[0], 1, count_at)
        code.b.call(work, [code.args[0], *_share(code, total, number, threads), number])

    for name in ("alone", "team"):
        _entry(module, name, share)
    code = Code(module, "work", [LONGS, I64, I64, I64], 1, inside=False)
    code.b.call(work, code.args)
    code.b.ret_void()
    return _kernel(module, count_at)


def _kernel(module: Any, count_at: int = 0) -> Kernel:
    """What a module with functions `alone` and `team` does, and `work` if it is to be a step among others."""
    engine = compiled(module)
    alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("alone"))
    team = engine.get_function_address("team") if openmp() else 0
    work = engine.get_function_address("work") if "work" in module.globals else 0
    return Kernel(alone, team, work, count_at, engine)


def _entry(module: Any, name: str, build: Callable[[Code, Any, Any], None]) -> None:
    """A function of an array of arguments; `build` makes its code, knowing the thread's number and how many there are."""
    code, library = Code(module, name, [LONGS], 1, inside=False), openmp()
    number, threads = integer(0), integer(1)
    if name == "team" and library is not None:
        number, threads = (_asked(code, function) for function in (library.omp_get_thread_num, library.omp_get_num_threads))
    build(code, number, threads)
    code.b.ret_void()


def _asked(code: Code, function: Any) -> Any:
    """What a function of a library says."""
    kind = ir.FunctionType(I32, []).as_pointer()
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    return code.b.sext(code.b.call(code.b.inttoptr(integer(address), kind), []), I64)


def _share(code: Code, total: Any, number: Any, threads: Any) -> list[Any]:
    """First and last of `total` pieces for one thread; none where its number is past the threads."""
    b = code.b
    return [code.least(total, b.sdiv(b.mul(total, share), threads)) for share in (number, b.add(number, integer(1)))]


@once
def _runner() -> Kernel:
    """Runs steps; after each the threads wait for one another, at first with open eyes."""
    module = ir.Module()

    def run(code: Code, number: Any, threads: Any) -> None:
        b, kind = code.b, ir.FunctionType(VOID, [LONGS, I64, I64, I64]).as_pointer()
        steps, count, arrived = code.longs(code.args[0], 3)
        steps, arrived = code.pointer(steps, LONGS), code.pointer(arrived, LONGS)
        with code.loop(0, count) as step:
            work, given, total, shared = code.longs(steps, 4, code.product(step, 4))
            sharing = b.select(b.icmp_signed("!=", shared, integer(0)), threads, integer(1))
            b.call(b.inttoptr(work, kind), [code.pointer(given, LONGS), *_share(code, total, number, sharing), number])
            _meet(code, arrived, code.product(b.add(step, integer(1)), threads))

    for name in ("alone", "team"):
        _entry(module, name, run)
    return _kernel(module)


def _meet(code: Code, arrived: Any, everyone: Any) -> None:
    """Wait until everyone has arrived; before long, let others have the core, who may be in the way of one that has not."""
    b = code.b
    b.atomic_rmw("add", arrived, integer(1), "seq_cst")
    with b.goto_entry_block():
        looks = b.alloca(I64)
    look, again, wait, done = (b.append_basic_block() for _ in range(4))
    b.store(integer(0), looks)
    b.branch(look)
    b.position_at_end(look)
    b.cbranch(b.icmp_signed("<", b.load_atomic(arrived, "seq_cst", 8), everyone), again, done)
    b.position_at_end(again)
    seen = b.add(b.load(looks), integer(1))
    b.store(seen, looks)
    b.cbranch(b.icmp_signed("<", seen, integer(LOOKS)), look, wait)
    b.position_at_end(wait)
    if hasattr(os, "sched_yield"):
        _asked(code, ctypes.CDLL(None).sched_yield)
    b.branch(look)
    b.position_at_end(done)
