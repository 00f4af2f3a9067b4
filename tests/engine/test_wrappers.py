"""What frameworks put around models and optimizers: refused with what works, or looked through."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.engine.alone import alone  # noqa: F401
from thinwire import recipes
from thinwire.engine.wrappers import innermost

pytestmark = pytest.mark.usefixtures("alone")


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def distribute(model: nn.Module, recipe: Any = None) -> thinwire.Session:
    return thinwire.distribute(sgd(model), model.named_parameters(), recipe or recipes.topk(0.1))


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


class Subclass(DistributedDataParallel):
    """Frameworks have their own."""


@pytest.mark.parametrize("kind", [DistributedDataParallel, Subclass])
@pytest.mark.parametrize("given", ["the model", "the wrapper"])
def test_distribute_beside_ddp_is_refused(kind: type, given: str) -> None:
    net = linear()
    wrapper = kind(net)
    with pytest.raises(ValueError, match=r"Parallel averages 0\.weight too") as said:
        distribute(net if given == "the model" else wrapper)
    assert "trainer.model_wrapped" in str(said.value)
    assert "accelerator.prepare(model)" in str(said.value)
    thinwire.attach(wrapper, recipes.topk(0.1)).detach()  # the remedy works


def test_a_ddp_that_is_built_after_distribute_is_refused_in_its_first_step() -> None:
    net = linear()
    optimizer = sgd(net)
    thinwire.distribute(optimizer, net.named_parameters(), recipes.topk(0.1))
    wrapper = DistributedDataParallel(net)
    with pytest.raises(ValueError, match=r"Parallel averages 0\.weight too"):
        step(wrapper, optimizer)


def test_a_ddp_of_other_parameters_or_one_that_is_gone_does_no_harm() -> None:
    net = linear()
    others = DistributedDataParallel(linear())
    wrapper = DistributedDataParallel(net)
    wrapper.itself = [wrapper]  # a cycle: only the collector frees it
    del wrapper
    gc.disable()
    try:
        distribute(net).detach()
    finally:
        gc.enable()
    distribute(copy.deepcopy(others).module).detach()


def test_parameters_that_ddp_was_told_to_ignore_may_be_distributed() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.weight", "1.bias"])
    wrapper = DistributedDataParallel(net)
    distribute(wrapper.module[1]).detach()


def test_replicate_is_refused_by_name() -> None:
    net = replicate(linear())
    with pytest.raises(ValueError, match=r"replicate\(\) averages gradients itself") as said:
        thinwire.attach(net, recipes.topk())
    assert "attach(DistributedDataParallel(model), recipe)" in str(said.value)
    optimizer = sgd(net)  # replicate builds its DDP when the model first runs
    thinwire.distribute(optimizer, net.named_parameters(), recipes.topk(0.1))
    with pytest.raises(ValueError, match=r"replicate\(\) averages these parameters too"):
        step(net, optimizer)
    with pytest.raises(ValueError, match=r"replicate\(\) averages these parameters too"):
        distribute(net)
    sharded = replicate_with_fsdp(linear())
    with pytest.raises(ValueError, match=r"replicate\(\) averages gradients itself"):
        thinwire.attach(sharded, recipes.topk())


@pytest.mark.filterwarnings("ignore:FSDP is switching to use")
@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("part", ["whole", "inside"])
def test_fsdp1_is_refused_by_name(original: bool, part: str) -> None:
    cpu = torch.device("cpu")
    model: nn.Module = FullyShardedDataParallel(linear(), device_id=cpu, use_orig_params=original)
    if part == "inside":
        model = nn.Sequential(model)
    with pytest.raises(ValueError, match=r"FSDP1 \(FullyShardedDataParallel\)") as said:
        thinwire.attach(model, recipes.topk())
    assert "attach(DistributedDataParallel(model), recipe)" in str(said.value)
    with pytest.raises(ValueError, match=r"is of FSDP1 \(FullyShardedDataParallel\)") as said:
        distribute(model)
    assert "attach(DistributedDataParallel(model), recipe)" in str(said.value)


@pytest.mark.parametrize("part", ["whole", "inside"])
def test_fsdp2_is_refused_by_name(part: str) -> None:
    model = linear()
    fully_shard(model if part == "whole" else model[0])
    for way in (distribute, lambda model: thinwire.attach(model, recipes.topk())):
        with pytest.raises(ValueError, match=r"FSDP2 \(fully_shard\)") as said:
            way(model)
        assert "attach(DistributedDataParallel(model), recipe)" in str(said.value)
        assert "distribute" not in str(said.value)


def test_attach_to_what_is_inside_or_around() -> None:
    net = linear()
    wrapper = DistributedDataParallel(net)
    with pytest.raises(ValueError, match="around which there is one; attach to that") as said:
        thinwire.attach(net, recipes.topk())
    assert "trainer.model_wrapped" in str(said.value)
    assert "distribute" not in str(said.value)
    outer = nn.Module()
    outer.inner = wrapper
    with pytest.raises(ValueError, match=r"has one inside; attach to its \.inner"):
        thinwire.attach(outer, recipes.topk())
    with pytest.raises(ValueError, match="got dict; pass what"):
        thinwire.attach({}, recipes.topk())  # type: ignore[arg-type]


def test_attach_to_a_plain_model_names_the_wrapper_before_distribute() -> None:
    with pytest.raises(ValueError, match="got Sequential; wrap it") as said:
        thinwire.attach(linear(), recipes.topk())
    text = str(said.value)
    assert text.index("trainer.model_wrapped") < text.index("thinwire.distribute(")
    assert "nothing will wrap" in text


class Accelerated(torch.optim.Optimizer):
    """As Accelerate builds it: an optimizer that holds the one that steps, without its fields."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def test_the_optimizer_inside_a_wrapper_is_the_one_that_is_hooked() -> None:
    weights: list[Tensor] = []
    for wrap in (lambda optimizer: optimizer, Accelerated, lambda o: Accelerated(Accelerated(o))):
        net = linear()
        nn.init.ones_(net[0].weight)
        optimizer = wrap(sgd(net))
        sync = thinwire.distribute(optimizer, net.named_parameters(), recipes.topk(0.1))
        for _ in range(2):
            step(net, optimizer)
            optimizer.zero_grad()
        assert sync.metrics()["steps"] == 2
        weights.append(net[0].weight.detach().clone())
        with pytest.raises(ValueError, match="distributed already"):
            thinwire.distribute(innermost(optimizer), net.named_parameters(), recipes.topk(0.1))
    assert all(torch.equal(weight, weights[0]) for weight in weights)


