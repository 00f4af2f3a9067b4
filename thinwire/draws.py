"""Private random numbers, from seeds that ranks derive alike or apart; never the global RNG."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def shared_seed(seed: int, step: int, name: str) -> int:
    """A number everyone derives alike from the same three."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def uniform(like: Tensor, seed: int, salt: str) -> Tensor:
    """Numbers in [0, 1), shaped like `like`; the same for the same seed and salt."""
    draw = torch.Generator(device=like.device).manual_seed(shared_seed(seed, 0, salt) % 2**63)
    return torch.rand(like.shape, generator=draw, device=like.device, dtype=torch.float32)
