"""The fast kernels that are here, to be held against their definitions."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch

from thinwire.kernels import cpu, gpu

TRITON = importlib.util.find_spec("triton") is not None
ROOMS = (cpu, gpu) if TRITON else (cpu,)


def every(name: str) -> pytest.MarkDecorator:
    """Once with each room's file of this name as `fast`."""
    here = [room.__name__ for room in ROOMS if importlib.util.find_spec(f"{room.__name__}.{name}")]
    files = [importlib.import_module(f"{room}.{name}") for room in here]
    return pytest.mark.parametrize("fast", files, ids=[room[-3:] for room in here])


BITS, RICE, SCALES = every("bits"), every("rice"), every("scales")


def same(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> None:
    """Equal to the bit, but for the kind of NaN."""
    assert mine is not None and theirs is not None
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def positions(n: int) -> dict[str, torch.Tensor]:
    """Some of n positions, ascending."""
    draw = torch.Generator().manual_seed(1)
    few = torch.randperm(n, generator=draw)[:2000].sort().values
    return {
        "random": few,
        "none": few[:0],
        "first": torch.tensor([0]),
        "last": torch.tensor([n - 1]),
        "edges": torch.tensor([0, 7, 8, 65_535, 65_536, 131_071, 131_072, n - 1]),
        "dense": torch.arange(65_000, 67_000),
        "crowded": torch.cat([torch.arange(300), few[few >= 300]]),
    }
