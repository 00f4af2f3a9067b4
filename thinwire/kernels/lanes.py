"""Vector lanes for Numba: what its own loops do not become.

A group of 32 numbers is added, tested and written in a few instructions, and which of them passed
comes back as the bits of one integer. These are plain LLVM vectors: the compiler makes of them what
the machine has (AVX-512, AVX2, NEON). Addresses are checked by nobody: `cpu.py` alone calls this.

Magnitudes are compared as the bits of their floats, which order like the magnitudes themselves;
NaN counts as infinity, so that it is larger than every number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 32
LINE = 64  # bytes of a line of cache, which is written whole or read first
MASK, INFINITE = 0x7FFFFFFF, 0x7F800000  # all bits but the sign; those of infinity
_I1, _I32, _I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(_I32, LANES)
Code = tuple[Any, Callable[[Any, Any, Any, Any], Any]]


def _all(number: int) -> Any:
    return ir.Constant(_INTS, [number] * LANES)


def _load(builder: Any, address: Any, kind: Any = _FLOATS) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 4
    return value


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = 4


def _splat(builder: Any, x: Any, kind: Any) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), _all(0))


def _size(builder: Any, floats: Any) -> Any:
    bits = builder.and_(builder.bitcast(floats, _INTS), _all(MASK))
    nan = builder.icmp_unsigned(">", bits, _all(INFINITE))
    return builder.select(nan, _all(INFINITE), bits)


def _bits(builder: Any, flags: Any) -> Any:
    return builder.bitcast(flags, _I32)


def _added(builder: Any, residual: Any, grad: Any, alpha: Any) -> tuple[Any, Any]:
    """residual += alpha * grad, where that is finite: the magnitudes, and where it is not."""
    old, new = _load(builder, residual), _load(builder, grad)
    total = builder.fadd(old, builder.fmul(_splat(builder, alpha, _FLOATS), new))
    bits = builder.and_(builder.bitcast(total, _INTS), _all(MASK))
    bad = builder.icmp_unsigned(">=", bits, _all(INFINITE))
    kept = builder.select(bad, old, total)
    _store(builder, kept, residual)
    return builder.and_(builder.bitcast(kept, _INTS), _all(MASK)), bad


def _reach(builder: Any, size: Any, edge: Any) -> Any:
    return builder.icmp_unsigned(">=", size, _splat(builder, edge, _INTS))


@intrinsic
def add_and_test(context: Any, residual: Any, grad: Any, alpha: Any, edge: Any) -> Code:
    """Add; low bits: the magnitude reaches the edge; high bits: not finite, and left as it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size, bad = _added(builder, *args[:3])
        low = builder.zext(_bits(builder, _reach(builder, size, args[3])), _I64)
        high = builder.zext(_bits(builder, bad), _I64)
        return builder.or_(low, builder.shl(high, ir.Constant(_I64, LANES)))

    return types.uint64(types.uintp, types.uintp, types.float32, types.uint32), codegen


@intrinsic
def add_and_raise(context: Any, residual: Any, grad: Any, alpha: Any, tops: Any) -> Code:
    """Add; tops = max(tops, magnitude) lane by lane; bits: not finite, and left as it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size, bad = _added(builder, *args[:3])
        _raise(builder, size, args[3])
        return _bits(builder, bad)

    return types.uint32(types.uintp, types.uintp, types.float32, types.uintp), codegen


def _raise(builder: Any, size: Any, tops: Any) -> None:
    before = _load(builder, tops, _INTS)
    higher = builder.select(builder.icmp_unsigned(">", size, before), size, before)
    _store(builder, higher, tops)


@intrinsic
def only_raise(context: Any, x: Any, tops: Any) -> Code:
    """tops = max(tops, |x|) lane by lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _raise(builder, _size(builder, _load(builder, args[0])), args[1])
        return ir.Constant(_I32, 0)

    return types.uint32(types.uintp, types.uintp), codegen


@intrinsic
def test(context: Any, x: Any, edge: Any) -> Code:
    """Bits: |x| reaches the edge."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _bits(builder, _reach(builder, _size(builder, _load(builder, args[0])), args[1]))

    return types.uint32(types.uintp, types.uint32), codegen


@intrinsic
def reach(context: Any, keys: Any, edge: Any) -> Code:
    """Bits: the key, a magnitude's bits already, reaches the edge."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _bits(builder, _reach(builder, _load(builder, args[0], _INTS), args[1]))

    return types.uint32(types.uintp, types.uint32), codegen


@intrinsic
def first(context: Any, mask: Any) -> Code:
    """The number of the lowest bit that is set, in 32 or 64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(_I1, 0))

    return mask(mask), codegen


@intrinsic
def ones(context: Any, mask: Any) -> Code:
    """How many bits are set."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint32(types.uint32), codegen


@intrinsic
def stream(context: Any, source: Any, target: Any) -> Code:
    """One line of numbers to a target on its boundary, past the caches; `fence` makes it seen."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.FloatType(), LINE // 4)
        put = builder.store(
            _load(builder, args[0], line), builder.inttoptr(args[1], line.as_pointer())
        )
        put.align = LINE
        put.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))
        return ir.Constant(_I32, 0)

    return types.uint32(types.uintp, types.uintp), codegen


@intrinsic
def fence(context: Any) -> Code:
    """What was streamed is in memory before anything that follows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return ir.Constant(_I32, 0)

    return types.uint32(), codegen
