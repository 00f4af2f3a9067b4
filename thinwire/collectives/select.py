"""What collectives do to a sum on the way: cut it to the largest, and book what that took."""

from __future__ import annotations

from thinwire import kernels
from thinwire.payload import Parts, Sparse, ascending, only


def surviving(own: Sparse, total: Sparse) -> Sparse:
    """Those of my entries that are still in the sum."""
    own = ascending(own)
    return only(own, kernels.member(own.indices, ascending(total).indices))


def given_up(before: Sparse, after: Sparse) -> Sparse:
    """What a cut took out of a sum, as a share: its negative."""
    before = ascending(before)
    rest = only(before, ~kernels.member(before.indices, ascending(after).indices))
    return Sparse(rest.indices, -rest.values, rest.numel)


def difference(a: Sparse, b: Sparse) -> Sparse:
    """a - b, of the same indices, where that is not zero."""
    error = Sparse(a.indices, a.values - b.values, a.numel)
    return only(error, error.values != 0)


def share(mine: list[Sparse], corrections: list[Sparse], numel: int) -> Parts:
    """What I chose and sent, and what else I answer for."""
    own = [(0, payload) for payload in mine]
    rest = tuple((0, payload) for payload in corrections if payload.entries)
    return Parts((*own, (0, Parts(rest, numel, chosen=False))), numel)
