"""What frameworks put around models and optimizers: looked through, or refused by name.

A wrapper that averages gradients itself sends them whole, whatever we send besides.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

WHERE = (
    "what DistributedDataParallel(...) or accelerator.prepare(model) returned, "
    "trainer.model_wrapped in transformers"
)
PLAIN = (
    "build the model without it (and without its setting in Accelerate or transformers), and use "
    "attach(DistributedDataParallel(model), recipe)"
)
# By name: importing the classes would cost half a second. The first that fits is the one.
_OTHERS = {
    "FullyShardedDataParallel": "FSDP1 (FullyShardedDataParallel)",
    "ReplicateModule": "replicate()",
    "FSDPModule": "FSDP2 (fully_shard)",
}


def is_optimizer(thing: object) -> bool:
    """Or a wrapper of one."""
    if isinstance(thing, nn.Module):
        return False
    return isinstance(thing, Optimizer) or isinstance(getattr(thing, "optimizer", None), Optimizer)


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer that really steps: Accelerate puts another one around it."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; e.g. "
            "torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    return optimizer


def check_model(model: Any) -> None:
    """`attach` works inside DDP and nothing else: which of all the others this is."""
    if isinstance(model, DistributedDataParallel):
        return
    begin = f"attach needs a DistributedDataParallel model, got {type(model).__name__}"
    if not isinstance(model, nn.Module):
        raise ValueError(f"{begin}; pass {WHERE}")
    for name, part in model.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise ValueError(f"{begin}, which has one inside; attach to its .{name}")
        other = _averages_itself(part)
        if other is not None:
            raise ValueError(
                f"{begin}: {other} averages gradients itself, where nothing can be compressed; "
                f"{PLAIN}"
            )
    if _wrapper_of(dict(model.named_parameters())) is not None:
        raise ValueError(f"{begin}, around which there is one; attach to that: {WHERE}")
    raise ValueError(
        f"{begin}; wrap it, or, if a framework does so, pass its wrapper ({WHERE}); for a model "
        "that nothing will wrap there is thinwire.distribute(model, recipe, optimizer)"
    )


def check_unwrapped(parameters: Mapping[str, Tensor]) -> None:
    """`distribute` is in place of DDP: none that lives may average these parameters too."""
    if _wrapper_of(parameters) is None:
        return
    gc.collect()  # one that nobody uses any more may only wait to be collected
    wrapper = _wrapper_of(parameters)
    if wrapper is None:
        return
    mine = {id(p) for p in parameters.values()}
    name = next(name for name, p in averaged_by(wrapper).items() if id(p) in mine)
    if isinstance(wrapper.module, nn.ParameterList):  # what replicate() hands to DDP
        raise ValueError(
            "replicate() averages these parameters too, and would send every gradient whole; "
            "build the model without it"
        )
    raise ValueError(
        f"DistributedDataParallel averages {name} too, and would send every gradient whole; use "
        f"thinwire.attach(wrapper, recipe) with the wrapper ({WHERE}), or build the model "
        "without it"
    )


def averaged_by(wrapper: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters DDP reduces, by name."""
    ignored = set(wrapper.parameters_to_ignore)
    return {
        name: p
        for name, p in wrapper.module.named_parameters()
        if p.requires_grad and name not in ignored
    }


def _averages_itself(part: nn.Module) -> str | None:
    mine = {kind.__name__ for kind in type(part).__mro__}
    if any(kind.__module__.endswith("_composable.replicate") for kind in type(part).__mro__):
        return "replicate()"
    return next((shown for name, shown in _OTHERS.items() if name in mine), None)


def _wrapper_of(parameters: Mapping[str, Tensor]) -> DistributedDataParallel | None:
    """A living DDP that averages one of these; a parameter itself does not tell."""
    mine = {id(p) for p in parameters.values()}
    for found in gc.get_referrers(*_with_subclasses(DistributedDataParallel)):
        whole = issubclass(type(found), DistributedDataParallel) and "reducer" in vars(found)
        if whole and any(id(p) in mine for p in averaged_by(found).values()):
            wrapper: DistributedDataParallel = found
            return wrapper
    return None


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    subclasses: list[type] = kind.__subclasses__()
    for subclass in subclasses:
        yield from _with_subclasses(subclass)
