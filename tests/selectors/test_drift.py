"""ADTopk's threshold estimation: intervals that follow the drift, the same on all ranks."""

from __future__ import annotations

import pytest
import torch

from thinwire import Bucket, recipes
from thinwire.comm import local
from thinwire.selectors.drift import CHANGES, Drifting

K, N = 100, 10_000


def turns(pick: Drifting, scales: list[float], seed: int = 0) -> dict:
    """The state after as many turns, the same numbers each time but scaled."""
    x = torch.randn(1, N, generator=torch.Generator().manual_seed(seed))
    state: dict = {}
    for scale in scales:
        chosen = pick(x * scale, K, state)
        assert K / 2 <= chosen.numel() <= 2 * K
        pick.settle([state], lambda votes: votes)
    return state


def test_exact_at_first_then_remembered():
    pick = Drifting(warmup=3)
    state: dict = {}
    draw = torch.Generator().manual_seed(0)
    for turn in range(8):
        rows = torch.randn(1, N, generator=draw)
        chosen = pick(rows, K, state)
        exactly = rows[0].abs().topk(K).indices.sort().values
        # three turns of warm-up; the last exact threshold then serves five turns
        assert torch.equal(chosen, exactly) == (turn < 3 or "vote" in state)
    assert state["turn"] == 8


def test_a_threshold_that_was_corrected_is_the_one_that_is_remembered():
    pick, state = Drifting(interval=8, warmup=1), {}
    x = torch.randn(1, N, generator=torch.Generator().manual_seed(0))
    pick(x, K, state)
    pick(4 * x, K, state)
    assert state["found"] > 2, "far too many for the threshold of before"
    pick(4 * x, K, state)
    assert 0.5 <= state["found"] <= 2


def test_another_k_is_exact_at_once():
    pick, state = Drifting(interval=8, warmup=1), {}
    x = torch.randn(1, N, generator=torch.Generator().manual_seed(0))
    for k in (K, K, 80, 80):
        chosen = pick(x, k, state)
        assert torch.equal(chosen, x[0].abs().topk(k).indices.sort().values)
    assert state["k"] == 80 and "vote" not in state


def test_negative_entries_count_as_much_as_positive_ones():
    x = -torch.arange(1.0, N + 1)[None]
    state: dict = {}
    for _ in range(20):
        assert N - 1 in Drifting(warmup=2)(x, K, state).tolist()


def test_the_interval_widens_while_the_threshold_holds_and_narrows_when_it_drifts():
    pick = Drifting(interval=8, shortest=5, warmup=1)
    calm = [1.0] * 10
    assert turns(pick, calm)["interval"] == 8 + CHANGES[0], "drift below epsilon / 2"
    assert turns(pick, [1.0] + [1.07] * 9)["interval"] == 8 + CHANGES[1], "below epsilon"
    assert turns(pick, [1.0] + [1.15] * 9)["interval"] == 8 + CHANGES[2], "within 2 epsilon"
    assert turns(pick, [1.0] + [1.5] * 9)["interval"] == 8 + CHANGES[3], "beyond"
    worse = [1.5**i for i in range(60)]
    assert turns(pick, worse)["interval"] == 5, "never below the shortest"
    # exact at turns 8, 18, 30, 44, ..., 170 and 198, from where it lasts 30
    assert turns(pick, [1.0] * 200)["interval"] == 30, "and on it grows, without a limit"


@pytest.mark.parametrize(
    ("now", "change"),
    [(10.4375, 2), (9.5625, 2), (10.5, 1), (9.5, 1), (10.9375, 1), (11.0, -1), (9.0, -1),
     (12.0, -1), (8.0, -1), (12.0625, -2), (7.9375, -2), (100.0, -2)],
)  # fmt: skip
def test_the_edges_of_drift(now, change):
    """From a threshold of 10, epsilon is 1: what happens at its half, at it and at its double."""
    pick, state = Drifting(interval=5, shortest=1, warmup=1), {}
    for theta in (10.0, 10.0, 10.0, 10.0, 10.0, now):
        pick(torch.full((1, N), theta), K, state)
        pick.settle([state], lambda votes: votes)
    assert state["interval"] == 5 + change
    assert state["due"] == 5 + state["interval"]


