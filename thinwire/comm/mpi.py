"""The verbs over an MPI communicator (mpi4py): another transport under the same algorithms.

    comm = MPIComm(MPI.COMM_WORLD)        # pip install 'thinwire[mpi]', and an MPI on the machine

Which MPI call each verb is: docs/communication.md. Tensors are handed over where they lie; on a
GPU that needs a CUDA-aware MPI, so others are staged through the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.pairwise import trade_at_once


class MPIComm:
    """The verbs over one communicator; a duplicate of it, so that our messages meet no others."""

    def __init__(self, communicator: Any = None) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = (MPI.COMM_WORLD if communicator is None else communicator).Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):  # MPI adds up neither
            return x.copy_(self.all_reduce(x.float()))
        host = _on_host(x)
        self._comm.Allreduce(self._mpi.IN_PLACE, host.numpy(), op=self._mpi.SUM)
        return x if host.data_ptr() == x.data_ptr() else x.copy_(host)

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        if sizes is None:
            sizes = self._counts(x)
        out = torch.empty(sum(sizes), dtype=x.dtype)
        width = x.element_size()
        self._comm.Allgatherv(_bytes(x), [_bytes(out), [n * width for n in sizes]])
        return list(out.to(x.device).split(list(sizes)))

    def all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        counts = [x.numel() for x in xs]
        if sizes is None:
            asked = torch.tensor(counts)
            told = torch.empty_like(asked)
            self._comm.Alltoall(asked.numpy(), told.numpy())
            sizes = told.tolist()
        width, like = xs[0].element_size(), xs[0]
        out = torch.empty(sum(sizes), dtype=like.dtype)
        leaving = torch.cat([_on_host(x) for x in xs])
        self._comm.Alltoallv(
            [_bytes(leaving), [n * width for n in counts]],
            [_bytes(out), [n * width for n in sizes]],
        )
        return list(out.to(like.device).split(list(sizes)))

    def trade(
        self, size: int, message: Callable[[int], Tensor], take: Callable[[int, Tensor], None]
    ) -> None:
        trade_at_once(self, size, message, take)

    def exchange(
        self, x: Tensor, to: int | None, source: int | None, size: int | None = None
    ) -> Tensor | None:
        to = self._mpi.PROC_NULL if to is None else to
        sender = self._mpi.PROC_NULL if source is None else source
        if size is None:
            told = torch.zeros(1, dtype=torch.int64)
            mine = torch.tensor([x.numel()])
            self._comm.Sendrecv(mine.numpy(), to, recvbuf=told.numpy(), source=sender)
            size = int(told)
        out = torch.empty(size if source is not None else 0, dtype=x.dtype)
        self._comm.Sendrecv(_bytes(x), to, recvbuf=_bytes(out), source=sender)
        return out.to(x.device) if source is not None else None

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        host = _on_host(x)
        self._comm.Bcast(_bytes(host), root)
        return x if host.data_ptr() == x.data_ptr() else x.copy_(host)

    def barrier(self) -> None:
        self._comm.Barrier()

    def _counts(self, x: Tensor) -> list[int]:
        told = torch.empty(self.size, dtype=torch.int64)
        self._comm.Allgather(torch.tensor([x.numel()]).numpy(), told.numpy())
        return [int(n) for n in told.tolist()]


def _on_host(x: Tensor) -> Tensor:
    return x.detach().contiguous().cpu()


def _bytes(x: Tensor) -> Any:
    """The tensor's memory, whatever its type: MPI has no bfloat16."""
    return _on_host(x).view(-1).view(torch.uint8).numpy()
