"""SparDL: blocks with a quota, summed on the way, for any number of ranks in log P rounds.

    blocks are numbered by their owner; I hold one for every distance d = 0 .. P-1 to its owner
    m = P;  until m = 1:  s = ceil(m / 2)
        send the blocks of distance s .. m-1 to rank + s, for which they are 0 .. m-1-s away
        add what rank - s sends to mine, keep the k/P largest of each block;  m = s
    everybody gets everyone's block

No block ever grows beyond its quota, so nothing has to be balanced, and a rank sends 4k(P-1)/P
words. Who drops an entry of a sum keeps it in its own residual. Zhao et al. 2023, arXiv 2304.00737
(one team; our own hop distances).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.collectives.select import difference, given_up, share
from thinwire.collectives.split import split
from thinwire.comm.metered import COUNT
from thinwire.layout import regions, share_of
from thinwire.payload import Payload, Sparse, add_up, ascending, largest, together
from thinwire.protocols import Traffic
from thinwire.state import State
from thinwire.wire import Wire
from thinwire.wire.link import Link


@dataclass(frozen=True, kw_only=True)
class BlockQuota:
    """The sum of which every block keeps its k/P largest entries.

    Example:
        >>> BlockQuota().keeps
        'owner'
    """

    ragged: ClassVar[bool] = True
    keeps: ClassVar[str] = "owner"

    def sum(
        self, mine: Sparse, k: int, step: int, link: Link, state: State
    ) -> tuple[Sparse, Payload]:
        rank, world, n = link.comm.rank, link.comm.size, mine.numel
        spans = regions(n, world)
        quotas = [share_of(k, block + step, world) for block in range(world)]
        blocks = [largest(*one) for one in zip(split(mine, spans), quotas, strict=True)]
        kept, corrections = list(blocks), list[Sparse]()
        for hop, far in hops(world):
            leaving = [(rank + d) % world for d in range(hop, far)]
            exact = ascending(together([blocks[block] for block in leaving], n))
            sent = link.round(exact)
            link.phase(f"hop {hop}")
            corrections.append(difference(sent, exact))
            got = split(link.pass_on(sent, (rank + hop) % world, (rank - hop) % world), spans)
            for block in ((rank + d) % world for d in range(far - hop)):
                both = add_up([blocks[block], got[block]])
                blocks[block] = largest(both, quotas[block])
                corrections.append(given_up(both, blocks[block]))
        own = link.round(blocks[rank])
        link.phase("gather")
        corrections.append(difference(own, blocks[rank]))
        return together(link.gather_spans(own, spans), n), share(kept, corrections, n)

    def traffic(self, k: int, n: int, world: int, wire: Wire, step: int = 0) -> Traffic:
        """If every block is filled to its quota."""
        passed = [wire.nbytes(round((far - hop) * k / world), n) for hop, far in hops(world)]
        gather = (world - 1) * (wire.nbytes(round(k / world), round(n / world)) + COUNT)
        sent = sum(passed) + COUNT * len(passed) + gather
        return Traffic(rounds=len(passed) + 1, bytes=sent)


def hops(world: int) -> list[tuple[int, int]]:
    """Each round's distance, and how many blocks a rank holds before it."""
    found, held = [], world
    while held > 1:
        found.append(((held + 1) // 2, held))
        held = (held + 1) // 2
    return found
