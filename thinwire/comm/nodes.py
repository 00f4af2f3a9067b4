"""Which ranks share a machine: as the caller says, or the launcher."""

from __future__ import annotations

import os

# how launchers tell the number of ranks on a node: torchrun, Open MPI, MPICH, SLURM
_LAUNCHERS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
              "SLURM_NTASKS_PER_NODE")  # fmt: skip
Groups = int | tuple[tuple[int, ...], ...]  # ranks per node, or all ranks of each
Nodes = Groups | None


def check_nodes(nodes: Nodes) -> None:
    if nodes is None:
        return
    if isinstance(nodes, int):
        good = not isinstance(nodes, bool) and nodes >= 1
    else:
        listed = isinstance(nodes, tuple | list) and all(isinstance(g, tuple | list) for g in nodes)
        flat = [rank for group in nodes for rank in group] if listed else []
        even = listed and len({len(group) for group in nodes}) == 1
        good = even and sorted(flat) == list(range(len(flat)))
    if not good:
        raise ValueError(
            "nodes must be the number of ranks on each, or a list of all ranks of each, equally "
            f"many, got {nodes!r}; e.g. nodes=8, or nodes=((0, 1), (2, 3))"
        )


def read_nodes(nodes: Nodes) -> Groups:
    """The nodes as given, or as the launcher says.

    Asked when a recipe is built: ranks that were told different numbers then find out when they
    compare recipes.
    """
    if nodes is not None:
        return nodes
    said = next((os.environ[name] for name in _LAUNCHERS if name in os.environ), None)
    if said is None or not said.isdigit() or int(said) < 1:
        raise ValueError(
            f"the launcher does not say how many ranks a node has ({', '.join(_LAUNCHERS)}), got "
            f"{said!r}; say it: TwoLevel(nodes=8), or collective='two_level(8)'"
        )
    return int(said)


def group_ranks(nodes: Groups, world: int) -> list[list[int]]:
    """The ranks of every node."""
    if isinstance(nodes, int):
        if world % nodes:
            raise ValueError(f"{world} ranks do not make nodes of {nodes}; give nodes= that fit")
        return [list(range(start, start + nodes)) for start in range(0, world, nodes)]
    if sum(len(group) for group in nodes) != world:
        raise ValueError(f"nodes={nodes} names other ranks than the {world} there are")
    return [list(group) for group in nodes]
