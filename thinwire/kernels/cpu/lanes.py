"""Vector lanes for Numba: what its own loops do not become.

A group of 32 numbers is added, tested and written in a few instructions, and which of them passed
comes back as the bits of one integer. These are plain LLVM vectors: the compiler makes of them what
the machine has (AVX-512, AVX2, NEON). Nobody checks addresses: loops must.

Magnitudes are compared as the bits of their floats, which order like the magnitudes themselves;
NaN counts as infinity, so that it is larger than every number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 32
LINE = 64  # bytes of a line of cache, which is written whole or read first
MASK, INFINITE = 0x7FFFFFFF, 0x7F800000  # all bits but the sign; those of infinity
_I1, _I32, _I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_I32, LANES)
FLOAT, WORD, AT = types.float32, types.uint32, types.uintp


def _repeat(number: int) -> Any:
    return ir.Constant(_INTS, [number] * LANES)


def _load(builder: Any, address: Any, kind: Any = _FLOATS) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 4
    return value


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 4


def _splat(builder: Any, x: Any, kind: Any) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), _repeat(0))


def _measure(builder: Any, floats: Any) -> Any:
    bits = builder.and_(builder.bitcast(floats, _INTS), _repeat(MASK))
    nan = builder.icmp_unsigned(">", bits, _repeat(INFINITE))
    return builder.select(nan, _repeat(INFINITE), bits)


def _to_bits(builder: Any, flags: Any) -> Any:
    return builder.bitcast(flags, _I32)


def _add(builder: Any, residual: Any, grad: Any, alpha: Any) -> tuple[Any, Any]:
    """residual += alpha * grad, where that is finite: the magnitudes, and where it is not."""
    old, new = _load(builder, residual), _load(builder, grad)
    total = builder.fadd(old, builder.fmul(_splat(builder, alpha, _FLOATS), new))
    bits = builder.and_(builder.bitcast(total, _INTS), _repeat(MASK))
    bad = builder.icmp_unsigned(">=", bits, _repeat(INFINITE))
    kept = builder.select(bad, old, total)
    _store(builder, kept, residual)
    return builder.and_(builder.bitcast(kept, _INTS), _repeat(MASK)), bad


def _compare(builder: Any, size: Any, edge: Any) -> Any:
    return builder.icmp_unsigned(">=", size, _splat(builder, edge, _INTS))


def _raise(builder: Any, size: Any, tops: Any) -> None:
    before = _load(builder, tops, _INTS)
    higher = builder.select(builder.icmp_unsigned(">", size, before), size, before)
    _store(builder, higher, tops)


def _intrinsic(result: Any, *given: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function for Numba's loops, with these types, from what emits its code."""

    def made(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = emit(builder, *args)
            return ir.Constant(_I32, 0) if value is None else value

        def typed(context: Any, *args: Any) -> Any:
            return result(*given), codegen

        return intrinsic(wraps(emit)(typed))

    return made


@_intrinsic(types.uint64, AT, AT, FLOAT, WORD)
def add_and_test(builder: Any, residual: Any, grad: Any, alpha: Any, edge: Any) -> Any:
    """Add; low bits: the magnitude reaches the edge; high bits: not finite, and left as it was."""
    size, bad = _add(builder, residual, grad, alpha)
    low = builder.zext(_to_bits(builder, _compare(builder, size, edge)), _I64)
    high = builder.zext(_to_bits(builder, bad), _I64)
    return builder.or_(low, builder.shl(high, ir.Constant(_I64, LANES)))


@_intrinsic(WORD, AT, AT, FLOAT, AT)
def add_and_raise(builder: Any, residual: Any, grad: Any, alpha: Any, tops: Any) -> Any:
    """Add; tops = max(tops, magnitude) lane by lane; bits: not finite, and left as it was."""
    size, bad = _add(builder, residual, grad, alpha)
    _raise(builder, size, tops)
    return _to_bits(builder, bad)


@_intrinsic(WORD, AT, AT)
def only_raise(builder: Any, x: Any, tops: Any) -> None:
    """tops = max(tops, |x|) lane by lane."""
    _raise(builder, _measure(builder, _load(builder, x)), tops)


@_intrinsic(WORD, AT, WORD)
def test(builder: Any, x: Any, edge: Any) -> Any:
    """Bits: |x| reaches the edge."""
    return _to_bits(builder, _compare(builder, _measure(builder, _load(builder, x)), edge))


@_intrinsic(WORD, AT, WORD)
def reach(builder: Any, keys: Any, edge: Any) -> Any:
    """Bits: the key, a magnitude's bits already, reaches the edge."""
    return _to_bits(builder, _compare(builder, _load(builder, keys, _INTS), edge))


@_intrinsic(WORD, WORD)
def count_ones(builder: Any, mask: Any) -> Any:
    """How many bits are set."""
    return builder.ctpop(mask)


@intrinsic
def find_first(context: Any, mask: Any) -> Any:
    """The number of the lowest bit that is set, in 32 or 64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(_I1, 0))

    return mask(mask), codegen


@_intrinsic(WORD, AT, AT)
def stream(builder: Any, source: Any, target: Any) -> None:
    """One line of numbers to a target on its boundary, past the caches; `fence` makes it seen."""
    line = ir.VectorType(ir.FloatType(), LINE // 4)
    put = builder.store(_load(builder, source, line), builder.inttoptr(target, line.as_pointer()))
    put.align = LINE
    put.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))


@_intrinsic(WORD)
def fence(builder: Any) -> None:
    """What was streamed is in memory before anything that follows."""
    builder.fence("seq_cst")
