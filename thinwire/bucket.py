"""A bucket: a fused flat slice of the gradient, what lies where in it, and its memory.

A view (`whole`, `by_layer`, `by_row` and its variants) shows a bucket as 2-D blocks of rows with
the number of entries to keep in each row. Granularity is a view, not an algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.layout import Layout, Slot, regions, share_of
from thinwire.operand import Sum, evaluate, in_memory_order, working_dtype
from thinwire.payload import Payload, Sparse, bound
from thinwire.schedule import ByParameter, Density, at, checked_density, density_at
from thinwire.state import Draft, Root, RowsOf, State


@dataclass(kw_only=True)
class Bucket:
    """What a reducer reduces; `Bucket.of` makes one. `reduce` may overwrite the gradient in `flat`.

    `scale` is the loss scale the gradient still carries; `rates` are the learning rates by
    parameter name, where the engine knows them; `unused` names the parameters that got no gradient
    on this rank, or is None where nobody keeps track.
    """

    flat: Tensor | Sum
    layout: Layout
    state: Root
    step: int = 0
    world: int = 1
    scale: float = 1.0
    rates: Mapping[str, float] | None = None
    unused: frozenset[str] | None = None
    draft: Draft | None = None
    path: str = ""

    @staticmethod
    def of(tensors: Mapping[str, Tensor], *, state: Root, step: int = 0) -> Bucket:
        """A bucket with a copy of these tensors.

        Args:
            tensors: Gradients by parameter name.
            state: A dict of the caller's, filled here and wanted again in the next step.
            step: Its number, which schedules ask for.

        Example:
            >>> Bucket.of({"weight": torch.ones(2, 3)}, state={}).flat.numel()
            6
        """
        layout = Layout.of(tensors)
        flat = torch.cat([in_memory_order(t) for t in tensors.values()] or [torch.zeros(0)])
        return Bucket(flat=flat, layout=layout, state=state, step=step)

    def scope(self, part: str) -> State:
        """This part's own state."""
        return State(self.state, self.draft, self.layout, self.path + part)

    def at(self, branch: str) -> Bucket:
        """The same bucket for a child of a combinator, whose state is kept apart."""
        return replace(self, path=f"{self.path}{branch}/")

    def take(self) -> Tensor:
        """The values to reduce, evaluated at this bucket's slots."""
        if isinstance(self.flat, Tensor):
            return self.flat
        for start, stop in self.layout.runs:
            self.flat.take_run(start, stop)
        return self.flat.residual

    @property
    def finite(self) -> bool:
        """False once a non-finite gradient was met while folding it into a residual."""
        return self.flat.finite if isinstance(self.flat, Sum) else True

    def poison(self, values: Tensor) -> Tensor:
        """These, which are about to be sent; NaN in their place once a gradient was not finite.

        A `Sum` leaves out what is not finite, so this is how every rank learns of it.
        """
        return values if self.finite else torch.full_like(values, float("nan"))

    def filled(self, payload: Payload, alpha: float) -> tuple[Tensor, float]:
        """A flat buffer that holds alpha times the payload at our slots, zeros between, and a
        magnitude that no entry exceeds: infinite, if one is not finite."""
        if not isinstance(payload, Sparse):
            return payload.add_into(self.blank(), alpha), bound(payload) * abs(alpha)
        out, own = self.buffer()
        runs = self.layout.runs if own else ((0, out.numel()),)
        return out, kernels.filled(out, runs, payload.indices, payload.values, alpha)

    def blank(self) -> Tensor:
        """A flat buffer that is zero at our slots."""
        out, own = self.buffer()
        if not own:
            return out.zero_()
        for start, stop in self.layout.runs:
            out[start:stop].zero_()
        return out

    def buffer(self) -> tuple[Tensor, bool]:
        """The gradient's own buffer, where it can hold a mean, or a new one; and which."""
        if isinstance(self.flat, Sum):
            out, exact = self.flat.scratch, self.flat.residual.dtype
        else:
            out, exact = self.flat, working_dtype(self.flat.dtype)
        if out.dtype != exact:
            return torch.empty(out.shape, dtype=exact, device=out.device), False
        return out, True


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A block of rows of which k entries each are to be kept.

    `place` maps flat indices within `rows` to positions in the bucket. `rows` may be an
    unevaluated `Sum`; selectors that cannot read one get `rows.take()`.
    """

    rows: Tensor | Sum  # (r, c)
    k: int
    place: Callable[[Tensor], Tensor]
    slot: Slot | None = None
    block: tuple[int, int, int] | None = None  # first row, one past the last, rows of the layer

    def state(self, scope: State) -> State | dict[str, object] | RowsOf:
        """The selector's state for these rows: of the layout, of the layer, or of a part of it."""
        if self.slot is None:
            return scope
        layer = scope.of(self.slot)
        return layer if self.block is None else RowsOf(layer, *self.block)


