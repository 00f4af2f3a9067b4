"""Codes and positions in few bits, in Triton.

Decoders of positions make the host wait for the device once: what came over the wire is checked
before anything is written by it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.gpu.launch import launch

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
def _mark(indices, k, words, B: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    place = tl.load(indices + at, mask=at < k, other=0)
    bit = (1 << (place % 32)).to(tl.int32)
    tl.atomic_or(words + place // 32, bit, mask=at < k)


@triton.jit
def _find_ones(data, n, before, out, COUNT: tl.constexpr, B: tl.constexpr):
    """How many bits are set in this program's part, or where they are, after those before."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    byte = tl.load(data + at // 8, mask=at < n, other=0).to(tl.int32)
    bit = (byte >> (at % 8).to(tl.int32)) & 1
    if COUNT:
        tl.store(before + tl.program_id(0), tl.sum(bit).to(tl.int64))
    else:
        place = tl.load(before + tl.program_id(0)) + tl.cumsum(bit, axis=0) - 1
        tl.store(out + place, at, mask=bit != 0)


def pack(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    size = -(-codes.numel() * bits // 8)
    out = torch.empty(size, dtype=torch.uint8, device=codes.device)
    launch(_pack, size, codes, codes.numel(), out, size, BITS=bits, EACH=8 // bits)
    return out


def unpack(data: Tensor, bits: int, n: int) -> Tensor:
    if bits == 8:
        return data
    out = torch.empty(n, dtype=torch.uint8, device=data.device)
    launch(_unpack, n, data, n, out, BITS=bits, EACH=8 // bits)
    return out


def bitmap_encode(indices: Tensor, numel: int) -> Tensor:
    words = torch.zeros(-(-numel // 32), dtype=torch.int32, device=indices.device)
    launch(_mark, indices.numel(), indices, indices.numel(), words)
    return words.view(torch.uint8)[: -(-numel // 8)]


def bitmap_decode(data: Tensor, k: int, numel: int) -> Tensor | None:
    n = min(numel, 8 * data.numel())
    programs = triton.cdiv(n, BITS)
    counts = torch.empty(programs, dtype=torch.int64, device=data.device)
    out = torch.empty(k, dtype=torch.int64, device=data.device)
    if programs:
        _find_ones[(programs,)](data, n, counts, out, COUNT=True, B=BITS)
    if int(counts.sum()) != k:  # host sync: more would be written past the end
        return None
    if k:
        _find_ones[(programs,)](data, n, counts.cumsum(0) - counts, out, COUNT=False, B=BITS)
    return out
