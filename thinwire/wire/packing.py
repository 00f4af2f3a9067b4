"""Small whole numbers side by side in bytes, and numbers in blocks: what the value codes share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.protocols import WireError


def packed_bytes(n: int, bits: int) -> int:
    """Bytes that n numbers of `bits` bits take."""
    return -(-n * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:  # (n,) uint8 -> bytes
    """Codes below 2 ** bits, bits 1, 2, 4 or 8, the first in the lowest bits."""
    if bits == 8:
        return codes
    each = 8 // bits
    groups = pad(codes, (0, -codes.numel() % each)).view(-1, each).to(torch.int32)
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.int32)
    return (groups << shifts).sum(dim=1).to(torch.uint8)


def unpack(data: Tensor, bits: int, n: int) -> Tensor:  # bytes -> (n,) uint8
    if data.numel() != packed_bytes(n, bits):
        raise WireError(
            f"expected {packed_bytes(n, bits)} bytes for {n} numbers of {bits} bits, got "
            f"{data.numel()}"
        )
    if bits == 8:
        return data
    shifts = torch.arange(0, 8, bits, device=data.device, dtype=torch.uint8)
    codes: Tensor = (data[:, None] >> shifts) & (2**bits - 1)
    return codes.reshape(-1)[:n]


def blocks_of(n: int, block: int) -> int:
    """How many blocks n numbers make."""
    return -(-n // block)


def in_blocks(x: Tensor, block: int) -> Tensor:  # (n,) -> (blocks, block)
    """A block a row; the last one is filled up with zeros."""
    return pad(x, (0, -x.numel() % block)).view(-1, block)


def out_of_blocks(rows: Tensor, n: int) -> Tensor:  # (blocks, block) -> (n,)
    return rows.reshape(-1)[:n]
