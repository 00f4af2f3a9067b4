"""Numbers and positions in fewer bits, in plain torch: what `narrow` must compute, on any device.

    pack, unpack                    small codes side by side in bytes
    int8_encode, sign_encode        codes and a scale a block of numbers; `scaled` is the way back
    bitmap_encode, bitmap_decode    a bit for every entry of the bucket
    block_encode, block_decode      the low 16 bits of positions, and a count every 65,536 entries

A block that holds a NaN or an infinity has the scale NaN and the codes 0. The last may be short.
Golomb-Rice codes have a file of their own, `rice`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 65_536  # positions that 16 bits tell apart
TOP = torch.finfo(torch.float32).max


def pack(codes: Tensor, bits: int) -> Tensor:  # (n,) uint8 -> bytes
    """Codes below 2 ** bits, bits 1, 2, 4 or 8, the first in the lowest bits."""
    if bits == 8:
        return codes
    each = 8 // bits
    groups = pad(codes, (0, -codes.numel() % each)).view(-1, each).to(torch.int32)
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.int32)
    return (groups << shifts).sum(dim=1).to(torch.uint8)


def unpack(data: Tensor, bits: int, n: int) -> Tensor:  # bytes -> (n,) uint8
    """The first n codes of as many bytes as they take."""
    if bits == 8:
        return data
    shifts = torch.arange(0, 8, bits, device=data.device, dtype=torch.uint8)
    codes: Tensor = (data[:, None] >> shifts) & (2**bits - 1)
    return codes.reshape(-1)[:n]


def int8_encode(x: Tensor, block: int) -> tuple[Tensor, Tensor]:  # (n,) -> (blocks,), (n,)
    """A scale for every block, and the nearest whole multiples of it, -127 to 127."""
    rows = in_blocks(x, block)
    scale = largest(rows) / 127
    codes = (rows / divisor(scale)).round_().nan_to_num_(0.0).clamp_(-127, 127)
    return held(scale), codes.to(torch.int8).view(-1)[: x.numel()]


def sign_encode(x: Tensor, block: int) -> tuple[Tensor, Tensor]:  # (n,) -> (blocks,), bytes
    """The mean magnitude of every block, and a bit for every number that is at least zero."""
    rows = in_blocks(x, block)
    top = largest(rows)
    inside = in_blocks(torch.ones_like(x), block).sum(1)  # filling must not pull the mean down
    scale = top * ((rows.abs() / divisor(top)).sum(1) / inside)[:, None]
    return held(scale), pack((x >= 0).to(torch.uint8), 1)


def scaled(codes: Tensor, scale: Tensor, block: int) -> Tensor:  # (n,), (blocks,) -> (n,)
    """Codes times their block's scale; rounding up past the largest number stops there."""
    top = torch.finfo(scale.dtype).max
    rows = in_blocks(codes.to(scale.dtype), block) * scale[:, None]
    return rows.clamp_(-top, top).view(-1)[: codes.numel()]


def bitmap_encode(indices: Tensor, numel: int) -> Tensor:  # (k,) -> bytes
    there = torch.zeros(numel, dtype=torch.uint8, device=indices.device)
    there[indices] = 1
    return pack(there, 1)


def bitmap_decode(data: Tensor, k: int, numel: int) -> Tensor | None:  # bytes -> (k,)
    """The k positions that are marked; None if these are more or fewer."""
    indices = unpack(data, 1, numel).nonzero().reshape(-1)
    return indices if indices.numel() == k else None


def block_encode(indices: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """How many positions every block has (int32), and their low halves (uint16)."""
    edges = torch.arange(0, numel + BLOCK, BLOCK, device=indices.device)
    counts = torch.searchsorted(indices, edges).diff()[: -(-numel // BLOCK)]
    return counts.to(torch.int32), (indices & (BLOCK - 1)).to(torch.uint16)


def block_decode(counts: Tensor, low: Tensor) -> Tensor | None:
    """The positions, not checked to ascend; None if the counts are not those of so many."""
    if bool((counts < 0).any()) or int(counts.to(torch.int64).sum()) != low.numel():
        return None
    starts = torch.arange(counts.numel(), device=low.device) * BLOCK
    return low.to(torch.int64) + starts.repeat_interleave(counts.to(torch.int64))


def largest(rows: Tensor) -> Tensor:  # (b, block) -> (b, 1)
    """The largest magnitude of every row; NaN wins."""
    return rows.abs().amax(dim=1, keepdim=True) if rows.numel() else rows.new_zeros(len(rows), 1)


def divisor(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


def held(scale: Tensor) -> Tensor:  # (b, 1) -> (b,)
    """Scales in single precision; one that is not finite becomes NaN, and its block with it."""
    inside = torch.where(scale.isfinite(), scale.clamp(-TOP, TOP), float("nan"))
    return inside.reshape(-1).to(torch.float32)


def in_blocks(x: Tensor, block: int) -> Tensor:  # (n,) -> (blocks, block)
    """A block a row; the last one is filled up with zeros."""
    return pad(x, (0, -x.numel() % block)).view(-1, block)