View = Callable[[Bucket, Density], Iterator[Piece]]


def whole(bucket: Bucket, density: Density) -> Iterator[Piece]:
    """The bucket as one row."""
    layout = bucket.layout
    if layout.size == 0:
        return
    if isinstance(density, ByParameter):
        k = sum(kept(slot, density, bucket.step) for slot in layout.slots)
    else:
        k = budget(layout.size, checked_density(at(density, bucket.step)))
    if layout.runs == ((0, layout.numel),):
        yield Piece(rows=_stretch(bucket, 0, layout.numel, 1), k=k, place=_shift(0))
        return
    x = bucket.take()  # gaps: pack our runs side by side
    rows = torch.cat([x[start:stop] for start, stop in layout.runs])[None]
    where = torch.cat([torch.arange(*run, device=x.device) for run in layout.runs])
    yield Piece(rows=rows, k=k, place=lambda index: where[index])


def by_region(bucket: Bucket, density: Density) -> Iterator[Piece]:
    """The bucket in as many equal stretches as there are ranks; the budget's rest goes round."""
    for piece in whole(bucket, density):
        for region, (start, stop) in enumerate(regions(piece.rows.shape[1], bucket.world)):
            k = min(stop - start, share_of(piece.k, region + bucket.step, bucket.world))
            place = _after(piece.place, start)
            yield Piece(rows=_columns(piece.rows, start, stop), k=k, place=place)


def by_layer(bucket: Bucket, density: Density) -> Iterator[Piece]:
    """Every parameter as one row: layer-wise top-k."""
    for slot in bucket.layout.slots:
        if slot.numel:
            rows = _stretch(bucket, slot.offset, slot.numel, 1)
            k = kept(slot, density, bucket.step)
            yield Piece(rows=rows, k=k, place=_shift(slot.offset), slot=slot)


def by_row(bucket: Bucket, density: Density) -> Iterator[Piece]:
    """ADTopk's matrix view: a row an output channel, (out, everything else)."""
    return _by_rows(bucket, density, lambda shape: tuple(range(1, len(shape))))


def by_dim1(bucket: Bucket, density: Density) -> Iterator[Piece]:
    """ADTopk as shipped: a row for every coordinate but dimension 1 (conv: one a spatial tap)."""
    return _by_rows(bucket, density, lambda shape: (1,))


def by_dim0(bucket: Bucket, density: Density) -> Iterator[Piece]:
    """Rank along dimension 0: every input feature sends (ADTopk's LSTM variant)."""
    return _by_rows(bucket, density, lambda shape: (0,))


def by_longer(bucket: Bucket, density: Density) -> Iterator[Piece]:
    """Rank along the longer of the first two dimensions (ADTopk's convergence scripts)."""
    return _by_rows(bucket, density, lambda shape: (0,) if shape[0] > shape[1] else (1,))


def flat_indices(columns: Tensor, rows: Tensor) -> Tensor:
    """Column numbers (r, k) of chosen entries as flat indices into `rows` (r, c)."""
    start = torch.arange(rows.shape[0], device=rows.device)[:, None] * rows.shape[1]
    return (columns + start).reshape(-1)


