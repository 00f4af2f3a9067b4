"""Value codes of eight bits and fewer: a scale a block, and a small code a number.

    Int8, Fp8     rounded to the nearest of 255 numbers
    Signs         one bit: plus or minus the mean magnitude of the block (EF-signSGD)
    OneBit        one bit: the mean of the block's positive or of its negative numbers (1-bit SGD)
    Levels        a few levels, rounded at random so that the expectation is right (QSGD, TernGrad)
    Natural       powers of two, rounded at random (natural compression; no blocks)

All answer NaN to a block that holds a NaN or an infinity, so that nobody misses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels.reference.scales import BROKEN, place
from thinwire.layout import shared_seed
from thinwire.protocols import WireError
from thinwire.schedule import checked_flag, checked_whole
from thinwire.wire.packing import Ends, blocks_of, edges_of, packed_bytes, unpacked
from thinwire.wire.values import ValueCodec, as_numbers, make_message


@dataclass(frozen=True)
class Int8:
    """Whole numbers from -127 to 127 times a scale a block."""

    block: int = 256
    ends: Ends = field(default=(), repr=False)
    exact: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _checked_block(self.block)

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return 4 * blocks_of(n, self.block, self.ends) + n

    def encode(self, x: Tensor, salt: str = "", out: Tensor | None = None) -> Tensor:
        out = make_message(self, x) if out is None else out
        scale, codes = out.split([out.numel() - x.numel(), x.numel()])
        kernels.int8_encode(
            x, self.block, _edges(self, x), (scale.view(torch.float32), codes.view(torch.int8))
        )
        return out

    def decode(
        self, data: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None,
        alpha: float | None = None,
    ) -> Tensor:  # fmt: skip
        (scale,), body = _read_scales(self, data, n, 1, dtype)
        codes = as_numbers(body, torch.int8, n)
        return kernels.scaled(codes, scale, self.block, _edges(self, data), out, alpha)


@dataclass(frozen=True)
class Fp8:
    """Eight-bit floating point (e4m3) times a scale a block, so that the largest just fits."""

    block: int = 256
    ends: Ends = field(default=(), repr=False)
    exact: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _checked_block(self.block)

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return 4 * blocks_of(n, self.block, self.ends) + n

    def encode(self, x: Tensor, salt: str = "", out: Tensor | None = None) -> Tensor:
        out = make_message(self, x) if out is None else out
        scale, codes = out.split([out.numel() - x.numel(), x.numel()])
        kernels.fp8_encode(x, self.block, _edges(self, x), (scale.view(torch.float32), codes))
        return out

    def decode(
        self, data: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None,
        alpha: float | None = None,
    ) -> Tensor:  # fmt: skip
        (scale,), body = _read_scales(self, data, n, 1, dtype)
        codes = as_numbers(body, torch.uint8, n)
        return kernels.fp8_decode(codes, scale, self.block, _edges(self, data), out, alpha)


@dataclass(frozen=True)
class Signs:
    """One bit a number: the sign, times the mean magnitude of its block."""

    block: int = 512
    ends: Ends = field(default=(), repr=False)
    exact: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _checked_block(self.block)

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return 4 * blocks_of(n, self.block, self.ends) + packed_bytes(n, 1)

    def encode(self, x: Tensor, salt: str = "", out: Tensor | None = None) -> Tensor:
        scale, signs = kernels.sign_encode(x, self.block, _edges(self, x))
        return place(torch.cat([scale.view(torch.uint8), signs]), out)

    def decode(
        self, data: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None,
        alpha: float | None = None,
    ) -> Tensor:  # fmt: skip
        (scale,), body = _read_scales(self, data, n, 1, dtype)
        signs = unpacked(body, 1, n).view(torch.int8) * 2 - 1
        return kernels.scaled(signs, scale, self.block, _edges(self, data), out, alpha)


@dataclass(frozen=True)
class OneBit:
    """One bit a number: it is the mean of its block's numbers of that sign."""

    block: int = 512
    ends: Ends = field(default=(), repr=False)
    exact: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _checked_block(self.block)

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return 8 * blocks_of(n, self.block, self.ends) + packed_bytes(n, 1)

    def encode(self, x: Tensor, salt: str = "", out: Tensor | None = None) -> Tensor:
        above, below, signs = kernels.onebit_encode(x, self.block, _edges(self, x))
        return place(torch.cat([above.view(torch.uint8), below.view(torch.uint8), signs]), out)

    def decode(
        self, data: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None,
        alpha: float | None = None,
    ) -> Tensor:  # fmt: skip
        (above, below), body = _read_scales(self, data, n, 2, dtype)
        signs = unpacked(body, 1, n)
        values = kernels.either(signs, above, below, self.block, _edges(self, data))
        return place(values, out, alpha)


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Whole multiples of scale / s, s = 2^(bits-1) - 1: up or down at random, or the `nearest`.

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
    nearest: bool = False
    seed: int = 0
    ends: Ends = field(default=(), repr=False)
    exact: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _checked_block(self.block)
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits must be 2, 4 or 8, got {self.bits!r}")
        checked_flag("fitted", self.fitted)
        checked_flag("nearest", self.nearest)
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
        return 4 * blocks_of(n, self.block, self.ends) + packed_bytes(n, self.bits)

    def encode(self, x: Tensor, salt: str = "", out: Tensor | None = None) -> Tensor:
        seed = None if self.nearest else shared_seed(self.seed, 0, salt)
        scale, codes = kernels.levels_encode(
            x, self.block, self.levels, seed, _edges(self, x),
            norm=self.norm, clip=self.clip, fitted=self.fitted,
        )  # fmt: skip
        return place(torch.cat([scale.view(torch.uint8), kernels.pack(codes, self.bits)]), out)

    def decode(
        self, data: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None,
        alpha: float | None = None,
    ) -> Tensor:  # fmt: skip
        (step,), body = _read_scales(self, data, n, 1, dtype)
        codes = unpacked(body, self.bits, n).view(torch.int8) - self.levels
        return kernels.scaled(codes, step, self.block, _edges(self, data), out, alpha)


