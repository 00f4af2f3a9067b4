"""Collectives sum sparse payloads whose supports differ from rank to rank.

Each returns the total and this rank's share of it, and prices itself in the same file.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.collectives.cheapest import Cheapest
    from thinwire.collectives.gather import AllGather
    from thinwire.collectives.gtopk import GTopK
    from thinwire.collectives.oktopk import OkTopk
    from thinwire.collectives.slots import Slots
    from thinwire.collectives.spardl import BlockQuota
    from thinwire.collectives.split import SplitReduce
    from thinwire.collectives.two_level import TwoLevel

__all__ = [
    "AllGather",
    "BlockQuota",
    "Cheapest",
    "GTopK",
    "OkTopk",
    "Slots",
    "SplitReduce",
    "TwoLevel",
]

_HOMES = {
    "AllGather": "gather", "BlockQuota": "spardl", "Cheapest": "cheapest", "GTopK": "gtopk",
    "OkTopk": "oktopk", "Slots": "slots", "SplitReduce": "split", "TwoLevel": "two_level",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imported when first used: some of them are built of reducers, which import others."""
    if name not in _HOMES:
        raise AttributeError(f"module 'thinwire.collectives' has no attribute {name!r}")
    return getattr(import_module(f"thinwire.collectives.{_HOMES[name]}"), name)