def test_attach_looks_through_wrapped_optimizers_too() -> None:
    net = linear()
    optimizer = Accelerated(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"applied twice.*by SGD \(momentum 0.9"):
        thinwire.attach(DistributedDataParallel(net), recipes.dgc(), optimizer=optimizer)


@pytest.mark.parametrize("optimizer", [None, linear()], ids=["None", "a model"])
def test_what_is_no_optimizer_is_refused(optimizer: Any) -> None:
    with pytest.raises(ValueError, match=r"optimizer must be a torch.optim.Optimizer, got"):
        thinwire.distribute(optimizer, linear().named_parameters(), recipes.topk())


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (lambda net: net.parameters(), "Parameter"),
        (lambda net: net.state_dict(), "str"),
        (lambda net: dict(net.named_parameters()), "str"),
        (lambda net: dict(zip("ab", net.parameters(), strict=True)), "str"),
    ],
)
def test_parameters_without_names_are_refused(given: Any, kind: str) -> None:
    net = linear()
    with pytest.raises(ValueError, match=rf"pairs \(name, parameter\), got one {kind}; pass model"):
        thinwire.distribute(given(net), recipes.topk(), sgd(net))


@pytest.mark.parametrize("recipe", ["topk(density=0.5)", recipes.topk(density=0.5)])
def test_one_order_of_arguments_and_recipes_as_they_are_typed(recipe: Any) -> None:
    net = linear()
    optimizer = sgd(net)
    for plug in (
        lambda: thinwire.distribute(net, recipe, optimizer),
        lambda: thinwire.distribute(net.named_parameters(), recipe, optimizer=optimizer),
        lambda: thinwire.distribute(optimizer, net.named_parameters(), recipe),  # Horovod's
        lambda: thinwire.attach(DistributedDataParallel(net), recipe, optimizer),
    ):
        with plug() as sync:
            assert repr(sync.recipe) == repr(recipes.topk(density=0.5))
            assert repr(sync).startswith("<thinwire.Session attached: topk(density=0.5), ")
            assert "rank 0 of 1, 0 steps" in repr(sync)
        assert not sync.attached and repr(sync).startswith("<thinwire.Session detached")
    with pytest.raises(ValueError, match=r"unknown recipe 'topq'; .*did you mean topk"):
        thinwire.attach(DistributedDataParallel(net), "topq(density=0.5)")


def test_metrics_are_numbers_and_nothing_else() -> None:
    net = linear()
    with thinwire.distribute(net, "topk(density=0.5)", sgd(net)) as sync:
        net(torch.ones(2, 4)).sum().backward()
        found = sync.metrics()
    assert found.keys() == thinwire.Session.metrics.__globals__["Metrics"].__annotations__.keys()
    assert all(type(value) in (int, float) for value in found.values())
    assert found["steps"] == 1 and found["seconds_select"] > 0
