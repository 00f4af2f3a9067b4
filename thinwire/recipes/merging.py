"""The largest entries of the whole bucket, merged by a collective that thins out the sum too."""

from __future__ import annotations

from typing import Unpack

from thinwire.bucket import by_region, whole
from thinwire.collectives import BlockQuota, GTopK, OkTopk, Slots, SplitReduce
from thinwire.protocols import Reducer
from thinwire.recipes.frame import sparse
from thinwire.recipes.options import Densities, Sparse, read_collective
from thinwire.recipes.recipe import recipe
from thinwire.selectors.threshold import Threshold, exact
from thinwire.selectors.topk import topk as _topk

_TREE = GTopK(tree=True)


@recipe()
def gtopk(density: Densities = 0.01, *, tree: bool = False, **shared: Unpack[Sparse]) -> Reducer:
    """The largest entries of the sum, merged in pairs.

    Pairs of ranks swap lists and select again from the sum.

    Args:
        density: Share of the entries of a bucket that are kept.
        tree: Merge lists towards rank 0 and broadcast, as the paper does.
        **shared: See `thinwire.recipes.options.Sparse`.

    Example:
        gtopk(density=Ramp(start=0.25, end=0.01, steps=500), wire="int8+auto")

    Source: Shi et al., ICDCS 2019, arXiv 1901.04359.
    """
    collective = shared["collective"]
    if tree and read_collective(collective, ragged=False, own=_TREE) != _TREE:
        raise ValueError(f"tree is gtopk's own collective, got collective={collective!r} too")
    return sparse(_topk, whole, density, shared, ragged=False, own=GTopK(tree=tree))


@recipe()
def topkdsa(density: Densities = 0.01, **shared: Unpack[Sparse]) -> Reducer:
    """The largest entries of every rank, summed by region.

    Every rank owns a region and sums what others send it, densely where it fills up.

    Args:
        density: Share of the entries of a bucket that are chosen.
        **shared: See `thinwire.recipes.options.Sparse`.

    Example:
        topkdsa(density=0.02)

    Source: SparCML, Renggli et al., SC 2019, arXiv 1802.08021; named in Ok-Topk, arXiv 2201.07598.
    """
    return sparse(_topk, whole, density, shared, ragged=False, own=SplitReduce())


@recipe()
def oktopk(density: Densities = 0.01, **shared: Unpack[Sparse]) -> Reducer:
    """About the largest entries of the sum, as published.

    Owners of regions of equal load keep the largest. Thresholds are exact in one step of 32 and
    reused in between. `slots` needs no such steps: all of them send the same.

    Args:
        density: Share of the entries of a bucket that are kept.
        **shared: See `thinwire.recipes.options.Sparse`.

    Example:
        oktopk(density=0.02)

    Source: Li & Hoefler, PPoPP 2022, arXiv 2201.07598.
    """
    pick = Threshold(estimate=exact, refresh=32, nudge=1.012, correct=None, capacity=4 / 3)
    return sparse(pick, whole, density, shared, own=OkTopk())


@recipe()
def slots(density: Densities = 0.01, **shared: Unpack[Sparse]) -> Reducer:
    """As oktopk, in two exchanges of slots of fixed size.

    Owners of regions keep what they drop. Where `wire` names no index code, it is "auto".

    Args:
        density: Share of the entries of a bucket that are kept.
        **shared: See `thinwire.recipes.options.Sparse`.

    Example:
        slots(density=Ramp(start=0.3, end=0.01, steps=700), wire="int8")

    Source: our own, after Ok-Topk (docs/communication.md).
    """
    return sparse(_topk, whole, density, shared, own=Slots(), indices="auto")


@recipe()
def spardl(density: Densities = 0.01, **shared: Unpack[Sparse]) -> Reducer:
    """The largest entries of the sum in each of P blocks.

    With P workers every block is cut to its share of the density at every hop.

    Args:
        density: Share of the entries of a bucket that are kept.
        **shared: See `thinwire.recipes.options.Sparse`.

    Example:
        spardl(density=0.02, wire="bf16+rice")

    Source: Zhao et al. 2023, arXiv 2304.00737.
    """
    return sparse(_topk, by_region, density, shared, own=BlockQuota())
