"""The contract of the house: what every part promises.

A *reducer* turns one bucket of gradients into `Reduced(mean, sent)`. Everything rests on one
law, true for every reducer on every step:

    mean == (1/P) * sum over ranks of sent

so error feedback is `residual = x - sent` for every algorithm. Algorithms reach other ranks
only through `Comm`, which is blocking; overlap with backward is the engine's business.

A part may promise more than its verbs, as plain attributes: `SelectorPromises` and its neighbours
list them with what holds where a part says nothing. So a plain function is a selector, and a class
with `sum` and `traffic` a collective. `promised` is the one place where they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from thinwire.bucket import Bucket
    from thinwire.layout import Layout
    from thinwire.operand import Sum
    from thinwire.payload import Dense, Payload, Sparse
    from thinwire.state import State
    from thinwire.wire import Wire
    from thinwire.wire.link import Link


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """What one reduction gave: the mean (same bits on all ranks) and this rank's share of it.

    Args:
        mean: The average, flat.
        sent: This rank's share of it.
        finite: False when any rank met a NaN or infinity: such a step counts as `sent = 0`.
        undo: Puts `sent` back into the residual. The engine calls it when another bucket of the
            same step was not finite.
        unused: The parameters that no rank had a gradient for.
        kept: The number of entries to report, where that is not what the payload holds.
        peak: A magnitude that no entry of the mean exceeds: it spares a look at all of them.

    Example:
        >>> reduced = recipe.reduce(bucket, comm)  # doctest: +SKIP
        >>> reduced.sent.add_into(x, alpha=-1.0)  # the residual  # doctest: +SKIP
    """

    mean: Tensor
    sent: Payload
    finite: bool = True
    undo: Callable[[], object] | None = None
    unused: tuple[str, ...] = ()
    kept: int | None = None
    peak: float = math.inf

    @property
    def entries(self) -> int:
        """Numbers that this rank's share of the mean is made of."""
        return self.sent.entries if self.kept is None else self.kept


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one rank sends: blocking rounds, and bytes under the textbook algorithm.

    `floor` marks a price that steps may exceed, because counts follow the data.
    """

    rounds: int = 0
    bytes: int = 0
    floor: bool = False

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            rounds=self.rounds + other.rounds,
            bytes=self.bytes + other.bytes,
            floor=self.floor or other.floor,
        )


class Reducer(Protocol):
    """What the engine knows: a way to average one bucket over all ranks."""

    def reduce(self, bucket: Bucket, comm: Comm) -> Reduced: ...

    def traffic(self, layout: Layout, world: int, step: int = 0) -> Traffic: ...


class Selector(Protocol):
    """Says *where*: k flat indices out of every row. A plain function qualifies."""

    def __call__(self, rows: Tensor, k: int, state: Any) -> Tensor: ...  # (r, c) -> flat indices


Memo = MutableMapping[str, Any]
Settle = Callable[[Sequence[Memo], Callable[[Tensor], Tensor]], None]


@dataclass(frozen=True, kw_only=True)
class SelectorPromises:
    """What a selector may promise.

    `fused`: it reads an unevaluated `Sum`, where others get `Sum.take()`. `capacity`: it chooses up
    to so many times k. `settle(states, highest)`: it must decide alike on all ranks; called after
    the exchange with the states it used, `highest` gives the elementwise maximum over ranks.
    """

    fused: bool = False
    capacity: float = 1.0
    settle: Settle | None = None


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One agreed projection: coefficients to add up, what they stand for, what to learn from them.

    Only the last pass of a frame is lifted back; the earlier ones only teach it.
    """

    coefficients: Tensor | Sum  # mine, flat; the wire may round them
    sizes: Sequence[int]  # how many are of each parameter, in their order
    learn: Callable[[Tensor], None]  # given the mean coefficients, same on all ranks
    lift: Callable[[Tensor], Payload] | None = None  # None: they are the gradient's own entries
    out: Tensor | None = None  # where the mean coefficients may go


