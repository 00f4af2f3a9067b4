"""The other ranks: a process group of our own, agreement before work, and news of failures.

Every rank compares what it is about to do with the others before the first collective of a new
kind, so that a disagreement is an error message instead of a hang. A rank that fails says so in
the store; the others look there while they wait.
"""

from __future__ import annotations

import hashlib
import logging
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.torch import TorchComm
from thinwire.protocols import RankFailed, RankMismatch

log = logging.getLogger(__name__)

GRACE = 5.0  # seconds a failed rank stays to be heard


class Peers:
    """Our own group over the ranks of `parent`; operations on it end after `timeout` seconds."""

    def __init__(self, parent: dist.ProcessGroup, timeout: float) -> None:
        self.group = dist.new_group(
            dist.get_process_group_ranks(parent),
            timeout=timedelta(seconds=timeout),
            backend=dist.get_backend(parent),
            use_local_synchronization=True,
        )
        self._timeout = timeout
        self._met: dict[str, int] = {}
        self._store = dist.distributed_c10d._get_default_store()
        self._key = f"thinwire/failed/{self.group.group_name}"
        self.comm = TorchComm(self.group, self._watch)

    @property
    def device(self) -> torch.device:
        """Where this group's tensors live."""
        if dist.get_backend(self.group) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def agree(self, subject: str, lines: list[str]) -> None:
        """Raise RankMismatch, with both sides, unless every rank says the same."""
        text = "\n".join(lines)
        digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
        digests = self.comm.all_gather(digest.to(self.device), [32] * self.comm.size)
        if all(torch.equal(d, digests[0]) for d in digests):
            return
        mine = torch.tensor(list(text.encode()), dtype=torch.uint8).to(self.device)
        texts = [bytes(t.tolist()).decode() for t in self.comm.all_gather(mine)]
        raise RankMismatch(_both_sides(subject, texts))

    def meet(self, what: str) -> None:
        """Wait until every rank has called this; an error if some do not within the time-out, or
        if one has said that it cannot (`refuse`).

        Through the store: a rank that went on instead is inside a collective, and another one of
        a different size would kill its process.
        """
        key = self._next(what)
        here = self._store.add(key, 1)
        patience = 0.8 * self._timeout  # less than that of a collective another rank waits in
        deadline = time.monotonic() + patience
        while here < self.comm.size:
            self._watch()
            if self._store.check([f"{key}/refused"]):
                self._store.add(f"{key}/refused/heard", 1)
                raise ValueError(self._store.get(f"{key}/refused").decode())
            if time.monotonic() > deadline:
                missing = RankMismatch(
                    f"only {here} of {self.comm.size} ranks called {what} within "
                    f"{patience:.1f} s; call it on every rank, between the same two steps"
                )
                self.report(missing, f"in {what}")
                raise missing
            time.sleep(0.01)
            here = self._store.add(key, 0)

    def refuse(self, what: str, error: ValueError) -> None:
        """Instead of `meet`: those who do, or will, get this error."""
        key = f"{self._next(what)}/refused"
        self._store.set(key, f"rank {self.comm.rank} in {what}: {error}")
        self._store.add(f"{key}/heard", 1)
        self._until_heard(key, self.comm.size)

    def _next(self, what: str) -> str:
        self._met[what] = self._met.get(what, 0) + 1
        return f"{self._key}/{what}/{self._met[what]}"

    def average_sparse(self, grad: Tensor) -> Tensor:
        """The mean of sparse gradients, as sparse as they are."""
        total = (grad / self.comm.size).coalesce()
        if self.comm.size > 1:
            self.comm.finish(dist.all_reduce(total, group=self.group, async_op=True), total)
        return total.coalesce()

    def report(self, error: BaseException, doing: str) -> None:
        """Tell the others that this rank is lost, and why."""
        if isinstance(error, RankFailed):
            return  # somebody else's news
        text = f"rank {self.comm.rank} failed {doing}: {type(error).__name__}: {error}"
        try:
            self._store.set(self._key, text)
            self._until_heard(self._key, self.comm.size - 1)
        except RuntimeError as lost:  # the store's host is gone: the others will see that too
            log.warning("could not tell the other ranks that %s: %s", text, lost)

    def leave(self) -> None:
        """Let go of the group, so that `destroy_process_group()` really ends its threads.

        A gloo thread that frees the last collective's tensors while Python is already shutting
        down kills the process (pytorch issue 190489).
        """
        del self.group, self.comm.group

    def _watch(self) -> None:
        try:
            told = self._store.check([self._key])
            text = self._store.get(self._key).decode() if told else ""
        except RuntimeError as lost:
            raise RankFailed(
                f"the process that hosts the rendezvous store is gone: {lost}"
            ) from None
        if told:
            self._store.add(f"{self._key}/heard", 1)
            raise RankFailed(text)

    def _until_heard(self, key: str, listeners: int) -> None:
        """This process may end with its error, and take the store with it: wait a little."""
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            if self._store.add(f"{key}/heard", 0) >= listeners:
                return
            time.sleep(0.05)


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
