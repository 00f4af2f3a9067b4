"""What goes wrong is said, on every rank, in time: nothing hangs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.integration.common import batch, ddp, mlp, sgd, train
from tests.processes import Pool, once
from thinwire import RankFailed, RankMismatch, recipes
from thinwire.combinators import Remember
from thinwire.engine import checkpoint
from thinwire.reducers import Select

pytestmark = pytest.mark.slow


class Exploding:
    """A selector that fails on one rank, in the fourth step."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, 0

    def __call__(self, rows: Any, k: int, state: Any) -> Any:
        self.calls += 1
        if self.rank == 1 and self.calls > 40:
            raise ArithmeticError("the selector of rank 1 gave up")
        return rows.abs().topk(k, dim=1).indices.reshape(-1)

    # what ranks compare is the class, not the count of calls
    __slots__ = ("calls", "rank")


def worker_fails(rank: int, world: int, mode: str) -> tuple[str, str, float]:
    net = mlp(6)
    optimizer = sgd(net)
    recipe = Remember(Select(pick=Exploding(rank), density=0.1))
    if mode == "attach":
        model: nn.Module = ddp(net)
        thinwire.attach(model, recipe, timeout=30.0)
    else:
        model = net
        thinwire.distribute(
            optimizer, net.named_parameters(), recipe, timeout=30.0, bucket_mb=0.005
        )
    train(model, optimizer, rank, 3)
    begin = time.monotonic()
    try:
        for step in range(3, 10):
            model(batch(rank, step)).pow(2).mean().backward()
            optimizer.step()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "nothing", "", 0.0


@pytest.mark.parametrize("mode", ["attach", "distribute"])
def test_a_failing_worker_is_named_on_every_rank(mode: str) -> None:
    results = once(3, worker_fails, mode)
    kind, message, _ = results[1]
    assert (kind, message) == ("ArithmeticError", "the selector of rank 1 gave up")
    for rank in (0, 2):
        kind, message, seconds = results[rank]
        assert kind == "RankFailed", message
        assert "rank 1 failed in step" in message
        assert "weight" in message
        assert "ArithmeticError: the selector of rank 1 gave up" in message
        assert seconds < 30.0


KEPT: list[Any] = []  # a model that nobody holds any more has left


def worker_dies(rank: int, world: int) -> tuple[str, float]:
    net = mlp(4)
    model, optimizer = ddp(net), sgd(net)
    thinwire.attach(model, recipes.topk(), timeout=5.0)
    train(model, optimizer, rank, 2)
    KEPT.append(model)
    if rank == 1:
        return "gone", 0.0
    begin = time.monotonic()
    try:
        train(model, optimizer, rank, 2, start=2)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "nothing", 0.0


def test_a_missing_worker_is_waited_for_no_longer_than_the_timeout() -> None:
    results = once(2, worker_dies, timeout=60.0)
    assert results[1][0] == "gone"
    assert results[0][0].startswith("RankFailed: rank 1 did not come to bucket 0 of step 2 within")
    assert results[0][1] < 25.0


def different_recipes(rank: int, world: int, mode: str) -> str:
    net = mlp(2)
    recipe = recipes.topk(density=0.02 if rank == 2 else 0.01)
    try:
        if mode == "attach":
            thinwire.attach(ddp(net), recipe, timeout=20.0)
        else:
            thinwire.distribute(sgd(net), net.named_parameters(), recipe, timeout=20.0)
    except RankMismatch as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize("mode", ["attach", "distribute"])
def test_different_recipes_are_shown_with_both_sides(pool: Pool, mode: str) -> None:
    for message in pool.run(3, different_recipes, mode):
        assert "ranks disagree on the recipe" in message
        assert "rank 0:" in message
        assert "density=0.01" in message
        assert "rank 2:" in message
        assert "density=0.02" in message


def different_models(rank: int, world: int) -> str:
    net = nn.Linear(8, 4 if rank else 5)
    try:
        thinwire.distribute(sgd(net), net.named_parameters(), recipes.dense(), timeout=20.0)
    except RankMismatch as error:
        return str(error)
    return "nothing was said"


