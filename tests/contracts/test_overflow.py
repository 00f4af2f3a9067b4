"""A sum that overflows skips its step, and no more than that: the next ones are taken again.

Every rank's own numbers are finite, but no sum of them is. Kept, they would overflow every later
sum too; they are dropped like numbers that are not finite, so that ordinary gradients commit again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contracts.test_contracts import CASES, SHAPES, gradients, residual_of
from thinwire import Bucket
from thinwire.comm import local

NEAR = 3.0e38  # the largest number of single precision is 3.4e38
WITH_MEMORY = [case for case, recipe in CASES.items() if hasattr(recipe, "memory")]


@pytest.mark.parametrize("scale", [1.0, 65536.0])
@pytest.mark.parametrize("case", WITH_MEMORY)
def test_a_step_that_overflows_is_the_only_one_that_is_skipped(case: str, scale: float) -> None:
    """Gradients near the largest number in one step, ordinary ones before and after."""
    recipe, world = CASES[case], 4
    huge = NEAR if scale == 1.0 else NEAR / scale  # the loss scale of the mean overflows it too

    def worker(comm: Any) -> list[bool]:
        state: dict[str, Any] = {}
        finite = []
        for step in range(6):
            grads = gradients(comm.rank, step, "gaussian", SHAPES)
            if step == 1:
                grads = {name: torch.full_like(g, huge) for name, g in grads.items()}
            grads = {name: g * scale for name, g in grads.items()}
            bucket = Bucket.of(grads, state=state, step=step)
            bucket.scale = scale
            reduced = recipe.reduce(bucket, comm)
            finite.append(reduced.finite)
            residual = residual_of(state, SHAPES)
            assert residual is not None and residual.isfinite().all()
        return finite

    everyone = local.run(world, worker)
    assert all(finite == everyone[0] for finite in everyone)
    assert everyone[0].count(False) <= 1 and everyone[0][0] and everyone[0][-1], everyone[0]
