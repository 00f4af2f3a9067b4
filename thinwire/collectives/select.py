"""What collectives do to a sum on the way: cut it to the largest, and book what that took."""

from __future__ import annotations

import torch

from thinwire import kernels
from thinwire.payload import Sparse, only


def largest(payload: Sparse, count: int) -> Sparse:
    """The entries of largest magnitude; NaN counts as larger, and not even 0 entries hide it."""
    if payload.entries <= count:
        return payload
    count = max(count, int(payload.values.isnan().sum()))
    kept = torch.zeros(payload.entries, dtype=torch.bool, device=payload.values.device)
    if count:
        kept[kernels.topk(payload.values[None], count)] = True
    return only(payload, kept)


def given_up(before: Sparse, after: Sparse) -> Sparse:
    """What a cut took out of a sum, as a share: its negative."""
    rest = only(before, ~torch.isin(before.indices, after.indices))
    return Sparse(rest.indices, -rest.values, rest.numel)


def difference(a: Sparse, b: Sparse) -> Sparse:
    """a - b, of the same indices, where that is not zero."""
    error = Sparse(a.indices, a.values - b.values, a.numel)
    return only(error, error.values != 0)
