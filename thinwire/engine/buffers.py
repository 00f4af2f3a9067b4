"""DDP's broadcast of buffers (the running means of BatchNorm), over our own group.

DDP sends them before every forward over the model's group, where a lost rank is waited for as long
as that group's time-out (half an hour by default) and is not named. `attach` puts this in its
place: the same bytes, from the same rank, with our time-out and our words.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.distributed.distributed_c10d import _get_default_group
from torch.nn.parallel import DistributedDataParallel

from thinwire.engine.peers import Peers


class Broadcast:
    """What DDP calls with its buffers and the rank whose they are to be.

    A copy, in a model that was saved or copied, does what DDP does.
    """

    def __init__(self, peers: Peers | None = None) -> None:
        self._peers = None if peers is None else weakref.ref(peers)

    def __reduce__(self) -> tuple[type[Broadcast], tuple[()]]:
        return Broadcast, ()

    def __call__(self, tensors: Sequence[Tensor], size: int, root: int = 0) -> None:
        peers = self._peers() if self._peers is not None else None
        if peers is None:  # DDP itself gives a copy the default group
            _broadcast_coalesced(_get_default_group(), list(tensors), size, root)
            return
        with peers.apart() as comm:
            everything = comm.broadcast(_bytes(tensors), root)
        if comm.rank != root:
            _unpack_into(everything, tensors)


def take_over(model: DistributedDataParallel, peers: Peers) -> None:
    """Buffers of this model go through our group, if that can carry them."""
    if all(buffer.device == peers.device for buffer in model.module.buffers()):
        model._distributed_broadcast_coalesced = Broadcast(peers)  # type: ignore[method-assign]


def give_back(model: DistributedDataParallel) -> None:
    model.__dict__.pop("_distributed_broadcast_coalesced", None)


def _bytes(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.detach().reshape(-1).view(torch.uint8) for x in _align(tensors)])


def _unpack_into(everything: Tensor, tensors: Sequence[Tensor]) -> None:
    ordered = _align(tensors)
    parts = everything.split([x.numel() * x.element_size() for x in ordered])
    for x, part in zip(ordered, parts, strict=True):
        x.copy_(part.view(x.dtype).view(x.shape))


def _align(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Wide elements first, so that each is read where its width allows."""
    return sorted(tensors, key=lambda x: -x.element_size())
