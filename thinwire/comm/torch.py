"""The verbs over a torch process group (gloo, NCCL, MPI).

Blocking and always in the caller's order. While waiting it looks out for a failure that another
rank has reported, so that nobody sits out the whole time-out behind a dead peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_PEEK = timedelta(seconds=1)
# torch 2.13 renamed it; older releases have only the longer name.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchComm:
    """Six verbs over one process group; `watch` raises if another rank reported a failure."""

    def __init__(self, group: dist.ProcessGroup, watch: Callable[[], None] | None = None) -> None:
        self.group, self._watch = group, watch or _nothing_to_see
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.numel() and self.size > 1:
            self.finish(dist.all_reduce(x, group=self.group, async_op=True), x)
        return x

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
        if self.size == 1:
            return [x]
        if sizes is None:
            sizes = self._sizes(x)
        room = max(sizes)
        if room == 0:
            return [x.new_empty(0) for _ in sizes]
        if x.device.type == "cpu":
            return self._to_everyone(x, sizes)
        # equal shapes only: pad to the longest
        padded = x if x.numel() == room else torch.cat([x, x.new_zeros(room - x.numel())])
        out = x.new_empty(self.size * room)
        self.finish(_gather_single(out, padded, group=self.group, async_op=True), x)
        return [out[r * room : r * room + n] for r, n in enumerate(sizes)]

    def all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        if self.size == 1:
            return [xs[0]]
        counts = [x.numel() for x in xs]
        if sizes is None:
            asked = torch.tensor(counts, device=xs[0].device)
            told = torch.empty_like(asked)
            self.finish(dist.all_to_all_single(told, asked, group=self.group, async_op=True), told)
            sizes = told.tolist()
        out = xs[0].new_empty(sum(sizes))
        work = dist.all_to_all_single(
            out, torch.cat(list(xs)), list(sizes), counts, group=self.group, async_op=True
        )
        self.finish(work, out)
        return list(out.split(list(sizes)))

    def exchange(
        self, x: Tensor, to: int | None, source: int | None, size: int | None = None
    ) -> Tensor | None:
        if to == self.rank and source == self.rank:
            return x.clone()
        if size is None:
            told = torch.zeros(1, dtype=torch.int64, device=x.device)
            self._swap(torch.tensor([x.numel()], device=x.device), to, told, source)
            size = int(told)
        out = x.new_empty(size if source is not None else 0)
        self._swap(x, to, out, source)
        return out if source is not None else None

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        if x.numel() and self.size > 1:
            work = dist.broadcast(x, group=self.group, group_src=root, async_op=True)
            self.finish(work, x)
        return x

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)

    def _to_everyone(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The same bytes as gloo's ring, all under way at once: one hop in place of P - 1, each of
        which waits for a thread to wake up (1.3 ms with four workers on two cores)."""
        told = [0 if rank == self.rank else n for rank, n in enumerate(sizes)]
        mine = [0 if rank == self.rank else x.numel() for rank in range(self.size)]
        out = x.new_empty(sum(told))
        work = dist.all_to_all_single(
            out, x.repeat(self.size - 1), told, mine, group=self.group, async_op=True
        )
        self.finish(work, out)
        parts = list(out.split(told))
        parts[self.rank] = x
        return parts

    def _sizes(self, x: Tensor) -> list[int]:
        mine = torch.tensor([x.numel()], device=x.device)
        told = self.all_gather(mine, [1] * self.size)
        return [int(n) for n in torch.cat(told).tolist()]

    def _swap(self, x: Tensor, to: int | None, out: Tensor, source: int | None) -> None:
        works = []
        if to is not None and x.numel():
            works.append(dist.isend(x.contiguous(), group=self.group, group_dst=to))
        if source is not None and out.numel():
            works.append(dist.irecv(out, group=self.group, group_src=source))
        for work in works:
            assert work is not None
            work.wait()  # gloo gives up a message whose wait times out: no peeking here

    def finish(self, work: dist.Work | None, x: Tensor) -> None:
        """Wait for a collective, with an eye on failures elsewhere."""
        assert work is not None
        if x.device.type != "cpu":  # streams: waiting here would block the host for nothing
            work.wait()
            return
        while True:
            try:
                work.wait(_PEEK)
                return
            except RuntimeError:
                if work.is_completed():  # it failed, or ended just now
                    self._watch()
                    work.wait()
                    return
                self._watch()


def _nothing_to_see() -> None:
    """No other rank reports failures to this comm."""
