"""`distribute`: a recipe without DDP. Gradient hooks pack buckets, backward's end collects means.

After `backward()` every `p.grad` is the average, as with DDP, so clipping and GradScaler work as
usual; `no_sync()` accumulates. The first step only looks (which gradients are sparse, which are
there at all); from the second on buckets leave while backward is still running.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from thinwire.engine import fusion
from thinwire.engine.ddp import check_optimizer, check_recipe, check_timeout
from thinwire.engine.peers import Peers
from thinwire.engine.steps import Arrival
from thinwire.engine.sync import Sync
from thinwire.layout import Layout
from thinwire.protocols import Reduced, Reducer

log = logging.getLogger(__name__)


def distribute(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]],
    recipe: Reducer,
    *,
    scaler: Any = None,
    timeout: float = 60.0,
    bucket_mb: float = 25.0,
    process_group: dist.ProcessGroup | None = None,
) -> Sync:
    """Average the gradients of this optimizer's parameters as the recipe says.

    Broadcasts rank 0's parameters (buffers are the caller's), then hooks every parameter. Buckets
    hold what corresponds to `bucket_mb` megabytes of gradient.
    """
    parameters = _checked(optimizer, named_parameters, recipe, timeout, bucket_mb)
    peers = Peers(process_group or dist.group.WORLD, timeout)  # type: ignore[arg-type]
    slots = list(Layout.of(parameters).slots)
    sync = Sync(recipe, slots, peers, scaler, tracks_unused=True)
    for p in parameters.values():
        whole = p.detach().contiguous()
        p.detach().copy_(peers.comm.broadcast(whole, root=0))
    sync.plug(_Hooks(sync, peers, optimizer, parameters, bucket_mb))
    return sync


@dataclass
class _Packed:
    """One bucket of the plan: its buffer, and who is still missing in this step."""

    layout: Layout
    flat: Tensor
    missing: set[str] = field(default_factory=set)


class _Hooks:
    """The socket: hooks on parameters and on the optimizer's step."""

    def __init__(
        self,
        sync: Sync,
        peers: Peers,
        optimizer: Optimizer,
        parameters: dict[str, Parameter],
        bucket_mb: float,
    ) -> None:
        self._sync, self._peers, self._parameters = sync, peers, parameters
        self._bucket_mb = bucket_mb
        self._count = sum(len(group["params"]) for group in optimizer.param_groups)
        self._plan: list[_Packed] | None = None
        self._home: dict[str, _Packed] = {}
        self._sparse: list[str] = []
        self._next = 0
        self._accumulating = False
        self._backward: int | None = None  # the one under way, from its first gradient to its end
        self._synchronized = False
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

    def unplug(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _ready(self, name: str, parameter: Tensor) -> None:
        """A gradient is complete: if its bucket is, and it is its turn, it leaves."""
        self._synchronized = False
        if self._accumulating:
            return
        backward = torch._C._current_graph_task_id()
        if self._backward != backward:  # also after one that was cut short by an exception
            self._begin()
            self._backward = backward
            # Runs at the end of this backward; errors of the lane surface there, as themselves.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if self._plan is None or name in self._sparse:
            return
        home = self._home[name]
        if name not in home.missing:
            raise RuntimeError(
                f"{name} got its gradient twice in one backward; with activation checkpointing use "
                "use_reentrant=False, otherwise wrap all but the last backward in sync.no_sync()"
            )
        home.missing.discard(name)
        while self._next < len(self._plan) and not self._plan[self._next].missing:
            self._send(self._plan[self._next])

    def _begin(self) -> None:
        self._next = 0
        for packed in self._plan or []:
            packed.missing = {slot.name for slot in packed.layout.slots}

    def _finish(self) -> None:
        """Send what is still here, wait for everything, leave averages in every `p.grad`."""
        self._backward = None
        if self._plan is None:
            self._look_around()
        assert self._plan is not None
        while self._next < len(self._plan):
            self._send(self._plan[self._next])
        for name in self._sparse:
            self._send_sparse(name)
        self._sync.wait()
        self._synchronized = True

    def _look_around(self) -> None:
        """Once: agree on which gradients are sparse anywhere, and pack the others."""
        sparse = torch.tensor([_is_sparse(p) for p in self._parameters.values()], dtype=torch.int32)
        found = self._peers.comm.all_reduce(sparse.to(self._peers.device)).tolist()
        self._sparse = [name for name, n in zip(self._parameters, found, strict=True) if n]
        for name in self._sparse:
            log.warning("%s: sparse gradient, passed through uncompressed", name)
        rest = {name: p for name, p in self._parameters.items() if name not in self._sparse}
        layouts = fusion.plan(rest, self._sync.recipe, self._bucket_mb)
        self._plan = [self._packed(layout) for layout in layouts]
        self._home = {s.name: packed for packed in self._plan for s in packed.layout.slots}

    def _packed(self, layout: Layout) -> _Packed:
        like = self._parameters[layout.slots[0].name]
        return _Packed(layout, torch.zeros(layout.numel, dtype=like.dtype, device=like.device))

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
        self._sync.submit(arrival, then=lambda reduced: self._write(packed.layout, reduced))

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
        self._sync.submit_sparse(
            grad,
            name,
            first=position == 0 and not self._plan,
            last=position == len(self._sparse) - 1,
            then=lambda mean: setattr(parameter, "grad", mean),
        )

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if count > self._count:
            raise ValueError(
                f"the optimizer has {count} parameters now, {self._count} when it was distributed; "
                "add parameter groups before thinwire.distribute, or detach and distribute again"
            )
        has_closure = any(callable(arg) for arg in (*args[1:], *kwargs.values()))
        if not has_closure:  # a closure runs backward itself
            self.synchronize()

    def _after_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._synchronized = False


def _is_sparse(parameter: Parameter) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse


def _checked(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]],
    recipe: Reducer,
    timeout: float,
    bucket_mb: float,
) -> dict[str, Parameter]:
    """This optimizer's parameters by name, each once; or a ValueError for what cannot work."""
    check_recipe(recipe)
    check_timeout(timeout)
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb must be above 0, got {bucket_mb!r}; DDP's default is 25")
    if not dist.is_initialized():
        raise ValueError("no process group; call torch.distributed.init_process_group first")
    named: dict[str, Parameter] = {}
    seen: set[int] = set()
    for name, p in named_parameters:
        if name in named:
            raise ValueError(f"two parameters are named {name!r}; state is kept by name")
        if id(p) not in seen:  # a tied parameter is one parameter
            named[name] = p
            seen.add(id(p))
    check_optimizer(optimizer, named)
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = {n: p for n, p in named.items() if p.requires_grad and id(p) in mine}
    if not parameters:
        raise ValueError("the optimizer has no parameter that requires a gradient")
    return parameters
