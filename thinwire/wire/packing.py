"""Small whole numbers side by side in bytes, and numbers in blocks: what the value codes share."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.protocols import WireError


def packed_bytes(n: int, bits: int) -> int:
    """Bytes that n numbers of `bits` bits take."""
    return -(-n * bits // 8)


def unpacked(data: Tensor, bits: int, n: int) -> Tensor:  # bytes -> (n,) uint8
    """`kernels.unpack` of bytes from the wire."""
    if data.numel() != packed_bytes(n, bits):
        raise WireError(
            f"expected {packed_bytes(n, bits)} bytes for {n} numbers of {bits} bits, got "
            f"{data.numel()}"
        )
    return kernels.unpack(data, bits, n)


Ends = tuple[int, ...]  # where stretches of numbers end, the last with the last number


def blocks_of(n: int, block: int, ends: Ends = ()) -> int:
    """How many blocks n numbers make; with `ends`, a block ends there too."""
    if not ends:
        return -(-n // block)
    return sum(-(-(stop - start) // block) for start, stop in pairwise((0, *ends)))


@lru_cache(maxsize=1024)
def edges_of(block: int, ends: Ends, device: torch.device) -> Tensor | None:  # (blocks + 1,)
    """Where blocks begin and end, if that does not follow from their length alone."""
    if not ends:
        return None
    starts = [torch.arange(start, stop, block) for start, stop in pairwise((0, *ends))]
    return torch.cat([*starts, torch.tensor(ends[-1:])]).to(device)


def ends_within(ends: Ends, start: int, stop: int) -> Ends:
    """Where stretches end in numbers [start, stop), counted from `start`; empty ones are none."""
    inside = {min(end, stop) - start for end in ends if end > start}
    return tuple(sorted(inside))
