"""`attach`: a recipe inside DistributedDataParallel, through its one comm hook.

DDP takes one hook for life, so ours is a dispatcher whose sync can come and go. DDP pickles what it
was given, so a copy of the dispatcher is one without a model: a model that was saved or copied
averages as DDP does, until something is attached to it. No postponed annotations in this file: DDP
compares the hook's annotations with the classes themselves.
"""

import logging
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire import recipes
from thinwire.combinators import remembers
from thinwire.engine import buffers
from thinwire.engine.begin import open_intake
from thinwire.engine.checks import check_optimizer, check_parameters, check_recipe, check_timeout
from thinwire.engine.lane import Intake
from thinwire.engine.optimizer import check_undistributed
from thinwire.engine.rebuilt import Rebuilding
from thinwire.engine.session import Session
from thinwire.engine.steps import Arrival
from thinwire.engine.wrappers import averaged_by, check_model, innermost
from thinwire.layout import Layout
from thinwire.protocols import Reducer

log = logging.getLogger(__name__)


def attach(
    model: DistributedDataParallel,
    recipe: Reducer | str,
    optimizer: Optimizer | None = None,
    *,
    scaler: Any = None,
    timeout: float = 60.0,
) -> Session:
    """Average the gradients of a DDP model as the recipe says, overlapped with backward.

    Call it on every rank, after DDP is built.

    Args:
        model: the `DistributedDataParallel` module itself, not one around it or inside it.
        recipe: from `thinwire.recipes`, or the same call as a string.
        optimizer: the one that trains the model. A recipe that needs something of it (learning
            rates, no second momentum) is refused without it.
        scaler: the `GradScaler`, if there is one, so that residuals are in unscaled units.
        timeout: seconds; no rank waits longer for another.

    Example:
        >>> model = DistributedDataParallel(net)  # doctest: +SKIP
        >>> sync = thinwire.attach(model, "int8()", optimizer)  # doctest: +SKIP
    """
    recipe = recipes.parse(recipe) if isinstance(recipe, str) else recipe
    optimizer = None if optimizer is None else innermost(optimizer)
    parameters = _checked(model, recipe, timeout)
    if optimizer is not None:
        check_optimizer(optimizer, parameters)
    named = dict(model.module.named_parameters())
    # DDP itself keeps the gradient of an unused parameter; only a residual has to know of it.
    tracks_unused = bool(model.find_unused_parameters) and remembers(recipe)
    intake, moved, story = open_intake(
        recipe, optimizer, parameters, named, model.process_group,
        scaler=scaler, timeout=timeout, tracks_unused=tracks_unused,
    )  # fmt: skip
    dispatcher = _dispatcher_of(model)
    if dispatcher is None:
        dispatcher = Dispatcher(model)
        model.register_comm_hook(dispatcher, thinwire_hook)
    buffers.take_over(model, intake.peers)
    names = {id(p): name for name, p in named.items()}
    dispatcher.plug(intake, names, tracks_unused, Rebuilding(model, parameters))
    return Session(intake, dispatcher, moved, story)