def test_the_largest_vote_counts_for_each_layer_by_itself():
    """Rank 1 sees the first layer drift, rank 2 the second, nobody the third."""

    def worker(comm):
        pick, states = Drifting(interval=5, shortest=1, warmup=1), [{}, {}, {}]

        def highest(votes):
            return torch.stack(comm.all_gather(votes, [votes.numel()] * comm.size)).amax(0)

        for turn in range(6):
            for layer, state in enumerate(states):
                drifts = turn == 5 and comm.rank == layer + 1
                pick(torch.full((1, N), 15.0 if drifts else 10.0), K, state)
            pick.settle(states, highest)
        return [state["interval"] for state in states]

    assert local.run(3, worker) == [[3, 3, 7]] * 3


@pytest.mark.parametrize(
    ("estimate", "pick"),
    [(True, Drifting()), (8, Drifting(interval=8, shortest=5)),
     (3, Drifting(interval=3, shortest=3))],
)  # fmt: skip
def test_the_first_interval_is_what_the_recipe_asks_for(estimate, pick):
    recipe = recipes.adtopk(
        density=0.01, interleave=True, estimate=estimate, memory="none", dense=None
    )
    assert recipe.second.pick == pick


@pytest.mark.parametrize("options", [{"interval": 4}, {"shortest": 0}, {"shortest": 6}])
def test_an_interval_below_the_shortest_is_refused(options):
    with pytest.raises(ValueError, match="at least the shortest one, got"):
        Drifting(**options)


def test_decisions_are_the_same_on_all_ranks():
    """One rank drifts, the others do not: all take the interval of the one that does."""
    recipe = recipes.adtopk(density=0.01, interleave=True, estimate=True)
    states: list[dict] = [{} for _ in range(3)]

    def worker(comm):
        draw = torch.Generator().manual_seed(comm.rank)
        intervals = []
        for step in range(90):
            grow = 1.2**step if comm.rank == 1 else 1.0
            grads = {"w": grow * torch.randn(50, 80, generator=draw), "b": torch.ones(50)}
            bucket = Bucket.of(grads, state=states[comm.rank], step=step)
            recipe.reduce(bucket, comm)
            kept = states[comm.rank]["slots"]["w"].get("no/second/select", {})
            intervals.append((kept.get("interval"), kept.get("due"), kept.get("turn")))
        return intervals

    first, *others = local.run(3, worker)
    # the interval that ends at turn 19 was a drift of rank 1 beyond 2 epsilon: it stays at 5
    assert {interval for interval, _, _ in first[40:]} == {5}
    assert all(other == first for other in others)
    assert first[-1][2] == 45, "every second step is a flat one"
    thresholds = {s["slots"]["w"]["no/second/select"]["threshold"] for s in states}
    assert len(thresholds) == 3, "thresholds are each rank's own"


def test_a_refresh_every_interval():
    """The exact threshold is taken when the interval is over: every fifth turn, not sixth."""
    pick, state, exact_at = Drifting(interval=5, shortest=5, warmup=1), {}, []
    draw = torch.Generator().manual_seed(0)
    for turn in range(21):
        rows = 1.5**turn * torch.randn(1, N, generator=draw)  # drifts: the interval stays
        pick(rows, K, state)
        if "vote" in state:
            exact_at.append(turn)
        pick.settle([state], lambda votes: votes)
    assert exact_at == [5, 10, 15, 20]


def test_a_nan_on_one_rank_does_not_put_ranks_out_of_step():
    """Without memory and without the engine's drafts: everyone still votes at the same turns."""
    recipe = recipes.adtopk(density=0.1, interleave=True, estimate=True, memory="none")

    def worker(comm):
        state: dict = {}
        draw = torch.Generator().manual_seed(comm.rank)
        aborted = []
        for step in range(100):
            grad = torch.randn(20, 20, generator=draw)
            if comm.rank == 0 and step in (9, 43, 45, 47):
                grad[3, 3] = float("nan")
            reduced = recipe.reduce(Bucket.of({"w": grad}, state=state, step=step), comm)
            if not reduced.finite:
                aborted.append(step)
        return aborted, state["slots"]["w"]["no/second/select"]["due"]

    results = local.run(2, worker)
    assert results[0] == results[1]
    assert results[0][0] == [9, 43, 45, 47]
