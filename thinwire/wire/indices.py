"""Index codes: ascending positions in [0, numel) to bytes and back.

Of k positions out of n, 1 % of them:   int32 32 bits each, u16 in blocks 16, Rice 8.1 (the entropy
is 8.08), a bitmap 100. Sizes of `fixed` codes follow from k and n alone; the others can say what
these positions would take without encoding them (`size`), and what random ones would (`nbytes`).
Decoders believe nothing: what is not an ascending list inside the bucket raises `WireError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels.reference.bits import BLOCK
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


def checked(indices: Tensor, numel: int) -> Tensor:
    """These positions, if they ascend and lie inside the bucket."""
    if not kernels.ascending(indices, numel):
        raise WireError(f"indices from the wire do not ascend within {numel} entries")
    return indices


def smallest(codes: Sequence[IndexCodec], indices: Tensor, numel: int) -> tuple[int, int]:
    """Which code takes the fewest bytes for these, and how many; of equals the first."""
    sizes = [code.size(indices, numel) for code in codes]
    fewest = min(sizes)
    return sizes.index(fewest), fewest
