"""Golomb-Rice codes of positions in plain torch.

A gap g is written as g >> m in unary and its m low bits as they are. m is chosen for every 256
positions, the one that takes the fewest bits of three near the mean. Low bits and unary parts stand
apart, which lets plain tensor operations write and read them:

    m of every 256 gaps, a byte each | low bits of all gaps | unary parts: 1 after as many 0
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.kernels.reference.bits import bitmap_encode, unpack

GROUP = 256  # gaps that share an m
MOST = 30  # the largest m: low bits and their place in a word fit into 64
_WORD = 32


def rice_size(indices: Tensor, /) -> int:
    """Bytes of these positions, before the work."""
    groups, unary, low = _choose_groups(_measure_gaps(indices))
    return groups.numel() + -(-low // 8) + -(-unary // 8)


def rice_encode(indices: Tensor, /) -> Tensor:  # (k,) -> bytes
    """Ascending positions in this code."""
    gaps = _measure_gaps(indices)
    groups, unary, low = _choose_groups(gaps)
    m = groups.repeat_interleave(GROUP)[: gaps.numel()]
    ends = ((gaps >> m) + 1).cumsum(0) - 1
    return torch.cat([
        groups.to(torch.uint8),
        _write(gaps & ((1 << m) - 1), m.cumsum(0) - m, low),
        bitmap_encode(ends, unary),
    ])  # fmt: skip


def rice_decode(data: Tensor, /, k: int, numel: int) -> Tensor | None:  # bytes -> (k,)
    """The k positions below numel, or None if this is no code of so many."""
    head = -(-k // GROUP)
    groups = data[:head].to(torch.int64)
    if groups.numel() != head or bool((groups > MOST).any()):
        return None
    m = groups.repeat_interleave(GROUP)[:k]
    starts = m.cumsum(0) - m
    cut = head + -(-int(m.sum()) // 8)
    tail = data[cut:]
    ends = unpack(tail, 1, 8 * tail.numel()).nonzero().reshape(-1)
    if data.numel() < cut or ends.numel() != k:
        return None
    if tail.numel() != (int(ends[-1]) // 8 + 1 if k else 0):
        return None
    high = ends.diff(prepend=ends.new_tensor([-1])) - 1
    if bool((high > numel >> m).any()):  # before it is shifted out of 64 bits
        return None
    indices = ((high << m) + _read(data[head:cut], starts, m) + 1).cumsum(0) - 1
    return indices if k == 0 or int(indices[-1]) < numel else None


def _measure_gaps(indices: Tensor) -> Tensor:
    return indices.diff(prepend=indices.new_tensor([-1])) - 1


def _choose_groups(gaps: Tensor) -> tuple[Tensor, int, int]:
    """The best m of every group, and how many bits both parts take."""
    if gaps.numel() == 0:
        return gaps, 0, 0
    rows = pad(gaps, (0, -gaps.numel() % GROUP)).view(-1, GROUP)  # a 0 more counts in no sum
    counts = torch.full((rows.shape[0],), GROUP, device=gaps.device)
    counts[-1] = gaps.numel() - GROUP * (rows.shape[0] - 1)
    near = (rows.sum(1) // counts).clamp(min=1).to(torch.float64).log2().to(torch.int64)
    tried = (near[:, None] + torch.tensor([-1, 0, 1], device=gaps.device)).clamp(0, MOST)
    unary = torch.stack([(rows >> tried[:, i : i + 1]).sum(1) for i in range(3)], dim=1)
    best = (unary + counts[:, None] * tried).argmin(dim=1, keepdim=True)
    chosen = tried.gather(1, best)[:, 0]
    bits = unary.gather(1, best)[:, 0] + counts
    return chosen, int(bits.sum()), int((counts * chosen).sum())


def _write(numbers: Tensor, starts: Tensor, bits: int) -> Tensor:  # (k,) -> bytes
    """Numbers at their bit positions: as no two overlap, adding them up is writing them."""
    words = torch.zeros(bits // _WORD + 2, dtype=torch.int64, device=numbers.device)
    shifted = numbers << (starts % _WORD)
    words.index_add_(0, starts // _WORD, shifted & 0xFFFFFFFF)
    words.index_add_(0, starts // _WORD + 1, shifted >> _WORD)
    return words.view(torch.int32)[::2].contiguous().view(torch.uint8)[: -(-bits // 8)]


def _read(data: Tensor, starts: Tensor, widths: Tensor) -> Tensor:
    """The numbers of these widths at these bit positions."""
    padded = pad(data, (0, -data.numel() % 4 + 8)).contiguous()
    words = padded.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    both = words[starts // _WORD] | (words[starts // _WORD + 1] << _WORD)
    return (both >> (starts % _WORD)) & ((1 << widths) - 1)
