"""What buckets DDP will come with once it has rebuilt them, known a step or two before it has.

DDP begins with all gradients in one bucket and notes the order in which they become ready; from
the second step on (with static_graph the third) it cuts its buckets by rank 0's order. A state
that is saved before that step must say how that step will be cut: a run that resumes from it
begins with one bucket again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    _DEFAULT_FIRST_BUCKET_BYTES,
    _compute_bucket_assignment_by_size,
)
from torch.nn.parallel import DistributedDataParallel

from thinwire.protocols import Comm

Groups = list[list[str]]  # parameters by bucket


class Rebuilding:
    """Notes the order of gradients until DDP has made its buckets anew."""

    def __init__(self, model: DistributedDataParallel, parameters: dict[str, Tensor]) -> None:
        self._parameters = parameters
        self._order: dict[str, None] = {}
        first = _DEFAULT_FIRST_BUCKET_BYTES if model.bucket_bytes_cap_default else None
        listed = list(getattr(model, "bucket_bytes_cap_list", ()))
        self._caps = listed or [first or model.bucket_bytes_cap, model.bucket_bytes_cap]
        begun = getattr(model, "_static_graph_delay_allreduce_enqueued", False)
        waits = model.static_graph or not model.find_unused_parameters
        done = not waits or getattr(model, "_has_rebuilt_buckets", True)
        self._steps = 0 if done else 2 if model.static_graph and not begun else 1
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._ready(name))
            for name, p in parameters.items()
            if self._steps
        ]

    def _ready(self, name: str) -> None:
        self._order.pop(name, None)  # with a checkpoint inside, the last time counts
        self._order[name] = None

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._steps = [], 0

    def take_step(self) -> Expected | None:
        """At the last bucket of a step: what to expect, as long as it is not there."""
        if not self._steps:
            return None
        self._steps -= 1
        expected = Expected(self._parameters, list(self._order), self._caps, self._steps > 0)
        self._order = {}
        if not self._steps:
            self.stop()
        return expected


@dataclass(frozen=True)
class Expected:
    """The next step's buckets and those of all later ones."""

    parameters: dict[str, Tensor]
    order: list[str]  # in which their gradients became ready here
    caps: list[int]  # bytes of the first bucket, and so on
    still: bool  # the next step is as this one was

    def agree(self, now: Groups, comm: Comm, device: torch.device) -> tuple[Groups, Groups]:
        """By rank 0's order, as DDP will cut them; on all ranks, after the same step."""
        names = list(self.parameters)
        place = {name: number for number, name in enumerate(names)}
        whole = len(self.order) == len(names)  # not where a rank without data plays along
        numbers = [place[name] for name in self.order] if whole else [-1] * len(names)
        order = comm.broadcast(torch.tensor(numbers, device=device), 0).tolist()
        if -1 in order:
            return now, now
        dense = {name for names in now for name in names}  # sparse gradients go alone
        ready = [names[n] for n in order if names[n] in dense]
        values = [self.parameters[name] for name in ready]
        known = [False] * len(ready), list(range(len(ready)))
        cut, _ = _compute_bucket_assignment_by_size(values, self.caps, *known)
        groups = [[ready[i] for i in bucket] for bucket in cut]
        return (now if self.still else groups), groups