class Dispatcher:
    """The state of our hook: one DDP model, and the intake it serves now."""

    def __init__(self, model: DistributedDataParallel | None = None) -> None:
        self._model = weakref.ref(model) if model is not None else None
        self.intake: Intake | None = None
        self._names: dict[int, str] = {}
        self._tracks_unused = False
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._warned: set[str] = set()
        self._rebuilding: Rebuilding | None = None

    def __reduce__(self) -> tuple[type["Dispatcher"], tuple[()]]:
        """Nothing of this process: neither the sync with its thread nor a group."""
        return Dispatcher, ()

    @property
    def model(self) -> DistributedDataParallel | None:
        return self._model() if self._model is not None else None

    def plug(
        self, intake: Intake, names: dict[int, str], tracks_unused: bool, rebuilding: Rebuilding
    ) -> None:
        self.intake, self._names, self._tracks_unused = intake, names, tracks_unused
        self._rebuilding = rebuilding

    def unplug(self) -> None:
        if self._rebuilding is not None:
            self._rebuilding.stop()
        if self.model is not None:
            buffers.give_back(self.model)
        self.intake = self._rebuilding = None

    def synchronize(self) -> None:
        """DDP has done so by the end of backward."""

    def no_sync(self) -> AbstractContextManager[None]:
        model, intake = self.model, self.intake
        assert model is not None and intake is not None
        if model.static_graph and intake.steps.meter.steps == 0:
            raise ValueError(
                "DDP with static_graph=True cannot accumulate in its first step (an assert "
                "of PyTorch 2.13 fails); take one step without no_sync() first"
            )
        return model.no_sync()

    def join(self) -> AbstractContextManager[object]:
        model = self.model
        assert model is not None
        joined: AbstractContextManager[object] = model.join()
        return joined

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        intake = self.intake
        if intake is None:
            assert self.model is not None
            return allreduce_hook(self.model.process_group, bucket)
        in_backward = torch._C._current_graph_task_id() != -1
        if bucket.index() == 0 and in_backward:
            # Runs at the end of backward: errors of the lane surface there, as themselves.
            torch.autograd.Variable._execution_engine.queue_callback(intake.wait)
        future = self._submit(bucket, intake)
        if bucket.is_last() and not in_backward:  # join(): a rank without data plays along
            intake.wait()
        return future

    def _submit(self, bucket: GradBucket, intake: Intake) -> torch.futures.Future[Tensor]:
        layout = self._layout(bucket.parameters())
        flat = bucket.buffer()
        first, last = bucket.index() == 0, bucket.is_last()
        if last and self._rebuilding is not None:
            expected = self._rebuilding.take_step()
            intake.expect(expected)
            if expected is None:  # DDP has rebuilt its buckets, for good
                self._rebuilding = None
        if flat.is_sparse:
            name = layout.slots[0].name
            if name not in self._warned:
                self._warned.add(name)
                log.warning("%s: sparse gradient, passed through uncompressed", name)
            return intake.submit_sparse(flat, name, first=first, last=last)
        unused = None
        if self._tracks_unused:
            zero = (s.name for s in layout.slots if not bool(flat[s.offset : s.stop].any()))
            unused = frozenset(zero)
        arrival = Arrival(flat=flat, layout=layout, first=first, last=last, unused=unused)
        return intake.submit(arrival)

    def _layout(self, parameters: list[Tensor]) -> Layout:
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            self._layouts[key] = Layout.of({self._names[id(p)]: p for p in parameters})
        return self._layouts[key]


def thinwire_hook(state: Dispatcher, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    return state.reduce(bucket)


def _dispatcher_of(model: DistributedDataParallel) -> Dispatcher | None:
    """The one that is registered with this very model, not one that was copied along."""
    for _, state in model._comm_hooks:
        if isinstance(state, Dispatcher) and state.model is model:
            return state
    return None


def _checked(model: DistributedDataParallel, recipe: Reducer, timeout: float) -> dict[str, Tensor]:
    """The parameters DDP reduces, by name; or a ValueError for what cannot work."""
    check_model(model)
    check_recipe(recipe)
    check_timeout(timeout)
    dispatcher = _dispatcher_of(model)
    if dispatcher is not None and dispatcher.intake is not None:
        raise ValueError(
            "this model already has a recipe attached; call detach() on its sync first"
        )
    if any(hook is not thinwire_hook for hook, _ in model._comm_hooks):
        raise ValueError(
            "this model already has another comm hook, and DDP takes one for life; build a new "
            "DistributedDataParallel and attach to it before anything else registers a hook"
        )
    if model.mixed_precision is not None:
        raise ValueError(
            "DDP's own mixed_precision installs its own comm hook; use torch.autocast instead"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ValueError(
            "torch.compile's python_reducer traces comm hooks; a stateful one cannot be traced: "
            "set torch._dynamo.config.optimize_ddp = True (the default)"
        )
    parameters = averaged_by(model)
    check_parameters(parameters)
    check_undistributed(parameters.values())
    return parameters