def test_different_models_are_shown_with_both_sides(pool: Pool) -> None:
    for message in pool.run(2, different_models):
        assert "rank 0: weight (5, 8)" in message
        assert "rank 1: weight (4, 8)" in message


def different_dtypes(rank: int, world: int, mode: str) -> str:
    net = nn.Linear(8, 4).to(torch.bfloat16 if rank else torch.float32)
    try:
        if mode == "attach":
            model = ddp(net, init_sync=False)  # else DDP's own broadcast ends the process
            thinwire.attach(model, recipes.topk(), timeout=20.0)
        else:
            thinwire.distribute(sgd(net), net.named_parameters(), recipes.topk(), timeout=20.0)
    except RankMismatch as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize("mode", ["attach", "distribute"])
def test_different_dtypes_are_shown_with_both_sides(pool: Pool, mode: str) -> None:
    for message in pool.run(2, different_dtypes, mode):
        assert "rank 0: weight (4, 8) (8, 1) torch.float32 on cpu" in message
        assert "rank 1: weight (4, 8) (8, 1) torch.bfloat16 on cpu" in message


def different_frozen(rank: int, world: int, what: str) -> str:
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4 + (rank if what == "shape" else 0)))
    net[1].requires_grad_(False)
    if what == "dtype" and rank:
        net[1].double()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    try:
        thinwire.distribute(optimizer, net.named_parameters(), recipes.topk(), timeout=20.0)
    except RankMismatch as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_frozen_parameters_are_agreed_on_before_they_are_broadcast(pool: Pool, what: str) -> None:
    theirs = {"shape": "(5, 4) torch.float32", "dtype": "(4, 4) torch.float64"}[what]
    for message in pool.run(2, different_frozen, what):
        assert "rank 0: 1.weight (4, 4) torch.float32" in message
        assert f"rank 1: 1.weight {theirs}" in message


