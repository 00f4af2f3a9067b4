"""Value codes of eight bits and fewer: a scale a block, and a small code a number.

    Int8, Fp8     rounded to the nearest of 255 numbers
    Signs         one bit: plus or minus the mean magnitude of the block (EF-signSGD)
    OneBit        one bit: the mean of the block's positive or of its negative numbers (1-bit SGD)
    Levels        a few levels, rounded at random so that the expectation is right (QSGD, TernGrad)
    Natural       powers of two, rounded at random (natural compression; no blocks)

All answer NaN to a block that holds a NaN or an infinity, so that nobody misses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.draws import uniform
from thinwire.kernels.bits import divisor, held, in_blocks, largest
from thinwire.protocols import WireError
from thinwire.wire.packing import blocks_of, out_of_blocks, packed_bytes, unpacked
from thinwire.wire.values import as_numbers


@dataclass(frozen=True)
class Int8:
    """Whole numbers from -127 to 127 times a scale a block."""

    block: int = 256
    exact: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _checked_block(self.block)

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return 4 * blocks_of(n, self.block) + n

    def encode(self, x: Tensor, salt: str = "") -> Tensor:
        scale, codes = kernels.int8_encode(x, self.block)
        return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)])

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        (scale,), body = _read_scales(data, n, self.block, 1, dtype)
        return kernels.scaled(as_numbers(body, torch.int8, n), scale, self.block)


@dataclass(frozen=True)
class Fp8:
    """Eight-bit floating point (e4m3) times a scale a block, so that the largest just fits."""

    block: int = 256
    exact: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = True
    _TOP: ClassVar[float] = 448.0

    def __post_init__(self) -> None:
        _checked_block(self.block)

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return 4 * blocks_of(n, self.block) + n

    def encode(self, x: Tensor, salt: str = "") -> Tensor:
        rows = in_blocks(x, self.block)
        scale = largest(rows) / self._TOP
        small = (rows / divisor(scale)).clamp_(-self._TOP, self._TOP)
        codes = out_of_blocks(small.to(torch.float8_e4m3fn), x.numel())
        return torch.cat([held(scale).view(torch.uint8), codes.view(torch.uint8)])

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        (scale,), body = _read_scales(data, n, self.block, 1, dtype)
        return kernels.scaled(as_numbers(body, torch.float8_e4m3fn, n).to(dtype), scale, self.block)


@dataclass(frozen=True)
class Signs:
    """One bit a number: the sign, times the mean magnitude of its block."""

    block: int = 512
    exact: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _checked_block(self.block)

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return 4 * blocks_of(n, self.block) + packed_bytes(n, 1)

    def encode(self, x: Tensor, salt: str = "") -> Tensor:
        scale, signs = kernels.sign_encode(x, self.block)
        return torch.cat([scale.view(torch.uint8), signs])

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        (scale,), body = _read_scales(data, n, self.block, 1, dtype)
        return kernels.scaled(unpacked(body, 1, n).view(torch.int8) * 2 - 1, scale, self.block)


@dataclass(frozen=True)
class OneBit:
    """One bit a number: it is the mean of its block's numbers of that sign."""

    block: int = 512
    exact: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _checked_block(self.block)

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return 8 * blocks_of(n, self.block) + packed_bytes(n, 1)

    def encode(self, x: Tensor, salt: str = "") -> Tensor:
        rows = in_blocks(x, self.block)
        top = largest(rows)
        unit = rows / divisor(top)
        means = [top * _mean_of(unit, unit > 0), top * _mean_of(unit, unit < 0)]
        signs = kernels.pack((x >= 0).to(torch.uint8), 1)
        return torch.cat([*(held(mean).view(torch.uint8) for mean in means), signs])

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        (above, below), body = _read_scales(data, n, self.block, 2, dtype)
        positive = in_blocks(unpacked(body, 1, n), self.block)
        return out_of_blocks(torch.where(positive > 0, above[:, None], below[:, None]), n)


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Whole multiples of scale / s, s = 2^(bits-1) - 1, rounded up or down at random.

    The scale is the block's norm (`"l2"`, QSGD) or its largest magnitude (`"max"`, TernGrad), of
    numbers held at `clip` standard deviations. The expectation is the number itself; but the error
    may be larger than the number, and fed back it would grow without end. With `fitted` the scale
    is the one nearest to the numbers in the least-squares sense, and the error never exceeds them:
    |x - c q|^2 = |x|^2 - <x, q>^2 / |q|^2.
    """

    bits: int = 4
    block: int = 512
    norm: str = "l2"
    clip: float | None = None
    fitted: bool = True
    seed: int = 0
    exact: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _checked_block(self.block)
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits must be 2, 4 or 8, got {self.bits!r}")
        if self.norm not in ("l2", "max"):
            raise ValueError(f"norm must be 'l2' or 'max', got {self.norm!r}")
        if self.clip is not None and not (isinstance(self.clip, int | float) and self.clip > 0):
            raise ValueError(
                f"clip must be above 0 standard deviations, or None, got {self.clip!r}"
            )

    @property
    def levels(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return 4 * blocks_of(n, self.block) + packed_bytes(n, self.bits)

    def encode(self, x: Tensor, salt: str = "") -> Tensor:
        rows = in_blocks(x, self.block)
        top = largest(rows)
        unit = rows / divisor(top)  # within -1 and 1: squares neither overflow nor vanish
        clipped = unit
        if self.clip is not None:
            limit = self.clip * unit.square().mean(dim=1, keepdim=True).sqrt()
            clipped = unit.clamp(-limit, limit)
        scale = largest(clipped) if self.norm == "max" else clipped.norm(dim=1, keepdim=True)
        share = clipped.abs() / divisor(scale) * self.levels
        whole = (share + uniform(share, self.seed, salt)).floor_().clamp_(max=self.levels)
        codes = whole * unit.sign()
        step = scale / self.levels
        if self.fitted:
            square = codes.square().sum(dim=1, keepdim=True)
            step = (unit * codes).sum(dim=1, keepdim=True) / divisor(square)
        body = (out_of_blocks(codes, x.numel()) + self.levels).to(torch.uint8)
        return torch.cat([held(top * step).view(torch.uint8), kernels.pack(body, self.bits)])

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        (step,), body = _read_scales(data, n, self.block, 1, dtype)
        codes = unpacked(body, self.bits, n).view(torch.int8) - self.levels
        return kernels.scaled(codes, step, self.block)


@dataclass(frozen=True, kw_only=True)
class Natural:
    """A sign and a power of two, up or down at random: eight bits, the mantissa gone.

    Powers are counted from the largest of the message; what is 2^-126 of it or less is zero.
    Variance at most 1/8 of the square. Horvath et al. 2022 (arXiv 1905.10988).
    """

    seed: int = 0
    exact: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = True
    _BROKEN: ClassVar[int] = 2**30  # stands for a message that holds a NaN or an infinity

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return 4 + n

    def encode(self, x: Tensor, salt: str = "") -> Tensor:
        if not bool(x.isfinite().all()):
            head = torch.tensor([self._BROKEN], dtype=torch.int32, device=x.device)
            return torch.cat([head.view(torch.uint8), x.new_zeros(x.numel(), dtype=torch.uint8)])
        mantissa, power = torch.frexp(x.double().abs())  # |x| = mantissa * 2^power, below 2^power
        up = uniform(x, self.seed, salt) < 2 * mantissa - 1
        power = power - 1 + up.to(power.dtype)
        power = power.clamp(max=127)
        top = int(power[x != 0].max()) if bool(x.any()) else 0
        below = top - power
        code = torch.where((x != 0) & (below < 127), below + 1, 0)
        code = code + 128 * ((x < 0) & (code > 0))
        head = torch.tensor([top], dtype=torch.int32, device=x.device).view(torch.uint8)
        return torch.cat([head, code.to(torch.uint8)])

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        if data.numel() != 4 + n:
            raise WireError(f"expected {4 + n} bytes of powers of two, got {data.numel()}")
        top = int(as_numbers(data[:4], torch.int32, 1))
        if top == self._BROKEN:
            return torch.full((n,), float("nan"), dtype=dtype, device=data.device)
        if not -1100 <= top <= 127:
            raise WireError(f"a power of two of {top} is outside [-1100, 127]")
        code = data[4:].to(torch.int64)
        size = torch.exp2((top + 1 - code % 128).double())
        signed = torch.where(code >= 128, -size, size)
        return torch.where(code % 128 > 0, signed, 0.0).to(dtype)


def _mean_of(unit: Tensor, there: Tensor) -> Tensor:
    total = torch.where(there, unit, 0.0).sum(dim=1, keepdim=True)
    broken = torch.where(unit.isfinite().all(dim=1, keepdim=True), 0.0, float("nan"))
    return total / there.sum(dim=1, keepdim=True).clamp(min=1) + broken


def _read_scales(
    data: Tensor, n: int, block: int, each: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """The scales, (blocks,) each, and the bytes after them."""
    count = blocks_of(n, block)
    width = 4 * count
    if data.numel() < each * width:
        raise WireError(f"expected {each * width} bytes of scales, got {data.numel()} in all")
    parts = data[: each * width].split(width) if width else [data[:0]] * each
    scales = [as_numbers(part, torch.float32, count).to(dtype) for part in parts]
    return scales, data[each * width :]


def _checked_block(block: int) -> None:
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block must be a whole number of at least 1, got {block!r}; 512 is usual")