def budget(n: int, density: float) -> int:
    """How many of n entries a density keeps: rounded, at least one."""
    return min(n, max(1, int(n * density + 0.5)))


def kept(slot: Slot, density: Density, step: int) -> int:
    """How many entries of a parameter a density keeps at this step."""
    if isinstance(density, float):  # checked when it was given
        return budget(slot.numel, density)
    return budget(slot.numel, density_at(density, step, slot))


def _by_rows(
    bucket: Bucket, density: Density, ranked: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> Iterator[Piece]:
    for slot in bucket.layout.slots:
        if slot.numel == 0:
            continue
        columns = ranked(slot.shape) if len(slot.shape) > 1 else tuple(range(len(slot.shape)))
        order = tuple(d for d in range(len(slot.shape)) if d not in columns) + columns
        sizes = [slot.shape[d] for d in order]
        strides = [slot.strides[d] for d in order]
        r = slot.numel // prod(slot.shape[d] for d in columns)
        if _rows_lie_in_memory(slot, columns, r):
            layer: Tensor | Sum = _stretch(bucket, slot.offset, slot.numel, r)
            place: Callable[[Tensor], Tensor] = _shift(slot.offset)
        else:  # rows are scattered over memory: copy them together, and remember where from
            values = evaluate(bucket.flat[slot.offset : slot.stop])
            native = values.as_strided(slot.shape, slot.strides, values.storage_offset())
            layer = native.permute(order).reshape(r, -1)
            place = _scatter(slot.offset, sizes, strides)
        yield from _blocks(slot, layer, place, kept(slot, density, bucket.step), bucket.step)


def _rows_lie_in_memory(slot: Slot, columns: tuple[int, ...], rows: int) -> bool:
    """Whether each row is one stretch of memory, one after the other (any order inside a row)."""
    length = slot.numel // rows
    inner = [slot.strides[d] for d in columns if slot.shape[d] > 1]
    others = [d for d in range(len(slot.shape)) if d not in columns and slot.shape[d] > 1]
    outer = [slot.strides[d] for d in others]
    apart = all(s < length for s in inner) and all(s >= length for s in outer)
    return apart and outer == sorted(outer, reverse=True)


def _blocks(
    slot: Slot, layer: Tensor | Sum, place: Callable[[Tensor], Tensor], wanted: int, step: int
) -> Iterator[Piece]:
    """The layer's budget over its rows by largest remainder: k each, k + 1 in a rotating block."""
    r, c = layer.shape
    k, extra = divmod(max(r, wanted), r)
    if extra == 0:
        yield Piece(rows=layer, k=k, place=place, slot=slot)
        return
    start = step * extra % r
    stop = start + extra
    lucky = [(start, stop)] if stop <= r else [(0, stop - r), (start, r)]
    edges = sorted({0, r, *(edge for run in lucky for edge in run)})
    for first, last in pairwise(edges):
        more = any(a <= first < b for a, b in lucky)
        yield Piece(
            rows=layer[first:last],
            k=k + more,
            place=_after(place, first * c),
            slot=slot,
            block=(first, last, r),
        )


def _columns(row: Tensor | Sum, start: int, stop: int) -> Tensor | Sum:  # (1, n) -> (1, m)
    return row.view(row.shape[1])[start:stop].view(1, stop - start)


def _stretch(bucket: Bucket, offset: int, numel: int, rows: int) -> Tensor | Sum:
    return bucket.flat[offset : offset + numel].view(rows, numel // rows)


def _shift(offset: int) -> Callable[[Tensor], Tensor]:
    return lambda index: index + offset if offset else index


def _after(place: Callable[[Tensor], Tensor], skipped: int) -> Callable[[Tensor], Tensor]:
    return lambda index: place(index + skipped)


def _scatter(offset: int, sizes: list[int], strides: list[int]) -> Callable[[Tensor], Tensor]:
    def place(index: Tensor) -> Tensor:
        position = torch.full_like(index, offset)
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            position += index % size * stride
            index = index // size
        return position

    return place
