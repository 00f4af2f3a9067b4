"""A DDP model with a recipe attached is saved and copied as any other."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import thinwire
from tests.engine.alone import alone  # noqa: F401
from thinwire import recipes

pytestmark = pytest.mark.usefixtures("alone")


def attached() -> tuple[DistributedDataParallel, thinwire.Session]:
    model = DistributedDataParallel(nn.Linear(4, 4))
    sync = thinwire.attach(model, recipes.topk(density=0.1))
    model(torch.ones(2, 4)).sum().backward()
    return model, sync


def gradient(model: Any) -> Tensor:
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    grads = [p.grad.reshape(-1) for p in model.parameters()]
    return torch.cat(grads)


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    assert b"Session" not in file.getvalue(), "nothing of this process may be in the file"
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("when", ["attached", "detached", "attached again"])
@pytest.mark.parametrize("copied", [saved, copy.deepcopy])
def test_a_copy_is_plain_ddp_until_something_is_attached_to_it(copied: Any, when: str) -> None:
    model, sync = attached()
    if when != "attached":
        sync.detach()
    if when == "attached again":
        sync = thinwire.attach(model, recipes.topk(density=0.1))
    twin = copied(copied(model))  # a copy of a copy too
    assert isinstance(twin, DistributedDataParallel)
    steps = sync.metrics()["steps"]
    assert torch.equal(gradient(twin), torch.tensor([2.0] * 20)), "whole, as DDP averages"
    assert sync.metrics()["steps"] == steps, "the copy is not the original's"
    own = thinwire.attach(twin, recipes.topk(density=0.1))
    assert (gradient(twin) != 0).sum() == 3
    assert own.metrics()["steps"] == 1
    own.detach()
    assert torch.equal(gradient(twin), torch.tensor([2.0] * 20))
    thinwire.attach(twin, recipes.topk(density=0.1))
    with pytest.raises(ValueError, match="already has a recipe attached"):
        thinwire.attach(twin, recipes.topk(density=0.1))
    if when != "detached":
        assert (gradient(model) != 0).sum() == 3, "the original goes on"


def test_what_users_copy_beside_ddp() -> None:
    model, sync = attached()
    averaged = AveragedModel(model)  # deep-copies the model
    averaged.update_parameters(model)
    assert torch.equal(averaged.module.module.weight, model.module.weight)
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = thinwire.distribute(optimizer, net.named_parameters(), recipes.topk(density=0.1))
    twins: list[Any] = []
    for copied in (saved, copy.deepcopy):
        twins += [copied(net), copied(optimizer)]
    for twin, stepping in (twins[:2], twins[2:]):
        twin(torch.ones(2, 4)).sum().backward()
        stepping.step()
    assert sync.metrics()["steps"] == 0, "copies are not the original's"
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert sync.metrics()["steps"] == 1
