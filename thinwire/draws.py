"""Private random numbers, from seeds that ranks derive alike or apart; never the global RNG."""

from __future__ import annotations

import hashlib


def shared_seed(seed: int, step: int, name: str) -> int:
    """A number everyone derives alike from the same three."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")
