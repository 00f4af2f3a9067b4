"""Selectors beside exact top-k: what they find, what they leave behind, how long they take.

Three distributions, one thread; the exact selection of the same run is the reference.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire import recipes
from thinwire.describe import parts

EXACT = "topk()"
SELECTORS: dict[str, Callable[[Tensor, int, Any], Tensor]] = {
    call: next(part.pick for part in parts(recipes.parse(call)) if hasattr(part, "pick"))
    for call in (
        EXACT, "topk(refresh=32)", "dgc()", "dgc(hierarchical=False)", "gaussiank()", "redsync()",
        "redsync(trim=True)", "sidco(fit='exponential')", "sidco(fit='gamma')", "sidco()",
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """One selector on one distribution, over several steps of error feedback."""

    selector: str
    data: str
    fewest: float  # entries found, as a share of those asked for
    most: float
    energy: float  # of what was to be sent, the share that was, in the last step
    seconds: float  # a selection, median


def measure(n: int, density: float, steps: int) -> Iterator[Row]:
    """A row for every distribution and selector, as they come."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for data, x in samples(n).items():
            for name, pick in SELECTORS.items():
                yield _row(name, data, pick, x, max(1, int(density * n)), steps)
    finally:
        torch.set_num_threads(threads)


def samples(n: int) -> dict[str, Tensor]:
    """Gaussian, Laplace and Student-t3 numbers, always the same."""
    draw = torch.Generator().manual_seed(0)
    gauss = torch.randn(n, generator=draw)
    share = torch.rand(n, generator=draw) - 0.5
    chi = torch.randn(3, n, generator=draw).square().mean(dim=0).sqrt()
    return {
        "gaussian": gauss,
        "laplace": -share.sign() * torch.log1p(-2 * share.abs()),
        "student-t3": torch.randn(n, generator=draw) / chi,
    }


def _row(
    name: str, data: str, pick: Callable[..., Tensor], x: Tensor, k: int, steps: int
) -> Row:  # fmt: skip
    residual = torch.zeros_like(x)
    state: dict[str, Any] = {}
    counts, seconds, energy = [], [], 0.0
    for step in range(steps):
        residual += x.roll(7919 * step)
        begin = time.perf_counter()
        chosen = pick(residual[None], k, state)
        seconds.append(time.perf_counter() - begin)
        counts.append(chosen.numel() / k)
        energy = float(residual[chosen].square().sum() / residual.square().sum())
        residual[chosen] = 0.0
    return Row(
        selector=name,
        data=data,
        fewest=min(counts),
        most=max(counts),
        energy=energy,
        seconds=statistics.median(seconds),
    )