@dataclass(frozen=True, kw_only=True)
class Natural:
    """A sign and a power of two, up or down at random: eight bits, the mantissa gone.

    Powers are counted from the largest of the message; what is 2^-126 of it or less is zero.
    Variance at most 1/8 of the square. Horvath et al. 2022 (arXiv 1905.10988).
    """

    seed: int = 0
    exact: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = True

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return 4 + n

    def encode(self, x: Tensor, salt: str = "", out: Tensor | None = None) -> Tensor:
        top, codes = kernels.natural_encode(x, shared_seed(self.seed, 0, salt))
        return place(torch.cat([top.view(torch.uint8), codes]), out)

    def decode(
        self, data: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None,
        alpha: float | None = None,
    ) -> Tensor:  # fmt: skip
        if data.numel() != 4 + n:
            raise WireError(f"expected {4 + n} bytes of powers of two, got {data.numel()}")
        top = int(as_numbers(data[:4], torch.int32, 1))
        if top == BROKEN:
            broken = torch.full((n,), float("nan"), dtype=dtype, device=data.device)
            return place(broken, out, alpha)
        if not -1100 <= top <= 127:
            raise WireError(f"a power of two of {top} is outside [-1100, 127]")
        return place(kernels.natural_decode(data[4:], top, dtype), out, alpha)


Blocked = Int8 | Fp8 | Signs | OneBit | Levels


def cut(codec: ValueCodec, ends: Ends) -> ValueCodec:
    """The same code for numbers that end there: blocks, if it has any, end there too."""
    return replace(codec, ends=ends) if isinstance(codec, Blocked) else codec


def _edges(codec: Blocked, like: Tensor) -> Tensor | None:
    return edges_of(codec.block, codec.ends, like.device)


def _read_scales(
    codec: Blocked, data: Tensor, n: int, each: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """The scales, (blocks,) each, and the bytes after them."""
    count = blocks_of(n, codec.block, codec.ends)
    width = 4 * count
    if data.numel() < each * width:
        raise WireError(f"expected {each * width} bytes of scales, got {data.numel()} in all")
    parts = data[: each * width].split(width) if width else [data[:0]] * each
    scales = [as_numbers(part, torch.float32, count).to(dtype) for part in parts]
    return scales, data[each * width :]


def _checked_block(block: int) -> None:
    checked_whole("block", block, 1, "a number of values; 512 is usual")
