"""The two leaves, because there are only two ways to add compressed things.

`Project`: all ranks agree on a frame beforehand; coefficients are linear, so they simply add.
`Select`: every rank keeps its own entries; supports differ and a sparse collective merges them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.bucket import Bucket, Piece, View, by_layer
from thinwire.collectives.gather import AllGather
from thinwire.describe import describe, spell
from thinwire.frames.shared import Identity
from thinwire.layout import Layout
from thinwire.operand import Sum, evaluate, magnitude, working_dtype
from thinwire.payload import (
    Dense,
    Parts,
    Payload,
    Sparse,
    ascending,
    limit,
    nothing,
    only,
    values_of,
    write_into,
)  # fmt: skip
from thinwire.protocols import (
    Collective,
    CollectivePromises,
    Comm,
    Frame,
    Pass,
    Reduced,
    Selector,
    SelectorPromises,
    Traffic,
    promised,
)
from thinwire.schedule import (
    ByParameter,
    Density,
    at,
    check_densities,
    checked_density,
    density_at,
    thinned,
)
from thinwire.wire import Wire
from thinwire.wire.average import reduce_traffic
from thinwire.wire.link import Link


@dataclass(frozen=True, kw_only=True)
class Project:
    """Average coefficients in a frame all ranks share.

    Each pass of the frame is one all-reduce; the last is lifted back into the mean, with the mean
    coefficients, and into my share, with mine.
    """

    frame: Frame
    wire: Wire = field(default_factory=Wire)

    __repr__ = spell

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        link = _link(bucket, comm, self.wire)
        for turn in self.frame.passes(bucket):
            mean, mine = link.all_reduce(turn.coefficients, turn.sizes, turn.out, bucket.poison)
            peak = magnitude(mean)
            if not peak < math.inf:
                lifted = _lift(turn, Dense(mean), mean)
                return _abort(_write(lifted, bucket), _read_unused(bucket, link))
            turn.learn(mean)
        lifted, sent = _lift(turn, Dense(mean), mean), _lift(turn, mine, mean)
        if turn.lift is not None:
            peak = float(limit(lifted))
        unused = _read_unused(bucket, link)
        return Reduced(mean=_write(lifted, bucket), sent=sent, unused=unused, peak=peak)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        sizes = self.frame.sizes(layout, step)
        return sum((reduce_traffic(sum(of), world, self.wire, sizes=of) for of in sizes), Traffic())


@dataclass(frozen=True, kw_only=True)
class Select:
    """Keep the entries that `pick` chooses in every row of the view `over`, and merge them.

    Where the collective takes varying counts, entries that are zero are not sent: a row of an
    embedding that this rank has not touched costs nothing. They are part of the share all the same.
    At density 1.0 there is nothing to choose and no index to send: the bucket is averaged dense,
    whatever `pick` or the collective would have held back.
    """

    pick: Selector
    over: View = by_layer
    density: Density = 0.01
    collective: Collective = field(default_factory=AllGather)
    wire: Wire = field(default_factory=Wire)

    def __post_init__(self) -> None:
        check_densities(self.density)

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced:
        if self._sends_all(bucket.layout, bucket.step):
            return self._dense.reduce(bucket, comm)
        states: list[Any] = []
        mine, zeros, asked = self._mine(replace(bucket, world=comm.size), states)
        link = _link(bucket, comm, self.wire)
        state = bucket.scope("collective")
        merge, k = self._merge(asked, bucket.layout), max(1, sum(asked.values()))
        total, share = merge.sum(mine, k, bucket.step, link, state)
        mean, peak = bucket.filled(total, 1.0 / comm.size)
        if not peak < math.inf:
            return _abort(mean, _read_unused(bucket, link))
        if self._picks.settle is not None:
            self._picks.settle(states, lambda votes: link.highest(votes.to(mine.values.device)))
        # an owner's share also keeps book of what it dropped: no more was kept than there is
        kept = min(share.entries, total.entries)
        unused, sent = _read_unused(bucket, link), _beside(share, zeros)
        return Reduced(mean=mean, sent=sent, unused=unused, kept=kept, peak=peak)

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic:
        """The price of as many entries as the density asks for; a floor, if more may be chosen."""
        if self._sends_all(layout, step):
            return self._dense.traffic(layout, world, step)
        flat = torch.empty(layout.numel, device="meta")
        ghost = Bucket(flat=flat, layout=layout, state={}, step=step, world=world)
        asked: Counter[str | None] = Counter()
        for piece in self.over(ghost, self._density(step)):
            _count(piece, asked)
        merge, k = self._merge(asked, layout), sum(asked.values())
        priced = merge.traffic(k, layout.numel, world, self.wire, step)
        return replace(priced, floor=priced.floor or self._picks.capacity > 1)

    __repr__ = spell

    def thin(self, factor: float, layout: Layout, step: int) -> Select:
        """The same at so many times its density of this step; what it sends whole stays whole."""
        if factor == 1.0 or self._sends_all(layout, step):
            return self
        return replace(self, density=thinned(self._density(step), factor))

    @cached_property
    def _picks(self) -> SelectorPromises:
        return promised(SelectorPromises, self.pick)

    @cached_property
    def _merges(self) -> CollectivePromises:
        return promised(CollectivePromises, self.collective)

    @cached_property
    def _dense(self) -> Project:
        return Project(frame=Identity(), wire=self.wire)

    def _sends_all(self, layout: Layout, step: int) -> bool:
        density = self._density(step)
        if isinstance(density, ByParameter):
            return layout.size > 0 and all(
                density_at(density, step, slot) == 1.0 for slot in layout.slots
            )
        return layout.size > 0 and density == 1.0

    def _density(self, step: int) -> Density:
        if isinstance(self.density, float | ByParameter):  # checked when it was given
            return self.density
        return checked_density(at(self.density, step))

    def _merge(self, asked: Counter[str | None], layout: Layout) -> Collective:
        """The collective; one that goes by tensors is told what is asked of each."""
        if self._merges.with_counts is None or None in asked:
            return self.collective
        return self._merges.with_counts(
            tuple((slot.numel, asked[slot.name]) for slot in layout.slots)
        )

    def _mine(
        self, bucket: Bucket, states: list[Any]
    ) -> tuple[Sparse, Sparse, Counter[str | None]]:
        """What this rank offers, the zeros it chose too and need not send, and how many entries of
        each parameter (of None: of all) everybody is expected to offer."""
        scope = bucket.scope("select")
        chosen: list[Tensor] = []
        asked: Counter[str | None] = Counter()
        for piece in self.over(bucket, self._density(bucket.step)):
            if piece.k < piece.rows.shape[1]:
                states.append(piece.state(scope))
                chosen.append(piece.place(self._pick(piece, states[-1])))
            else:
                chosen.append(piece.place(_everything(piece)))
            _count(piece, asked)
        flat = bucket.flat
        x = flat.residual if isinstance(flat, Sum) else flat
        none = torch.empty(0, dtype=torch.int64, device=x.device)
        indices = torch.cat([none, *chosen])
        values = kernels.gather(x, indices).to(working_dtype(x.dtype))
        zeros = Sparse(indices[:0], values[:0], bucket.layout.numel)
        if self._merges.ragged:
            zeros = only(Sparse(indices, values, bucket.layout.numel), values == 0)
            indices, values = kernels.compress(indices, values, values != 0)
        runs = bucket.layout.runs
        if not bucket.finite and not indices.numel() and runs:  # who chose nothing has to tell too
            indices, values = indices.new_tensor([runs[0][0]]), values.new_zeros(1)
        values = bucket.poison(values)
        return ascending(Sparse(indices, values, bucket.layout.numel)), zeros, asked

    def _pick(self, piece: Piece, state: Any) -> Tensor:
        rows = piece.rows
        if isinstance(rows, Sum) and not self._picks.fused:
            rows = rows.take()
        if piece.k == 0 and kernels.finite(evaluate(rows)):  # NaN is never hidden
            return torch.empty(0, dtype=torch.int64, device=evaluate(rows).device)
        k = min(rows.shape[1], round(max(1, piece.k) * self._merges.reach))
        index = self.pick(rows, k, state)  # type: ignore[arg-type]
        expected = piece.k * piece.rows.shape[0]
        if index.numel() != expected and not self._merges.ragged:
            raise ValueError(
                f"selector {describe(self.pick)} chose {index.numel()} entries where {expected} "
                "were asked for; with varying counts use collective=AllGather(ragged=True)"
            )
        return index


def _lift(turn: Pass, coefficients: Payload, like: Tensor) -> Payload:
    """What these coefficients stand for in the gradient."""
    return coefficients if turn.lift is None else turn.lift(values_of(coefficients, like))


def _beside(share: Payload, zeros: Sparse) -> Payload:
    """The share with the zeros that were chosen: who counts what was sent counts them too."""
    return Parts(((0, share), (0, zeros)), zeros.numel) if zeros.entries else share


def _count(piece: Piece, asked: Counter[str | None]) -> None:
    asked[piece.slot.name if piece.slot else None] += piece.k * piece.rows.shape[0]


def _everything(piece: Piece) -> Tensor:
    """Of a piece that is sent whole there is nothing to choose, nor to estimate."""
    rows = evaluate(piece.rows)
    return torch.arange(rows.numel(), device=rows.device)


def _link(bucket: Bucket, comm: Comm, wire: Wire) -> Link:
    salt = f"{bucket.layout.fingerprint}/{bucket.step}/{comm.rank}"
    if bucket.unused is None:
        return Link(comm, wire, salt=salt)
    used = [slot.name not in bucket.unused for slot in bucket.layout.slots]
    device = bucket.flat.grad.device if isinstance(bucket.flat, Sum) else bucket.flat.device
    return Link(comm, wire, torch.tensor(used, dtype=torch.uint8, device=device), salt)


def _read_unused(bucket: Bucket, link: Link) -> tuple[str, ...]:
    used_anywhere = link.read_notes()
    if used_anywhere is None:
        return ()
    slots = zip(bucket.layout.slots, used_anywhere.tolist(), strict=True)
    return tuple(slot.name for slot, used in slots if not used)


def _abort(mean: Tensor, unused: tuple[str, ...]) -> Reduced:
    """A step that some rank could not take: its mean is passed on for GradScaler to see."""
    return Reduced(mean=mean, sent=nothing(mean.numel()), finite=False, unused=unused)


def _write(payload: Payload, bucket: Bucket) -> Tensor:
    """The payload as a flat mean."""
    whole = bucket.layout.runs == ((0, payload.numel),)
    if whole and isinstance(payload, Dense):
        return payload.values
    return write_into(payload, bucket.buffer()[0]) if whole else payload.add_into(bucket.blank())
