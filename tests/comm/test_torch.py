"""The same verbs over gloo give the same answers as over threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.comm.test_local import expected, verbs
from tests.processes import Pool
from thinwire.comm.torch import TorchComm


def over_gloo(rank: int, world: int) -> dict[str, Any]:
    return verbs(TorchComm(dist.group.WORLD))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_verbs(pool: Pool, world: int) -> None:
    assert pool.run(world, over_gloo) == [expected(rank, world) for rank in range(world)]