class Frame(Protocol):
    """A basis all ranks agree on before the step, so that coefficients simply add."""

    def passes(self, bucket: Bucket) -> Iterator[Pass]: ...

    def sizes(self, layout: Layout, step: int) -> list[list[int]]: ...  # of each pass, for pricing


class Collective(Protocol):
    """Sums private supports: returns the total, and my share of it."""

    def sum(
        self, mine: Sparse, k: int, step: int, link: Link, state: State
    ) -> tuple[Sparse | Dense, Payload]: ...

    def traffic(self, k: int, n: int, world: int, wire: Wire, step: int = 0) -> Traffic: ...


@dataclass(frozen=True, kw_only=True)
class CollectivePromises:
    """What a collective may promise.

    `ragged`: it takes counts that vary from rank to rank. `keeps`: who holds what it drops, the
    "sender" or the "owner" of a region. `reach`: it has use for so many times k entries.
    `with_counts(counts)`: itself for these tensors, (entries, entries asked for) of each.
    """

    ragged: bool = True
    keeps: str = "sender"
    reach: float = 1.0
    with_counts: Callable[[tuple[tuple[int, int], ...]], Collective] | None = None


class Memory(Protocol):
    """What happens to the part of the gradient that was not sent."""

    def fold(self, bucket: Bucket, world: int) -> Sum: ...

    def keep(
        self, x: Tensor, sent: Payload, bucket: Bucket
    ) -> Callable[[], object]: ...  # returns how to undo it


@dataclass(frozen=True, kw_only=True)
class MemoryPromises:
    """What a memory may promise.

    `learning_rate`: it holds rate times gradient, and so must see the rates. `corrects_momentum`:
    it applies the momentum itself, so the optimizer must have none.
    """

    learning_rate: bool = False
    corrects_momentum: bool = False


Promises = TypeVar("Promises", SelectorPromises, CollectivePromises, MemoryPromises)


def promised(kind: type[Promises], part: object) -> Promises:
    """What this part promises; of what it says nothing about, the default."""
    said: dict[str, Any] = {f.name: getattr(part, f.name, f.default) for f in fields(kind)}
    return kind(**said)


class Comm(Protocol):
    """Transport: seven blocking verbs; ragged sizes and empty tensors are ordinary.

    Where the receiver knows the sizes it says so (`sizes`, `size`), and none are exchanged. Then
    every rank knows the longest message of all, too: it is among those it sends or receives.
    `trade` is an all-to-all of messages of `size` bytes that are made, by `message(rank)`, and
    taken, by `take(rank, data)`, while others are on their way.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor: ...  # sum, in place

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]: ...

    def all_to_all(
        self, xs: Sequence[Tensor], sizes: Sequence[int] | None = None
    ) -> list[Tensor]: ...

    def trade(
        self, size: int, message: Callable[[int], Tensor], take: Callable[[int, Tensor], None]
    ) -> None: ...

    def exchange(
        self, x: Tensor, to: int | None, source: int | None, size: int | None = None
    ) -> Tensor | None: ...  # either may be None; a swap is to == source

    def broadcast(self, x: Tensor, root: int) -> Tensor: ...

    def barrier(self) -> None: ...


class RankMismatch(RuntimeError):
    """Ranks disagree on recipe or layout; the message shows both sides.

    Example:
        >>> raise RankMismatch("rank 1 has topk(density=0.02), rank 0 topk(density=0.01)")
        Traceback (most recent call last):
        thinwire.protocols.RankMismatch: rank 1 has topk(density=0.02), rank 0 topk(density=0.01)
    """


class RankFailed(RuntimeError):
    """Another rank failed; the message names it and repeats its error.

    Example:
        >>> raise RankFailed("rank 2 failed: out of memory")
        Traceback (most recent call last):
        thinwire.protocols.RankFailed: rank 2 failed: out of memory
    """


class WireError(RuntimeError):
    """Bytes that came over the wire do not decode to what was agreed.

    Example:
        >>> raise WireError("expected 12 bytes, got 7")
        Traceback (most recent call last):
        thinwire.protocols.WireError: expected 12 bytes, got 7
    """