def bad_attachments(rank: int, world: int) -> dict[str, str]:
    said: dict[str, str] = {}

    def expect(label: str, call: Any) -> None:
        try:
            call()
            said[label] = "nothing was said"
        except ValueError as error:
            said[label] = str(error)

    net, ones = mlp(2), torch.ones(7)
    model, stranger = ddp(net), mlp(2)
    expect("plain module", lambda: thinwire.attach(net, recipes.topk()))
    expect("no recipe", lambda: thinwire.attach(model, 0.01))
    expect("timeout", lambda: thinwire.attach(model, recipes.topk(), timeout=0))
    expect("optimizer", lambda: thinwire.attach(model, recipes.topk(), optimizer=sgd(stranger)))
    sync = thinwire.attach(model, recipes.topk())
    expect("twice", lambda: thinwire.attach(model, recipes.topk()))
    expect("wrong rank", lambda: sync.load_state_dict({**sync.state_dict(), "rank": 1 - rank}))
    expect("wrong world", lambda: sync.load_state_dict({**sync.state_dict(), "world": 7}))
    expect("version", lambda: sync.load_state_dict({"weight": 1}))
    expect("damaged", lambda: sync.load_state_dict({**sync.state_dict(), "step": "5"}))
    cut = {key: value for key, value in sync.state_dict().items() if key != "buckets"}
    hollow = {"0.weight": 5}
    expect("hollow", lambda: sync.load_state_dict({**sync.state_dict(), "slots": hollow}))
    expect("truncated", lambda: sync.load_state_dict(cut))
    poison = {"0.weight": {"memory": {"residual": torch.full((32, 32), float("nan"))}}}
    expect("poison", lambda: sync.load_state_dict({**sync.state_dict(), "slots": poison}))
    train(model, sgd(net), rank, 1)
    full = sync.state_dict()
    expect("empty", lambda: sync.load_state_dict({**full, "slots": {}}))
    huge = {"0.weight": {"memory": {"residual": torch.full((32, 32), 1e38)}}}
    expect("huge", lambda: sync.load_state_dict({**full, "slots": huge}))
    other = {**full["slots"], "0.weight": {**full["slots"]["0.weight"], "select": {"t": ones}}}
    expect("another shape", lambda: sync.load_state_dict({**full, "slots": other}))
    expect("bad buckets", lambda: sync.load_state_dict({**full, "buckets": [[5]]}))
    names = {"nowhere.weight": {}}
    expect("stranger", lambda: sync.load_state_dict({**sync.state_dict(), "slots": names}))
    shape = {"0.weight": {"memory": {"residual": torch.zeros(3)}}}
    expect("shape", lambda: sync.load_state_dict({**sync.state_dict(), "slots": shape}))

    hooked = ddp(mlp(2))
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    hooked.register_comm_hook(None, fp16_compress_hook)
    expect("other hook", lambda: thinwire.attach(hooked, recipes.topk()))

    late = ddp(mlp(2))
    late.module.requires_grad_(False)
    expect("late", lambda: thinwire.attach(late, recipes.topk()))
    frozen = mlp(2).requires_grad_(False)
    imaginary = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    named = list(imaginary.named_parameters())
    expect("complex", lambda: thinwire.distribute(sgd(imaginary), named, recipes.topk()))
    for label, name, value in (
        ("mixed", "mixed_precision", 1),
        ("python", "_use_python_reducer", 1),
    ):
        other = ddp(mlp(2))
        setattr(other, name, value)
        expect(label, lambda other=other: thinwire.attach(other, recipes.topk()))
    early = mlp(2)
    early[0].weight._in_backward_optimizers = []
    expect("inside", lambda: thinwire.attach(ddp(early), recipes.topk()))
    named = list(net.named_parameters())
    opt = sgd(net)
    expect(
        "frozen",
        lambda: thinwire.distribute(sgd(frozen), frozen.named_parameters(), recipes.topk()),
    )
    expect(
        "not its",
        lambda: thinwire.distribute(sgd(stranger), net.named_parameters(), recipes.topk()),
    )
    expect("bucket", lambda: thinwire.distribute(opt, named, recipes.topk(), bucket_mb=0))
    clash = [("w", p) for _, p in named]
    expect("names", lambda: thinwire.distribute(opt, clash, recipes.topk()))
    return said


def test_what_cannot_work_is_refused_with_the_reason_and_the_remedy(pool: Pool) -> None:
    said = pool.run(2, bad_attachments)[0]
    for label, parts in {
        "plain module": (
            "needs a DistributedDataParallel",
            "got Sequential",
            "around which there is one",
        ),
        "no recipe": ("must have reduce", "got 0.01", "recipes.adtopk"),
        "timeout": ("timeout must be above 0", "got 0"),
        "optimizer": ("4 parameters that are not the model's", "build it from"),
        "twice": ("already has a recipe", "detach()"),
        "wrong rank": ("is rank 1's of 2, loaded by rank 0 of 2", "one state a rank"),
        "wrong world": ("of 7", "start without it"),
        "version": ("expected a thinwire state of version 3, got None",),
        "damaged": ("step must be a int, got '5'",),
        "hollow": ("what the state has for '0.weight' is damaged",),
        "truncated": ("buckets must be a list, got None",),
        "poison": ("residual of '0.weight' is not finite",),
        "huge": ("residual of '0.weight' is not finite, or too large for a sum over ranks",),
        "empty": ("is not what sync.state_dict() returned, for its digest differs",),
        "another shape": ("is not what sync.state_dict() returned, for its digest differs",),
        "bad buckets": ("buckets must be lists of this model's parameters, each once, got [[5]]",),
        "stranger": ("it has no shape of 'nowhere.weight'",),
        "shape": ("residual of '0.weight' has shape (3,)", "load the state"),
        "other hook": ("already has another comm hook", "build a new"),
        "frozen": ("no parameter requires a gradient", "requires_grad_()"),
        "late": ("no parameter requires a gradient", "requires_grad_()"),
        "complex": ("complex", "view_as_real"),
        "inside": ("steps inside backward", "step after backward"),
        "mixed": ("mixed_precision", "autocast"),
        "python": ("python_reducer", "optimize_ddp = True"),
        "not its": ("4 parameters that are not the model's",),
        "bucket": ("bucket_mb must be above 0, got 0",),
        "names": ("two parameters are named 'w'",),
    }.items():
        for part in parts:
            assert part in said[label], (label, said[label])


