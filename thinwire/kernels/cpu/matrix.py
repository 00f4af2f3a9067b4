"""Products of a large matrix with a few columns, in Numba: one pass over the matrix.

A library's product is made for large factors, and takes five times as long for four columns. Here
four columns, or four rows, are worked on at once, so that what is read is used four times.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor, float32, from_numpy

from thinwire.kernels.cpu.arrays import PART, Array, as_tensor, compiled, run_parts
from thinwire.kernels.reference import matrix as reference

MANY = 16  # columns from which on a library's product is as fast
AT_ONCE = 4
_summing = {"reassoc", "contract"}  # sums of this rank's own, in any order


@compiled("void(f4[:, ::1], f4[:, ::1], f4[:, ::1])", fastmath=_summing)
def _project(x, columns, out):
    """out[i, c] = x[i] . columns[c]"""
    for i in range(x.shape[0]):
        for c in range(0, columns.shape[0], AT_ONCE):
            a, b, d, e = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for j in range(x.shape[1]):
                v = x[i, j]
                a += v * columns[c, j]
                b += v * columns[c + 1, j]
                d += v * columns[c + 2, j]
                e += v * columns[c + 3, j]
            out[i, c], out[i, c + 1], out[i, c + 2], out[i, c + 3] = a, b, d, e


@compiled("void(f4[:, ::1], f4[:, ::1], f4[:, ::1])", fastmath=_summing)
def _project_back(x, weights, out):
    """out[c] = sum over i of weights[i, c] x[i]"""
    out[:] = np.float32(0)
    whole = x.shape[0] - x.shape[0] % AT_ONCE
    for i in range(0, whole, AT_ONCE):
        for c in range(weights.shape[1]):
            a, b = weights[i, c], weights[i + 1, c]
            d, e = weights[i + 2, c], weights[i + 3, c]
            for j in range(x.shape[1]):
                out[c, j] += (a * x[i, j] + b * x[i + 1, j]) + (d * x[i + 2, j] + e * x[i + 3, j])
    for i in range(whole, x.shape[0]):
        for c in range(weights.shape[1]):
            a = weights[i, c]
            for j in range(x.shape[1]):
                out[c, j] += a * x[i, j]


@compiled("void(f4[:, ::1], f4[:, ::1], f4[:, ::1], b1)")
def _add_outer(out, weights, columns, adds):
    """out[i] (+)= sum over c of weights[i, c] columns[c], in this order on every machine."""
    for i in range(out.shape[0]):
        row = out[i]
        if not adds:
            row[:] = np.float32(0)
        for c in range(0, columns.shape[0], AT_ONCE):
            a, b = weights[i, c], weights[i, c + 1]
            d, e = weights[i, c + 2], weights[i, c + 3]
            for j in range(row.size):
                near = a * columns[c, j] + b * columns[c + 1, j]
                row[j] += near + (d * columns[c + 2, j] + e * columns[c + 3, j])


def project(matrix: Tensor, basis: Tensor) -> Tensor:
    if not _are_few(basis):
        return reference.project(matrix, basis)
    x, columns = matrix.detach().numpy(), np.ascontiguousarray(_fill_up(basis).T)
    out = np.empty((x.shape[0], columns.shape[0]), np.float32)
    run_parts(x.shape[0], lambda a, b: _project(x[a:b], columns, out[a:b]), _rows_of_a_part(x))
    return from_numpy(out)[:, : basis.shape[1]].contiguous()


def project_back(matrix: Tensor, basis: Tensor) -> Tensor:
    if not _are_few(basis):
        return reference.project_back(matrix, basis)
    x, weights = matrix.detach().numpy(), np.ascontiguousarray(basis.detach().numpy())

    def part(start: int, stop: int) -> Array:
        sums = np.empty((weights.shape[1], x.shape[1]), np.float32)
        _project_back(x[start:stop], weights[start:stop], sums)
        return sums

    parts = run_parts(x.shape[0], part, _rows_of_a_part(x))
    return as_tensor(sum(parts[1:], parts[0]).reshape(-1)).view(basis.shape[1], -1).T


def add_outer(out: Tensor, p: Tensor, q: Tensor, alpha: float | None = None) -> Tensor:
    if not (_are_few(p) and _are_few(q)):
        return reference.add_outer(out, p, q, alpha)
    x, columns = out.numpy(), np.ascontiguousarray(_fill_up(q).T)
    weights = _fill_up(p) * np.float32(1.0 if alpha is None else alpha)
    adds = alpha is not None
    run_parts(
        x.shape[0],
        lambda a, b: _add_outer(x[a:b], weights[a:b], columns, adds),
        _rows_of_a_part(x),
    )
    return out


def _are_few(factor: Tensor) -> bool:
    """Columns in single precision, so few that they are worth loops of their own."""
    return factor.shape[1] < MANY and factor.dtype == float32


def _fill_up(x: Tensor) -> Array:
    """With columns of zeros, so that there are as many as are worked on at once."""
    given = x.detach().numpy()
    missing = -given.shape[1] % AT_ONCE
    return np.ascontiguousarray(np.pad(given, ((0, 0), (0, missing))) if missing else given)


def _rows_of_a_part(x: Array) -> int:
    """Rows worth a thread."""
    return max(1, PART // max(1, int(x.shape[1])))
