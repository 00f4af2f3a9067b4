"""Sparse sums and Golomb-Rice codes on the CPU: tensors in and out, `codes` does the work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import codes
from thinwire.kernels.lanes import INFINITE
from thinwire.kernels.rice import GROUP, MOST
from thinwire.kernels.threads import Array as Array
from thinwire.kernels.threads import in_parts

Runs = Sequence[tuple[int, int]]


def array(x: Tensor) -> Array:
    """The tensor's numbers, flat, where they lie."""
    return x.detach().view(-1).numpy()


def tensor(x: Array) -> Tensor:
    """The array's numbers, where they lie."""
    return torch.from_numpy(x).as_strided((x.size,), (1,))  # of nothing NumPy strides as it likes


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """See `reference.gather`."""
    out = np.empty(indices.numel(), np.float32)
    if not codes.gather(array(x), array(indices), out):
        raise IndexError(f"indices outside the {x.numel()} entries that are asked for")
    return tensor(out)


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0) -> Tensor:
    """See `reference.scatter_add`."""
    weight = np.float32(alpha)
    if not codes.scatter_add(array(out), array(indices), array(values), weight):
        raise IndexError(f"indices outside the {out.numel()} entries that they are added into")
    return out


def merged(indices: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """See `reference.merged`."""
    index, value = array(indices[0]), array(values[0])
    for other, more in zip(indices[1:], values[1:], strict=True):
        size = index.size + other.numel()
        where, sums = np.empty(size, np.int64), np.empty(size, np.float32)
        size = codes.merge(index, value, array(other), array(more), where, sums)
        index, value = where[:size], sums[:size]
    return tensor(index), tensor(value)


def filled(out: Tensor, runs: Runs, indices: Tensor, values: Tensor, alpha: float) -> float:
    """See `reference.filled`."""
    edges = np.array(runs, np.int64).reshape(-1)
    inside = edges.size == 0 or (edges[0] >= 0 and edges[-1] <= out.numel())
    target, where, what, weight = array(out), array(indices), array(values), np.float32(alpha)
    starts = codes.payloads(where, target.size)

    def part(low: int, high: int) -> tuple[int, int]:
        peak, used = codes.fill(target, edges, starts, where, what, weight, low, high)
        return int(peak), int(used)

    parts = in_parts(target.size, part) if inside and starts.size else [(-1, 0)]
    if min(peak for peak, _ in parts) < 0 or sum(used for _, used in parts) != where.size:
        raise IndexError(f"indices outside the {out.numel()} entries that they are written into")
    peak = max(peak for peak, _ in parts)
    return float(np.uint32(min(peak, INFINITE)).view(np.float32))


def ascending(indices: Tensor, numel: int) -> bool:
    """See `reference.ascending`."""
    return bool(codes.ascending(array(indices), numel))


def rice_size(indices: Tensor) -> int:
    """See `rice.rice_size`."""
    groups = np.empty(-(-indices.numel() // GROUP), np.uint8)
    unary, low = codes.rice_sizes(array(indices), groups)
    return int(groups.size + -(-low // 8) + -(-unary // 8))


def rice_encode(indices: Tensor) -> Tensor:
    """See `rice.rice_encode`."""
    index = array(indices)
    head = -(-index.size // GROUP)
    groups = np.empty(head, np.uint8)
    unary, low = codes.rice_sizes(index, groups)
    cut = head + -(-low // 8)
    out = np.zeros(cut + -(-unary // 8), np.uint8)
    out[:head] = groups
    codes.rice_write(index, groups, out[head:cut], out[cut:])
    return tensor(out)


def rice_decode(data: Tensor, k: int, numel: int) -> Tensor | None:
    """See `rice.rice_decode`."""
    message, head = array(data.contiguous()), -(-k // GROUP)
    groups = message[:head]
    if groups.size != head or (head and int(groups.max()) > MOST):
        return None
    bits = int(groups.sum(dtype=np.int64)) * GROUP
    if head:
        bits -= (head * GROUP - k) * int(groups[-1])
    cut = head + -(-bits // 8)
    out = np.empty(k, np.int64)
    if message.size < cut or codes.rice_read(groups, message[head:cut], message[cut:], numel, out):
        return None
    return tensor(out)


def member(indices: Tensor, others: Tensor) -> Tensor:
    """See `reference.member`."""
    out = np.empty(indices.numel(), np.bool_)
    codes.member(array(indices), array(others), out)
    return tensor(out)


def compress(indices: Tensor, values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.compress`."""
    n = indices.numel()
    where, what = np.empty(n + 1, np.int64), np.empty(n + 1, np.float32)  # it writes, then counts
    count = codes.compress(array(indices), array(values), array(kept), where, what)
    return tensor(where[:count]), tensor(what[:count])
