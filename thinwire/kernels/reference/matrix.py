"""Products of a large matrix with a few columns, in plain torch.

    project      M B          (n, m) (m, r) -> (n, r)
    project_back M^T B        (n, m) (n, r) -> (m, r)
    add_outer    out + P Q^T  (n, r) (m, r) -> (n, m), or in place of out

The fast forms read or write the matrix once. Sums may be taken in another order there, so results
agree but for rounding. `add_outer` rounds alike on all machines: means are made of it.
"""

from __future__ import annotations

from torch import Tensor


def project(matrix: Tensor, basis: Tensor, /) -> Tensor:  # (n, m), (m, r) -> (n, r)
    """Every row times every column of the basis."""
    return matrix @ basis


def project_back(matrix: Tensor, basis: Tensor, /) -> Tensor:  # (n, m), (n, r) -> (m, r)
    """Every column times every column of the basis."""
    return (basis.T @ matrix).T


def add_outer(
    out: Tensor, p: Tensor, q: Tensor, /, alpha: float | None = None
) -> Tensor:  # (n, m), (n, r), (m, r)
    """alpha times p q^T added to what `out` holds; without alpha, p q^T in place of it."""
    if alpha is None:
        return out.copy_(p @ q.T)
    return out.addmm_(p.to(out.dtype), q.T.to(out.dtype), alpha=alpha)
