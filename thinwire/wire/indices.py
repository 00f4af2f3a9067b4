"""Index codes: sorted or unsorted positions to bytes and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.protocols import WireError
from thinwire.wire.values import as_numbers


@dataclass(frozen=True)
class Int32:
    """Four bytes a position."""

    def nbytes(self, k: int) -> int:
        return 4 * k

    def encode(self, indices: Tensor, numel: int) -> Tensor:
        if numel > 2**31:
            raise ValueError(
                f"a bucket of {numel} entries is too large for 32-bit indices; use smaller buckets"
            )
        return indices.to(torch.int32).view(torch.uint8)

    def decode(self, data: Tensor, k: int, numel: int) -> Tensor:
        indices = as_numbers(data, torch.int32, k).to(torch.int64)
        if k and not (int(indices.min()) >= 0 and int(indices.max()) < numel):
            raise WireError(f"an index from the wire is outside the bucket of {numel} entries")
        return indices
