"""What `attach` and `distribute` do alike: complete the recipe, check it, and open an `Intake`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from thinwire.engine.checks import check_memories, check_patterns, learning_rates
from thinwire.engine.explain import explain
from thinwire.engine.lane import Intake
from thinwire.engine.momentum import Moved, complete
from thinwire.engine.peers import Peers
from thinwire.protocols import Reducer


def open_intake(
    asked: Reducer,
    optimizer: Optimizer | None,
    parameters: Mapping[str, Tensor],
    named: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    *,
    scaler: Any,
    timeout: float,
    tracks_unused: bool,
) -> tuple[Intake, Moved | None, Callable[[], str]]:
    """The recipe at work among the ranks of a group, what momentum moved into it, and its story.

    `parameters` are those it averages, `named` all there are.
    """
    recipe, moved = complete(asked, optimizer, parameters, group)
    check_patterns(recipe, named)
    check_memories(recipe, optimizer, parameters, moved is not None)
    peers = Peers(group, timeout, next(iter(parameters.values())).device)
    rates = None
    if optimizer is not None:
        rates = moved.rates if moved else partial(learning_rates, optimizer, parameters)
    intake = Intake(recipe, parameters, peers, scaler, tracks_unused, rates)
    return intake, moved, partial(explain, asked, recipe, optimizer)
