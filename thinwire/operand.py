"""What a reducer works on: a tensor, or a lazy sum of residual and gradient."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.layout import Slot, fills_memory


class Sum:
    """alpha * grad + residual, not added yet, so that one kernel can add and select in one sweep.

    `take()` adds it now, in place, for everyone else. Gradient entries that are not finite are
    left out and lower the flag `finite` of the whole sum: nothing non-finite is ever stored. A mean
    may be written over `scratch`: the gradient's own buffer. `units` is what a parameter's mean
    must be multiplied by to be in the gradient's unit, where that is not 1; 0.0 if nothing can be
    sent.
    """

    def __init__(
        self, residual: Tensor, grad: Tensor, alpha: float = 1.0, root: Sum | None = None,
        scratch: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.residual, self.grad, self.alpha = residual, grad, alpha
        self.scratch = grad if scratch is None else scratch
        self.root = root or self
        self.finite = True
        self.units: list[tuple[Slot, float]] = []
        self.evaluated: list[tuple[int, int]] = []  # runs of the root that are added already
        mine = self._start if self.root.evaluated else 0
        self.pending = not any(start <= mine < stop for start, stop in self.root.evaluated)

    @property
    def _start(self) -> int:
        return int(self.residual.storage_offset() - self.root.residual.storage_offset())

    def __getitem__(self, cut: slice) -> Sum:
        return Sum(self.residual[cut], self.grad[cut], self.alpha, self.root)

    def view(self, *shape: int) -> Sum:
        residual, grad = self.residual.view(*shape), self.grad.view(*shape)
        return Sum(residual, grad, self.alpha, self.root)

    @property
    def shape(self) -> torch.Size:
        return self.residual.shape

    def take_run(self, start: int, stop: int) -> Tensor:
        """Add a stretch now; slices within it made later know that it is done."""
        values = self[start:stop].take()
        self.root.evaluated.append((start, stop))
        return values

    def take(self) -> Tensor:
        if self.pending:
            self.pending = False
            if not kernels.accumulate(self.residual, self.grad, self.alpha):
                self.root.finite = False
        return self.residual

    def topk(
        self, k: int, memo: MutableMapping[str, Any]
    ) -> Tensor:  # of a 2-D sum: (r, c) -> (r * k,)
        """Add it now, and where the k largest of every row are, in one sweep."""
        if not self.pending:
            return kernels.topk(self.residual, k, memo)
        self.pending = False
        index, finite = kernels.add_topk(self.residual, self.grad, self.alpha, k, memo)
        self.root.finite &= finite
        return index


def evaluate(values: Tensor | Sum) -> Tensor:
    """The values as a tensor, whichever of the two they are."""
    return values.take() if isinstance(values, Sum) else values


def magnitude(x: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x)
    return float(torch.maximum(-low, high))


def in_memory_order(tensor: Tensor) -> Tensor:
    """The tensor's entries as one flat tensor, in the order they lie in memory."""
    tensor = tensor.detach()
    if fills_memory(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Residuals and means are kept in at least single precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
