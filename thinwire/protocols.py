"""The contract of the house: what every part promises, and no code.

A *reducer* turns one bucket of gradients into `Reduced(mean, sent)`. Everything rests on one
law, true for every reducer on every step:

    mean == (1/P) * sum over ranks of sent

so error feedback is `residual = x - sent` for every algorithm. Algorithms reach other ranks
only through `Comm`, which is blocking; overlap with backward is the engine's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

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

    `finite` is False when any rank met a NaN or infinity: such a step counts as `sent = 0`.
    `undo` puts `sent` back into the residual; the engine calls it when another bucket of the
    same step was not finite. `unused` names the parameters no rank had a gradient for. `kept` is
    the number of entries to report, where that is not what the payload holds. `peak` is a magnitude
    that no entry of the mean exceeds: where it is known, it spares a look at all of them.
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
    """Says *where*: k flat indices out of every row. A plain function qualifies.

    One that must decide alike on all ranks may have `settle(states, highest)`: called after the
    exchange with the states it has used, `highest` is the elementwise maximum over ranks. One that
    may choose more than k says how many times k at most (`capacity`).
    """

    def __call__(self, rows: Tensor, k: int, state: Any) -> Tensor: ...  # (r, c) -> flat indices


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One agreed projection: coefficients to add up, what they stand for, what to learn from them.

    Only the last pass of a frame is lifted back; the earlier ones only teach it.
    """

    coefficients: Tensor  # mine, flat; the wire may round them
    sizes: Sequence[int]  # how many are of each parameter, in their order
    lift: Callable[[Tensor], Payload]
    learn: Callable[[Tensor], None]  # given the mean coefficients, same on all ranks


class Frame(Protocol):
    """A basis all ranks agree on before the step, so that coefficients simply add."""

    def passes(self, bucket: Bucket) -> Iterator[Pass]: ...

    def sizes(self, layout: Layout, step: int) -> list[list[int]]: ...  # of each pass, for pricing


class Collective(Protocol):
    """Sums private supports: returns the total, and my share of it.

    It may say that counts vary (`ragged`), who `keeps` what it drops, and that it has use for more
    entries than k (`reach` times as many). One that goes by tensors has `with_counts`, and is told
    the size of each and what is asked of it.
    """

    def sum(
        self, mine: Sparse, k: int, step: int, link: Link, state: State
    ) -> tuple[Sparse | Dense, Payload]: ...

    def traffic(self, k: int, n: int, world: int, wire: Wire, step: int = 0) -> Traffic: ...


class Memory(Protocol):
    """What happens to the part of the gradient that was not sent."""

    def fold(self, bucket: Bucket, world: int) -> Sum: ...

    def keep(
        self, x: Tensor, sent: Payload, bucket: Bucket
    ) -> Callable[[], object]: ...  # returns how to undo it


class Comm(Protocol):
    """Transport: six blocking verbs; ragged sizes and empty tensors are ordinary.

    Where the receiver knows the sizes it says so (`sizes`, `size`), and none are exchanged.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor: ...  # sum, in place

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]: ...

    def all_to_all(
        self, xs: Sequence[Tensor], sizes: Sequence[int] | None = None
    ) -> list[Tensor]: ...

    def exchange(
        self, x: Tensor, to: int | None, source: int | None, size: int | None = None
    ) -> Tensor | None: ...  # either may be None; a swap is to == source

    def broadcast(self, x: Tensor, root: int) -> Tensor: ...

    def barrier(self) -> None: ...


class RankMismatch(RuntimeError):
    """Ranks disagree on recipe or layout; the message shows both sides."""


class RankFailed(RuntimeError):
    """Another rank failed; the message names it and repeats its error."""


class WireError(RuntimeError):
    """Bytes that came over the wire do not decode to what was agreed."""
