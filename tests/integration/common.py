"""Small models and loops that the process tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from thinwire.combinators import memories

WIDTH = 32
# One recipe for every way to exchange and to remember: where a test is about the engine.
KINDS = ["dense", "half", "topk", "dgc", "gtopk", "topkdsa", "adtopk", "acpsgd", "qsgd"]
SMALL_BUCKETS = 0.004  # megabytes: one linear layer of WIDTH a bucket


def mlp(layers: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def batch(rank: int, step: int, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*(shape or (4, WIDTH)), generator=draw)


def ddp(net: nn.Module, **keywords: Any) -> DDP:
    return DDP(net, **{"bucket_cap_mb": SMALL_BUCKETS, **keywords})


def sgd(net: nn.Module, recipe: Any = None) -> torch.optim.SGD:
    """With momentum, unless the recipe applies it itself."""
    corrected = any(hasattr(memory, "corrects_momentum") for memory in memories(recipe))
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.0 if corrected else 0.9)


def train(model: nn.Module, optimizer: Any, rank: int, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        model(batch(rank, step)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])
