"""The largest entries of the whole bucket, merged by a collective that thins out the sum too."""

from __future__ import annotations

from thinwire.bucket import by_region, whole
from thinwire.collectives.gtopk import GTopK
from thinwire.collectives.oktopk import OkTopk
from thinwire.collectives.slots import Slots
from thinwire.collectives.spardl import BlockQuota
from thinwire.collectives.split import SplitReduce
from thinwire.protocols import Memory, Reducer
from thinwire.recipes.options import Densities, Merge, merge, schedulable, sparse
from thinwire.selectors.threshold import Threshold, exact
from thinwire.selectors.topk import topk as _topk
from thinwire.wire import Wire
from thinwire.wire import wire as as_wire

_TREE = GTopK(tree=True)


@schedulable
def gtopk(
    density: Densities = 0.01,
    *,
    tree: bool = False,
    collective: Merge = None,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """The largest entries of the sum of all, found by swapping lists and selecting again.

    With `tree` lists are merged towards rank 0, as the paper does.
    Source: Shi et al., ICDCS 2019, arXiv 1901.04359.
    """
    if tree and merge(collective, ragged=False, own=_TREE) != _TREE:
        raise ValueError(f"tree is gtopk's own collective, got collective={collective!r} too")
    return sparse(
        _topk, whole, density=density, collective=collective, own=GTopK(tree=tree), memory=memory,
        wire=wire, warmup=warmup, ragged=False,
    )  # fmt: skip


@schedulable
def topkdsa(
    density: Densities = 0.01,
    *,
    collective: Merge = None,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """The largest entries of every rank, summed by owners of regions, dense where they fill up.

    Source: SparCML, Renggli et al., SC 2019, arXiv 1802.08021; named in Ok-Topk, arXiv 2201.07598.
    """
    return sparse(
        _topk, whole, density=density, collective=collective, own=SplitReduce(), memory=memory,
        wire=wire, warmup=warmup, ragged=False,
    )  # fmt: skip


@schedulable
def oktopk(
    density: Densities = 0.01,
    *,
    collective: Merge = None,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """About the largest entries of the sum, from owners of regions of equal load, as published.

    Thresholds are exact in one step of 32 and reused in between. `slots` needs no such
    steps: all of them send the same. Source: Li & Hoefler, PPoPP 2022, arXiv 2201.07598.
    """
    pick = Threshold(estimate=exact, refresh=32, nudge=1.012, correct=None, capacity=4 / 3)
    return sparse(
        pick, whole, density=density, collective=collective, own=OkTopk(), memory=memory,
        wire=as_wire(wire, "int32"), warmup=warmup,
    )  # fmt: skip


@schedulable
def slots(
    density: Densities = 0.01,
    *,
    collective: Merge = None,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """About the largest entries of the sum, in two exchanges of coded slots of fixed size.

    Owners of regions keep what they drop. Source: our own, after Ok-Topk (docs/communication.md).
    """
    return sparse(
        _topk, whole, density=density, collective=collective, own=Slots(), memory=memory,
        wire=as_wire(wire, "auto"), warmup=warmup,
    )  # fmt: skip


@schedulable
def spardl(
    density: Densities = 0.01,
    *,
    collective: Merge = None,
    memory: str | Memory = "residual",
    wire: str | Wire = "fp32",
    warmup: int = 0,
) -> Reducer:
    """The largest entries of the sum in every one of P blocks, cut to that at every hop.

    Source: Zhao et al. 2023, arXiv 2304.00737.
    """
    return sparse(
        _topk, by_region, density=density, collective=collective, own=BlockQuota(), memory=memory,
        wire=wire, warmup=warmup,
    )  # fmt: skip
