"""Gaps between positions in adaptive Golomb-Rice code, and the choice of the smallest code.

The code itself is a kernel: `kernels/reference/rice.py` says how it is laid out. Golomb 1966; Rice
& Plaunt 1971.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels.reference.rice import GROUP, MOST
from thinwire.protocols import WireError
from thinwire.wire.indices import Bitmap, Blocks, IndexCodec, Int32, smallest
from thinwire.wire.packing import packed_bytes


@dataclass(frozen=True)
class Rice:
    """Within a tenth of a bit of the entropy of random positions, and below it where they crowd."""

    fixed: ClassVar[bool] = False

    def nbytes(self, k: int, numel: int) -> int:
        """Of k random positions: gaps are geometric."""
        return _random(k, numel)

    def size(self, indices: Tensor, numel: int) -> int:
        return kernels.rice_size(indices)

    def encode(self, indices: Tensor, numel: int) -> Tensor:
        return kernels.rice_encode(indices)

    def decode(self, data: Tensor, k: int, numel: int) -> Tensor:
        indices = kernels.rice_decode(data, k, numel)
        if indices is None:
            raise WireError(
                f"{data.numel()} bytes are no Rice code of {k} ascending positions below {numel}"
            )
        return indices


@dataclass(frozen=True)
class Smallest:
    """Whichever code takes the fewest bytes for these positions; one byte says which."""

    codes: tuple[IndexCodec, ...] = (Int32(), Blocks(), Rice(), Bitmap())
    fixed: ClassVar[bool] = False

    def nbytes(self, k: int, numel: int) -> int:
        return 1 + min(code.nbytes(k, numel) for code in self.codes)

    def size(self, indices: Tensor, numel: int) -> int:
        return 1 + smallest(self.codes, indices, numel)[1]

    def encode(self, indices: Tensor, numel: int) -> Tensor:
        best, _ = smallest(self.codes, indices, numel)
        which = torch.tensor([best], dtype=torch.uint8, device=indices.device)
        return torch.cat([which, self.codes[best].encode(indices, numel)])

    def decode(self, data: Tensor, k: int, numel: int) -> Tensor:
        which = int(data[0]) if data.numel() else -1
        if not 0 <= which < len(self.codes):
            raise WireError(f"index code {which} is unknown; there are {len(self.codes)}")
        return self.codes[which].decode(data[1:], k, numel)


@lru_cache(maxsize=4096)
def _random(k: int, numel: int) -> int:
    """Bytes of the code of k random positions."""
    if k == 0 or numel == 0:
        return 0
    stay = max(0.0, 1 - k / numel)
    near = round(math.log2(numel / k))  # the best m is hardly ever further off than one
    mean: dict[int, float] = {
        m: stay ** (2**m) / max(1e-12, 1.0 - stay ** (2**m))
        for m in range(max(0, near - 2), max(1, min(MOST, near + 1) + 1))
    }
    m = min(mean, key=lambda m: mean[m] + m)  # of g >> m
    return -(-k // GROUP) + packed_bytes(k * m, 1) + math.ceil(k * (mean[m] + 1) / 8)
