"""Dimension missing: how many rows of a real model's weights send nothing in a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire import recipes
from thinwire.bucket import Bucket
from thinwire.comm import local
from thinwire.comm.local import LocalComm
from thinwire.protocols import Reducer
from thinwire_lab.jobs.data import images
from thinwire_lab.jobs.networks import vision


def find_unserved(calls: list[str], steps: int = 10, batch: int = 64) -> dict[str, float]:
    """The share of weight rows that had something to send and sent nothing, by recipe.

    The digits model is trained by one worker, with the recipe's own feedback.
    """
    return {call: _share(recipes.parse(call), steps, batch) for call in calls}


def _share(recipe: Reducer, steps: int, batch: int) -> float:
    torch.manual_seed(0)
    net, (train, _) = vision.mlp(64, 256), images.digits(8, 1)
    names, parameters = zip(*net.named_parameters(), strict=True)

    def worker(comm: LocalComm) -> tuple[int, int]:
        state: dict[str, Any] = {}
        silent = rows = 0
        for step in range(steps):
            chosen = torch.arange(step * batch, (step + 1) * batch)
            pictures, labels = train.batch(chosen, None)
            loss = F.cross_entropy(net(pictures), labels)
            grads = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
            waiting = _add_residual(state, grads)
            bucket = Bucket.of(grads, state=state, step=step)
            layout = bucket.layout
            reduced = recipe.reduce(bucket, comm)
            sent = reduced.sent.add_into(torch.zeros(layout.numel))
            for slot in layout.slots:
                net.get_parameter(slot.name).data.sub_(slot.view(reduced.mean), alpha=0.1)
                if len(slot.shape) > 1:
                    had = (waiting[slot.name] != 0).flatten(1).any(dim=1)
                    served = (slot.view(sent) != 0).flatten(1).any(dim=1)
                    rows += int(had.sum())
                    silent += int((had & ~served).sum())
        return silent, rows

    silent, rows = local.run(1, worker)[0]
    return silent / rows


def _add_residual(state: dict[str, Any], grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradient plus residual: what each parameter has to send."""
    kept = state.get("slots", {})
    return {
        name: grad + kept.get(name, {}).get("memory", {}).get("residual", 0.0)
        for name, grad in grads.items()
    }
