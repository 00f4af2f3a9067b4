"""Momentum moved from the optimizer into a recipe's memory, and back.

`tuned` recipes apply momentum before the exchange. While one is attached, the optimizer's momentum
is zero and its weight decay d is d / (1 - m), which is what momentum makes of it. What was taken
stands in the parameter groups, so that checkpoints of the optimizer carry it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

from thinwire.engine.checks import learning_rates
from thinwire.engine.explain import explain, family, supporting
from thinwire.protocols import Comm, Reducer
from thinwire.recipes.tuned import Tuned

log = logging.getLogger(__name__)

TAKEN = "taken_by_thinwire"  # in a parameter group: its own momentum, nesterov and weight decay
PART = "memory"  # where the recipe keeps what it remembers of a parameter


def complete(
    recipe: Reducer,
    optimizer: Optimizer | None,
    parameters: Mapping[str, Tensor],
    group: dist.ProcessGroup,
) -> tuple[Reducer, Moved | None]:
    """A tuned recipe as it is for this optimizer and these workers; and its momentum, if that
    moves. Rank 0 logs the choice: a warning, where no recorded training supports it."""
    if not isinstance(recipe, Tuned):
        return recipe, None
    if optimizer is None:
        raise ValueError(
            "tuned chooses by the optimizer, and moves its momentum: pass "
            "attach(model, recipe, optimizer)"
        )
    world, numel = group.size(), sum(p.numel() for p in parameters.values())
    own = [_own(one) for one in optimizer.param_groups]
    if not recipe.clipped and isinstance(optimizer, SGD) and _movable(own):
        momentum, nesterov = own[0]["momentum"], own[0]["nesterov"]
        chosen = recipe.choose(world, numel, momentum=momentum, nesterov=nesterov)
        moved: Moved | None = Moved(optimizer, parameters)
    else:
        adam, moved = family(optimizer) == "adam", None
        chosen = recipe.choose(world, numel, adam=adam)
    if group.rank() == 0:
        known = supporting(recipe, family(optimizer))
        log.log(logging.INFO if known else logging.WARNING, explain(recipe, chosen, optimizer))
    return chosen, moved


class Moved:
    """The momentum of an optimizer, applied by a recipe while `here`."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._slots: Callable[[], dict[str, Any]] = dict
        self.here = False

    def begin(self, slots: Callable[[], dict[str, Any]]) -> None:
        """Move it into the state that `slots` returns."""
        self._slots, self.here = slots, True
        self._take()

    def rates(self) -> dict[str, float]:
        """The learning rates of the day, once the momentum is where it should be."""
        if self.here:
            self._take()
        return learning_rates(self._optimizer, self._parameters)

    def move_back(self, comm: Comm | None) -> None:
        """Into the optimizer, as it was. With a comm, on all ranks: what they have gathered too."""
        if comm is not None and self.here:
            for name, p in self._parameters.items():
                parts = self._slots().get(name, {}).get(PART, {})
                mine = parts.pop("momentum", None)
                mine = torch.zeros_like(p, dtype=torch.float32) if mine is None else mine
                total = comm.all_reduce(mine.contiguous().reshape(-1).clone())
                mean = total.view(p.shape) / comm.size + self._decayed(p)
                self._optimizer.state[p]["momentum_buffer"] = mean.to(p.dtype)
        for group in self._optimizer.param_groups:
            group.update(group.pop(TAKEN, {}))
        self.here = False

    def _take(self) -> None:
        """Out of the optimizer; out of groups that were loaded meanwhile too."""
        for group in self._optimizer.param_groups:
            if TAKEN not in group:
                own = group[TAKEN] = _own(group)
                decay = own["weight_decay"] / (1 - own["momentum"])
                group.update(momentum=0.0, nesterov=False, weight_decay=decay)
                self._hand_over({id(p) for p in group["params"]})
            elif group["momentum"]:
                raise RuntimeError(
                    f"something set the optimizer's momentum to {group['momentum']} while the "
                    "recipe applies it; build the scheduler with cycle_momentum=False"
                )

    def _hand_over(self, group: set[int]) -> None:
        """What the optimizer has gathered of these parameters becomes every rank's."""
        for name, p in self._parameters.items():
            known = self._optimizer.state.get(p, {}) if id(p) in group else {}
            buffer = known.pop("momentum_buffer", None)
            if buffer is not None:
                parts = self._slots().setdefault(name, {}).setdefault(PART, {})
                parts["momentum"] = buffer.float() - self._decayed(p)

    def _decayed(self, p: Tensor) -> Tensor:
        """What weight decay has added to the momentum of a parameter."""
        for group in self._optimizer.param_groups:
            if any(p is one for one in group["params"]):
                scaled = float(group["weight_decay"])  # while the momentum is here
                return scaled * p.detach().float()
        return torch.zeros_like(p, dtype=torch.float32)


def _own(group: dict[str, Any]) -> dict[str, Any]:
    """A group's own settings, whether they were taken from it or not."""
    names = ("momentum", "nesterov", "weight_decay", "dampening")
    return dict(group.get(TAKEN, {name: group.get(name, 0) for name in names}))


def _movable(own: list[dict[str, Any]]) -> bool:
    """Whether all groups have the same momentum, and some."""
    same = len({(group["momentum"], group["nesterov"]) for group in own}) == 1
    return same and 0 < own[0]["momentum"] < 1 and not any(group["dampening"] for group in own)
