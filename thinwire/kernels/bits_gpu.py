"""Codes and positions in few bits on a GPU, in Triton; `bits` defines them.

Tested with TRITON_INTERPRET=1; not timed by us. Decoders of positions make the host wait for the
device once: what came over the wire is checked before anything is written by it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.bits import BLOCK

B = 1024
BITS = 8192  # of a bitmap, that one program looks through


@triton.jit
def _pack(codes, n, out, bytes_, BITS: tl.constexpr, EACH: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    lane = tl.arange(0, EACH)
    place = at[:, None] * EACH + lane[None, :]
    code = tl.load(codes + place, mask=place < n, other=0).to(tl.int32)
    byte = tl.sum(code << (BITS * lane)[None, :], axis=1)
    tl.store(out + at, byte.to(tl.uint8), mask=at < bytes_)


@triton.jit
def _unpack(data, n, out, BITS: tl.constexpr, EACH: tl.constexpr, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    byte = tl.load(data + at // EACH, mask=at < n, other=0).to(tl.int32)
    code = (byte >> (BITS * (at % EACH)).to(tl.int32)) & ((1 << BITS) - 1)
    tl.store(out + at, code.to(tl.uint8), mask=at < n)


@triton.jit
def _marked(indices, k, words, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    place = tl.load(indices + at, mask=at < k, other=0)
    bit = (1 << (place % 32)).to(tl.int32)
    tl.atomic_or(words + place // 32, bit, mask=at < k)


@triton.jit
def _ones(data, n, before, out, COUNT: tl.constexpr, B: tl.constexpr):
    """How many bits are set in this program's part, or where they are, after those before."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    byte = tl.load(data + at // 8, mask=at < n, other=0).to(tl.int32)
    bit = (byte >> (at % 8).to(tl.int32)) & 1
    if COUNT:
        tl.store(before + tl.program_id(0), tl.sum(bit).to(tl.int64))
    else:
        place = tl.load(before + tl.program_id(0)) + tl.cumsum(bit, axis=0) - 1
        tl.store(out + place, at, mask=bit != 0)


@triton.jit
def _split(indices, k, counts, low, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    place = tl.load(indices + at, mask=at < k, other=0)
    tl.atomic_add(counts + (place >> 16), 1, mask=at < k)
    tl.store(low + at, (place & 0xFFFF).to(tl.int16), mask=at < k)


@triton.jit
def _joined(low, ends, blocks, k, out, STEPS: tl.constexpr, B: tl.constexpr):
    """Every position looks for its block: the first that ends after it."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside = at < k
    first = tl.zeros_like(at)
    last = first + blocks - 1
    for _ in range(STEPS):
        middle = (first + last) // 2
        ended = tl.load(ends + middle, mask=inside, other=0) <= at
        first = tl.where(ended & (first < last), middle + 1, first)
        last = tl.where(ended, last, middle)
    half = tl.load(low + at, mask=inside, other=0).to(tl.int64) & 0xFFFF
    tl.store(out + at, (first << 16) + half, mask=inside)


def pack(codes: Tensor, bits: int) -> Tensor:
    """See `bits.pack`."""
    if bits == 8:
        return codes
    size = -(-codes.numel() * bits // 8)
    out = torch.empty(size, dtype=torch.uint8, device=codes.device)
    if size:
        _pack[(triton.cdiv(size, B),)](
            codes.contiguous(), codes.numel(), out, size, BITS=bits, EACH=8 // bits, B=B
        )
    return out


def unpack(data: Tensor, bits: int, n: int) -> Tensor:
    """See `bits.unpack`."""
    if bits == 8:
        return data
    out = torch.empty(n, dtype=torch.uint8, device=data.device)
    if n:
        _unpack[(triton.cdiv(n, B),)](data.contiguous(), n, out, BITS=bits, EACH=8 // bits, B=B)
    return out


def bitmap_encode(indices: Tensor, numel: int) -> Tensor:
    """See `bits.bitmap_encode`."""
    words = torch.zeros(-(-numel // 32), dtype=torch.int32, device=indices.device)
    if indices.numel():
        _marked[(triton.cdiv(indices.numel(), B),)](
            indices.contiguous(), indices.numel(), words, B=B
        )
    return words.view(torch.uint8)[: -(-numel // 8)]


def bitmap_decode(data: Tensor, k: int, numel: int) -> Tensor | None:
    """See `bits.bitmap_decode`."""
    return ones(data, numel, k)


def ones(data: Tensor, n: int, k: int) -> Tensor | None:
    """Where the k bits are that are set among the first n; None if they are more or fewer."""
    data, n = data.contiguous(), min(n, 8 * data.numel())
    programs = triton.cdiv(n, BITS)
    counts = torch.empty(programs, dtype=torch.int64, device=data.device)
    out = torch.empty(k, dtype=torch.int64, device=data.device)
    if programs:
        _ones[(programs,)](data, n, counts, out, COUNT=True, B=BITS)
    if int(counts.sum()) != k:  # host sync: more would be written past the end
        return None
    if k:
        _ones[(programs,)](data, n, counts.cumsum(0) - counts, out, COUNT=False, B=BITS)
    return out


def block_encode(indices: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """See `bits.block_encode`."""
    k = indices.numel()
    counts = torch.zeros(-(-numel // BLOCK), dtype=torch.int32, device=indices.device)
    low = torch.empty(k, dtype=torch.int16, device=indices.device)
    if k:
        _split[(triton.cdiv(k, B),)](indices.contiguous(), k, counts, low, B=B)
    return counts, low.view(torch.uint16)


def block_decode(counts: Tensor, low: Tensor) -> Tensor | None:
    """See `bits.block_decode`."""
    k, blocks = low.numel(), counts.numel()
    ends = counts.to(torch.int64).cumsum(0)
    total = int(ends[-1]) if blocks else 0  # host sync: the message is checked before it is used
    if total != k or bool((counts < 0).any()):
        return None
    out = torch.empty(k, dtype=torch.int64, device=low.device)
    if k:
        halves = low.contiguous().view(torch.int16)
        steps = blocks.bit_length() + 1
        _joined[(triton.cdiv(k, B),)](halves, ends, blocks, k, out, STEPS=steps, B=B)
    return out
