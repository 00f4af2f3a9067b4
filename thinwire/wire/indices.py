"""Index codes: ascending positions in [0, numel) to bytes and back.

Of k positions out of n, 1 % of them:   int32 32 bits each, u16 in blocks 16, Rice 8.1 (the entropy
is 8.08), a bitmap 100. Sizes of `fixed` codes follow from k and n alone; the others can say what
these positions would take without encoding them (`size`), and what random ones would (`nbytes`).
Decoders believe nothing: what is not an ascending list inside the bucket raises `WireError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels.bits import BLOCK
from thinwire.layout import Layout
from thinwire.protocols import WireError
from thinwire.wire.packing import packed_bytes
from thinwire.wire.values import as_numbers


class IndexCodec(Protocol):
    """Ascending positions to bytes."""

    fixed: ClassVar[bool]  # whether k and numel alone say how many bytes

    def nbytes(self, k: int, numel: int) -> int: ...  # if not fixed, of random positions

    def size(self, indices: Tensor, numel: int) -> int: ...  # of these, before the work

    def encode(self, indices: Tensor, numel: int) -> Tensor: ...

    def decode(self, data: Tensor, k: int, numel: int) -> Tensor: ...


@dataclass(frozen=True)
class Int32:
    """Four bytes a position."""

    fixed: ClassVar[bool] = True

    def nbytes(self, k: int, numel: int) -> int:
        return 4 * k

    def size(self, indices: Tensor, numel: int) -> int:
        return self.nbytes(indices.numel(), numel) if numel <= 2**31 else 2**62  # never chosen

    def encode(self, indices: Tensor, numel: int) -> Tensor:
        if numel > 2**31:
            raise ValueError(
                f"a bucket of {numel} entries is too large for 32-bit indices; use smaller buckets"
            )
        return indices.to(torch.int32).view(torch.uint8)

    def decode(self, data: Tensor, k: int, numel: int) -> Tensor:
        return checked(as_numbers(data, torch.int32, k).to(torch.int64), numel)


@dataclass(frozen=True)
class Bitmap:
    """One bit a position of the bucket, set where it is in the list."""

    fixed: ClassVar[bool] = True

    def nbytes(self, k: int, numel: int) -> int:
        return packed_bytes(numel, 1)

    def size(self, indices: Tensor, numel: int) -> int:
        return self.nbytes(indices.numel(), numel)

    def encode(self, indices: Tensor, numel: int) -> Tensor:
        return kernels.bitmap_encode(indices, numel)

    def decode(self, data: Tensor, k: int, numel: int) -> Tensor:
        if data.numel() != packed_bytes(numel, 1):
            raise WireError(
                f"expected a bitmap of {packed_bytes(numel, 1)} bytes, got {data.numel()}"
            )
        indices = kernels.bitmap_decode(data, k, numel)
        if indices is None:
            raise WireError(f"a bitmap does not mark as many positions as came with it, {k}")
        return indices


@dataclass(frozen=True)
class Blocks:
    """Two bytes a position inside its block of 65,536, and four a block for how many there are."""

    fixed: ClassVar[bool] = True

    def nbytes(self, k: int, numel: int) -> int:
        return 2 * k + 4 * -(-numel // BLOCK)

    def size(self, indices: Tensor, numel: int) -> int:
        return self.nbytes(indices.numel(), numel)

    def encode(self, indices: Tensor, numel: int) -> Tensor:
        counts, low = kernels.block_encode(indices, numel)
        return torch.cat([counts.view(torch.uint8), low.view(torch.uint8)])

    def decode(self, data: Tensor, k: int, numel: int) -> Tensor:
        blocks = -(-numel // BLOCK)
        if data.numel() != self.nbytes(k, numel):
            raise WireError(
                f"expected {self.nbytes(k, numel)} bytes of indices, got {data.numel()}"
            )
        counts = as_numbers(data[: 4 * blocks], torch.int32, blocks)
        indices = kernels.block_decode(counts, as_numbers(data[4 * blocks :], torch.uint16, k))
        if indices is None:
            raise WireError(f"counts from the wire do not add up to {k} positions")
        return checked(indices, numel)


@dataclass(frozen=True)
class Rows:
    """A byte a position inside its row, where that has up to 256 columns, else two; and a count.

    Rows are those of the parameters' matrices; `over(layout)` tells which. Longer ones, and a part
    of a bucket, are cut every 65,536.
    """

    layout: Layout | None = None
    fixed: ClassVar[bool] = False
    _LONGEST: ClassVar[int] = 256

    def over(self, layout: Layout) -> Rows:
        return Rows(layout)

    def nbytes(self, k: int, numel: int) -> int:
        starts, lengths = self._rows(numel)
        if not numel or not k:
            return 1 + starts.numel()
        narrow = int(lengths[lengths <= self._LONGEST].sum()) / numel
        mean = k / starts.numel()
        return 1 + starts.numel() * (1 if 2 * mean + 8 < 256 else 2) + round(k * (2 - narrow))

    def least(self, k: int, numel: int) -> int:
        """Bytes of k positions, wherever they are: at least a byte each, and one for every row."""
        return 1 + k + _row_edges(self._known(numel), numel).numel() - 1

    def size(self, indices: Tensor, numel: int) -> int:
        starts, lengths = self._rows(numel, indices.device)
        rows, counts = _rows_of(indices, starts)
        narrow = int((lengths[rows] <= self._LONGEST).sum())
        return 1 + _width(counts) * counts.numel() + 2 * indices.numel() - narrow

    def encode(self, indices: Tensor, numel: int) -> Tensor:
        starts, lengths = self._rows(numel, indices.device)
        rows, counts = _rows_of(indices, starts)
        inside, narrow = indices - starts[rows], lengths[rows] <= self._LONGEST
        width = _width(counts)
        return torch.cat([
            torch.tensor([width], dtype=torch.uint8, device=indices.device),
            counts.to(_COUNTS[width]).view(torch.uint8),
            inside[narrow].to(torch.uint8),
            inside[~narrow].to(torch.uint16).view(torch.uint8),
        ])  # fmt: skip

    def decode(self, data: Tensor, k: int, numel: int) -> Tensor:
        starts, lengths = self._rows(numel, data.device)
        width = int(data[0]) if data.numel() else 0
        if width not in _COUNTS:
            raise WireError(f"row counts of {width} bytes; they have 1, 2 or 4")
        body = 1 + width * starts.numel()
        counts = as_numbers(data[1:body], _COUNTS[width], starts.numel()).to(torch.int64)
        narrow = spread((lengths <= self._LONGEST).to(torch.int64), counts, k) > 0
        bytes_, middle = data[body:], int(narrow.sum())
        inside = torch.empty(k, dtype=torch.int64, device=data.device)
        inside[narrow] = as_numbers(bytes_[:middle], torch.uint8, middle).to(torch.int64)
        inside[~narrow] = as_numbers(bytes_[middle:], torch.uint16, k - middle).to(torch.int64)
        if k and bool((inside >= spread(lengths, counts, k)).any()):
            raise WireError("an index from the wire is outside its row")
        return checked(inside + spread(starts, counts, k), numel)

    def _rows(self, numel: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        edges = _row_edges(self._known(numel), numel).to(device or "cpu")
        return edges[:-1], edges.diff()

    def _known(self, numel: int) -> Layout | None:
        return self.layout if self.layout is not None and self.layout.numel == numel else None


_COUNTS = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}


def _width(counts: Tensor) -> int:
    """Bytes that hold the largest count."""
    top = int(counts.max()) if counts.numel() else 0
    return 1 if top < 256 else 2 if top < BLOCK else 4


def _rows_of(indices: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Which row each position is in, and how many there are in each."""
    rows = torch.searchsorted(starts, indices, right=True) - 1
    return rows, torch.bincount(rows, minlength=starts.numel())


