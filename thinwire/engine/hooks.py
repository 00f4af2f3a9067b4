"""The socket of `distribute`: hooks on every parameter and on the optimizer's step.

The first step only looks (which gradients are sparse, which are there at all); from the second on
a bucket leaves as soon as its gradients are complete and the buckets before it have left, while
backward is still running. Backward's end waits for the means and writes them into `p.grad`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from thinwire.engine import fusion
from thinwire.engine.checks import check_not_in_checkpoint, is_sparse
from thinwire.engine.lane import Intake
from thinwire.engine.peers import Peers
from thinwire.engine.steps import Arrival
from thinwire.engine.wrappers import check_unwrapped
from thinwire.layout import Layout
from thinwire.protocols import Reduced

log = logging.getLogger(__name__)

LOOKS = (1, 2, 16)  # steps in which to look for another wrapper: it takes long in a large process


def broadcast(peers: Peers, parameters: Mapping[str, Tensor], root: int) -> None:
    """Everyone takes the root's parameters."""
    with peers.apart() as comm:
        for p in parameters.values():
            whole = p.detach().contiguous()
            p.detach().copy_(comm.broadcast(whole, root=root))


@dataclass
class _Packed:
    """One bucket of the plan: its buffer, and who is still missing in this step."""

    layout: Layout
    flat: Tensor
    missing: set[str] = field(default_factory=set)


