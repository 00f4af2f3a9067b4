"""Gaps between positions in adaptive Golomb-Rice code, and the choice of the smallest code.

A gap g is written as g >> m in unary and its m low bits as they are. m is chosen for every 256
positions, the one that takes the fewest bits, so that layers of different density cost what they
must. Low bits and unary parts stand apart, which lets plain tensor operations write and read them:

    m of every 256 gaps, a byte each | low bits of all gaps | unary parts: 1 after as many 0

Golomb 1966; Rice & Plaunt 1971.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from thinwire.layout import Layout
from thinwire.protocols import WireError
from thinwire.wire.indices import Bitmap, Blocks, IndexCodec, Int32, Rows, checked, smallest
from thinwire.wire.packing import in_blocks, packed_bytes, unpack

GROUP = 256  # gaps that share an m
_WORD = 32
_MOST = 30  # the largest m: low bits and their place in a word fit into 64


@dataclass(frozen=True)
class Rice:
    """Within a tenth of a bit of the entropy of random positions, and below it where they crowd."""

    fixed: ClassVar[bool] = False

    def nbytes(self, k: int, numel: int) -> int:
        """Of k random positions: gaps are geometric."""
        if k == 0 or numel == 0:
            return 0
        stay = max(0.0, 1 - k / numel)
        mean: dict[int, float] = {
            m: stay ** (2**m) / max(1e-12, 1.0 - stay ** (2**m)) for m in range(_MOST + 1)
        }
        m = min(mean, key=lambda m: mean[m] + m)  # of g >> m
        return -(-k // GROUP) + packed_bytes(k * m, 1) + math.ceil(k * (mean[m] + 1) / 8)

    def size(self, indices: Tensor, numel: int) -> int:
        groups, unary, low = self._sizes(_gaps(indices))
        return groups.numel() + packed_bytes(low, 1) + packed_bytes(unary, 1)

    def encode(self, indices: Tensor, numel: int) -> Tensor:
        gaps = _gaps(indices)
        groups, unary, low = self._sizes(gaps)
        m = groups.repeat_interleave(GROUP)[: gaps.numel()]
        ends = ((gaps >> m) + 1).cumsum(0) - 1
        return torch.cat([
            groups.to(torch.uint8),
            _written(gaps & ((1 << m) - 1), m.cumsum(0) - m, low),
            _written(torch.ones_like(ends), ends, unary),
        ])  # fmt: skip

    def decode(self, data: Tensor, k: int, numel: int) -> Tensor:
        head = -(-k // GROUP)
        groups = data[:head].to(torch.int64)
        if groups.numel() != head or bool((groups > _MOST).any()):
            raise WireError(f"a Rice code of {k} positions without its parameters")
        m = groups.repeat_interleave(GROUP)[:k]
        starts = m.cumsum(0) - m
        cut = head + packed_bytes(int(m.sum()), 1)
        if data.numel() < cut:
            raise WireError(f"a Rice code of {k} positions ends after {data.numel()} bytes")
        tail = data[cut:]
        ends = unpack(tail, 1, 8 * tail.numel()).nonzero().reshape(-1)
        if ends.numel() != k or (k and int(ends[-1]) // 8 + 1 != tail.numel()):
            raise WireError(f"a Rice code of {ends.numel()} positions came with {k} values")
        gaps = (ends.diff(prepend=ends.new_tensor([-1])) - 1 << m) + _read(
            data[head:cut], starts, m
        )
        return checked((gaps + 1).cumsum(0) - 1, numel)

    @staticmethod
    def _sizes(gaps: Tensor) -> tuple[Tensor, int, int]:
        """The best m of every group, and how many bits both parts take."""
        if gaps.numel() == 0:
            return gaps, 0, 0
        rows = in_blocks(gaps, GROUP)  # what fills up the last row counts 0 in every sum
        counts = torch.full((rows.shape[0],), GROUP, device=gaps.device)
        counts[-1] = gaps.numel() - GROUP * (rows.shape[0] - 1)
        near = (rows.sum(1) // counts).clamp(min=1).to(torch.float64).log2().to(torch.int64)
        tried = (near[:, None] + torch.tensor([-1, 0, 1], device=gaps.device)).clamp(0, _MOST)
        unary = torch.stack([(rows >> tried[:, i : i + 1]).sum(1) for i in range(3)], dim=1)
        best = (unary + counts[:, None] * tried).argmin(dim=1, keepdim=True)
        chosen = tried.gather(1, best)[:, 0]
        bits = unary.gather(1, best)[:, 0] + counts
        return chosen, int(bits.sum()), int((counts * chosen).sum())


@dataclass(frozen=True)
class Smallest:
    """Whichever code takes the fewest bytes for these positions; one byte says which."""

    codes: tuple[IndexCodec, ...] = (Int32(), Blocks(), Rice(), Bitmap(), Rows())
    fixed: ClassVar[bool] = False

    def over(self, layout: Layout) -> Smallest:
        """The same choice, with the rows of this layout."""
        return Smallest(tuple(Rows(layout) if isinstance(c, Rows) else c for c in self.codes))

    def nbytes(self, k: int, numel: int) -> int:
        return 1 + min(code.nbytes(k, numel) for code in self.codes)

    def size(self, indices: Tensor, numel: int) -> int:
        return 1 + min(code.size(indices, numel) for code in self.codes)

    def encode(self, indices: Tensor, numel: int) -> Tensor:
        best = smallest(self.codes, indices, numel)
        which = torch.tensor([best], dtype=torch.uint8, device=indices.device)
        return torch.cat([which, self.codes[best].encode(indices, numel)])

    def decode(self, data: Tensor, k: int, numel: int) -> Tensor:
        which = int(data[0]) if data.numel() else -1
        if not 0 <= which < len(self.codes):
            raise WireError(f"index code {which} is unknown; there are {len(self.codes)}")
        return self.codes[which].decode(data[1:], k, numel)


def _gaps(indices: Tensor) -> Tensor:
    return indices.diff(prepend=indices.new_tensor([-1])) - 1


def _written(numbers: Tensor, starts: Tensor, bits: int) -> Tensor:  # (k,) -> bytes
    """Numbers at their bit positions: as no two overlap, adding them up is writing them."""
    words = torch.zeros(bits // _WORD + 2, dtype=torch.int64, device=numbers.device)
    shifted = numbers << (starts % _WORD)
    words.index_add_(0, starts // _WORD, shifted & 0xFFFFFFFF)
    words.index_add_(0, starts // _WORD + 1, shifted >> _WORD)
    return words.view(torch.int32)[::2].contiguous().view(torch.uint8)[: packed_bytes(bits, 1)]


def _read(data: Tensor, starts: Tensor, widths: Tensor) -> Tensor:
    """The numbers of these widths at these bit positions."""
    padded = pad(data, (0, -data.numel() % 4 + 8)).contiguous()
    words = padded.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    both = words[starts // _WORD] | (words[starts // _WORD + 1] << _WORD)
    return (both >> (starts % _WORD)) & ((1 << widths) - 1)
