"""Two levels: the name under which a recipe asks for dense sums inside nodes (`ByNode`)."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.collectives.gather import AllGather
from thinwire.comm.metered import gathered
from thinwire.comm.nodes import Nodes, check_nodes, group_ranks, read_nodes
from thinwire.protocols import Collective, Traffic
from thinwire.wire import Wire


@dataclass(frozen=True, kw_only=True)
class TwoLevel:
    """As `collective=` of a recipe: dense inside nodes, a collective between them.

    A selector must see the node's sum, so the recipe is put inside a `ByNode`.

    Args:
        nodes: How many ranks each node has, or the ranks of each. None asks the launcher, whose
            ranks are numbered node by node.
        between: The collective between nodes; None is the recipe's own.

    Example:
        >>> TwoLevel(nodes=8).nodes
        8
    """

    nodes: Nodes = None
    between: Collective | None = None

    def __post_init__(self) -> None:
        check_nodes(self.nodes)
        if isinstance(self.between, TwoLevel):
            raise ValueError(f"there are two levels, got a third in {self.between!r}; give one")

    def traffic(self, k: int, n: int, world: int, wire: Wire, step: int = 0) -> Traffic:
        """If the node's ranks have equal shares."""
        size = len(group_ranks(read_nodes(self.nodes), world)[0])
        share = 4 * (n // size)
        inside = Traffic(rounds=2 * (size - 1), bytes=2 * gathered(share, size))
        merge = self.between or AllGather()
        return inside + merge.traffic(k // size, n // size, world // size, wire, step)