class Hooks:
    """The socket: hooks on parameters and on the optimizer's step."""

    def __init__(
        self,
        intake: Intake,
        peers: Peers,
        optimizer: Optimizer,
        parameters: dict[str, Parameter],
        named: dict[str, Parameter],
        bucket_mb: float,
        counts: Sequence[int] | None = None,
    ) -> None:
        self._intake, self._peers, self._parameters, self._named = intake, peers, parameters, named
        self._bucket_mb, self._counts = bucket_mb, counts
        self._hooked = {id(p) for p in parameters.values()}
        self._plan: list[_Packed] | None = None
        self._home: dict[str, _Packed] = {}
        self._sparse: list[str] = []
        self._next = 0
        self._accumulating = self._joining = False
        self._begun = 0  # backward passes that were to be sent
        self._means: list[tuple[Layout, Reduced]] = []
        self._ending: weakref.ref[Callable[[], None]] | None = None  # of the backward under way
        self._synchronized = False
        self.plugged = True
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(partial(self._ready, name))
            for name, p in parameters.items()
        ]
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def synchronize(self) -> None:
        if not self._synchronized:
            self._begin()
            self._finish()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Ranks that run out of data play along without gradients until all have; then all take
        the parameters of one that was still training."""
        self._peers.meet("join()")
        self._joining = True
        try:
            yield
            shadows = 0
            while self._anyone_active(0):
                self._shadow_step()
                shadows += 1
            self._take_parameters(mine_are_last=shadows == 0)
        finally:
            self._joining = False

    def unplug(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.plugged = False

    def _ready(self, name: str, parameter: Tensor) -> None:
        """A gradient is complete: if its bucket is, and it is its turn, it leaves."""
        self._synchronized = False
        if self._accumulating:
            return
        if not self._under_way():
            self._begin()
            # Runs at the end of this backward; errors of the lane surface there, as themselves.
            ending = partial(self._finish)
            self._ending = weakref.ref(ending)
            torch.autograd.Variable._execution_engine.queue_callback(ending)
        if self._plan is None or name in self._sparse:
            return
        home = self._home[name]
        if name not in home.missing:
            raise RuntimeError(
                f"{name} got its gradient twice in one backward; with activation checkpointing use "
                "use_reentrant=False"
            )
        home.missing.discard(name)
        while self._next < len(self._plan) and not self._plan[self._next].missing:
            self._send(self._plan[self._next])

    def _under_way(self) -> bool:
        """Whether this gradient belongs to a backward we know.

        Its end is queued with autograd, which drops it if the backward breaks off with an error.
        """
        return self._ending is not None and self._ending() is not None

    def _begin(self) -> None:
        check_not_in_checkpoint()
        self._begun += 1
        if self._begun in LOOKS:
            check_unwrapped(self._parameters)  # by a DDP that was built after us
        self._intake.wait()  # what a backward that broke off has left
        if self._plan and self._next == len(self._plan) and self._means:  # all sent, not applied
            self._peers.meet("its next batch, because backward broke off after its last bucket")
        if self._joining:
            self._anyone_active(1)
        self._open_buckets()

    def _open_buckets(self) -> None:
        self._means.clear()
        self._next = 0
        for packed in self._plan or []:
            packed.missing = {slot.name for slot in packed.layout.slots}

    def _anyone_active(self, me: int) -> bool:
        """Inside join(): every rank says whether it still trains, before every step."""
        count = torch.tensor([me], dtype=torch.int32, device=self._peers.device)
        with self._peers.apart() as comm:
            return bool(comm.all_reduce(count).item() > 0)

    def _shadow_step(self) -> None:
        grads = {name: p.grad for name, p in self._parameters.items()}
        for p in self._parameters.values():
            p.grad = None
        self._open_buckets()
        self._finish()
        for name, p in self._parameters.items():
            p.grad = grads[name]

    def _take_parameters(self, *, mine_are_last: bool) -> None:
        flag = torch.tensor([mine_are_last], dtype=torch.uint8, device=self._peers.device)
        with self._peers.apart() as comm:
            flags = comm.all_gather(flag, [1] * comm.size)
        broadcast(self._peers, self._named, root=[bool(f) for f in flags].index(True))

    def _finish(self) -> None:
        """Send what is still here, wait for everything, leave averages in every `p.grad`."""
        self._ending = None
        if self._plan is None:
            self._look_around()
        assert self._plan is not None
        while self._next < len(self._plan):
            self._send(self._plan[self._next])
        for name in self._sparse:
            self._send_sparse(name)
        self._intake.wait()
        for layout, reduced in self._means:
            self._write(layout, reduced)
        self._means.clear()
        self._synchronized = True

    def _look_around(self) -> None:
        """Once: agree on which gradients are sparse anywhere, and pack the others."""
        sparse = torch.tensor(
            [is_sparse(p.grad) for p in self._parameters.values()], dtype=torch.int32
        )
        with self._peers.apart() as comm:
            found = comm.all_reduce(sparse.to(self._peers.device)).tolist()
        self._sparse = [name for name, n in zip(self._parameters, found, strict=True) if n]
        for name in self._sparse:
            log.warning("%s: sparse gradient, passed through uncompressed", name)
        rest = {name: p for name, p in self._parameters.items() if name not in self._sparse}
        world = self._peers.comm.size
        if self._counts is not None:
            layouts = fusion.pack_by_counts(rest, self._counts)
        else:
            layouts = fusion.pack(rest, self._intake.recipe, self._bucket_mb, max(2, world))
        self._plan = [self._allocate(layout) for layout in layouts]
        self._home = {s.name: packed for packed in self._plan for s in packed.layout.slots}

    def _allocate(self, layout: Layout) -> _Packed:
        like = self._parameters[layout.slots[0].name]
        return _Packed(layout, torch.zeros(layout.numel, dtype=like.dtype, device=like.device))

    @torch.no_grad()
    def _send(self, packed: _Packed) -> None:
        assert self._plan is not None
        unused = set()
        for slot in packed.layout.slots:
            grad = self._parameters[slot.name].grad
            if grad is None:
                unused.add(slot.name)
                slot.view(packed.flat).zero_()
            elif grad.is_sparse:
                raise ValueError(
                    f"{slot.name} has a sparse gradient for the first time after the first step; "
                    "let every parameter take part in the first step"
                )
            else:
                slot.view(packed.flat).copy_(grad)
        arrival = Arrival(
            flat=packed.flat,
            layout=packed.layout,
            first=self._next == 0,
            last=self._next == len(self._plan) - 1 and not self._sparse,
            unused=frozenset(unused),
        )
        self._next += 1
        self._intake.submit(arrival, lambda reduced: self._means.append((packed.layout, reduced)))

    @torch.no_grad()
    def _write(self, layout: Layout, reduced: Reduced) -> None:
        """The mean into every gradient; a parameter no rank used keeps none."""
        for slot in layout.slots:
            parameter = self._parameters[slot.name]
            if slot.name in reduced.unused:
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(slot.view(reduced.mean))

    def _send_sparse(self, name: str) -> None:
        parameter = self._parameters[name]
        grad = parameter.grad
        if grad is None:
            grad = torch.zeros_like(parameter).to_sparse(1)
        assert self._plan is not None
        position = self._sparse.index(name)
        self._intake.submit_sparse(
            grad,
            name,
            first=position == 0 and not self._plan,
            last=position == len(self._sparse) - 1,
            then=lambda mean: setattr(parameter, "grad", mean),
        )

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.requires_grad and id(p) not in self._hooked:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} was added to the optimizer or unfrozen "
                    "after thinwire.distribute and is not averaged; detach and distribute again"
                )
        has_closure = any(callable(arg) for arg in (*args[1:], *kwargs.values()))
        if not has_closure:  # a closure runs backward itself
            self.synchronize()

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._synchronized = False
