"""thinwire: data-parallel PyTorch training that sends little.

sync = thinwire.attach(DistributedDataParallel(net), thinwire.recipes.adtopk(density=0.01))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire import recipes
    from thinwire.bucket import Bucket
    from thinwire.engine.ddp import attach
    from thinwire.engine.optimizer import distribute
    from thinwire.engine.sync import Sync
    from thinwire.protocols import RankFailed, RankMismatch, Reduced, WireError

__version__ = "0.1.0"
__all__ = [
    "Bucket",
    "RankFailed",
    "RankMismatch",
    "Reduced",
    "Sync",
    "WireError",
    "attach",
    "distribute",
    "recipes",
]

_HOMES = {
    "Bucket": "bucket", "Sync": "engine.sync", "attach": "engine.ddp",
    "distribute": "engine.optimizer", "RankFailed": "protocols", "RankMismatch": "protocols",
    "Reduced": "protocols", "WireError": "protocols",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imported when first used: torch takes seconds, in which Ctrl-C is to end a command."""
    if name == "recipes":
        return import_module("thinwire.recipes")
    if name not in _HOMES:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    return getattr(import_module(f"thinwire.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
