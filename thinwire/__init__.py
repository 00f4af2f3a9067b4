"""thinwire: data-parallel PyTorch training that sends little.

    sync = thinwire.attach(DistributedDataParallel(net), "int8()", optimizer)

Schedules, memories and rules, which recipes take in place of numbers and names, are here too;
collectives are in `thinwire.collectives`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire import recipes
    from thinwire.bucket import Bucket
    from thinwire.engine.ddp import attach
    from thinwire.engine.optimizer import distribute
    from thinwire.engine.session import Session
    from thinwire.layout import small, vectors
    from thinwire.memory import MomentumCorrected, Residual
    from thinwire.protocols import RankFailed, RankMismatch, Reduced, WireError
    from thinwire.schedule import Flushed, Piecewise, Ramp, dgc_ramp, stages

__version__ = "0.1.0"
__all__ = [
    "Bucket",
    "Flushed",
    "MomentumCorrected",
    "Piecewise",
    "Ramp",
    "RankFailed",
    "RankMismatch",
    "Reduced",
    "Residual",
    "Session",
    "WireError",
    "attach",
    "dgc_ramp",
    "distribute",
    "recipes",
    "small",
    "stages",
    "vectors",
]

_HOMES = {
    "Bucket": "bucket", "Session": "engine.session", "attach": "engine.ddp",
    "distribute": "engine.optimizer", "RankFailed": "protocols", "RankMismatch": "protocols",
    "Reduced": "protocols", "WireError": "protocols", "Residual": "memory",
    "MomentumCorrected": "memory", "Flushed": "schedule", "Piecewise": "schedule",
    "Ramp": "schedule", "dgc_ramp": "schedule", "stages": "schedule", "small": "layout",
    "vectors": "layout",
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
