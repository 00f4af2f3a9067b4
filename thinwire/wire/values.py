"""Value codes: a flat tensor of numbers to bytes and back.

`exact` codes may be summed on the way; a code that rounds is not summable (adding rounded
partial sums hop by hop would break the conservation law), so `Link` decodes before it adds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from thinwire.protocols import WireError


class ValueCodec(Protocol):
    """Numbers to bytes; `nbytes` answers without doing the work.

    A code that rounds at random draws from its own seed and the `salt`, which names the message.
    """

    exact: ClassVar[bool]
    keeps_zero: ClassVar[bool]  # whether zero comes out as zero, among other numbers

    def nbytes(self, n: int, itemsize: int = 4) -> int: ...

    def encode(self, x: Tensor, salt: str = "") -> Tensor: ...  # (n,) -> (nbytes,) uint8

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True)
class Exact:
    """The numbers as they are."""

    exact: ClassVar[bool] = True
    keeps_zero: ClassVar[bool] = True

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return n * itemsize

    def encode(self, x: Tensor, salt: str = "") -> Tensor:
        return x.contiguous().view(torch.uint8)

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        return as_numbers(data, dtype, n)


@dataclass(frozen=True)
class Half:
    """IEEE half precision times one power of two, chosen so that the largest value just fits.

    Half alone ends at 65504 and flushes what is below 6e-8; gradients have both. The exponent
    costs four bytes a message and is exact, so only the 11-bit mantissa rounds.
    """

    exact: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = True
    _TOP: ClassVar[int] = 15  # largest power of two that half can hold
    _LARGEST: ClassVar[float] = (2 - 2**-10) * 2.0**127  # float32 with an 11-bit mantissa

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return 4 + 2 * n

    def encode(self, x: Tensor, salt: str = "") -> Tensor:
        largest = float(torch.linalg.vector_norm(x, float("inf"))) if x.numel() else 0.0
        power = 0
        if math.isfinite(largest) and largest > 0:
            power = self._TOP - math.frexp(largest)[1]
        power = max(-126, min(126, power))
        x = _below_overflow(x, self._LARGEST) if largest > self._LARGEST else x
        head = torch.tensor([power], dtype=torch.int32, device=x.device).view(torch.uint8)
        return torch.cat([head, (x * 2.0**power).to(torch.float16).view(torch.uint8)])

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        if data.numel() < 4:
            raise WireError(f"half-precision message of {data.numel()} bytes has no exponent")
        power = int(as_numbers(data[:4], torch.int32, 1))
        if not -126 <= power <= 126:
            raise WireError(f"half-precision exponent {power} is outside [-126, 126]")
        return as_numbers(data[4:], torch.float16, n).to(dtype) * 2.0**-power


@dataclass(frozen=True)
class Bf16:
    """The upper half of a float32: its range, eight bits of mantissa."""

    exact: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = True

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return 2 * n

    def encode(self, x: Tensor, salt: str = "") -> Tensor:
        x = _below_overflow(x, torch.finfo(torch.bfloat16).max)
        return x.to(torch.bfloat16).view(torch.uint8)

    def decode(self, data: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        return as_numbers(data, torch.bfloat16, n).to(dtype)


def _below_overflow(x: Tensor, top: float) -> Tensor:
    """Rounding up past `top` would make an infinity of a finite number; true ones stay."""
    return torch.where(x.isinf(), x, x.clamp(-top, top))


def as_numbers(data: Tensor, dtype: torch.dtype, n: int) -> Tensor:
    """n numbers out of exactly as many bytes as they take."""
    width = torch.empty(0, dtype=dtype).element_size()
    if data.numel() != n * width:
        raise WireError(f"expected {n} x {width} bytes, got {data.numel()}")
    if n == 0:
        return torch.empty(0, dtype=dtype, device=data.device)
    if data.storage_offset() % width:
        data = data.clone()  # a view with another element type must start on its own boundary
    return data.view(dtype)
