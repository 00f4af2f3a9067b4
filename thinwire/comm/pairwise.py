"""The verbs made of messages between pairs: point-to-point forms, and groups within a world.

Rank r sends to r + i and receives from r - i, for i = 1, 2, ...: at every turn the destinations
are a permutation, so nobody is hit by two senders at once (Ok-Topk's destination rotation). Over a
part of the ranks it is a comm for that group, which needs no process group of its own.
`trade_at_once` is the verb `trade` for comms that have nothing better than an all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from thinwire.protocols import Comm


def turns(rank: int, world: int) -> Iterator[tuple[int, int]]:
    """To whom this rank sends, and from whom it receives, at every turn."""
    return (((rank + turn) % world, (rank - turn) % world) for turn in range(1, world))


def trade_at_once(
    comm: Comm, size: int, message: Callable[[int], Tensor], take: Callable[[int, Tensor], None]
) -> None:
    """All messages are made, then all are exchanged, then all are taken."""
    peers = list(turns(comm.rank, comm.size))
    if not peers:
        return
    made = {to: message(to) for to, _ in peers}
    mine = made[peers[0][0]][:0]
    sizes = [size * (rank != comm.rank) for rank in range(comm.size)]
    got = comm.all_to_all([made.get(rank, mine) for rank in range(comm.size)], sizes)
    for _, source in peers:
        take(source, got[source])


class Pairwise:
    """A comm of these ranks (all, if none are named) that calls nothing but `exchange`."""

    def __init__(self, comm: Comm, ranks: Sequence[int] | None = None) -> None:
        self.under = comm
        self._ranks = list(range(comm.size)) if ranks is None else list(ranks)
        self.rank, self.size = self._ranks.index(comm.rank), len(self._ranks)

    def all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        got = [xs[self.rank]] * self.size
        for to, source in turns(self.rank, self.size):
            size = None if sizes is None else sizes[source]
            part = self.exchange(xs[to], to, source, size)
            assert part is not None
            got[source] = part
        return got

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        return self.all_to_all([x] * self.size, sizes)

    def trade(
        self, size: int, message: Callable[[int], Tensor], take: Callable[[int, Tensor], None]
    ) -> None:
        for to, source in turns(self.rank, self.size):
            got = self.exchange(message(to), to, source, size)
            assert got is not None
            take(source, got)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Everyone sums its own chunk, in rank order, so that all ranks get the same bits."""
        flat = x.view(-1)
        cuts = [flat.numel() * r // self.size for r in range(self.size + 1)]
        chunks = [flat[cuts[r] : cuts[r + 1]] for r in range(self.size)]
        mine = chunks[self.rank]
        total = torch.zeros_like(mine)
        for part in self.all_to_all(chunks, [mine.numel()] * self.size):
            total += part
        flat.copy_(torch.cat(self.all_gather(total, [chunk.numel() for chunk in chunks])))
        return x

    def exchange(
        self, x: Tensor, to: int | None, source: int | None, size: int | None = None
    ) -> Tensor | None:
        to = None if to is None else self._ranks[to]
        source = None if source is None else self._ranks[source]
        return self.under.exchange(x, to, source, size)

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        if self.rank != root:
            got = self.exchange(x.view(-1)[:0], None, root, x.numel())
            assert got is not None
            return x.copy_(got.view(x.shape))
        for rank in range(self.size):
            if rank != root:
                self.exchange(x.view(-1), rank, None, 0)
        return x

    def barrier(self) -> None:
        self.all_gather(torch.zeros(1), [1] * self.size)
