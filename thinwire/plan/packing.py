"""How many gradients to send together: plans of buffers, from the same times as everything else.

A plan is a list of counts: so many gradients, in the order of backward, go into each buffer. It is
made of numbers that all ranks share, so all ranks fuse alike and none waits for a gradient that
another has sent already (quantity-based buffering, FGBuff / SAFusion).

Times are functions of how many gradients a buffer holds: `select(n)` of the processor, `send(n)` of
the network. `ready[i]` is when gradient i is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

Seconds = Callable[[int], float]
Counts = list[int]


def by_count(tensors: int, count: int) -> Counts:
    """So many gradients each; the last buffer takes the rest."""
    if count < 1:
        raise ValueError(f"a buffer holds at least 1 gradient, got {count}")
    whole, rest = divmod(tensors, count)
    return [count] * whole + ([rest] if rest else [])


def by_bytes(sizes: Sequence[int], cap: float) -> Counts:
    """As many as fit under a cap of bytes, and at least one (DDP's rule)."""
    if not cap > 0:
        raise ValueError(f"a buffer's cap must be above 0 bytes, got {cap}")
    counts: Counts = []
    held = cap
    for size in sizes:
        if counts and held + size <= cap:
            counts[-1] += 1
            held += size
        else:
            counts.append(1)
            held = size
    return counts


def merge(sizes: Sequence[int], ready: Sequence[float], send: Seconds) -> Counts:
    """MG-WFBP (Shi et al. 2019, arXiv 1811.11141): wait for the next gradient if it is there before
    the network is free, or if waiting costs less than the message that it saves."""
    return merge_sparse(sizes, ready, lambda n: 0.0, send)


def merge_sparse(
    sizes: Sequence[int], ready: Sequence[float], select: Seconds, send: Seconds
) -> Counts:
    """OMGS-SGD (Shi et al. 2020, arXiv 1911.08727): as above for sparse gradients, where a merged
    selection costs more or less than two."""
    counts: Counts = []
    free = 0.0
    held = 0
    for i, size in enumerate(sizes):
        if counts:
            begin = max(free, ready[i - 1] + select(held))
            waits = ready[i] - ready[i - 1] + select(held + size) - select(held) - select(size)
            waits -= begin - ready[i - 1] - select(held)  # it would have waited for the network
            saves = send(held) + send(size) - send(held + size)
            if waits < saves:
                counts[-1] += 1
                held += size
                continue
            free = begin + send(held)
        counts.append(1)
        held = size
    return counts


def overlap(sizes: Sequence[int], ready: Sequence[float], select: Seconds, send: Seconds) -> Counts:
    """A buffer is closed when filling it has taken as long as sending the one before (FGBuff), so
    that the next is ready about when the wire is free."""
    counts: Counts = []
    held, opened, sending = 0, 0.0, 0.0
    for i, size in enumerate(sizes):
        filled = ready[i - 1] - opened + select(held) if counts else 0.0
        if counts and filled < sending:
            counts[-1] += 1
            held += size
            continue
        if counts:
            sending, opened = send(held), ready[i - 1]
        counts.append(1)
        held = size
    return counts


def groups(names: Sequence[str], counts: Counts) -> list[list[str]]:
    """The gradients of each buffer."""
    if sum(counts) != len(names) or any(count < 1 for count in counts):
        raise ValueError(
            f"a plan of {sum(counts)} gradients in {len(counts)} buffers does not fit a model of "
            f"{len(names)}; plan again"
        )
    ends = list(accumulate(counts))
    return [list(names[end - count : end]) for end, count in zip(ends, counts, strict=True)]
