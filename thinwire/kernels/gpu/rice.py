"""Golomb-Rice codes of positions, in Triton.

A program has one group of 256 gaps: it chooses the
group's m, and, once all groups know where they begin, writes its bits with atomic ors, because two
groups may share a word. Reading finds the ends of the unary parts as a bitmap's bits are found.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.gpu.bits import bitmap_decode
from thinwire.kernels.reference.rice import GROUP, MOST


@triton.jit
def _load_gaps(indices, k, GROUP: tl.constexpr):
    """This program's gaps, as zeros where there is no position, and which there are."""
    at = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    here = at < k
    mine = tl.load(indices + at, mask=here, other=0)
    before = tl.load(indices + at - 1, mask=here & (at > 0), other=-1)
    return at, here, tl.where(here, mine - before - 1, 0)


@triton.jit
def _choose(indices, k, groups, unary, low, GROUP: tl.constexpr, MOST: tl.constexpr):
    _, here, gaps = _load_gaps(indices, k, GROUP)
    count = tl.sum(here.to(tl.int64))
    mean = tl.maximum(tl.sum(gaps) // count, 1)
    near = tl.sum(((mean >> tl.arange(0, 64)) > 0).to(tl.int64)) - 1  # log2
    first = tl.minimum(tl.maximum(near - 1, 0), MOST)
    best = first
    fewest = tl.sum(gaps >> first)
    for more in tl.static_range(2):
        m = tl.minimum(tl.maximum(near + more, 0), MOST)
        bits = tl.sum(gaps >> m)
        fewer = bits + count * m < fewest + count * best
        best = tl.where(fewer, m, best)
        fewest = tl.where(fewer, bits, fewest)
    group = tl.program_id(0)
    tl.store(groups + group, best.to(tl.uint8))
    tl.store(unary + group, fewest + count)
    tl.store(low + group, count * best)


@triton.jit
def _write(indices, k, groups, unary_starts, low_starts, low, unary, GROUP: tl.constexpr):
    _, here, gaps = _load_gaps(indices, k, GROUP)
    group = tl.program_id(0)
    m = tl.load(groups + group).to(tl.int64)
    place = tl.load(low_starts + group) + tl.arange(0, GROUP) * m
    shifted = (gaps & ((1 << m) - 1)) << (place % 32)
    tl.atomic_or(low + place // 32, shifted.to(tl.int32), mask=here)
    tl.atomic_or(low + place // 32 + 1, (shifted >> 32).to(tl.int32), mask=here)
    parts = tl.where(here, (gaps >> m) + 1, 0)
    end = tl.load(unary_starts + group) + tl.cumsum(parts, axis=0) - 1
    one = tl.full((GROUP,), 1, tl.int64) << (end % 32)
    tl.atomic_or(unary + end // 32, one.to(tl.int32), mask=here)


@triton.jit
def _read(groups, low_starts, low, ends, k, numel, steps, broken, GROUP: tl.constexpr):
    """How far every position is from the last, from the ends of unary parts and the low bits."""
    group = tl.program_id(0)
    lane = tl.arange(0, GROUP)
    at = group.to(tl.int64) * GROUP + lane
    here = at < k
    end = tl.load(ends + at, mask=here, other=0)
    before = tl.load(ends + at - 1, mask=here & (at > 0), other=-1)
    m = tl.load(groups + group).to(tl.int64)
    high = tl.where(here, end - before - 1, 0)
    if tl.sum((high > (numel >> m)).to(tl.int32)) > 0:
        tl.atomic_max(broken, 1)
    place = tl.load(low_starts + group) + lane * m
    word = tl.load(low + place // 32, mask=here, other=0).to(tl.int64) & 0xFFFFFFFF
    more = tl.load(low + place // 32 + 1, mask=here, other=0).to(tl.int64) & 0xFFFFFFFF
    part = ((word | (more << 32)) >> (place % 32)) & ((1 << m) - 1)
    held = tl.minimum(high, numel >> m)  # not shifted out of 64 bits
    tl.store(steps + at, (held << m) + part + 1, mask=here)


def rice_size(indices: Tensor) -> int:
    *_, lengths = _count(indices)
    return sum(lengths)


def rice_encode(indices: Tensor) -> Tensor:
    groups, unary, low, (_, *lengths) = _count(indices)
    lower, upper = (
        torch.zeros(length // 4 + 2, dtype=torch.int32, device=indices.device) for length in lengths
    )
    if groups.numel():
        _write[groups.shape](
            indices, indices.numel(), groups, unary.cumsum(0) - unary, low.cumsum(0) - low, lower,
            upper, GROUP=GROUP,
        )  # fmt: skip
    parts = (lower.view(torch.uint8)[: lengths[0]], upper.view(torch.uint8)[: lengths[1]])
    return torch.cat([groups, *parts])


def rice_decode(data: Tensor, k: int, numel: int) -> Tensor | None:
    head = -(-k // GROUP)
    groups = data[:head]
    if groups.numel() != head or bool((groups > MOST).any()):  # host sync, as below: nothing that
        return None  # came over the wire is used before it was checked
    counts = torch.full((head,), GROUP, dtype=torch.int64, device=data.device)
    counts[-1:] -= head * GROUP - k
    low = counts * groups
    cut = head + -(-int(low.sum()) // 8)
    if data.numel() < cut:
        return None
    tail = data[cut:]
    ends = bitmap_decode(tail, k, 8 * tail.numel())
    if ends is None or tail.numel() != (int(ends[-1]) // 8 + 1 if k else 0):
        return None
    words = torch.zeros((cut - head) // 4 + 3, dtype=torch.int32, device=data.device)
    words.view(torch.uint8)[: cut - head] = data[head:cut]
    steps = torch.empty(k, dtype=torch.int64, device=data.device)
    broken = torch.zeros(1, dtype=torch.int32, device=data.device)
    if head:
        _read[(head,)](
            groups, low.cumsum(0) - low, words, ends, k, numel, steps, broken, GROUP=GROUP
        )
    indices = steps.cumsum(0) - 1
    well = not bool(broken) and (k == 0 or int(indices[-1]) < numel)
    return indices if well else None


def _count(indices: Tensor) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """The best m of every group, bits of its unary and its low parts, and bytes of all three."""
    head = -(-indices.numel() // GROUP)
    groups = torch.empty(head, dtype=torch.uint8, device=indices.device)
    bits = torch.empty(2, head, dtype=torch.int64, device=indices.device)
    unary, low = bits
    if head:
        _choose[(head,)](indices, indices.numel(), groups, unary, low, GROUP=GROUP, MOST=MOST)
    ones, lows = bits.sum(dim=1).tolist()  # host sync: it allocates the message
    return groups, unary, low, [head, -(-lows // 8), -(-ones // 8)]
