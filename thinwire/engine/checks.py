"""What `attach` and `distribute` refuse: one message each, with the reason and the remedy.

And what they read from the optimizer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from thinwire.combinators import memories
from thinwire.describe import describe, parts
from thinwire.engine.wrappers import PLAIN
from thinwire.layout import Layout
from thinwire.protocols import MemoryPromises, promised
from thinwire.schedule import ByParameter


def check_recipe(recipe: object) -> None:
    if not callable(getattr(recipe, "reduce", None)):
        raise ValueError(
            f"a recipe must have reduce(bucket, comm), got {recipe!r}; e.g. "
            "thinwire.recipes.adtopk(density=0.01)"
        )


def is_sparse(grad: Tensor | None) -> bool:
    return grad is not None and grad.is_sparse


def check_not_in_checkpoint() -> None:
    """A re-entrant checkpoint runs a backward of its own, which looks like the end of ours."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back  # type: ignore[assignment]
    if frame is not None:
        raise RuntimeError(
            "activation checkpointing with use_reentrant=True runs a backward of its own for "
            "every segment; use use_reentrant=False"
        )


def check_patterns(recipe: Any, parameters: Mapping[str, Tensor]) -> None:
    """Every pattern of a recipe is meant for some parameter: one that is found in none, or in none
    that is left for it, is a slip, and would pass unnoticed."""
    known = list(parameters)
    every = list(parts(recipe))
    for pattern in (pattern for part in every for pattern in getattr(part, "patterns", ())):
        if not any(re.search(pattern, name) for name in known):
            more = f" and {len(known) - 5} more" if len(known) > 5 else ""
            raise ValueError(
                f"the recipe's pattern {pattern!r} is found in no parameter's name; there are "
                f"{', '.join(known[:5])}{more}"
            )
    rules = [part for part in every if isinstance(part, ByParameter)]
    slots = Layout.of(parameters).slots
    for densities in rules:
        reached = {densities.rule_of(slot) for slot in slots}
        for number, (which, _) in enumerate(densities.rules):
            shadowed = any(densities.holds(number, slot) for slot in slots)
            if which != "" and number not in reached and shadowed:
                raise ValueError(
                    f"the recipe's {describe(which)} is reached by no parameter: all for which it "
                    "holds belong to a rule before it; put it before that one"
                )
    if rules and callable(getattr(recipe, "traffic", None)):
        recipe.traffic(Layout.of(parameters), 2)  # finds a density for everything it sends


def check_timeout(timeout: float) -> None:
    if not timeout > 0:
        raise ValueError(f"timeout must be above 0 seconds, got {timeout!r}; the default is 60.0")


def check_parameters(parameters: Mapping[str, Tensor]) -> None:
    """There are some, and all are of a kind that can be averaged."""
    if not parameters:
        raise ValueError(
            "no parameter requires a gradient: there is nothing to average; call requires_grad_() "
            "on what is to be trained before attaching"
        )
    for name, p in parameters.items():
        if p.is_complex():
            raise ValueError(
                f"{name} is complex ({p.dtype}), which recipes do not handle; keep "
                "torch.view_as_real of it as the parameter"
            )
        if type(p).__name__ == "DTensor":  # importing the class would cost half a second
            raise ValueError(
                f"{name} is a DTensor, of FSDP2 (fully_shard), replicate() or tensor parallelism; "
                f"thinwire averages whole parameters: {PLAIN}"
            )
        if getattr(p, "_fsdp_flattened", False):
            raise ValueError(
                f"{name} is of FSDP1 (FullyShardedDataParallel), which averages gradients itself, "
                f"where nothing can be compressed; {PLAIN}"
            )
        if hasattr(p, "_in_backward_optimizers"):
            raise ValueError(
                f"{name} has an optimizer that steps inside backward, before gradients are "
                "averaged; step after backward"
            )


def check_memories(
    recipe: object, optimizer: Optimizer | None, parameters: Mapping[str, Tensor], moves: bool
) -> None:
    """What a memory wants of the optimizer: its learning rates, or that it has no momentum.

    If its momentum `moves` into the recipe, it may have some.
    """
    kept = memories(recipe)
    if any(promised(MemoryPromises, memory).learning_rate for memory in kept):
        if optimizer is None:
            raise ValueError(
                "this recipe keeps learning rate x gradient and must see the rates: pass "
                "attach(model, recipe, optimizer=optimizer)"
            )
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, p in parameters.items():
            if id(p) not in trained:
                raise ValueError(
                    f"this recipe keeps learning rate x gradient, and {name} is in no group of the "
                    "optimizer; give it a group, or freeze it"
                )
    if moves or not any(promised(MemoryPromises, memory).corrects_momentum for memory in kept):
        return
    if optimizer is None:
        raise ValueError(
            "this recipe applies momentum itself and must see that the optimizer has none: pass "
            "attach(model, recipe, optimizer=optimizer)"
        )
    for number, group in enumerate(optimizer.param_groups):
        momentum = group.get("momentum") or (group.get("betas") or (0.0,))[0]
        if momentum:
            raise ValueError(
                f"momentum would be applied twice: by this recipe, and by "
                f"{type(optimizer).__name__} (momentum {momentum} in parameter group {number}); "
                "give the optimizer none, or use memory='residual'"
            )


def learning_rates(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """The rate of the day by parameter name; what left the optimizer has none."""
    rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
    return {name: rates.get(id(p), 0.0) for name, p in parameters.items()}


def check_optimizer(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
    """Every parameter of the optimizer must be one of these."""
    known = {id(p) for p in parameters.values()}
    strangers = [
        tuple(p.shape)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and id(p) not in known
    ]
    if strangers:
        raise ValueError(
            f"the optimizer has {len(strangers)} parameters that are not the model's (first shape "
            f"{strangers[0]}); build it from the parameters of the model you pass here"
        )
