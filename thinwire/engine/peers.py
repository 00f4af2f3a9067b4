"""The other ranks: a group of our own, agreement before work, and who it is that fails.

Every rank compares what it is about to do with the others before the first collective of a new
kind, so that a disagreement is an error message instead of a hang. While it waits it listens on
its lines (`lines.py`): whoever fails says so there, and whoever is missing is found out, so that
every rank names the one that is really lost, within the time-out.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from thinwire.comm.torch import TorchComm
from thinwire.engine import rendezvous
from thinwire.engine.lines import GRACE, Lines
from thinwire.protocols import RankFailed, RankMismatch

log = logging.getLogger(__name__)

EVIDENCE = 3.0  # seconds after a broken connection in which we hope to hear whose fault it was
ROOM, WIDEST = 1 << 20, 32  # bytes a peer may announce: for headers, and per entry
LONGEST_TEXT = 1 << 26  # bytes of a recipe and a model's parameters, told when they differ


class Peers:
    """Our own group over the ranks of `parent`; nothing waits on it longer than `timeout` seconds.

    Tensors are on `device`.
    """

    def __init__(
        self, parent: dist.ProcessGroup, timeout: float, device: torch.device | None = None
    ) -> None:
        self.device = device or torch.device("cpu")
        self._timeout, self._process = timeout, os.getpid()
        self._met: dict[str, int] = {}
        self._lost: RuntimeError | None = None
        self._earlier = getattr(sys, "last_value", None)
        ranks, rank = dist.get_process_group_ranks(parent), dist.get_rank(parent)
        kind = _kind(parent, self.device)
        store = dist.distributed_c10d._get_default_store()
        deadline = time.monotonic() + timeout
        try:
            sockets, name = rendezvous.meet(store, ranks, rank, timeout)
        except TimeoutError as error:
            raise RankFailed(str(error)) from None
        self.lines = Lines(rank, sockets)
        try:
            ours = PrefixStore(f"thinwire/{name}", store)
            group = self._group(kind, ours, rank, len(ranks), deadline - time.monotonic())
        except BaseException:
            self.lines.leave("could not connect", patience=0.0)
            raise
        self.comm = TorchComm(group, self)

    def agree(self, subject: str, lines: list[str]) -> None:
        """Raise RankMismatch, with both sides, unless every rank says the same."""
        text = "\n".join(lines)
        digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
        digests = self.comm.all_gather(digest.to(self.device), [32] * self.comm.size)
        if all(torch.equal(d, digests[0]) for d in digests):
            self.done()
            return
        mine = torch.tensor(list(text.encode()), dtype=torch.uint8).to(self.device)
        self.comm.room = LONGEST_TEXT
        texts = [bytes(t.tolist()).decode() for t in self.comm.all_gather(mine)]
        raise RankMismatch(_both_sides(subject, texts))

    def meet(self, what: str) -> None:
        """Wait until every rank has called this; an error if some do not within the time-out, or
        if one has said that it cannot (`refuse`).

        Not by a collective: a rank that went on instead is inside another one, and sizes that
        differ would kill its process.
        """
        label = self._next(what)
        self.lines.tell_meeting(label)
        deadline = time.monotonic() + self._timeout
        while len(there := self.lines.there(label)) < self.comm.size - 1:
            if label in self.lines.refusals:
                self.lines.forget(label)
                raise ValueError(self.lines.refusals.pop(label))
            self._raise_if_lost()
            apart = self.lines.elsewhere(label)
            if apart is not None:
                self._declare(apart, RankMismatch)
            if time.monotonic() > deadline:
                absent = self.lines.absent(self._timeout)
                if absent is not None:
                    self._declare(absent)
                others = sorted(set(range(self.comm.size)) - there - {self.comm.rank})
                names = ", ".join(f"rank {rank}" for rank in others)
                missing = RankMismatch(
                    f"only {len(there) + 1} of {self.comm.size} ranks called {what} within "
                    f"{self._timeout:.1f} s, {names} did not; call it on every rank, between the "
                    "same two steps"
                )
                self.report(missing, f"in {what}")
                raise missing
            self.lines.wait(0.1)
        self.lines.forget(label)

    def refuse(self, what: str, error: ValueError) -> None:
        """Instead of `meet`: those who do, or will, get this error."""
        self.lines.tell_refusal(self._next(what), f"rank {self.comm.rank} in {what}: {error}")

    def _next(self, what: str) -> str:
        self._met[what] = self._met.get(what, 0) + 1
        return f"{what} #{self._met[what]}"

    def average_sparse(self, grad: Tensor) -> Tensor:
        """The mean of sparse gradients, as sparse as they are."""
        total = (grad / self.comm.size).coalesce()
        return self.comm.all_reduce(total).coalesce()

    def report(self, error: BaseException, doing: str) -> None:
        """Tell the others that this rank is lost, and why."""
        if not isinstance(error, RankFailed):  # else it is somebody else's news
            reason = f"{type(error).__name__}: {error}"
            self.lines.tell_failure(f"rank {self.comm.rank} failed {doing}: {reason}")

    def at(self, step: int, bucket: int, entries: int) -> None:
        """Where this rank is, for those who wait for it: a bucket of so many entries."""
        self.comm.room = ROOM + WIDEST * entries
        self.lines.place = replace(self.lines.place, step=step, bucket=bucket)

    @contextmanager
    def apart(self) -> Iterator[TorchComm]:
        """An exchange that is no bucket, such as a broadcast of parameters."""
        yield self.comm
        self.done()

    def done(self) -> None:
        """One more exchange that all ranks take part in is behind this one: who waits for its data
        need not wonder where it goes next."""
        self.lines.place = replace(self.lines.place, done=self.lines.place.done + 1)

    def inside(self, waiting: bool) -> None:
        """This rank has begun, or ended, to wait for others. (A comm calls this.)"""
        self.lines.place = replace(self.lines.place, inside=waiting)
        if self._lost is not None:  # given up by `watch`: what came late must change nothing
            raise self._lost

    def look(self) -> None:
        """Raise RankFailed if what this rank waits for will not come. (A comm calls this.)"""
        since = self.comm.since
        if since is None:
            return
        self._raise_if_lost()
        apart = self.lines.elsewhere(None)
        if apart is not None:
            self._declare(apart, RankMismatch)
        waited = time.monotonic() - since
        if waited > self._timeout:
            self._declare(self.lines.missing(waited))

    def blame(self, error: RuntimeError) -> NoReturn:
        """Raise RankFailed for whoever broke the exchange that ended with this error."""
        deadline = time.monotonic() + EVIDENCE
        while time.monotonic() < deadline:
            self.look()
            self.lines.wait(0.1)
        self._declare(f"the exchange broke off, and no rank says why: {error}")

    def watch(self) -> None:
        """The same look from another thread, for waits that cannot look themselves: with some
        patience, so that those who can may speak first."""
        since = self.comm.since
        now = time.monotonic()
        lost = self._news(GRACE + 1.0)
        if since is not None and lost is not None:
            self._declare(lost)
        if since is not None and now - since > self._timeout + 1.0:
            self._declare(self.lines.missing(now - since))
        if self._lost is not None:
            raise self._lost

    def leave(self, *, idle: bool) -> None:
        """Say goodbye, or why this process ends, and let go of the group and its descriptors.

        A gloo thread that frees the last collective's tensors while Python is already shutting
        down kills the process (pytorch issue 190489). If one may still wait for a lost peer, the
        group stays, else we would wait for that thread.
        """
        if os.getpid() != self._process:  # a forked child: nothing of this is its own
            return
        error = getattr(sys, "last_value", None)  # that nobody caught
        if error is not None and error is not self._earlier and self._lost is None:
            self._explain(error)
        self.lines.leave("has left: it detached, or its process ended", 2.0 if idle else 0.0)
        if idle:
            del self.comm.group

    def _explain(self, error: BaseException) -> None:
        """Why this process ends. If the user's own collectives, or DDP's, died of another rank's
        end, that is known in a moment."""
        deadline = time.monotonic() + (GRACE if isinstance(error, RuntimeError) else 0.0)
        while (lost := self.lines.failure or self.lines.gone(0.0)) is None:
            if time.monotonic() >= deadline:
                self.report(error, f"after {self.lines.place}")
                return
            self.lines.wait(0.1)
        log.error("%s", lost)
        if self.lines.failure is None:
            self.lines.tell_failure(lost)

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            raise self._lost
        text = self._news(0.0)
        if text is not None:
            self._declare(text)

    def _news(self, patience: float) -> str | None:
        """Who is lost, if that has been known for so long."""
        failure, at = self.lines.failure, self.lines.failed_at
        known = failure is not None and time.monotonic() - at >= patience
        if known and not self.lines.lost_before_failure():
            return failure
        return self.lines.gone(GRACE + patience)

    def _declare(self, text: str, kind: type[RuntimeError] = RankFailed) -> NoReturn:
        """Tell the others, if they have not told us; no verb of this group succeeds any more."""
        if self.lines.failure is None:
            self.lines.tell_failure(text)
        if self._lost is None:
            self._lost = kind(text)
        raise self._lost from None  # whatever gloo made of it

    def _group(
        self, kind: str, store: Store, rank: int, size: int, patience: float
    ) -> dist.ProcessGroup:
        """A process group that PyTorch keeps no list of: gone when we let go of it.

        (`dist.new_group` names groups by how many there are, which ranks may count differently.)
        """
        limit, first = timedelta(seconds=self._timeout), timedelta(seconds=max(1.0, patience))

        def build() -> Any:
            if kind == "gloo":
                backend = dist.ProcessGroupGloo(store, rank, size, first)
                backend._set_default_timeout(limit)
                return backend
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            return dist.ProcessGroupNCCL(store, rank, size, options)

        begun = time.monotonic()
        try:
            # Longer than gloo itself may take: a thread that still builds it would end the process.
            backend = rendezvous.within(first.total_seconds() + 2.0, build)
        except (TimeoutError, RuntimeError) as error:
            absent = self.lines.failure or self.lines.absent(time.monotonic() - begun)
            said = absent or (
                f"rank {rank} could not connect its {kind} group: {error}; between machines set "
                f"{' or '.join(rendezvous.VARIABLES)} to the interface that leads there (here are "
                f"{rendezvous.named_interfaces()})"
            )
            raise RankFailed(said) from None
        types = dist.ProcessGroup.BackendType
        group = dist.ProcessGroup(store, rank, size)
        group._register_backend(self.device, types.GLOO if kind == "gloo" else types.NCCL, backend)
        return group


def _kind(parent: dist.ProcessGroup, device: torch.device) -> str:
    kind: str = parent._get_backend(device).name()
    if kind not in ("gloo", "nccl"):
        raise ValueError(
            f"the process group uses {kind!r} for tensors on {device.type}; thinwire runs over "
            "gloo and nccl: init_process_group('cpu:gloo,cuda:nccl')"
        )
    return kind


def _both_sides(subject: str, texts: list[str]) -> str:
    other = next(rank for rank, text in enumerate(texts) if text != texts[0])
    mine, theirs = texts[0].splitlines(), texts[other].splitlines()
    shown = []
    for number in range(max(len(mine), len(theirs))):
        pair = [lines[number] if number < len(lines) else "(nothing)" for lines in (mine, theirs)]
        if pair[0] != pair[1]:
            shown.append(f"  rank 0: {pair[0]}\n  rank {other}: {pair[1]}")
    more = f"\n  ... and {len(shown) - 5} more lines" if len(shown) > 5 else ""
    listing = "\n".join(shown[:5])
    return f"ranks disagree on the {subject}; give every rank the same:\n{listing}{more}"
