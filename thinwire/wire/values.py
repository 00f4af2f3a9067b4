"""Value codes: a flat tensor of numbers to bytes and back.

`exact` codes may be summed on the way; a code that rounds is not summable (adding rounded
partial sums hop by hop would break the conservation law), so `Link` decodes before it adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels.reference.scales import place
from thinwire.protocols import WireError


class ValueCodec(Protocol):
    """Numbers to bytes; `nbytes` answers without doing the work.

    A code that rounds at random draws from its own seed and the `salt`, which names the message.
    Bytes and numbers are new, or go into `out`; with `alpha`, numbers times alpha are added to it.
    """

    exact: ClassVar[bool]
    keeps_zero: ClassVar[bool]  # whether zero comes out as zero, among other numbers

    def nbytes(self, n: int, itemsize: int = 4) -> int: ...

    def encode(
        self, x: Tensor, salt: str = "", out: Tensor | None = None
    ) -> Tensor: ...  # (n,) -> (nbytes,) uint8

    def decode(
        self, data: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None,
        alpha: float | None = None,
    ) -> Tensor: ...  # fmt: skip


@dataclass(frozen=True)
class Exact:
    """The numbers as they are."""

    exact: ClassVar[bool] = True
    keeps_zero: ClassVar[bool] = True

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return n * itemsize

    def encode(self, x: Tensor, salt: str = "", out: Tensor | None = None) -> Tensor:
        return place(x.contiguous().view(torch.uint8), out)

    def decode(
        self, data: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None,
        alpha: float | None = None,
    ) -> Tensor:  # fmt: skip
        return place(as_numbers(data, dtype, n), out, alpha)


@dataclass(frozen=True)
class Half:
    """IEEE half precision times one power of two, chosen so that the largest value just fits.

    Half alone ends at 65504 and flushes what is below 6e-8; gradients have both. The exponent
    costs four bytes a message and is exact, so only the 11-bit mantissa rounds.
    """

    exact: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = True

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return 4 + 2 * n

    def encode(self, x: Tensor, salt: str = "", out: Tensor | None = None) -> Tensor:
        out = make_message(self, x) if out is None else out
        power, _ = kernels.half_encode(x, out[4:].view(torch.float16))
        out[:4] = power.view(torch.uint8)
        return out

    def decode(
        self, data: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None,
        alpha: float | None = None,
    ) -> Tensor:  # fmt: skip
        if data.numel() < 4:
            raise WireError(f"half-precision message of {data.numel()} bytes has no exponent")
        power = int(as_numbers(data[:4], torch.int32, 1))
        if not -126 <= power <= 126:
            raise WireError(f"half-precision exponent {power} is outside [-126, 126]")
        return kernels.half_decode(as_numbers(data[4:], torch.float16, n), power, dtype, out, alpha)


@dataclass(frozen=True)
class Bf16:
    """The upper half of a float32: its range, eight bits of mantissa."""

    exact: ClassVar[bool] = False
    keeps_zero: ClassVar[bool] = True

    def nbytes(self, n: int, itemsize: int = 4) -> int:
        return 2 * n

    def encode(self, x: Tensor, salt: str = "", out: Tensor | None = None) -> Tensor:
        out = make_message(self, x) if out is None else out
        kernels.bf16_encode(x, out.view(torch.bfloat16))
        return out

    def decode(
        self, data: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None,
        alpha: float | None = None,
    ) -> Tensor:  # fmt: skip
        return kernels.bf16_decode(as_numbers(data, torch.bfloat16, n), dtype, out, alpha)


def make_message(codec: ValueCodec, x: Tensor) -> Tensor:
    """Room for the bytes of these numbers."""
    size = codec.nbytes(x.numel(), x.element_size())
    return torch.empty(size, dtype=torch.uint8, device=x.device)


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
