"""Two levels: dense inside nodes, the recipe between them; nothing lost, few bytes across."""

from __future__ import annotations

import io

import pytest
import torch

from tests.collectives.worlds import INPUTS, N, check_law, private, reduce
from thinwire import Bucket, recipes
from thinwire.bucket import by_layer
from thinwire.by_node import ByNode, deal
from thinwire.collectives.gtopk import GTopK
from thinwire.collectives.slots import Slots
from thinwire.collectives.spardl import BlockQuota
from thinwire.collectives.split import SplitReduce
from thinwire.collectives.two_level import TwoLevel
from thinwire.combinators import Remember, Route, dense
from thinwire.comm import local
from thinwire.comm.metered import Metered
from thinwire.comm.nodes import group_ranks, read_nodes
from thinwire.engine import fusion
from thinwire.layout import Layout
from thinwire.reducers import Select
from thinwire.selectors.topk import topk

SHAPES = {"a": (20, 10), "b": (30,), "c": (5, 4, 3), "e": (0,), "d": (110,)}


def several(rank, step, seed=0):
    draw = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def run(recipe, world, steps=4, unused=None):
    states = [{} for _ in range(world)]

    def worker(comm):
        found = []
        for step in range(steps):
            bucket = Bucket.of(several(comm.rank, step), state=states[comm.rank], step=step)
            bucket.unused = None if unused is None else unused(comm.rank)
            meter = Metered(comm, trace=True)
            out = recipe.reduce(bucket, meter)
            sent = out.sent.add_into(torch.zeros(bucket.layout.numel))
            found.append((out.mean.clone(), sent, meter, out.unused))
        return found

    return local.run(world, worker)


BETWEEN = {
    "topk": lambda nodes: recipes.topk(density=0.1, collective=TwoLevel(nodes=nodes)),
    "adtopk": lambda nodes: recipes.adtopk(density=0.1, collective=TwoLevel(nodes=nodes)),
    "gtopk": lambda nodes: recipes.topk(
        density=0.1, collective=TwoLevel(nodes=nodes, between=GTopK())
    ),
    "slots, bf16": lambda nodes: recipes.topk(
        density=0.1, wire="bf16+auto", collective=TwoLevel(nodes=nodes, between=Slots())
    ),
    "int8 inside": lambda nodes: recipes.sidco(
        density=0.1, wire="int8", collective=TwoLevel(nodes=nodes)
    ),
}


@pytest.mark.parametrize(
    ("world", "nodes"),
    [(1, 1), (2, 1), (2, 2), (4, 2), (6, 3), (6, 2), (8, 4), (9, 3), (16, 4), (3, 3), (5, 5),
     (7, 1), (4, ((0, 3), (2, 1)))],
)  # fmt: skip
@pytest.mark.parametrize("name", BETWEEN)
def test_the_law(name, world, nodes):
    results = run(BETWEEN[name](nodes), world)
    check_law(results, world, 3e-6)


@pytest.mark.parametrize("kind", INPUTS)
def test_one_parameter_belongs_to_one_rank_of_the_node(kind):
    """The others have handed everything over, and keep nothing."""
    recipe = recipes.topk(density=0.05, collective=TwoLevel(nodes=2))
    check_law(reduce(recipe, 4, INPUTS[kind]), 4)


def test_what_is_kept_and_what_comes_back_is_the_same_gradient():
    """Without new gradients residuals run dry: every entry arrives in the end."""
    recipe = recipes.topk(density=0.2, collective=TwoLevel(nodes=2))
    results = reduce(recipe, 4, lambda r, s: private(r, 0) * (s == 0), steps=12)
    delivered = sum(results[0][step][0].double() for step in range(12))
    wanted = sum(private(rank, 0).double() for rank in range(4)) / 4
    assert (delivered - wanted).abs().max() < 1e-5


