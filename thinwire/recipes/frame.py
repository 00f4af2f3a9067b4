"""What recipes of a kind are built of: one function for each layer, from the inside to the outside.

choose          Select: entries, and who adds them up
route_dense     parameters that are averaged exactly
frame_sparse    both, with partial sparsification, nodes of two levels, and what follows
frame           warm-up, memory, and parameters without feedback
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from thinwire.bucket import Bucket, View
from thinwire.by_node import ByNode
from thinwire.choose import Choose
from thinwire.collectives import Cheapest, TwoLevel
from thinwire.combinators import Remember, Route, Rule, Warmup, dense
from thinwire.comm.nodes import read_nodes
from thinwire.layout import Layout, Slot
from thinwire.partial import Partial
from thinwire.protocols import Collective, CollectivePromises, Reducer, Selector, promised
from thinwire.recipes import options
from thinwire.recipes.options import Densities, Merge, Shared, Sparse
from thinwire.reducers import Select
from thinwire.schedule import ByParameter, Density
from thinwire.wire import Wire
from thinwire.wire import wire as as_wire


def sparse(
    pick: Selector,
    over: View,
    density: Densities,
    shared: Sparse,
    *,
    ragged: bool = True,
    own: Collective | None = None,
    indices: str = "int32",
) -> Reducer:
    """A whole sparse recipe: entries that `pick` chooses in the view `over`.

    `ragged` says that counts vary, `own` is the recipe's collective, `indices` the index code of a
    wire that names none.
    """
    chosen = options.read_estimate(shared["estimate"], pick, over)
    select = choose(
        chosen, over, density, shared, ragged=ragged or chosen is not pick, own=own, indices=indices
    )
    return frame_sparse(select, density, shared)


def choose(
    pick: Selector,
    over: View,
    density: Densities,
    shared: Sparse,
    *,
    ragged: bool,
    own: Collective | None = None,
    indices: str = "int32",
) -> Select:
    """Choosing and adding up."""
    if ragged and not promised(CollectivePromises, own).ragged:
        own = replace(cast(Any, own), ragged=True)
    collective = options.read_collective(shared["collective"], ragged=ragged, own=own)
    wire = as_wire(shared["wire"], indices)
    _check_zero(collective, wire)
    shares = options.read_density(density)
    return Select(pick=pick, over=over, density=shares, collective=collective, wire=wire)


def frame_sparse(
    inner: Reducer, density: Densities, shared: Sparse, stays: Rule | None = None
) -> Reducer:
    """Around what selects: what `stays` dense, by default as the caller says, and all the rest."""
    if stays is None and shared["dense"] is not None:
        stays = options.read_rule("dense", shared["dense"])
    if stays is not None:
        inner = Route(stays, dense(), inner)
    if shared["partial"]:
        choices = (("dense", dense()), ("sparse", inner))
        decide = Partial(density=options.read_density(density), always=stays or no_parameter)
        inner = Choose(choices=choices, decide=decide)
    return frame(_by_node(shared["collective"], inner), shared)


def route_dense(inner: Reducer, shared: Shared) -> Reducer:
    """Around a code or a projection: parameters that the caller wants averaged exactly."""
    if shared["dense"] is None:
        return inner
    return Route(options.read_rule("dense", shared["dense"]), dense(), inner)


def frame(inner: Reducer, shared: Shared) -> Reducer:
    """Memory outside, warm-up inside it: a dense step delivers the residual at once."""
    inner = inner if shared["warmup"] == 0 else Warmup(shared["warmup"], inner)
    memory = options.read_memory(shared["memory"])
    kept = inner if memory is None else Remember(inner, memory)
    unfed = shared["no_feedback"]
    if not unfed:
        return kept
    rule = options.read_rule("no_feedback", unfed)
    if shared["memory"] == "none":
        raise ValueError(
            f"no_feedback says which parameters keep no residual, got {unfed!r} where none does "
            "(memory='none'); give one of them"
        )
    return Route(rule, inner, kept)


def sends_all(layout: Layout, over: View, density: Density) -> bool:
    """Whether a view keeps every entry anyway; of a density that changes, nothing can be said."""
    numbers = [n for _, n in density.rules] if isinstance(density, ByParameter) else [density]
    if any(callable(number) for number in numbers):
        return False
    flat = torch.empty(layout.numel, device="meta")
    pieces = over(Bucket(flat=flat, layout=layout, state={}), density)
    return all(piece.k == piece.rows.shape[1] for piece in pieces)


def no_parameter(slot: Slot) -> bool:
    """The rule that holds for no parameter."""
    return False


def _check_zero(collective: Collective, wire: Wire) -> None:
    """Where some parameters may go dense, the zeros between what was chosen must stay zeros."""
    if isinstance(collective, Cheapest) and not wire.values.keeps_zero:
        raise ValueError(
            f"{wire.values!r} has no zero, so no parameter could go dense and the cheapest "
            "collective would always gather; use another wire, such as wire='int8', or "
            "collective='gather'"
        )


def _by_node(collective: Merge, inner: Reducer) -> Reducer:
    """Around what selects, if the caller wants two levels."""
    given = options.named_collective(collective, ragged=True)
    return ByNode(inner, read_nodes(given.nodes)) if isinstance(given, TwoLevel) else inner
