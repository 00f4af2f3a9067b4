"""Codes and positions in few bits, in plain torch.

    pack, unpack                    small codes side by side in bytes
    bitmap_encode, bitmap_decode    a bit for every entry of the bucket
    block_encode, block_decode      the low 16 bits of positions, and a count every 65,536 entries

Golomb-Rice codes have a file of their own, `rice`, and so have the codes of numbers, `scales`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 65_536  # positions that 16 bits tell apart


def pack(codes: Tensor, /, bits: int) -> Tensor:  # (n,) uint8 -> bytes
    """Codes below 2 ** bits, bits 1, 2, 4 or 8, the first in the lowest bits."""
    if bits == 8:
        return codes
    each = 8 // bits
    groups = pad(codes, (0, -codes.numel() % each)).view(-1, each).to(torch.int32)
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.int32)
    return (groups << shifts).sum(dim=1).to(torch.uint8)


def unpack(data: Tensor, /, bits: int, n: int) -> Tensor:  # bytes -> (n,) uint8
    """The first n codes of as many bytes as they take."""
    if bits == 8:
        return data
    shifts = torch.arange(0, 8, bits, device=data.device, dtype=torch.uint8)
    codes: Tensor = (data[:, None] >> shifts) & (2**bits - 1)
    return codes.reshape(-1)[:n]


def bitmap_encode(indices: Tensor, /, numel: int) -> Tensor:  # (k,) -> bytes
    """A bit for every entry of the bucket, set at these positions."""
    there = torch.zeros(numel, dtype=torch.uint8, device=indices.device)
    there[indices] = 1
    return pack(there, 1)


def bitmap_decode(data: Tensor, /, k: int, numel: int) -> Tensor | None:  # bytes -> (k,)
    """The k positions that are marked; None if these are more or fewer."""
    indices = unpack(data, 1, numel).nonzero().reshape(-1)
    return indices if indices.numel() == k else None


def block_encode(indices: Tensor, /, numel: int) -> tuple[Tensor, Tensor]:
    """How many positions every block has (int32), and their low halves (uint16)."""
    edges = torch.arange(0, numel + BLOCK, BLOCK, device=indices.device)
    counts = torch.searchsorted(indices, edges).diff()[: -(-numel // BLOCK)]
    return counts.to(torch.int32), (indices & (BLOCK - 1)).to(torch.uint16)


def block_decode(counts: Tensor, /, low: Tensor) -> Tensor | None:
    """The positions, not checked to ascend; None if the counts are not those of so many."""
    if bool((counts < 0).any()) or int(counts.to(torch.int64).sum()) != low.numel():
        return None
    starts = torch.arange(counts.numel(), device=low.device) * BLOCK
    return low.to(torch.int64) + starts.repeat_interleave(
        counts.to(torch.int64), output_size=low.numel()
    )