def test_without_a_process_group() -> None:
    net = mlp(1)
    with pytest.raises(ValueError, match=r"call torch\.distributed.init_process_group first"):
        thinwire.distribute(sgd(net), net.named_parameters(), recipes.topk())


def one_rank_pauses(rank: int, world: int) -> str:
    net = mlp(2)
    model, optimizer = ddp(net), sgd(net)
    sync = thinwire.attach(model, recipes.topk(), timeout=6.0)
    train(model, optimizer, rank, 3)
    try:
        if rank == 0:
            sync.pause()
        train(model, optimizer, rank, 3)
    except (RankFailed, RankMismatch, RuntimeError) as error:
        return str(error)
    return "nothing was said"


def test_a_pause_on_one_rank_only_is_an_error_not_a_hang() -> None:
    zero, one = once(2, one_rank_pauses, timeout=60.0)
    for said in (zero, one):
        assert said == (
            "rank 0 has come to pause(), while rank 1 is in bucket 0 of step 3; all ranks must do "
            "the same, between the same two steps"
        )


def resumed_on_one_rank(rank: int, world: int) -> str:
    net = mlp(2)
    model, optimizer = ddp(net), sgd(net)
    sync = thinwire.attach(model, recipes.topk(), timeout=6.0)
    train(model, optimizer, rank, 3)
    try:
        if rank == 1:
            sync.load_state_dict(sync.state_dict())
        train(model, optimizer, rank, 1)
    except (RankFailed, RankMismatch) as error:
        emergency = sync.state_dict()  # a failure does not take the state with it
        assert emergency["step"] == 3
        sync.detach()
        return str(error)
    return "nothing was said"


def test_a_state_loaded_on_one_rank_only_is_an_error_not_a_crash() -> None:
    zero, one = once(2, resumed_on_one_rank, timeout=60.0)
    for said in (zero, one):
        assert "rank 1 has come to load_state_dict(), while rank 0 is in bucket 0 of step 3" in said


def damaged_on_one_rank(rank: int, world: int) -> list[str]:
    sync = thinwire.attach(ddp(mlp(2)), recipes.topk(), timeout=60.0)
    whole = sync.state_dict()
    begun, said = time.monotonic(), []
    for damage in ({"step": "5"}, {"buckets": [["0.weight"], 5]}, {"step": 1}):
        try:
            sync.load_state_dict({**whole, **damage} if rank == 1 else whole)
        except ValueError as error:
            said.append(str(error))
    assert time.monotonic() - begun < 60  # nobody waits for the time-out
    sync.load_state_dict(whole)  # on all ranks
    return said


def test_a_state_that_is_damaged_on_one_rank_is_refused_by_all(pool: Pool) -> None:
    zero, one, two = pool.run(3, damaged_on_one_rank)
    starts = ("step must be a int", "buckets must be lists of this", "it is not what sync.state_di")
    for text, start in zip(one, starts, strict=True):
        assert text.startswith(f"the state is damaged: {start}")
    assert zero == two == [f"rank 1 in load_state_dict(): {text}" for text in one]


def different_steps(rank: int, world: int) -> str:
    net = mlp(2)
    model, optimizer = ddp(net), sgd(net)
    sync = thinwire.attach(model, recipes.topk(warmup=2), timeout=6.0)
    sync.load_state_dict(checkpoint.sign({**sync.state_dict(), "step": 5 * rank}))
    try:
        train(model, optimizer, rank, 1)
    except RankMismatch as error:
        return str(error)
    return "nothing was said"


def test_states_of_different_steps_are_shown_with_both_sides(pool: Pool) -> None:
    for message in pool.run(2, different_steps):
        assert "rank 0: step 0" in message
        assert "rank 1: step 5" in message
