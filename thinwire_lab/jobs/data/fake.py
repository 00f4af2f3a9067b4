"""Random numbers of the right shape, for runs that measure throughput and learn nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire_lab.jobs.data.source import Batch, Data

SIZE = 1 << 20  # examples it pretends to have


@dataclass(frozen=True)
class Fake:
    """The same few examples over and over: loading them costs nothing."""

    example: Batch  # one example a row
    size: int

    def __len__(self) -> int:
        return self.size

    def batch(self, chosen: Tensor, draw: torch.Generator | None) -> Batch:
        rows = chosen % len(self.example[0])
        return tuple(column[rows] for column in self.example)


def fake(shapes: tuple[tuple[tuple[int, ...], int], ...], rows: int = 64) -> tuple[Data, Data]:
    """Columns of these shapes: whole numbers below the bound, or normal ones if it is 0."""
    draw = torch.Generator().manual_seed(0)
    columns = tuple(
        torch.randint(bound, (rows, *shape), generator=draw)
        if bound
        else torch.randn(rows, *shape, generator=draw)
        for shape, bound in shapes
    )
    return Fake(columns, SIZE), Fake(columns, rows)  # a test of them should not take long
