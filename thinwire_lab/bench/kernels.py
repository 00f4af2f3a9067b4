"""How fast the inner loops are, in units of one `add_` over the gradient: three streams of memory.

Contenders take turns; figures are medians. What torch needs for the same result stands beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels.reference import bits, scales

COLUMNS = 1000
ROWS = 30  # that `measure` yields


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel: seconds, those of `add_` in the same turns, and those of plain torch, if any."""

    name: str
    seconds: float
    unit: float
    plain: float | None = None


Work = Callable[[Tensor], object]


def measure(n: int, turns: int, threads: int = 1) -> Iterator[Row]:
    """A row for each kernel, for n numbers."""
    torch.set_num_threads(threads)
    kernels.warm()
    draw = torch.Generator().manual_seed(0)
    grad, residual = torch.randn(n, generator=draw), torch.randn(n, generator=draw)
    bench = _Bench(residual, grad, turns)
    for density in (0.01, 0.001):
        yield from _flat(bench, density)
    yield from _by_row(bench)
    yield from _thresholds(bench)
    yield from _sparse(bench)
    yield from _rice(bench)
    yield from _values(bench)
    yield from _positions(bench)


class _Bench:
    def __init__(self, residual: Tensor, grad: Tensor, turns: int) -> None:
        self.residual, self.grad, self._turns = residual, grad, turns
        self.x = residual.clone()
        self.n = grad.numel()

    def row(self, name: str, work: Work, plain: Work | None = None) -> Row:
        contenders: list[Work] = [lambda x: x.add_(self.grad), work]
        contenders += [plain] if plain is not None else []
        taken: list[list[float]] = [[] for _ in contenders]
        for turn in range(self._turns + 1):
            for contender, seconds in zip(contenders, taken, strict=True):
                self.x.copy_(self.residual)
                begin = time.perf_counter()
                contender(self.x)
                if turn:  # the first is for caches and guesses
                    seconds.append(time.perf_counter() - begin)
        unit, ours, *rest = (statistics.median(seconds) for seconds in taken)
        return Row(name=name, seconds=ours, unit=unit, plain=rest[0] if rest else None)


def _flat(bench: _Bench, density: float) -> Iterator[Row]:
    k = int(bench.n * density)
    memo: dict[str, object] = {}

    def ours(x: Tensor) -> Tensor:
        return kernels.add_topk(x[None], bench.grad[None], 1.0, k, memo)[0]

    def first(x: Tensor) -> Tensor:
        return kernels.add_topk(x[None], bench.grad[None], 1.0, k, {})[0]

    def wrong(x: Tensor) -> Tensor:
        return kernels.add_topk(x[None], bench.grad[None], 1.0, k, {"guess": 1e-3})[0]

    def plain(x: Tensor) -> Tensor:
        return x.add_(bench.grad).abs().topk(k).indices

    yield bench.row(f"add, exact top-k {density:.1%}", ours, plain)
    yield bench.row("  first step: guess from a sample", first)
    yield bench.row("  a guess 1000 times too low", wrong)


