"""Small whole numbers side by side in bytes, and numbers in blocks: what the value codes share."""

from __future__ import annotations

from torch import Tensor

from thinwire import kernels
from thinwire.protocols import WireError


def packed_bytes(n: int, bits: int) -> int:
    """Bytes that n numbers of `bits` bits take."""
    return -(-n * bits // 8)


def unpacked(data: Tensor, bits: int, n: int) -> Tensor:  # bytes -> (n,) uint8
    """`kernels.unpack` of bytes from the wire."""
    if data.numel() != packed_bytes(n, bits):
        raise WireError(
            f"expected {packed_bytes(n, bits)} bytes for {n} numbers of {bits} bits, got "
            f"{data.numel()}"
        )
    return kernels.unpack(data, bits, n)


def blocks_of(n: int, block: int) -> int:
    """How many blocks n numbers make."""
    return -(-n // block)