@lru_cache(maxsize=64)
def _row_edges(layout: Layout | None, numel: int) -> Tensor:
    """Where rows begin and end, none longer than a block."""
    edges = [torch.tensor([0, numel]), torch.arange(0, numel, BLOCK)]
    for slot in layout.slots if layout is not None else ():
        if slot.numel:
            length = slot.matrix[1]
            stop = slot.offset + slot.numel
            edges.append(torch.arange(slot.offset, stop + 1, length))
            edges.append(torch.arange(slot.offset, stop, BLOCK) if length > BLOCK else edges[0])
    distinct: Tensor = torch.cat(edges).unique()
    return distinct


def spread(of_row: Tensor, counts: Tensor, k: int) -> Tensor:
    """Each row's number once for each of its entries, of which there must be k in all."""
    if bool((counts < 0).any()) or int(counts.to(torch.int64).sum()) != k:
        raise WireError(f"counts from the wire do not add up to {k} positions")
    return of_row.repeat_interleave(counts.to(torch.int64))


def checked(indices: Tensor, numel: int) -> Tensor:
    """These positions, if they ascend and lie inside the bucket."""
    if not kernels.ascending(indices, numel):
        raise WireError(f"indices from the wire do not ascend within {numel} entries")
    return indices


def smallest(codes: Sequence[IndexCodec], indices: Tensor, numel: int) -> tuple[int, int]:
    """Which code takes the fewest bytes for these, and how many; of equals the first.

    A code that knows what it takes at `least` is not asked for more where that is too much.
    """
    best, fewest = -1, 0
    for number, code in enumerate(codes):
        least = getattr(code, "least", None)
        if best >= 0 and least is not None and least(indices.numel(), numel) >= fewest:
            continue
        size = code.size(indices, numel)
        if best < 0 or size < fewest:
            best, fewest = number, size
    return best, fewest