def _by_row(bench: _Bench) -> Iterator[Row]:
    rows, k = (bench.n // COLUMNS, COLUMNS), 10
    cut = rows[0] * COLUMNS
    grad = bench.grad[:cut].view(rows)

    def ours(x: Tensor) -> Tensor:
        return kernels.add_topk(x[:cut].view(rows), grad, 1.0, k, {})[0]

    def plain(x: Tensor) -> Tensor:
        return x[:cut].view(rows).add_(grad).abs().topk(k, dim=1).indices

    yield bench.row(f"add, top-10 of every {COLUMNS}", ours, plain)


def _thresholds(bench: _Bench) -> Iterator[Row]:
    most = bench.n // 20

    def plain(x: Tensor) -> Tensor:
        return (x.abs() >= 2.5).nonzero()

    yield bench.row("add, non-finite left out", lambda x: kernels.accumulate(x, bench.grad))
    yield bench.row("count above a threshold", lambda x: kernels.above(x, 2.5, 0),
                    lambda x: (x.abs() >= 2.5).sum())  # fmt: skip
    yield bench.row("positions above a threshold", lambda x: kernels.above(x, 2.5, most), plain)


def _sparse(bench: _Bench) -> Iterator[Row]:
    k = bench.n // 100
    draw = torch.Generator().manual_seed(1)
    index = [torch.randint(bench.n, (k,), generator=draw).unique() for _ in range(4)]
    value = [torch.randn(i.numel(), generator=draw) for i in index]

    def plain_sum(x: Tensor) -> None:
        where, place = torch.cat(index).unique(return_inverse=True)
        torch.zeros(where.numel()).index_add_(0, place, torch.cat(value))

    yield bench.row("gather 1 %", lambda x: kernels.gather(x, index[0]), lambda x: x[index[0]])
    yield bench.row("sum of 4 payloads of 1 %", lambda x: kernels.merged(index, value), plain_sum)
    yield bench.row("scatter-add of 1 %", lambda x: kernels.scatter_add(x, index[0], value[0]),
                    lambda x: x.index_add_(0, index[0], value[0]))  # fmt: skip


def _rice(bench: _Bench) -> Iterator[Row]:
    k = bench.n // 100
    draw = torch.Generator().manual_seed(2)
    index = torch.randint(bench.n, (k,), generator=draw).unique()
    code = kernels.rice_encode(index)
    yield bench.row(f"Rice, {k:,} positions: encode", lambda x: kernels.rice_encode(index))
    yield bench.row(
        f"Rice, {k:,} positions: decode",
        lambda x: kernels.rice_decode(code, index.numel(), bench.n),
    )


def _values(bench: _Bench) -> Iterator[Row]:
    """Codes of numbers beside the same in plain torch."""
    numbers = torch.randn(bench.n, generator=torch.Generator().manual_seed(3))
    scale, codes = kernels.int8_encode(numbers, 256)
    small, eights = kernels.fp8_encode(numbers, 256)
    top, powers = kernels.natural_encode(numbers, 0)

    def row(what: str, call: Callable[[ModuleType, Tensor], object]) -> Row:
        return bench.row(what, lambda x: call(kernels, x), lambda x: call(scales, x))

    def levels(of: ModuleType, x: Tensor) -> object:
        return of.levels_encode(x, 512, 7, 0, norm="l2", clip=None, fitted=True)

    yield row("bf16: encode", lambda of, x: of.bf16_encode(x))
    yield row("fp16: encode", lambda of, x: of.half_encode(x))
    yield row("int8 in blocks of 256: encode", lambda of, x: of.int8_encode(x, 256))
    yield row("int8 in blocks of 256: decode", lambda of, x: of.scaled(codes, scale, 256))
    yield row("fp8 in blocks of 256: encode", lambda of, x: of.fp8_encode(x, 256))
    yield row("fp8 in blocks of 256: decode", lambda of, x: of.fp8_decode(eights, small, 256))
    yield row("4 bits at random (QSGD): encode", levels)
    yield row("powers of two: encode", lambda of, x: of.natural_encode(x, 0))
    yield row("powers of two: decode", lambda of, x: of.natural_decode(powers, int(top), x.dtype))
    yield row("signs in blocks of 512: encode", lambda of, x: of.sign_encode(x, 512))
    yield row("1-bit SGD in blocks of 512: encode", lambda of, x: of.onebit_encode(x, 512))


def _positions(bench: _Bench) -> Iterator[Row]:
    """Codes of positions beside the same in plain torch."""
    draw = torch.Generator().manual_seed(3)
    index = torch.randint(bench.n, (bench.n // 100,), generator=draw).unique()
    k = index.numel()
    marks, (counts, low) = kernels.bitmap_encode(index, bench.n), bits.block_encode(index, bench.n)

    def row(what: str, call: Callable[[ModuleType, Tensor], object]) -> Row:
        return bench.row(what, lambda x: call(kernels, x), lambda x: call(bits, x))

    yield row("bitmap of 1 %: encode", lambda of, x: of.bitmap_encode(index, bench.n))
    yield row("bitmap of 1 %: decode", lambda of, x: of.bitmap_decode(marks, k, bench.n))
    yield row("16 bits a position: encode", lambda of, x: of.block_encode(index, bench.n))
    yield row("16 bits a position: decode", lambda of, x: of.block_decode(counts, low))
