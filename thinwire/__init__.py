"""thinwire: data-parallel PyTorch training that sends little.

sync = thinwire.attach(DistributedDataParallel(net), thinwire.recipes.adtopk(density=0.01))
"""

from __future__ import annotations

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
