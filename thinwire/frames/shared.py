"""Frames that are the same for everybody without having to be learnt.

`Identity`: every coordinate (dense averaging; with a lossy wire, half precision).
`SharedCoordinates`: k random coordinates a parameter, drawn alike on all ranks, so that only
values travel (random-k).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.bucket import Bucket, kept
from thinwire.layout import Layout, Slot, shared_seed
from thinwire.operand import working_dtype
from thinwire.payload import Sparse, at_runs
from thinwire.protocols import Pass
from thinwire.schedule import Density, check_densities


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Every coordinate."""

    def passes(self, bucket: Bucket) -> Iterator[Pass]:
        layout = bucket.layout
        (sizes,) = self.sizes(layout, bucket.step)
        if layout.runs == ((0, layout.numel),):
            yield Pass(
                coefficients=bucket.flat, sizes=sizes, learn=_nothing_to_learn,
                out=bucket.buffer()[0],
            )  # fmt: skip
            return
        x = bucket.take()
        mine = torch.cat([x[start:stop] for start, stop in layout.runs] or [x[:0]])
        yield Pass(
            coefficients=mine.to(working_dtype(x.dtype)),
            sizes=sizes,
            lift=partial(at_runs, runs=layout.runs, numel=layout.numel),
            learn=_nothing_to_learn,
        )

    def sizes(self, layout: Layout, step: int) -> list[list[int]]:
        return [[slot.numel for slot in layout.slots]]


@dataclass(frozen=True, kw_only=True)
class SharedCoordinates:
    """k coordinates of every parameter, drawn from (seed, step, name): no index travels.

    Stich et al. 2018 (arXiv 1809.07599).
    """

    density: Density = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        check_densities(self.density)

    def passes(self, bucket: Bucket) -> Iterator[Pass]:
        x = bucket.take()
        drawn = [self._draw(slot, bucket.step) for slot in bucket.layout.slots if slot.numel]
        indices = torch.cat([torch.empty(0, dtype=torch.int64), *drawn]).to(x.device)
        mine = x[indices].to(working_dtype(x.dtype))
        if isinstance(bucket.flat, Tensor) and not kernels.finite(x):
            mine.fill_(float("nan"))  # nobody may miss it because it was not drawn
        yield Pass(
            coefficients=mine,
            sizes=self.sizes(bucket.layout, bucket.step)[0],
            lift=lambda values: Sparse(indices, values, x.numel()),
            learn=_nothing_to_learn,
        )

    def sizes(self, layout: Layout, step: int) -> list[list[int]]:
        return [[kept(slot, self.density, step) for slot in layout.slots if slot.numel]]

    def _draw(self, slot: Slot, step: int) -> Tensor:
        k = kept(slot, self.density, step)
        draw = np.random.default_rng(shared_seed(self.seed, step, slot.name))
        chosen = draw.choice(slot.numel, size=k, replace=False, shuffle=False)
        return torch.from_numpy(np.sort(chosen)) + slot.offset


def _nothing_to_learn(mean: Tensor) -> None:
    pass
