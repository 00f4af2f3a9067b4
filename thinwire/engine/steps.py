"""Taking steps, without threads: every bucket through the recipe, then all of them kept or none.

Residuals change in place before the exchange. If any bucket of any rank met a non-finite gradient
the step counts as `sent = 0`: what the other buckets sent is put back, all other state is a draft
that is thrown away, and every rank knows, because the mean it sees is not finite.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.bucket import Bucket
from thinwire.comm.metered import Metered, all_reduced, gathered, nbytes
from thinwire.engine import checkpoint
from thinwire.engine.peers import Peers
from thinwire.engine.rebuilt import Expected, Groups
from thinwire.layout import Layout, Slot
from thinwire.protocols import Reduced, Reducer
from thinwire.state import Draft, Root, merge

REPLAYS = 2  # steps in which DDP may come with one large bucket, before it has rebuilt them


@dataclass(kw_only=True)
class Arrival:
    """One bucket as a socket hands it in; `scale` is the loss scale its gradients carry,
    `rates` the learning rates they will meet, `ready` when they were complete."""

    flat: Tensor
    layout: Layout
    first: bool  # of the step
    last: bool
    unused: frozenset[str] | None = None
    scale: float = 1.0
    rates: dict[str, float] | None = None
    ready: float = field(default_factory=time.perf_counter)


@dataclass
class Meter:
    """Totals of this rank so far."""

    committed: int = 0
    skipped: int = 0
    bytes_dense: int = 0
    entries: int = 0
    numel: int = 0
    select: float = 0.0
    scatter: float = 0.0
    exposed: float = 0.0

    @property
    def steps(self) -> int:
        return self.committed + self.skipped


@dataclass
class _Step:
    """What must be kept or undone together."""

    draft: Draft = field(default_factory=dict)
    finite: bool = True
    undos: list[Callable[[], object]] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)


class Steps:
    """The state of one training run on this rank, and the recipe that advances it."""

    def __init__(self, recipe: Reducer, peers: Peers) -> None:
        self.recipe, self._peers = recipe, peers
        self.comm = Metered(peers.comm)
        self.meter = Meter()
        self.number = 0  # of committed steps
        self.root: Root = {}
        self.next: Groups = []  # parameters by bucket, in the next step
        self.buckets: Groups = []  # and in all after it
        self._expected: Expected | None = None
        self._now = _Step()
        self._sent = 0  # buckets of a step that is not closed yet, whether undone or not
        self._agreed: set[str] = set()
        self._saved: list[Groups] = []
        self._replays_left = 0

    def reduce(self, arrival: Arrival) -> Reduced:
        """One bucket, blocking; the last one of a step closes it."""
        if arrival.first:
            self._begin()
        layouts = self._as_saved(arrival) if self._replays_left else []
        reduced = self._regroup(arrival, layouts) if layouts else self._one(arrival)
        if arrival.last:
            self._close()
        return reduced

    def reduce_sparse(self, grad: Tensor, *, first: bool, last: bool) -> Tensor:
        """A gradient that is sparse already: averaged as it is, part of the step all the same."""
        if first:
            self._begin()
        self._peers.at(self.number, len(self._now.layouts), grad.numel())
        mean = self._peers.average_sparse(grad)
        self._sent += 1
        self._peers.done()
        self.comm.bytes += gathered(_sparse_bytes(grad), self.comm.size)  # gloo gathers and adds
        self.meter.bytes_dense += all_reduced(4 * grad.numel(), self.comm.size)
        self._now.finite &= kernels.finite(mean.values())
        if last:
            self._close()
        return mean

    def expect(self, expected: Expected | None) -> None:
        """Before the last bucket of a step: what DDP will make of its buckets later."""
        self._expected = expected

    def load(self, state: Mapping[str, Any]) -> None:
        self.root = checkpoint.copy_trees(state)
        self.number = state["step"]
        self._sent = 0  # all ranks have met
        self._agreed.clear()  # compare steps again
        self.next, self.buckets = ([list(g) for g in state[key]] for key in ("next", "buckets"))
        self._saved = [self.next, self.buckets]
        self._replays_left = REPLAYS if self.buckets else 0

    def _begin(self) -> None:
        """A step begins; a backward that was cut short has left one half done: on all ranks, else
        some would now add up other buckets, or steps, than the rest."""
        if self._sent:
            self._peers.meet(
                f"its next batch, because backward broke off in step {self.number} after "
                f"{self._sent} of its buckets were sent"
            )
        self.roll_back()
        self._sent = 0

    def _one(self, arrival: Arrival) -> Reduced:
        self._peers.at(self.number, len(self._now.layouts), arrival.layout.numel)
        self._agree(arrival.layout)
        bucket = Bucket(
            flat=arrival.flat,
            layout=arrival.layout,
            state=self.root,
            step=self.number,
            scale=arrival.scale,
            rates=arrival.rates,
            unused=arrival.unused,
            draft=self._now.draft,
        )
        self.comm.start(arrival.ready)
        begin, waited = time.perf_counter(), self.comm.seconds
        with torch.profiler.record_function("thinwire::reduce"), torch.no_grad():
            reduced = self.recipe.reduce(bucket, self.comm)
        self._count(arrival, reduced, begin, self.comm.seconds - waited)
        self._now.finite &= reduced.finite
        if reduced.undo is not None:
            self._now.undos.append(reduced.undo)
        self._now.layouts.append(arrival.layout)
        self._sent += 1
        self._peers.done()
        return reduced

    def _count(self, arrival: Arrival, reduced: Reduced, begin: float, waited: float) -> None:
        end = time.perf_counter()
        select = (self.comm.first or end) - begin
        self.meter.select += select
        self.meter.scatter += end - begin - select - waited
        self.meter.bytes_dense += all_reduced(nbytes(arrival.flat), self.comm.size)
        self.meter.entries += reduced.entries
        self.meter.numel += arrival.layout.size

    def _close(self) -> None:
        self._look_ahead()
        self._sent = 0
        if self._now.finite:
            merge(self.root, self._now.draft)
            self.number += 1
            self.meter.committed += 1
            self._now = _Step()
        else:
            self.meter.skipped += 1
            self.roll_back()

    def roll_back(self) -> None:
        """Undo what a step has done so far."""
        for undo in self._now.undos:
            undo()
        self._now = _Step()

    def _agree(self, layout: Layout) -> None:
        """Before the first collective of a kind: does every rank mean the same bucket?"""
        if layout.fingerprint not in self._agreed:
            lines = [f"step {self.number}", *map(slot_line, layout.slots)]
            self._peers.agree("step or the bucket", lines)
            self._agreed.add(layout.fingerprint)

    def _look_ahead(self) -> None:
        """How the next steps will be cut into buckets, whatever becomes of this one."""
        now = [[slot.name for slot in layout.slots] for layout in self._now.layouts]
        expected, self._expected = self._expected, None
        self.next = self.buckets = now
        if self._replays_left:
            self._replays_left -= 1
            self._saved = self._saved[-1:]
            self.next = self.buckets = self._saved[0]
        elif expected is not None:
            with self._peers.apart() as comm:
                self.next, self.buckets = expected.agree(now, comm, self._peers.device)

    def _as_saved(self, arrival: Arrival) -> list[Layout]:
        """The saved groups in a bucket that is larger, as those are that a resumed run starts with.

        Until DDP has rebuilt its buckets, going on in the saved ones makes resuming bit-exact.
        """
        here = {slot.name: slot for slot in arrival.layout.slots}
        groups = [names for names in self._saved[0] if names[0] in here]
        inside = sorted(name for names in groups for name in names) == sorted(here)
        if not inside or groups == [list(here)]:
            return []
        return [Layout.packed(here[name] for name in names) for names in groups]

    def _regroup(self, arrival: Arrival, layouts: list[Layout]) -> Reduced:
        here = {slot.name: slot for slot in arrival.layout.slots}
        mean = torch.empty_like(arrival.flat)
        results = []
        for layout in layouts:
            flat = torch.cat([_cut(arrival.flat, here[slot.name]) for slot in layout.slots])
            reduced = self._one(replace(arrival, flat=flat, layout=layout))
            for slot in layout.slots:
                _cut(mean, here[slot.name]).copy_(_cut(reduced.mean, slot))
            results.append(reduced)
        unused = tuple(name for reduced in results for name in reduced.unused)
        return replace(results[0], mean=mean, unused=unused)


def slot_line(slot: Slot) -> str:
    return f"{slot.name} {slot.shape} {slot.strides}"


def _sparse_bytes(grad: Tensor) -> int:
    grad = grad.coalesce()
    return nbytes(grad.indices()) + nbytes(grad.values())


def _cut(flat: Tensor, slot: Slot) -> Tensor:
    return flat[slot.offset : slot.stop]
