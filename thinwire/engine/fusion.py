"""Packing parameters into buckets by what they will send, not by what they hold.

`bucket_mb` is in megabytes of gradient, as DDP's; it is translated into compressed bytes at the
model's own rate, so that compressed buckets are as many as DDP's would be and about equal on the
wire. Parameters are taken in reverse order of registration, roughly as backward finishes them.
A plan of buffers (`thinwire.plan.packing`) says itself how many gradients go together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from thinwire.layout import Layout
from thinwire.plan.packing import groups
from thinwire.protocols import Reducer

MB = 2**20


def pack(
    parameters: Mapping[str, Tensor], recipe: Reducer, bucket_mb: float, world: int = 2
) -> list[Layout]:
    """The buckets, in the order in which they are sent."""
    names = list(parameters)[::-1]
    costs = {
        name: _wire_bytes(recipe, Layout.of({name: parameters[name]}), world) for name in names
    }
    held = sum(p.numel() * p.element_size() for p in parameters.values())
    cap = bucket_mb * MB * sum(costs.values()) / max(1, held)
    packed: dict[object, list[list[str]]] = {}
    room: dict[object, float] = {}
    for name in names:
        kind = (parameters[name].dtype, parameters[name].device)
        if kind not in packed or costs[name] > room[kind]:
            packed.setdefault(kind, []).append([])
            room[kind] = cap
        packed[kind][-1].append(name)
        room[kind] -= costs[name]
    buckets = [bucket for kind in packed.values() for bucket in kind]
    buckets.sort(key=lambda bucket: names.index(bucket[-1]))  # whichever is complete first
    return [Layout.of({name: parameters[name] for name in bucket}) for bucket in buckets]


def pack_by_counts(parameters: Mapping[str, Tensor], counts: Sequence[int]) -> list[Layout]:
    """The buckets of a plan: so many gradients each, in the order of backward."""
    names = list(parameters)[::-1]
    buckets = groups(names, list(counts))
    for bucket in buckets:
        kinds = {(parameters[name].dtype, parameters[name].device) for name in bucket}
        if len(kinds) > 1:
            raise ValueError(
                f"a bucket of the plan mixes {len(kinds)} precisions or devices ({bucket[0]} to "
                f"{bucket[-1]}); plan again, or leave buckets= out"
            )
    return [Layout.of({name: parameters[name] for name in bucket}) for bucket in buckets]


def _wire_bytes(recipe: Reducer, layout: Layout, world: int) -> float:
    """Bytes a parameter sends, averaged over an odd and an even step, neither of them the first."""
    if not hasattr(recipe, "traffic"):  # a reducer of the user's need not know its price
        return 4 * layout.numel
    return sum(recipe.traffic(layout, world, step).bytes for step in (1, 2)) / 2
