"""`distribute`: a recipe without DDP, on the parameters of an optimizer (Horovod style).

After `backward()` every `p.grad` is the average, as with DDP, so clipping and GradScaler work as
usual; `no_sync()` accumulates.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from thinwire import recipes
from thinwire.engine.begin import open_intake
from thinwire.engine.checks import check_optimizer, check_parameters, check_recipe, check_timeout
from thinwire.engine.fusion import pack_by_counts
from thinwire.engine.hooks import Hooks, broadcast
from thinwire.engine.session import Session
from thinwire.engine.wrappers import check_unwrapped, innermost, is_optimizer
from thinwire.protocols import Reducer


def distribute(
    model: nn.Module | Iterable[tuple[str, Parameter]],
    recipe: Reducer | str,
    optimizer: Optimizer,
    *,
    scaler: Any = None,
    timeout: float = 60.0,
    bucket_mb: float = 25.0,
    buckets: Sequence[int] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Session:
    """Average the gradients of this optimizer's parameters as the recipe says, without DDP.

    Call it on every rank. It broadcasts rank 0's parameters (buffers are the caller's), and hooks
    those that the optimizer trains.

    Args:
        model: a plain module, or its `named_parameters()`.
        recipe: from `thinwire.recipes`, or the same call as a string.
        optimizer: the one that trains the model.
        scaler: the `GradScaler`, if there is one, so that residuals are in unscaled units.
        timeout: seconds; no rank waits longer for another.
        bucket_mb: megabytes of gradient that travel together.
        buckets: instead, how many gradients each bucket has, in the order of backward: a plan's.
        process_group: whose ranks take part; all by default.

    Example:
        >>> sync = thinwire.distribute(net, "int8()", optimizer)  # doctest: +SKIP
    """
    if is_optimizer(model):  # Horovod's order: optimizer, parameters, recipe
        model, recipe, optimizer = recipe, optimizer, model  # type: ignore[assignment]
    recipe = recipes.parse(recipe) if isinstance(recipe, str) else recipe
    pairs = model.named_parameters() if isinstance(model, nn.Module) else model
    optimizer, named = innermost(optimizer), _by_name(pairs)
    parameters = _checked(optimizer, named, recipe, timeout, bucket_mb)
    if buckets is not None:
        if bucket_mb != 25.0:
            raise ValueError(
                f"buckets says what goes together, got bucket_mb={bucket_mb!r} too; give one"
            )
        pack_by_counts(parameters, buckets)  # one that does not fit is refused now
    group: dist.ProcessGroup = process_group or dist.group.WORLD  # type: ignore[assignment]
    intake, moved, story = open_intake(
        recipe, optimizer, parameters, named, group,
        scaler=scaler, timeout=timeout, tracks_unused=True,
    )  # fmt: skip
    peers = intake.peers
    frozen = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in named.items() if n not in parameters]
    plan = f"buckets {list(buckets)}" if buckets else "no plan"
    peers.agree("plan of buckets or the other parameters", [plan, *frozen])
    broadcast(peers, named, root=0)
    hooks = Hooks(intake, peers, optimizer, parameters, named, bucket_mb, buckets)
    _distributed[optimizer] = weakref.ref(hooks)
    return Session(intake, hooks, moved, story)


_distributed: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Hooks]] = weakref.WeakKeyDictionary()


def _is_distributed(optimizer: Optimizer) -> bool:
    hooks = _distributed[optimizer]() if optimizer in _distributed else None
    return hooks is not None and hooks.plugged


def check_undistributed(parameters: Iterable[Tensor]) -> None:
    """`attach` is in place of `distribute`: these must not be averaged by both."""
    mine = {id(p) for p in parameters}
    for optimizer in list(_distributed):
        groups = optimizer.param_groups if _is_distributed(optimizer) else []
        if any(id(p) in mine for group in groups for p in group["params"]):
            raise ValueError(
                "thinwire.distribute averages these parameters already; call detach() on its sync "
                "first"
            )


def _by_name(named_parameters: Iterable[tuple[str, Parameter]]) -> dict[str, Parameter]:
    """Each parameter once, a tied one under its first name."""
    named: dict[str, Parameter] = {}
    seen: set[int] = set()
    for name, p in _pairs(named_parameters):
        if name in named:
            raise ValueError(
                f"two parameters are named {name!r}, and state is kept by name; pass "
                "model.named_parameters()"
            )
        if id(p) not in seen:
            named[name] = p
            seen.add(id(p))
    return named


def _pairs(named_parameters: Iterable[Any]) -> Iterator[tuple[str, Parameter]]:
    if not isinstance(named_parameters, Iterable):
        named_parameters = [named_parameters]
    for pair in named_parameters:
        match pair:
            case (str() as name, Parameter() as p):
                yield name, p
            case _:
                raise ValueError(
                    "named_parameters must be pairs (name, parameter), got one "
                    f"{type(pair).__name__}; pass model.named_parameters()"
                )


def _checked(
    optimizer: Optimizer,
    named: dict[str, Parameter],
    recipe: Reducer,
    timeout: float,
    bucket_mb: float,
) -> dict[str, Parameter]:
    """This optimizer's parameters by name; or a ValueError for what cannot work."""
    check_recipe(recipe)
    check_timeout(timeout)
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb must be above 0, got {bucket_mb!r}; DDP's default is 25")
    if not dist.is_initialized():
        raise ValueError("no process group; call torch.distributed.init_process_group first")
    if _is_distributed(optimizer):
        raise ValueError("this optimizer is distributed already; call detach() on its sync first")
    check_optimizer(optimizer, named)
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = {n: p for n, p in named.items() if p.requires_grad and id(p) in mine}
    check_parameters(parameters)
    check_unwrapped(parameters)
    return parameters