def test_selection_sees_the_sum_of_the_node():
    """Two ranks of a node cancel each other: between nodes there is nothing to send."""
    recipe = recipes.topk(density=0.1, collective=TwoLevel(nodes=2), memory="none")

    def make(rank, step):
        return private(rank // 2, step) * (1 if rank % 2 else -1)

    results = reduce(recipe, 4, make, steps=1)
    assert not results[0][0][0].any()


def test_few_bytes_go_across():
    results = run(recipes.topk(density=0.1, collective=TwoLevel(nodes=2)), 4)
    across = inside = 0
    for rank, found in enumerate(results):
        for event in found[1][2].events:
            for peer, size in event.sent:
                if peer // 2 == rank // 2:
                    inside += size
                else:
                    across += size
    entries = sum(max(1, round(0.1 * torch.Size(s).numel())) for n, s in SHAPES.items() if n != "e")
    assert across == 4 * 8 * entries / 2  # each node's pairs, once to the other, two ranks a node
    assert inside > across


def test_parameters_nobody_used_are_known_to_all():
    def unused(rank):
        return frozenset({"b", "d"} if rank == 0 else {"b"})

    results = run(recipes.topk(density=0.1, collective=TwoLevel(nodes=2)), 4, 2, unused)
    assert all(found[1][3] == ("b",) for found in results)


def test_one_bad_rank_is_heard_by_all():
    def make(rank, step):
        x = private(rank, step)
        x[7] = float("inf") if rank == 3 and step == 1 else x[7]
        return x

    results = reduce(recipes.topk(density=0.1, collective=TwoLevel(nodes=2)), 4, make, steps=3)
    assert all(not rank[1][0].isfinite().all() for rank in results)
    assert all(rank[2][0].isfinite().all() for rank in results)
    check_law([[rank[0], rank[2]] for rank in results], 4)


def test_parameters_of_others_in_the_same_buffer_stay_untouched():
    """Route: half of the bucket to nodes, half past them; and two of them beside each other."""
    inner = Select(pick=topk, over=by_layer, density=0.1)

    def rule(slot):
        return slot.name in ("a", "c")

    for other in (dense(), ByNode(inner, 2)):
        recipe = Remember(Route(rule, ByNode(inner, 2), other))
        check_law(run(recipe, 4), 4, 3e-6)
    built = recipes.adtopk(density=0.1, no_feedback=["c"], collective=TwoLevel(nodes=2))
    check_law(run(built, 4), 4, 3e-6)


def test_the_recipes_own_collective_goes_between_nodes():
    wanted = {"gtopk": GTopK, "topkdsa": SplitReduce, "slots": Slots, "spardl": BlockQuota}
    for name, kind in wanted.items():
        built = getattr(recipes, name)(density=0.1, collective="two_level(2)")
        assert isinstance(built.inner.inner.collective, kind)
        check_law(run(built, 4), 4, 3e-6)
    with pytest.raises(ValueError, match="two levels"):
        TwoLevel(nodes=2, between=TwoLevel(nodes=4))
    with pytest.raises(ValueError, match="Remember outside"):
        ByNode(Remember(Select(pick=topk)), 2)


@pytest.mark.parametrize("name", BETWEEN)
def test_a_run_goes_on_with_the_same_bits(name):
    """Twice the same from the start, and from a state that was saved and loaded."""
    recipe = BETWEEN[name](2)

    def steps(states, numbers):
        def worker(comm):
            means = []
            for step in numbers:
                bucket = Bucket.of(several(comm.rank, step), state=states[comm.rank], step=step)
                means.append(recipe.reduce(bucket, comm).mean.clone())
            return means

        return local.run(4, worker)[0]

    states = [{} for _ in range(4)]
    first = steps(states, range(3))
    buffer = io.BytesIO()
    torch.save(states, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    rest = steps(states, range(3, 6))
    again = steps([{} for _ in range(4)], range(6))
    assert all(torch.equal(a, b) for a, b in zip(first + rest, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(rest, steps(loaded, range(3, 6)), strict=True))


def test_optimizer_mode_packs_buckets_for_any_nodes():
    parameters = {name: torch.zeros(100, 100) for name in "abcdef"}
    for nodes in (4, ((0, 1), (2, 3))):
        recipe = recipes.topk(collective=TwoLevel(nodes=nodes))
        assert fusion.pack(parameters, recipe, 25, world=4)


def test_nodes_are_given_or_read_from_the_launcher(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert group_ranks(2, 6) == [[0, 1], [2, 3], [4, 5]]
    assert group_ranks(((0, 2), (1, 3)), 4) == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="say it: TwoLevel"):
        recipes.topk(collective="two_level")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert read_nodes(None) == 2 and read_nodes(4) == 4
    with pytest.raises(ValueError, match="5 ranks do not make nodes of 2"):
        group_ranks(read_nodes(None), 5)
    with pytest.raises(ValueError, match="other ranks"):
        group_ranks(((0, 1),), 4)
    for wrong in (0, True, 2.5, "2", ((0, 1), (2,)), ((0, 0),), (0, 1)):
        with pytest.raises(ValueError, match="nodes must be"):
            TwoLevel(nodes=wrong)
    assert recipes.topk(collective="two_level").inner.nodes == 2
    assert recipes.topk(collective="two_level(8)").inner.nodes == 8


def test_momentum_needs_a_sender_that_keeps():
    with pytest.raises(ValueError, match="sender keeps"):
        recipes.dgc(collective=TwoLevel(nodes=2))


def test_parameters_are_dealt_out_whole_and_evenly():
    layout = Bucket.of(several(0, 0), state={}).layout
    shares = deal(layout, 2)
    assert [slot for share in shares for slot in share] == list(layout.slots)
    sizes = [sum(slot.numel for slot in share) for share in shares]
    assert sum(sizes) == N and min(sizes) > 0.3 * N
    assert deal(Layout((), 0), 3) == [(), (), ()]
