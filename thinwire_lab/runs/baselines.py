"""What a recipe is measured against: what PyTorch offers, and what people write by hand.

All of them on DistributedDataParallel with `gradient_as_bucket_view=True`, as the recipes are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

ALONE = "no communication"
IDLE = "DDP, sends nothing"
PLAIN = "plain DDP"
HALF = "fp16 hook"
POWER = "PowerSGD hook"
BY_HAND = "torch.topk by hand"
BASELINES = (ALONE, IDLE, PLAIN, HALF, POWER, BY_HAND)
DENSITY = 0.01
RANK = 4
PLAIN_STEPS = 2  # that PyTorch's PowerSGD hook takes before it begins: as few as it allows
_ONE_BUCKET = 10_000  # MB: with several, PyTorch's hook mixes up its collectives on gloo


class Baseline:
    """A DDP model that averages its gradients in one of the known ways."""

    def __init__(self, name: str, net: nn.Module, bucket_mb: float) -> None:
        whole = _ONE_BUCKET if name == POWER else bucket_mb
        self.model = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=whole)
        self._apart = name in (ALONE, BY_HAND)
        self.finish: Callable[[], None] = lambda: None
        numel = sum(p.numel() for p in net.parameters())
        ring = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
        self.bytes_sent = self._plain_bytes = ring * 4.0 * numel
        self._plain_steps = 0
        if name in (ALONE, IDLE):
            self.bytes_sent = 0.0
        if name == IDLE:  # all that DDP does, but send
            self.model.register_comm_hook(None, debugging_hooks.noop_hook)
        elif name == HALF:
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
            self.bytes_sent /= 2
        elif name == POWER:
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=RANK, start_powerSGD_iter=PLAIN_STEPS
            )
            self._plain_steps = PLAIN_STEPS
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            self.bytes_sent = ring * 4.0 * sum(_low_rank(p) for p in net.parameters())
        elif name == BY_HAND:
            by_hand = ByHand(net)
            self.finish, self.bytes_sent = by_hand.average, by_hand.bytes_sent

    def count_sent(self, steps: int) -> dict[str, Any]:
        """Bytes of so many steps from the first, beside those of plain DDP."""
        plain = min(steps, self._plain_steps)
        sent = plain * self._plain_bytes + (steps - plain) * self.bytes_sent
        whole = steps * self._plain_bytes
        density = sent / whole if self._plain_steps and whole else 1.0
        dense = steps * int(self._plain_bytes)
        return {"steps": steps, "bytes_sent": int(sent), "bytes_dense": dense, "density": density}

    def backward(self) -> AbstractContextManager[Any]:
        """Inside, backward communicates as this one does."""
        return self.model.no_sync() if self._apart else nullcontext()


class ByHand:
    """Error feedback and 1 % top-k for every parameter, as in the papers' own code: torch.topk,
    then an all-gather of values and of indices."""

    def __init__(self, net: nn.Module) -> None:
        self._parameters = list(net.parameters())
        self._residuals = [torch.zeros(p.numel()) for p in self._parameters]
        self._world = dist.get_world_size()
        pairs = sum(max(1, int(DENSITY * p.numel())) for p in self._parameters)
        self.bytes_sent = (self._world - 1) * 12.0 * pairs

    def average(self) -> None:
        """Replace every gradient by the mean of what all ranks sent."""
        for p, residual in zip(self._parameters, self._residuals, strict=True):
            assert p.grad is not None
            residual.add_(p.grad.view(-1))
            k = max(1, int(DENSITY * residual.numel()))
            indices = residual.abs().topk(k, sorted=False).indices
            values = residual[indices]
            residual[indices] = 0.0
            flat = p.grad.view(-1).zero_()
            for where, what in zip(self._all(indices), self._all(values), strict=True):
                flat.index_add_(0, where, what, alpha=1 / self._world)

    def _all(self, x: Tensor) -> list[Tensor]:
        out = [torch.empty_like(x) for _ in range(self._world)]
        dist.all_gather(out, x)
        return out


def _low_rank(p: Tensor) -> int:
    if p.dim() < 2:
        return p.numel()
    rows = p.shape[0]
    columns = p.numel() // rows
    rank = min(RANK, rows, columns)
    low = rank * (rows + columns)
    return low if 2 * low < p.numel() else p.numel()  # the hook leaves alone what it cannot halve
