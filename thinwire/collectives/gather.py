"""Everyone sends its pairs to everyone: the simplest sparse sum, 2k(P-1) words a rank (TopkA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.comm.metered import gathered
from thinwire.payload import Sparse, together
from thinwire.protocols import Traffic
from thinwire.schedule import checked_flag
from thinwire.state import State
from thinwire.wire import Wire
from thinwire.wire.link import Link


@dataclass(frozen=True, kw_only=True)
class AllGather:
    """Everyone's entries to everyone.

    Args:
        ragged: Whether counts may differ between ranks; they are exchanged first.

    Example:
        >>> AllGather(ragged=True).keeps
        'sender'
    """

    ragged: bool = False
    keeps: ClassVar[str] = "sender"

    def __post_init__(self) -> None:
        checked_flag("ragged", self.ragged)

    def sum(
        self, mine: Sparse, k: int, step: int, link: Link, state: State
    ) -> tuple[Sparse, Sparse]:
        mine = link.round(mine)
        link.phase("gather")
        return together(link.all_gather(mine, ragged=self.ragged), mine.numel), mine

    def traffic(self, k: int, n: int, world: int, wire: Wire, step: int = 0) -> Traffic:
        ragged = self.ragged or not wire.fixed
        return Traffic(rounds=1, bytes=gathered(wire.nbytes(k, n), world, ragged=ragged))
