"""What travels: dense, sparse or low-rank things that can be *added into* a buffer.

`add_into(out, alpha)` is the only verb: with alpha = 1/P it decodes, with alpha = -1 it is error
feedback. `entries` counts the numbers a payload carries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinwire import kernels


class Payload(Protocol):
    """Anything that can be added, with a weight, into a flat buffer of `numel` entries."""

    @property
    def numel(self) -> int: ...

    @property
    def entries(self) -> int: ...

    def add_into(self, out: Tensor, alpha: float = 1.0) -> Tensor: ...


@dataclass(frozen=True)
class Dense:
    """Every entry."""

    values: Tensor  # (n,)

    @property
    def numel(self) -> int:
        return self.values.numel()

    @property
    def entries(self) -> int:
        return self.values.numel()

    def add_into(self, out: Tensor, alpha: float = 1.0) -> Tensor:
        return out.add_(self.values, alpha=alpha)


@dataclass(frozen=True)
class Sparse:
    """Some entries; an index that stands twice counts twice."""

    indices: Tensor  # (k,) int64
    values: Tensor  # (k,)
    numel: int

    @property
    def entries(self) -> int:
        return self.indices.numel()

    def add_into(self, out: Tensor, alpha: float = 1.0) -> Tensor:
        return kernels.scatter_add(out, self.indices, self.values, alpha)


@dataclass(frozen=True)
class LowRank:
    """The matrix p q^T; `entries` are the numbers sent for it, one factor or both."""

    p: Tensor  # (n, r)
    q: Tensor  # (m, r)
    entries: int

    @property
    def numel(self) -> int:
        return self.p.shape[0] * self.q.shape[0]

    def add_into(self, out: Tensor, alpha: float = 1.0) -> Tensor:
        kernels.add_outer(out.view(self.p.shape[0], self.q.shape[0]), self.p, self.q, alpha)
        return out


@dataclass(frozen=True)
class Parts:
    """Payloads at offsets of one flat buffer; no parts at all is the zero payload.

    Those a rank has not `chosen` it answers for all the same: rounded sums, entries that an owner
    drops. A momentum is cleared only where its own rank chose to send.
    """

    items: tuple[tuple[int, Payload], ...]
    numel: int
    chosen: bool = True

    @property
    def entries(self) -> int:
        return sum(payload.entries for _, payload in self.items)

    def add_into(self, out: Tensor, alpha: float = 1.0) -> Tensor:
        for offset, payload in self.items:
            payload.add_into(out[offset : offset + payload.numel], alpha)
        return out


@dataclass(frozen=True)
class Without:
    """A payload that leaves some stretches of the buffer alone."""

    inner: Payload
    gaps: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return self.inner.numel

    @property
    def entries(self) -> int:
        return self.inner.entries

    def add_into(self, out: Tensor, alpha: float = 1.0) -> Tensor:
        before = [out[start:stop].clone() for start, stop in self.gaps]
        self.inner.add_into(out, alpha)
        for (start, stop), kept in zip(self.gaps, before, strict=True):
            out[start:stop] = kept
        return out


@dataclass(frozen=True)
class Mapped:
    """A payload in another basis: `back` maps a flat buffer of coefficients to a flat gradient."""

    inner: Payload
    back: Callable[[Tensor], Tensor]

    @property
    def numel(self) -> int:
        return self.inner.numel

    @property
    def entries(self) -> int:
        return self.inner.entries

    def add_into(self, out: Tensor, alpha: float = 1.0) -> Tensor:
        coefficients = self.inner.add_into(torch.zeros_like(out))
        return out.add_(self.back(coefficients), alpha=alpha)


def find_chosen(payload: Payload) -> Tensor | None:
    """The positions this rank picked for itself, or None if it picked none: a dense share has no
    private choice in it."""
    if isinstance(payload, Sparse):
        return payload.indices
    if isinstance(payload, Parts) and payload.chosen:
        found = [(offset, find_chosen(item)) for offset, item in payload.items]
        places = [index + offset for offset, index in found if index is not None]
        return torch.cat(places) if places else None
    if isinstance(payload, Without):
        index = find_chosen(payload.inner)
        if index is None:
            return None
        for start, stop in payload.gaps:
            index = index[(index < start) | (index >= stop)]
        return index
    return None


def write_into(payload: Payload, out: Tensor) -> Tensor:
    """The payload in place of whatever is in the buffer: a pass less than clearing and adding."""
    if isinstance(payload, Parts) and sum(p.numel for _, p in payload.items) == payload.numel:
        for offset, item in payload.items:
            write_into(item, out[offset : offset + item.numel])
        return out
    if isinstance(payload, Dense):
        return out.copy_(payload.values)
    if isinstance(payload, LowRank) and payload.p.dtype == out.dtype:
        kernels.add_outer(out.view(payload.p.shape[0], payload.q.shape[0]), payload.p, payload.q)
        return out
    return payload.add_into(out.zero_())


def values_of(payload: Payload, like: Tensor) -> Tensor:
    """All its entries, flat, in the precision of this tensor."""
    if isinstance(payload, Dense):
        return payload.values
    zeros = torch.zeros(payload.numel, dtype=like.dtype, device=like.device)
    return payload.add_into(zeros)


def bound(payload: Payload) -> float:
    """A magnitude that no entry of it exceeds; infinite only if it holds what is not finite."""
    size = float(limit(payload))
    if size < math.inf:
        return size
    if isinstance(payload, Dense) and kernels.finite(payload.values):
        return float(torch.finfo(payload.values.dtype).max)  # its squares overflowed, not it
    return math.inf


def limit(payload: Payload) -> Tensor:
    """A magnitude that nothing it adds to a zero exceeds: a scalar, not finite where none is known
    or not everything is finite. One for all parts, so that a device is asked once."""
    if isinstance(payload, Parts):
        return sum((limit(item) for _, item in payload.items), torch.zeros(()))
    size = torch.tensor(float("inf"))
    if isinstance(payload, LowRank):
        size = payload.p.norm() * payload.q.norm()
    elif isinstance(payload, Dense):
        size = payload.values.norm()  # the largest entry would do, and takes ten times as long
    elif isinstance(payload, Sparse):
        size = torch.linalg.vector_norm(payload.values, 1)  # an index may stand twice
    return size


def nothing(numel: int) -> Parts:
    """The payload that adds nothing."""
    return Parts((), numel)


def at_runs(packed: Tensor, runs: Sequence[tuple[int, int]], numel: int) -> Parts:
    """Values that lie side by side, each run of them at its place in the buffer."""
    pieces = packed.split([stop - start for start, stop in runs])
    return Parts(tuple(zip((a for a, _ in runs), map(Dense, pieces), strict=True)), numel)


def together(payloads: list[Sparse], numel: int) -> Sparse:
    """One sparse payload that adds what all of them add, in their order."""
    return Sparse(
        torch.cat([p.indices for p in payloads]), torch.cat([p.values for p in payloads]), numel
    )


def ascending(payload: Sparse) -> Sparse:
    """The same entries in the order of their indices, as wires want them."""
    if kernels.ascending(payload.indices, payload.numel):
        return payload
    order = payload.indices.argsort(stable=True)
    return Sparse(payload.indices[order], payload.values[order], payload.numel)


def add_up(payloads: list[Sparse]) -> Sparse:
    """The sum of ascending payloads: one entry an index, ascending; equal ones in their order."""
    summed = kernels.merged([p.indices for p in payloads], [p.values for p in payloads])
    return Sparse(*summed, payloads[0].numel)


def only(payload: Sparse, kept: Tensor) -> Sparse:
    """Those of its entries for which the mask is set."""
    return Sparse(*kernels.compress(payload.indices, payload.values, kept), payload.numel)


def largest(payload: Sparse, count: int) -> Sparse:
    """So many entries of largest magnitude; NaN and infinity come first, and are never hidden."""
    if payload.entries <= count:
        return payload
    if count == 0:
        return only(payload, ~payload.values.isfinite())
    kept = torch.zeros(payload.entries, dtype=torch.bool, device=payload.values.device)
    kept[kernels.topk(payload.values[None], count)] = True
    return only(payload, kept)
