"""What a step is measured with: a few built-in models, the papers' jobs, or a user's function.

A maker is a function of the batch size that returns a module and the inputs it is called with. A
module that returns a single number is taken to return its loss; of anything else the mean of the
squares is.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.spelling import meant
from thinwire_lab.errors import Refused
from thinwire_lab.jobs.catalogue import JOBS
from thinwire_lab.jobs.job import FAKE, Source, Task
from thinwire_lab.jobs.networks import vision

Made = tuple[nn.Module, tuple[Any, ...]]
Maker = Callable[[int], Made]


def mlp(batch: int) -> Made:
    """24 linear layers of 1024: 25.2 M parameters."""
    return _linear(24, 1024, batch)


def small(batch: int) -> Made:
    """8 linear layers of 512: 2.1 M parameters."""
    return _linear(8, 512, batch)


def conv(batch: int) -> Made:
    """Six convolutions of growing width on 32 x 32 pictures, and one linear layer: 1.1 M."""
    layers: list[nn.Module] = []
    width = 3
    for wider, stride in ((32, 1), (64, 2), (128, 2), (128, 1), (256, 2), (256, 1)):
        layers += [nn.Conv2d(width, wider, 3, stride, padding=1), nn.BatchNorm2d(wider), nn.ReLU()]
        width = wider
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return net, (torch.randn(batch, 3, 32, 32),)


def vgg16(batch: int) -> Made:
    """VGG-16 on 32 x 32 pictures: 14.7 M parameters."""
    return vision.vgg16(), (torch.randn(batch, 3, 32, 32),)


BUILT_IN: dict[str, Maker] = {"mlp": mlp, "vgg16": vgg16, "small": small, "conv": conv}


def maker(name: str) -> Maker:
    """A built-in model by name, or `module:function` from the current folder or the path."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if name in JOBS:
        return partial(_job, name)
    place, colon, function = name.partition(":")
    if not colon:
        known = dict.fromkeys([*BUILT_IN, *JOBS])
        raise ValueError(
            f"unknown model {name!r}; there are {', '.join(known)}, or give module:function"
            f"{meant(name, known)}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(place), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"cannot load the model {name!r}: {error}; give a function of the batch size that "
            "returns (module, inputs)"
        ) from None
    _check_call(name, found)
    made: Maker = found
    return made


def _check_call(name: str, found: Any) -> None:
    """Before workers are started, each of which would show where it failed."""
    shown = f"a {type(found).__name__}"
    if callable(found) and not isinstance(found, nn.Module):
        try:
            signature = inspect.signature(found)
        except ValueError:  # of compiled code nothing is known
            return
        try:
            signature.bind(1)
            return
        except TypeError:
            shown = f"{name}({', '.join(signature.parameters)})"
    raise ValueError(
        f"a model is a function of the batch size alone that returns (module, inputs), got {shown}"
    )


def make(name: str, batch: int) -> Made:
    """The model and its inputs, or a refusal that says what was wrong with them."""
    made = maker(name)(batch)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise Refused(f"{name} must return (module, inputs), got {type(made).__name__}")
    net, inputs = made
    return net, tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)


def loss_of(output: Any) -> Tensor:
    """A number to descend on."""
    if hasattr(output, "loss") and isinstance(output.loss, Tensor):  # as Hugging Face has it
        return output.loss
    if not isinstance(output, Tensor):
        raise Refused(f"the model must return a tensor, got {type(output).__name__}")
    return output if output.dim() == 0 else output.square().mean()


class _WithLoss(nn.Module):
    """A job's network that returns its loss."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.net, self._loss = task.net(), task.loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self._loss(self.net, batch)


def _job(name: str, batch: int) -> Made:
    """A job at the size of its paper, on random inputs."""
    task = JOBS[name].make("paper", Source(data=FAKE))
    return _WithLoss(task), task.train.batch(torch.arange(batch), None)


def _linear(layers: int, width: int, batch: int) -> Made:
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return net, (torch.randn(batch, width),)
